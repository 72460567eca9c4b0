"""Fused kernels: where they are placed, that they compute the same, and what is left alone and why."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megacompile
from megacompile import MegacompileError
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.partition import partition
from megacompile.blocks.policies import differentiate
from megacompile.capture.batch import read_batch
from megacompile.capture.parameter_forms import parameter_forms
from megacompile.errors import BudgetError
from megacompile.graph import fusion_check, pattern_tools
from megacompile.graph.captured import Captured
from megacompile.graph.fusion_report import Fusions, fold
from megacompile.graph.fusion_rewriter import PATTERNS, fuse, read_switches
from tests.support.graphs import capture
from tests.support.models import Through, batch_for, build

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
GOLDEN = Path(__file__).parent / "golden" / "fusions.json"
_SHAPE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", _SHAPE),
    "Qwen2ForCausalLM": ("Qwen2Config", _SHAPE),
    "Qwen3ForCausalLM": ("Qwen3Config", _SHAPE | {"head_dim": 8}),
    "Gemma2ForCausalLM": ("Gemma2Config", _SHAPE | {"head_dim": 8, "sliding_window": 8}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", _SHAPE | {"head_dim": 8, "sliding_window": 8}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", _SHAPE),
    "Olmo2ForCausalLM": ("Olmo2Config", _SHAPE),
    "Phi3ForCausalLM": ("Phi3Config", _SHAPE),
    "MistralForCausalLM": ("MistralConfig", _SHAPE),
    "MixtralForCausalLM": ("MixtralConfig", _SHAPE | {"num_local_experts": 4}),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        _SHAPE | {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2},
    ),
    "GptOssForCausalLM": ("GptOssConfig", _SHAPE | {"head_dim": 8, "num_local_experts": 4}),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
         "bos_token_id": 1, "eos_token_id": 2},
    ),
    "GPTJForCausalLM": (
        "GPTJConfig",
        {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4,
         "bos_token_id": 1, "eos_token_id": 2},
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
         "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    ),
}  # fmt: skip


def captured(model: nn.Module, batch: Any, dtype: torch.dtype = torch.float32) -> Captured:
    one = read_batch(batch, model)
    return capture(model, one.args, one.kwargs, forms=parameter_forms(model, dtype))


@functools.cache
def known(name: str) -> Captured:
    """A small model's graph, captured once: fuse leaves it as it is."""
    return captured(build(name), batch_for(name))


def fused(graph: Captured, **off: bool) -> Fusions:
    return fuse(graph, read_switches(off or True))[1]


def architecture(name: str) -> nn.Module:
    config, fields = _OTHERS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**fields))
    return model.train()


def record(fusions: Fusions) -> dict[str, Any]:
    missed = [f"{m.pattern}: {m.reason}" for m in fusions.near_misses]
    return {"placed": fusions.counts, "not placed": {m: missed.count(m) for m in sorted(set(missed))}}


@pytest.mark.slow_cases(r"(?!Llama|GPT2|Gemma3)")
@pytest.mark.parametrize("name", sorted(_OTHERS))
def test_placements_of_an_architecture(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    for dtype in (torch.float32, torch.bfloat16):
        found = record(fused(captured(architecture(name), batch_for(name), dtype)))
        assert found == golden[name], (
            f"{name} in {dtype}: python -m tests.unit.graph.test_fuse accepts the change"
        )


@pytest.mark.slow_cases(r"(?!llama)")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2-dropout"])
def test_programs_with_fused_kernels_compute_the_same(name: str) -> None:
    steps = [batch_for(name, seed) for seed in range(3)]
    traces = {on: _train(name, steps, on) for on in (False, True)}
    for plain, ours in zip(*traces.values(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def _train(name: str, steps: list[Any], on: bool) -> list[Tensor]:
    """Loss and gradient norm of each step; steps are small, so that noise is not normalised into weights."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    program = megacompile.compile(
        model,
        "100MB",
        example_batch=steps[0],
        optimizer=optimizer,
        max_grad_norm=1.0,
        compute_dtype=torch.float32,
        kernels=on,
    )
    trace = []
    for batch in steps:
        out = program.train_step(batch)
        assert out.grad_norm is not None
        trace += [out.loss.clone(), out.grad_norm.clone()]
    assert bool(program.fusions.placements) == on
    program.close()
    return trace


def test_a_head_is_fused_beside_metrics_of_its_logits() -> None:
    """The metrics' logits have no gradient: they are made in parts, none longer than what reads them."""

    class WithMetrics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(8, 40)

        def forward(self, x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
            logits = self.head(x)
            known = logits.detach()
            parts = [known[:, :4], known[:, 4:8][:, 1:]]
            certain = torch.cat([part.softmax(-1).amax(-1) for part in parts], 1)
            losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
            return (losses * weight.flatten()).sum() + certain.sum()

    generator = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(2, 8, 8, generator=generator),
        "labels": torch.randint(0, 40, (2, 7), generator=generator),
        "weight": torch.randn(2, 7, generator=generator),
    }
    ours, fusions = fuse(captured(WithMetrics(), batch), read_switches(True))
    assert fusions.counts == {"linear_cross_entropy": 1}
    linears = [n for n in ours.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert [tuple(n.meta["val"].shape) for n in linears] == [(2, 4, 40), (2, 3, 40)]
    model = WithMetrics()
    program = megacompile.compile(
        model, "1GB", optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), kernels=True,
        compute_dtype=torch.float32,
    )  # fmt: skip
    eager = WithMetrics()
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    for _ in range(3):
        loss = eager(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(program.train_step(batch).loss, loss.detach())
    assert program.fusions.counts == {"linear_cross_entropy": 1}


def test_logits_that_a_gradient_comes_back_from_are_not_made_twice() -> None:
    def two_losses(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + logits[:2].square().mean()

    found = fused(captured(Through(nn.Linear(8, 40), two_losses), (torch.randn(4, 8), torch.arange(4))))
    assert not found.placements
    assert "is also read by" in found.near_misses[0].reason


@pytest.mark.slow_cases(r"gemma3")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_gradients_with_fused_kernels_are_the_same(name: str) -> None:
    plain = known(name)
    ours, fusions = fuse(plain, read_switches(True))
    assert fusions.placements
    model = build(name)
    for want, got in zip(_gradients(plain, model, name), _gradients(ours, model, name), strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def _gradients(graph: Captured, model: nn.Module, name: str) -> list[Tensor]:
    """The loss and the gradient of every parameter, from running a graph."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    leaves = list(batch_for(name).values())
    given = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            found = graph.parameters.get(node.name), graph.buffers.get(node.name), graph.inputs.get(node.name)
            weight, buffer, leaf = found
            if weight is not None:
                given.append(parameters[weight])
            elif buffer is not None:
                given.append(buffers[buffer])
            elif leaf is not None:
                given.append(leaves[leaf])
            else:
                given.append(graph.constants.get(node.name, torch.zeros(2, dtype=torch.int64)))
    (loss,) = torch.fx.Interpreter(torch.fx.GraphModule({}, graph.graph)).run(*given)
    return [loss.detach(), *torch.autograd.grad(loss, list(parameters.values()))]


def _templates(graph: Captured) -> list[DifferentiatedTemplate]:
    return [differentiate(t, graph.fake_mode) for t in partition(graph).templates]


def test_blocks_save_less_and_hold_no_logits() -> None:
    plain = captured(build("llama"), batch_for("llama", length=64), torch.bfloat16)
    ours, _ = fuse(plain, read_switches(True))
    before, after = _templates(plain), _templates(ours)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        for policy in ("all", "some"):
            if policy in old.policies and policy in new.policies:
                assert new.policies[policy].saved_bytes <= old.policies[policy].saved_bytes
    layer = [max(t.policies["all"].saved_bytes for t in side) for side in (before, after)]
    assert layer[1] < 0.7 * layer[0]
    sources = "".join(f.source for t in after for f in t.functions())
    assert "[128, 128]" not in sources and "[2, 64, 128]" not in sources  # tokens by vocabulary
    assert sum(f.flops for t in after for f in t.functions() if "cross_entropy" in f.source) > 0


def test_kernels_lower_the_least_budget() -> None:
    """Also on the CPU, where they run as plain torch: their copies are small, and gradients reuse memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = _SHAPE | {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384}
    ids = torch.zeros(1, 512, dtype=torch.long)
    least = []
    for on in (False, True):
        model = LlamaForCausalLM(LlamaConfig(**(shape | {"max_position_embeddings": 512})))
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(BudgetError) as error:
            megacompile.compile(
                model,
                "1MB",
                example_batch={"input_ids": ids, "labels": ids},
                optimizer=optimizer,
                compute_dtype=torch.float32,
                kernels=on,
            )
        assert error.value.least_bytes is not None
        least.append(error.value.least_bytes)
    assert least[1] < least[0]


class Mlp(nn.Module):
    """One gated MLP and a head; switches spoil one condition each."""

    def __init__(self, spoil: str = "") -> None:
        super().__init__()
        self.spoil = spoil
        self.norm = nn.RMSNorm(16)
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.head = nn.Linear(16, 40)
        self.classes = nn.Parameter(torch.ones(40))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.norm(x)
        gate, up = F.silu(self.gate(h)), self.up(h)
        if self.spoil == "narrow":
            up = up[:, :1]
        h = self.down(gate * up)
        if self.spoil == "shared":
            h = h + gate.mean()
        logits = self.head(h)
        if self.spoil == "biased":
            logits = logits + self.classes
        weight = self.classes.detach() if self.spoil == "weighted" else None
        how = "sum" if self.spoil == "sum" else "mean"
        return F.cross_entropy(logits, labels, weight=weight, reduction=how, label_smoothing=0.1)


def _mlp(spoil: str = "", **off: bool) -> Fusions:
    labels = torch.arange(6)
    labels[2] = -100
    return fused(captured(Mlp(spoil).train(), {"x": torch.randn(6, 16), "labels": labels}), **off)


def test_a_plain_module_is_recognised_by_its_operators() -> None:
    for spoil in ("", "sum"):
        assert _mlp(spoil).counts == {"rms_norm": 1, "glu": 1, "linear_cross_entropy": 1}
        assert not _mlp(spoil).near_misses


@pytest.mark.parametrize(
    ("spoil", "pattern", "reason"),
    [
        ("narrow", "glu", "differ in shape"),
        ("shared", "glu", "is also read by"),
        ("biased", "linear_cross_entropy", "logits come from aten.add"),
        ("weighted", "linear_cross_entropy", "classes are weighted"),
    ],
)
def test_near_misses_say_why(spoil: str, pattern: str, reason: str) -> None:
    fusions = _mlp(spoil)
    (miss,) = fusions.near_misses
    assert miss.pattern == pattern and reason in miss.reason and pattern not in fusions.counts
    assert miss.reason.split()[0] in str(fusions)


class Clamped(nn.Module):
    """A gated MLP as MiniMax M3 writes it: GPT-OSS's activation of packed halves; ``spoil`` changes it."""

    def __init__(self, spoil: str = "") -> None:
        super().__init__()
        self.spoil = spoil
        self.both, self.down = nn.Linear(16, 48), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        gate, up = gate.clamp(max=1.5), up.clamp(-1.0 if self.spoil == "limits" else -1.5, 1.5)
        if self.spoil == "swapped":
            gate, up = up, gate
        swish = gate * torch.sigmoid(gate * 1.702)
        return self.down((up if self.spoil == "plain" else up + 1) * swish).square().mean()


def test_clamped_gates_are_placed_on_packed_halves_too() -> None:
    graph = captured(Clamped(), {"x": torch.randn(5, 16)})
    ours, fusions = fuse(graph, read_switches(True))
    assert fusions.counts == {"glu": 1} and not fusions.near_misses
    assert any(n.target is torch.ops.megacompile.clamped_glu.default for n in ours.graph.nodes)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [("limits", "gate is clamped to"), ("swapped", "gate is clamped to"), ("plain", "one added to up")],
)
def test_clamped_gates_that_differ_are_left_alone(spoil: str, reason: str) -> None:
    (miss,) = fused(captured(Clamped(spoil), {"x": torch.randn(5, 16)})).near_misses
    assert miss.pattern == "glu" and reason in miss.reason


class Sliced(nn.Module):
    """A head whose loss reads all positions but the last, as user code and older models write it."""

    def __init__(self, start: int | None = None, end: int | None = -1, last: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(16, 40)
        self.kept, self.last = slice(start, end), last

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x)
        logits = logits[..., self.kept] if self.last else logits[:, self.kept]
        labels = labels if self.last else labels[:, self.kept]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "end"), [(None, -1), (1, None), (2, 5)])
def test_slices_of_logits_become_slices_of_hidden_states(
    start: int | None, end: int | None, dtype: torch.dtype
) -> None:
    batch = {"x": torch.randn(2, 7, 16, dtype=dtype), "labels": torch.randint(40, (2, 7))}
    graph = captured(Sliced(start, end), batch, dtype)
    ours, fusions = fuse(graph, read_switches(True))
    assert fusions.counts == {"linear_cross_entropy": 1}
    shapes = [n.meta["val"].shape for n in ours.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert not any(shape[-1:] == (40,) and len(shape) > 1 for shape in shapes), "logits are still there"
    (miss,) = fused(
        captured(Sliced(0, 5, last=True), batch | {"labels": torch.randint(5, (2, 7))}, dtype)
    ).near_misses
    assert "logits come from aten.slice" in miss.reason


def test_a_sum_that_is_read_too_early_is_not_fused() -> None:
    """The fused operator stands where the norm stood: what reads the sum before it would read nothing."""

    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.RMSNorm(16), nn.Linear(16, 16)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            total = self.out(x) + y
            before = total.sin()
            return (self.norm(total) + total * before).square().mean()

    class Late(Early):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            total = self.out(x) + y
            return (self.norm(total) * total).square().mean()

    batch = {"x": torch.randn(5, 16), "y": torch.randn(5, 16)}
    early, late = (fused(captured(model(), batch)) for model in (Early, Late))
    assert early.counts == {"rms_norm": 1} and "is also read by sin" in early.near_misses[0].reason
    assert late.counts == {"add_rms_norm": 1} and not late.near_misses


def test_trained_tables_keep_their_gradient() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cos, self.sin = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(5, 8))

        def forward(self, x: Tensor) -> Tensor:
            turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
            return (x * self.cos + turned * self.sin).square().mean()

    fusions = fused(captured(Turned(), {"x": torch.randn(3, 5, 8)}))
    assert not fusions.placements and "needs a gradient" in fusions.near_misses[0].reason


@pytest.mark.parametrize("name", list(PATTERNS))
def test_a_switch_turns_one_kernel_off(name: str) -> None:
    others = {"layer_norm": "gpt2", "qk_norm_rope": "gemma3", "routing_weights": "Qwen3MoeForCausalLM"}
    model = others.get(name, "llama")
    graph = captured(architecture(model), batch_for(model)) if model in _OTHERS else known(model)
    fusions = fused(graph, **{name: False})
    assert name not in fusions.counts and fusions.off == (name,) and fusions.counts
    assert f"switched off: {name}" in str(fusions)


def test_switches_are_checked() -> None:
    model = Mlp()
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(MegacompileError, match="choose from rms_norm, add_rms_norm, layer_norm, rope"):
        megacompile.compile(model, "1GB", optimizer=adamw, kernels={"rms": False})
    bad: Mapping[str, Any] = {"rope": "no"}
    with pytest.raises(MegacompileError, match="must be True or False"):
        read_switches(bad)
    assert not any(read_switches(None).values()) and all(read_switches(True).values())
    graph = known("llama")
    assert fuse(graph, read_switches(False))[0] is graph


class Heads(nn.Module):
    """Queries as Qwen3 makes them: normed by heads, then rotated; ``spoil`` changes one thing."""

    def __init__(self, spoil: str = "") -> None:
        super().__init__()
        self.spoil = spoil
        self.q, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.q(x).unflatten(-1, (2, 8))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        normed = x = x.transpose(1, 2)
        if self.spoil == "pairs":
            turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        else:
            turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
        x = x * cos + turned * sin
        return (x * normed if self.spoil == "read" else x).square().mean()


@pytest.mark.parametrize(
    ("spoil", "tables", "reason"),
    [
        ("", (1, 1, 5, 8), ""),
        ("pairs", (1, 1, 5, 8), "pairs of neighbouring columns"),
        ("heads", (1, 2, 5, 8), "not one row for each token"),
        ("read", (1, 1, 5, 8), "is also read by"),
    ],
)
def test_a_norm_and_the_rotation_behind_it_are_one(spoil: str, tables: tuple[int, ...], reason: str) -> None:
    batch = {"x": torch.randn(3, 5, 16), "cos": torch.randn(tables), "sin": torch.randn(tables)}
    fusions = fused(captured(Heads(spoil), batch))
    if not reason:
        assert fusions.counts == {"qk_norm_rope": 1} and not fusions.near_misses
        return
    (miss,) = fusions.near_misses
    assert fusions.counts == {"rms_norm": 1, "rope": 1}
    assert miss.pattern == "qk_norm_rope" and reason in miss.reason


PLANTED: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, w, eps, offset=0.0, early=True: (x * w * (1 + offset), x[..., 0]),
    "rope": lambda x, cos, sin, interleaved=False: x * cos,
    "glu": lambda gate, up, activation: F.silu(gate) * up * 1.001,
}


@pytest.mark.parametrize("name", list(PLANTED))
def test_a_wrong_operator_is_not_placed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = pattern_tools.Emitter.call

    def wrong(emit: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if target is getattr(torch.ops.megacompile, name).default:
            target = PLANTED[name]
        return right(emit, target, *args, **kwargs)

    monkeypatch.setattr(pattern_tools.Emitter, "call", wrong)
    fusions = fused(known("llama"))
    assert name not in fusions.counts and len(fusions.counts) == (3 if name == "rms_norm" else 4)
    reasons = [m.reason for m in fusions.near_misses if m.pattern == name]
    assert reasons and all("of scale" in reason for reason in reasons)


def test_a_failing_operator_is_not_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(match: Any, inputs: Any) -> Tensor:
        raise ValueError("no such thing")

    monkeypatch.setattr(fusion_check, "_fused", refuse)
    fusions = fused(known("llama"))
    assert not fusions.placements and "no such thing" in fusions.near_misses[0].reason


def test_fusing_leaves_the_captured_graph_alone() -> None:
    graph = known("llama")
    before = [(n.name, n.target) for n in graph.graph.nodes]
    ours, fusions = fuse(graph, read_switches(True))
    assert before == [(n.name, n.target) for n in graph.graph.nodes]
    ours.graph.lint()
    for node in ours.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node
    first = "rms_norm (×5)\n  model.layers.0-3.input_layernorm (×4)\n  model.norm\nadd_rms_norm (×4)\n"
    assert str(fusions).startswith(first)


def test_values_of_the_fused_graph_are_true() -> None:
    """Shapes, dtypes and strides that nodes carry are what a run gives, also past changed strides."""
    ours, _ = fuse(
        captured(architecture("GPTNeoXForCausalLM"), batch_for("x"), torch.bfloat16), read_switches(True)
    )
    placeholders = [n.meta["val"] for n in ours.graph.nodes if n.op == "placeholder"]

    class Compare(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            out = super().run_node(n)
            if isinstance(out, Tensor) and n.op == "call_function":
                want = n.meta["val"]
                assert (out.shape, out.dtype, out.stride()) == (want.shape, want.dtype, want.stride()), n
            return out

    with ours.fake_mode, torch.no_grad():
        Compare(torch.fx.GraphModule({}, ours.graph)).run(*placeholders)


def test_equal_places_fold_into_one_line() -> None:
    places = [f"model.layers.{i}.norm" for i in range(4)] + ["model.layers.6.norm", "model.norm", ""]
    assert fold(places) == ["model.layers.0-3,6.norm (×5)", "model.norm", "the model itself"]


if __name__ == "__main__":
    rows = {name: record(fused(captured(architecture(name), batch_for(name)))) for name in sorted(_OTHERS)}
    GOLDEN.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
