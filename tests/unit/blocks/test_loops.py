"""Loops over chunks of a sequence: what they compute, what finds a wrong rule, what they hold."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from megacompile.api.frontend import Compiled, Division, Frontend
from megacompile.blocks import chunk_loops, chunk_roles, chunk_stages, joint_graph, loop_check, policies
from megacompile.blocks.chunk_roles import length_of, two_lengths
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.joint_graph import Joint
from megacompile.blocks.loop_check import disagreement
from megacompile.blocks.partition import Template
from megacompile.blocks.policies import _Cutter, differentiate
from megacompile.capture.batch import read_batch
from tests.support.models import batch_for, build

LENGTH = 60  # no other size of the small models


@functools.cache
def compiled_of(kind: str, dtype: torch.dtype, length: int) -> Compiled:
    """A small model's stages before the plan; "fused" kinds have fused kernels."""
    kind, _, fused = kind.partition(" ")
    model = build(kind)
    batch = read_batch(batch_for(kind, size=1, length=length), model)
    return Frontend(model, dtype, kernels=bool(fused)).build(batch)


@functools.cache
def traced(
    kind: str, block: int, dtype: torch.dtype = torch.float32, length: int = LENGTH
) -> tuple[Template, Joint, Any]:
    """A template of a small model and its joint graph, its sequence's dimensions noted."""
    compiled = compiled_of(kind, dtype, length)
    template, mode = compiled.part.templates[block], compiled.fused.fake_mode
    assert length_of(template) == length
    pairs, reason = two_lengths(template, mode, (24, 26))
    assert reason is None
    return template, pairs[0][1], mode


def functions(
    kind: str, block: int, chunk: int | None, dtype: torch.dtype = torch.float32, length: int = LENGTH
) -> DifferentiatedTemplate:
    """A template's functions of little memory, whole or over chunks."""
    template, joint, mode = traced(kind, block, dtype, length)
    given = (length, chunk) if chunk else None
    return _Cutter(template, joint, mode, None, loops=given, lean=True).run()


@pytest.mark.slow_cases(r"(llama-1|llama f|qwen3|gemma3|gpt2)")
@pytest.mark.parametrize(
    ("kind", "block", "chunk"),
    [
        ("llama", 1, 7),
        ("llama", 1, 20),
        ("llama", 1, LENGTH),
        ("llama", 2, 7),
        ("gpt2", 1, 16),
        ("gpt2", 2, 16),
        ("qwen3", 1, 7),
        ("qwen3 fused", 1, 7),
        ("gemma3", 2, 7),
        ("llama fused", 1, 7),
        ("gpt2 fused", 1, 7),
    ],
)
def test_loops_compute_what_whole_functions_do(kind: str, block: int, chunk: int) -> None:
    """Layers, heads and their loss; chunks that divide the length, that do not, and one in all."""
    whole, looped = functions(kind, block, None), functions(kind, block, chunk)
    assert all(f.looped for f in looped.functions())
    assert disagreement(traced(kind, block)[0], whole, looped) is None
    for name, policy in looped.policies.items():
        assert policy.saved == whole.policies[name].saved
        assert policy.forward.end_bytes == whole.policies[name].forward.end_bytes
        assert "for start, end in spans(" in policy.forward.source


@pytest.mark.parametrize("kind", ["llama", "llama fused", "gpt2 fused"])
def test_only_attention_mixes_positions_in_a_layer(kind: str) -> None:
    _, joint, _ = traced(kind, 1)
    mixing = {
        str(node.target)
        for node in joint.graph.nodes
        if chunk_roles.role(node) == "mixing"
        and any(a.meta["along"] is not None for a in node.all_input_nodes)
    }
    assert mixing - {"<built-in function getitem>", "output"} == {
        "megacompile.attention.default",
        "megacompile.attention_backward.default",
    }


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_clamped_gate_acts_on_each_position_alone(interleaved: bool) -> None:
    ops = torch.ops.megacompile

    def passes(both: Tensor, grad: Tensor) -> list[Tensor]:
        return [
            ops.clamped_glu(both, 1.0, 1.7, interleaved),
            ops.clamped_glu_backward(grad, both, 1.0, 1.7, interleaved),
        ]

    inputs = [torch.randn(1, LENGTH, 12), torch.randn(1, LENGTH, 6)]
    long, short = (
        SimpleNamespace(graph=make_fx(passes, tracing_mode="fake")(*(x[:, :n] for x in inputs)).graph)
        for n in (LENGTH, 24)
    )
    assert chunk_roles.compare(long, LENGTH, short, 24) is None  # type: ignore[arg-type]
    calls = [node for node in long.graph.nodes if node.op == "call_function"]
    assert len(calls) == 2 and all(chunk_roles.role(node) == "local" for node in calls)
    chunks = [passes(*part) for part in zip(*(x.split(7, 1) for x in inputs), strict=True)]
    for whole, *parts in zip(passes(*inputs), *chunks, strict=True):
        torch.testing.assert_close(whole, torch.cat(parts, 1))


def test_a_loop_holds_what_a_chunk_needs_and_no_logits_of_all_positions() -> None:
    whole, looped = functions("llama", 2, None), functions("llama", 2, 4)
    logits = LENGTH * 128 * 4
    assert whole.forward.peak_bytes > logits > 4 * looped.forward.peak_bytes


def _attention_is_local(node: fx.Node) -> str:
    source: Any = node.args[0] if node.target is operator.getitem else node
    return "local" if "attention" in str(source.target) else _ROLE(node)


def _sums_keep_the_last_chunk(body: Any, node: fx.Node, reads: tuple[str, ...]) -> None:
    _ADD(body, node, reads)
    line = body.lines[-1]
    if line.text.startswith("add_product_"):
        body.lines.insert(-1, chunk_loops._Line(f"aten.zero_.default({line.reads[0]})", line.reads[:1]))


def _of_another_dimension(body: Any, node: fx.Node) -> bool:
    along = node.meta.get("along")
    if along == 2:
        node.meta["along"] = 1
    try:
        return _FETCH(body, node)
    finally:
        node.meta["along"] = along


def _loops_end_early(example: Any, length: int, chunk: int) -> Any:
    return [(start, min(start + chunk, length)) for start in range(0, length - chunk, chunk)]


def _all_labels_count(graph: fx.Graph) -> None:
    _MEANS(graph)
    for node in graph.nodes:
        if node.target is torch.ops.aten.ne.Scalar:
            node.update_arg(1, -1)


def _a_mean_without_its_share(graph: fx.Graph) -> None:
    """The sums of chunks are added, and not divided by the number of labels."""
    _MEANS(graph)
    losses = [n for n in graph.nodes if n.target is torch.ops.aten.nll_loss_forward.default]
    for mean in [mean for loss in losses for given in loss.users for mean in given.users]:
        mean.replace_all_uses_with(mean.args[0])


_ADD, _FETCH, _MEANS = chunk_loops._Body._add, chunk_loops._Body._fetch, chunk_loops.means_as_sums
_FAULTS: list[tuple[int, Any, str, Callable[..., Any]]] = [
    (1, chunk_stages, "role", _attention_is_local),
    (1, chunk_loops._Body, "_add", _sums_keep_the_last_chunk),
    (1, chunk_loops._Body, "_fetch", _of_another_dimension),
    (1, "megacompile.blocks.codegen", "spans", _loops_end_early),
    (2, chunk_loops, "means_as_sums", _all_labels_count),
    (2, chunk_loops, "means_as_sums", _a_mean_without_its_share),
]


@pytest.mark.parametrize(("block", "owner", "name", "fault"), _FAULTS, ids=[f[3].__name__ for f in _FAULTS])
def test_a_wrong_rule_is_found_on_random_numbers(
    block: int, owner: Any, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = functions("llama", block, None)
    template = traced("llama", block)[0]
    if isinstance(owner, str):
        looped = functions("llama", block, 16)
        monkeypatch.setattr(f"{owner}.{name}", fault)
    else:
        monkeypatch.setattr(owner, name, fault)
        try:
            looped = functions("llama", block, 16)
        except RuntimeError:
            return  # shapes do not even go together
    assert disagreement(template, whole, looped) is not None


def test_a_template_whose_loops_differ_stays_whole_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    template, _, mode = traced("llama", 2)
    found = policies.differentiate(template, mode, chunk=16)
    assert found.loops == (LENGTH, 16) and found.not_looped is None
    monkeypatch.setattr(loop_check, "TOLERANCE", {torch.float32: -1.0})
    found = policies.differentiate(template, mode, chunk=16)
    assert found.loops is None and found.not_looped is not None
    assert "is off by" in found.not_looped
    assert set(found.policies) == {"all", "some", "none", "least"}
    assert not any(f.looped for f in found.functions())
    monkeypatch.setattr(chunk_loops._Body, "_resized", lambda body, node: list(node.args))
    found = policies.differentiate(template, mode, chunk=15)  # none made before
    assert found.loops is None and str(found.not_looped).startswith("its loops fail: ")


def test_a_length_that_is_also_a_size_of_weights_stays_whole() -> None:
    """Sizes that are the sequence's cannot be told from those of a layer of 64 hidden units."""
    model = build("llama")
    frontend = Frontend(model, torch.float32)
    compiled = frontend.build(read_batch(batch_for("llama", size=1, length=32), model), Division(chunk=8))
    layer = compiled.templates[1]
    assert layer.loops is None and layer.not_looped is not None
    assert "another length" in layer.not_looped


def test_a_template_is_traced_once_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = build("llama"), list[Template]()
    trace = joint_graph.trace_joint
    monkeypatch.setattr(joint_graph, "trace_joint", lambda t, mode: (made.append(t), trace(t, mode))[1])
    frontend = Frontend(model, torch.float32, differentiate=functools.partial(differentiate, check=False))
    batch = read_batch(batch_for("llama", size=1, length=LENGTH), model)
    found = [frontend.build(batch, Division(chunk=chunk)) for chunk in (0, 20, 8)]
    assert [c.templates[1].loops for c in found] == [None, (LENGTH, 20), (LENGTH, 8)]
    assert len(made) == 2 * len(found[0].part.templates)  # at their own length and at a short one


def test_several_sequences_stay_whole() -> None:
    model = build("llama")
    batch = read_batch(batch_for("llama", size=2, length=LENGTH), model)
    compiled = Frontend(model, torch.float32).build(batch, Division(chunk=8))
    assert not any(t.loops for t in compiled.templates)


@pytest.mark.slow_cases(r"512")
@pytest.mark.parametrize(("length", "counts"), [(LENGTH, [30]), (512, [4, 64, 256])])
def test_gradients_of_weights_in_bf16_are_rounded_once(
    length: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside FP32 they are as good as the whole function's; sums in bf16 are not."""

    def distance(count: int) -> float:
        chunk = length // count if count > 1 else None
        return max(_distances(functions("llama", 1, chunk, torch.bfloat16, length), length))

    whole = distance(1)
    assert max(map(distance, counts)) <= whole + 5e-4
    monkeypatch.setattr(chunk_loops, "_summed", lambda value: value.dtype)
    monkeypatch.setattr(chunk_loops._Body, "_add", _sum_as_it_is)
    assert distance(counts[-1]) > whole + 5e-4


def _sum_as_it_is(body: Any, node: fx.Node, reads: tuple[str, ...]) -> None:
    total = f"sum_{node.name}"
    body.names[node] = total
    body.outer.append(total)
    made = chunk_loops.call_text(node, names=body._name, arguments=list(node.args))
    body.lines.append(chunk_loops._Line(f"aten.add_.Tensor({total}, {made})", (total, *reads)))


def _distances(found: DifferentiatedTemplate, length: int) -> list[float]:
    """Root mean square errors of gradients of weight matrices, beside a whole run in float32."""
    template = traced("llama", 1, torch.bfloat16, length)[0]
    exact = functions("llama", 1, None, length=length)
    given = loop_check._random_inputs(template)
    grads = []
    for made, dtype in ((exact, torch.float32), (found, torch.bfloat16)):
        policy = made.policies["none"]
        assert policy.backward is not None
        known = {("in", i): x.to(dtype) if x.is_floating_point() else x for i, x in enumerate(given)}
        (out,) = loop_check._run_function(policy.forward, known)  # type: ignore[arg-type]
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        known["grad", 0] = gradient.to(dtype)
        grads.append(loop_check._run_function(policy.backward, known))  # type: ignore[arg-type]
    pairs = [(a, b.float()) for a, b in zip(*grads, strict=True) if a.dim() == 2]
    return [float((a - b).norm() / a.norm()) for a, b in pairs]


class Dropping(nn.Module):
    """Products between dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = functional.dropout(self.embed(input_ids), 0.5)
        return (x + functional.dropout(self.down(functional.dropout(self.up(x), 0.5)), 0.5)).square().sum()


def test_dropout_is_bitwise_that_of_whole_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small whole numbers each product and sum is exact, so that nothing but masks can differ."""
    frontend = Frontend(Dropping(), torch.float32)
    compiled = frontend.build(
        read_batch({"input_ids": torch.zeros(1, LENGTH, dtype=torch.long)}, frontend.model)
    )
    template, mode = compiled.part.templates[-1], compiled.fused.fake_mode
    pairs, reason = two_lengths(template, mode, (24, 26))
    assert reason is None

    def results(chunk: int | None) -> list[Tensor]:
        loops = (LENGTH, chunk) if chunk else None
        found = _Cutter(template, pairs[0][1], mode, None, loops=loops, lean=True).run()
        assert all(f.looped for f in found.functions()) == bool(chunk)
        backward, generator = found.policies["none"].backward, torch.Generator().manual_seed(0)
        assert backward is not None
        known: dict[Any, Tensor] = {
            ("in", i): torch.randint(-2, 3, e.shape, generator=generator).to(e.dtype)
            for i, e in enumerate(template.examples)
        }
        (loss,) = loop_check._run_function(found.forward, known)
        known["grad", 0] = torch.ones_like(loss)
        return [loss, *loop_check._run_function(backward, known)]

    whole, looped = results(None), results(16)
    assert (whole[0] > 0) and all(map(torch.equal, whole, looped))
    monkeypatch.setattr(chunk_stages, "role", _dropout_is_local)
    assert not all(map(torch.equal, whole, results(16)))


_ROLE = chunk_roles.role


def _dropout_is_local(node: fx.Node) -> str:
    return "local" if "dropout" in str(node.target) else _ROLE(node)


def test_what_counts_as_a_difference() -> None:
    """Equal infinities of a mask do not; NaN does; rounding of sums that cancel does not."""
    mask, wrong = torch.tensor([0.0, -torch.inf]), torch.tensor([-torch.inf, 0.0])
    assert loop_check._differ(mask, mask.clone(), 1e-5, 0.0) is None
    assert "inf" in str(loop_check._differ(mask, wrong, 1e-5, 0.0))
    nothing = torch.tensor([torch.nan])
    assert "nan" in str(loop_check._differ(nothing, nothing, 1e-5, 0.0))
    zero, noise = torch.full((4,), 1e-9), torch.full((4,), 2e-9)
    assert loop_check._differ(zero, noise, 1e-5, least=1e-2) is None
    assert loop_check._differ(zero, noise, 1e-5, least=0.0) is not None
    assert loop_check._differ(zero + 1e-3, noise, 1e-5, least=1e-2) is not None
