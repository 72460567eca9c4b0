"""Frozen weights in codes, as QLoRA has them: kept and streamed as codes, decoded in blocks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import megacompile
from megacompile.capture.quantized_weights import stored_value
from megacompile.capture.weight_codings import settle
from tests.e2e.test_trainer import assert_same_logs, logs, trainer
from tests.e2e.test_trl import sft
from tests.support.coded_weights import (
    WIDTH,
    Adapted,
    Linear4bit,
    Linear8bitLt,
    decoded_blocks,
    decoded_by_hand,
    decoded_rows,
    frozen_copy,
    library,
)
from tests.support.ranks import run_ranks

STEPS = 3
STORED = 64 + 4 * 64 + 64 * 64 // 2  # bytes of a weight: its book, its scales and its codes


class InRows(Tensor):
    """A tensor subclass of 8-bit codes, which computes as torchao's do."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)  # type: ignore[attr-defined]
        made.codes, made.scales = codes, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, held: dict[str, Tensor], context: None, *outer: Any) -> Any:
        return cls(held["codes"], held["scales"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.codes.to(x.dtype)) * weight.scales.to(x.dtype) + bias
        if func.__name__ in ("to", "mul"):
            return func(args[0].codes * args[0].scales[:, None], *args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].codes, args[0].scales) if func is torch.ops.aten.detach.default else NotImplemented


def in_rows(width: int, out: int) -> nn.Module:
    layer = nn.Linear(width, out).requires_grad_(False)
    codes = torch.randint(-127, 128, (out, width), dtype=torch.int8)
    layer.weight = nn.Parameter(InRows(codes, torch.rand(out) / 300), requires_grad=False)
    return layer


def by_bitsandbytes(**given: Any) -> Callable[[int, int], nn.Module]:
    def make(width: int, out: int) -> nn.Module:
        bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing: pip install bitsandbytes")
        plain, layer = nn.Linear(width, out), bnb.nn.Linear4bit(width, out, **given)
        layer.load_state_dict(plain.state_dict())
        frozen: nn.Module = layer.to("cpu").requires_grad_(False)
        return frozen

    return make


def in_8_bits(width: int, out: int) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing: pip install bitsandbytes")
    plain, layer = (
        nn.Linear(width, out),
        bnb.nn.Linear8bitLt(width, out, has_fp16_weights=False, threshold=6.0),
    )
    layer.load_state_dict(plain.state_dict())
    frozen: nn.Module = layer.to("cpu").requires_grad_(False)
    return frozen


def by_torchao(config: str, **given: Any) -> Callable[[int, int], nn.Module]:
    def make(width: int, out: int) -> nn.Module:
        ao: Any = pytest.importorskip(
            "torchao.quantization", reason="torchao is missing: pip install torchao"
        )
        options = {name: value(ao) if callable(value) else value for name, value in given.items()}
        holder = nn.Sequential(nn.Linear(width, out)).requires_grad_(False)
        ao.quantize_(holder, getattr(ao, config)(set_inductor_config=False, **options))
        return holder[0]

    return make


def decoded_by_bitsandbytes(layer: Any) -> Tensor:
    import bitsandbytes as bnb

    weight: Tensor = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight


def built(make: Callable[[int, int], nn.Module]) -> Adapted:
    torch.manual_seed(0)
    return Adapted(make)


def batch(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed)).unbind()
    return x.to(dtype), y


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def compiled(model: nn.Module, dtype: torch.dtype, budget: str = "1MB", **given: Any) -> megacompile.Program:
    return megacompile.compile(model, budget, optimizer=optimizer_of(model), compute_dtype=dtype, **given)


def trained(program: megacompile.Program, dtype: torch.dtype = torch.float32) -> list[float]:
    return [float(program.train_step(batch(i, dtype)).loss) for i in range(STEPS)]


MAKERS = [
    pytest.param(Linear4bit, decoded_by_hand, id="4 bits, by hand"),
    pytest.param(Linear8bitLt, decoded_by_hand, id="8 bits, by hand"),
    pytest.param(by_bitsandbytes(quant_type="nf4"), decoded_by_bitsandbytes, id="nf4, nested"),
    pytest.param(
        by_bitsandbytes(quant_type="fp4", compress_statistics=False, quant_storage=torch.bfloat16),
        decoded_by_bitsandbytes,
        id="fp4 in bf16",
    ),
]


@pytest.mark.slow_cases(r"dtype1-(?!nf4)")
@pytest.mark.filterwarnings("ignore:.*and other 8-bit weights")
@pytest.mark.parametrize(("make", "decode"), MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_that_over_decoded_weights(make: Any, decode: Any, dtype: torch.dtype) -> None:
    """Bit for bit; host and link carry codes: half a byte or one, and a scale for each block or row.

    The decoded weights are FP32: beside weights of bf16, a program would keep the trained ones in FP32.
    """
    model = built(make)
    stored = STORED if make is not Linear8bitLt else WIDTH * 4 + WIDTH * WIDTH
    other = compiled(frozen_copy(model, decode), dtype)
    want = trained(other, dtype)
    program = compiled(model, dtype)
    assert trained(program, dtype) == want
    codes = [group.nbytes for group in program.schedule.work.groups if group.nbytes == stored]
    assert len(codes) == 3
    ours, theirs = (p.memory.host_bytes["masters"] for p in (program, other))
    assert theirs - ours >= 3 * (WIDTH * WIDTH * dtype.itemsize - stored)
    program.close()
    other.close()


LIBRARIES = [
    pytest.param(by_bitsandbytes(quant_type="nf4"), id="nf4"),
    pytest.param(in_8_bits, id="8 bits"),
    pytest.param(Linear8bitLt, id="8 bits by hand"),
    pytest.param(in_rows, id="subclass by hand"),
    pytest.param(by_torchao("Int8WeightOnlyConfig"), id="torchao int8"),
    pytest.param(
        by_torchao("Int8WeightOnlyConfig", granularity=lambda ao: ao.PerGroup(32)), id="torchao int8, groups"
    ),
    pytest.param(by_torchao("Float8WeightOnlyConfig"), id="torchao float8"),
]


def in_eager(model: nn.Module) -> list[float]:
    optimizer, losses = optimizer_of(model), []
    for i in range(STEPS):
        loss = model(*batch(i))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow_cases(r"(torchao int8, groups|torchao float8)")
@pytest.mark.filterwarnings("ignore:.*and other 8-bit weights")
@pytest.mark.parametrize("make", LIBRARIES)
def test_training_is_that_of_the_library(make: Any) -> None:
    """In FP32, losses bit for bit, whatever the budget; the model has its codes again, run or not."""
    model, frozen = built(make), built(make)
    want = in_eager(model)
    for budget in ("1MB", "70kB"):
        ours = built(make)
        if budget == "70kB":
            ours(*batch(0))  # an 8-bit layer takes its weight's scales then
        program = compiled(ours, torch.float32, budget)
        assert trained(program) == want
        masters = program.memory.host_bytes["masters"]
        assert masters < 3 * 4 * WIDTH * WIDTH
        program.sync_to(ours)
        program.close()
        for mine, its in zip(ours.parameters(), model.parameters(), strict=True):
            if its.requires_grad:
                torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)
        assert in_eager(ours) != want
    ours.load_state_dict({n: v for n, v in frozen.state_dict().items() if "bases" not in n}, strict=False)
    assert in_eager(ours) == want


def adapted(make: Callable[[int, int], nn.Module] | nn.Module, adapter: str) -> nn.Module:
    """Frozen layers, those of a model or new ones, with adapters of PEFT's that read their weights."""
    import peft

    torch.manual_seed(0)
    model = make if isinstance(make, nn.Module) else Adapted(make)
    on = {"target_modules": r"bases\.\d"}
    given: Any = {
        "DoRA": lambda: peft.LoraConfig(r=2, use_dora=True, init_lora_weights=False, **on),
        "HiRA": lambda: peft.HiraConfig(r=2, init_weights=False, **on),
        "VeRA": lambda: peft.VeraConfig(r=2, init_weights=False, **on),
    }
    torch.manual_seed(1)
    whole: nn.Module = peft.get_peft_model(model, given[adapter]())  # type: ignore[arg-type]
    return whole


OUTSIDE = [
    pytest.param(Linear4bit, "DoRA", id="DoRA over 4 bits"),
    pytest.param(Linear8bitLt, "DoRA", id="DoRA over 8 bits"),
    pytest.param(Linear4bit, "VeRA", id="VeRA over 4 bits"),
    pytest.param(Linear8bitLt, "VeRA", id="VeRA over 8 bits"),
    pytest.param(in_rows, "VeRA", id="VeRA over a subclass"),
    pytest.param(in_rows, "DoRA", id="DoRA over a subclass"),
    pytest.param(in_rows, "HiRA", id="HiRA over a subclass"),
]


@pytest.fixture
def bitsandbytes_for_peft(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, PEFT finds our stand-in. It remembers what it found, also for the tests after this one."""
    imports = pytest.importorskip("peft.import_utils", reason="peft is missing: pip install peft")
    remembered = imports.is_bnb_available, imports.is_bnb_4bit_available
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "bitsandbytes", library())
        for answer in remembered:
            answer.cache_clear()
        yield
    for answer in remembered:
        answer.cache_clear()


@pytest.mark.slow_cases(r"(VeRA over \d bits|DoRA over a subclass)")
@pytest.mark.usefixtures("bitsandbytes_for_peft")
@pytest.mark.filterwarnings("ignore:.*and other 8-bit weights")
@pytest.mark.parametrize(("make", "adapter"), OUTSIDE)
def test_adapters_that_read_weights_train_as_over_decoded_ones(make: Any, adapter: str) -> None:
    """DoRA and HiRA decode the weight of the layer that they adapt; VeRA's layers share modules."""
    model = built(make)
    want = in_eager(adapted(frozen_copy(model, decoded_by_hand), adapter))
    program = compiled(adapted(model, adapter), torch.float32)
    assert trained(program) == pytest.approx(want, rel=1e-6)
    assert program.memory.host_bytes["masters"] < 3 * 4 * WIDTH * WIDTH
    program.close()


class Reading(Adapted):
    """Has a frozen layer, whose weight its forward reads as a test says."""

    def __init__(self, make: Any, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(make, layers=1)
        self._does = does

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self._does(self.bases[0], x), y)


def looked_at(weight: Any) -> list[Any]:
    found = [type(weight).__name__, weight.shape, weight.dtype, weight.requires_grad]
    return [*found, isinstance(weight, nn.Parameter), isinstance(weight, nn.Linear), weight.numel()]


@pytest.mark.filterwarnings("ignore:.*and other 8-bit weights")
@pytest.mark.parametrize("make", [Linear4bit, Linear8bitLt, in_rows])
def test_a_weight_that_is_read_looks_as_it_is(make: Any) -> None:
    """Its class, form and attributes; those of the layer that holds it, too."""
    seen: list[Any] = []

    def does(layer: Any, x: Tensor) -> Tensor:
        weight = layer.weight
        seen[:] = looked_at(weight)
        if make is Linear4bit:
            assert layer.quant_state.absmax.shape == weight.quant_state.absmax.shape
            x = x + decoded_blocks(weight.data, weight.quant_state).sum(0)
        elif make is Linear8bitLt:
            assert layer.state.CB.shape == weight.CB.shape
            x = x + decoded_rows(weight, layer.state.SCB).sum(0)
        layer.weight = weight if make is in_rows else weight.to(x.device)  # as PEFT does
        return x + layer(x)

    torch.manual_seed(0)
    model = Reading(make, does)
    program = compiled(model, torch.float32)
    want = looked_at(model.bases[0].weight)
    trained(program)
    assert seen == want
    program.close()


def test_what_cannot_be_done_with_a_read_weight_is_refused() -> None:
    def assigns(layer: Any, x: Tensor) -> Tensor:
        layer.weight = nn.Parameter(layer.weight.data + 1, requires_grad=False)
        return x

    with pytest.raises(
        megacompile.MegacompileError, match=r"assigns the weight of a Linear4bit, which is kept"
    ):
        trained(compiled(Reading(Linear4bit, assigns), torch.float32))
    with pytest.raises(megacompile.MegacompileError, match=r"a tensor subclass, .* lacks this operation"):
        trained(compiled(Reading(in_rows, lambda layer, x: x @ layer.weight), torch.float32))


KEPT = [
    pytest.param(by_bitsandbytes(quant_type="nf4"), id="nested"),
    pytest.param(by_bitsandbytes(quant_type="nf4", compress_statistics=False), id="not nested"),
    pytest.param(in_8_bits, id="8 bits"),
    pytest.param(Linear8bitLt, id="8 bits by hand"),
    pytest.param(in_rows, id="subclass by hand"),
    pytest.param(by_torchao("Int8WeightOnlyConfig"), id="torchao int8"),
]


def bytes_of(model: Any) -> list[Tensor]:
    settle(model)
    return [stored_value(layer.weight) for layer in model.bases]


@pytest.mark.slow_cases(r"(not nested|torchao)")
@pytest.mark.filterwarnings("ignore:.*and other 8-bit weights")
@pytest.mark.parametrize("make", KEPT)
def test_values_come_back_as_codes(make: Any, tmp_path: Path) -> None:
    model, fresh = built(make), built(make)
    program = compiled(model, torch.bfloat16, offload_dir=tmp_path)
    trained(program)
    copied = copy.deepcopy(model)
    if make is not in_rows:  # which knows one function alone
        copied.bases[0](torch.randn(2, WIDTH))
    assert all(torch.equal(*both) for both in zip(bytes_of(copied), bytes_of(fresh), strict=True))
    state = program.state_dict()
    assert state["bases.0.weight"].dtype == torch.uint8
    program.load_state_dict(state)
    with pytest.raises(megacompile.MegacompileError, match=r"bases\.0\.weight is kept in codes"):
        program.export(tmp_path / "exported")
    program.sync_to(model)
    program.close()
    assert all(torch.equal(*both) for both in zip(bytes_of(model), bytes_of(fresh), strict=True))
    assert all(type(p) is type(q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))
    if "bitsandbytes" in str(type(model.bases[0])):
        states = [{n: v for n, v in m.state_dict().items() if "bases" in n} for m in (model, fresh)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def of_rank(rank: int) -> list[float]:
    """Losses of one of two ranks, or of a process without others (-1), over half of a batch or all of it."""
    program = compiled(built(Linear4bit), torch.float32)
    losses = []
    for step in range(STEPS):
        parts = [tuple(half) for half in zip(*(x.chunk(2) for x in batch(step)), strict=True)]
        losses.append(float(program.train_step([parts[rank]] if rank >= 0 else parts).loss))
    program.close()
    return losses


@pytest.mark.slow
def test_ranks_share_codes() -> None:
    """Each keeps a half of them, and gets the other over the fabric."""
    assert run_ranks(2, of_rank) == [pytest.approx(of_rank(-1), rel=1e-6)] * 2


def test_other_scales_are_kept_where_they_come_back() -> None:
    """A state of another base: what the model then has is that base, whatever its own scales were."""
    model, other = (built(by_bitsandbytes(quant_type="nf4")) for _ in range(2))
    for layer in other.bases:
        layer.weight.quant_state.offset *= 2  # type: ignore[union-attr]
    theirs = compiled(other, torch.bfloat16)
    trained(theirs)
    program = compiled(model, torch.bfloat16)
    trained(program)
    program.load_state_dict(theirs.state_dict())
    theirs.sync_to(other)
    program.sync_to(model)
    for mine, its in zip(model.bases, other.bases, strict=True):
        assert torch.equal(decoded_by_bitsandbytes(mine), decoded_by_bitsandbytes(its))


def test_what_cannot_be_kept_as_codes_is_refused_by_name() -> None:
    for change, words in (
        ({"quant_state": None}, r'bases\.0\.weight has no codes yet: call model\.to\("cpu"\)'),
        ({"packing": True}, r"bases\.0\.weight was packed for inference on this CPU"),
    ):
        model = built(Linear4bit)
        weight: Any = model.bases[0].weight
        if "packing" in change:
            weight.quant_state.packing_format_for_cpu = True
        else:
            weight.quant_state = None
        with pytest.raises(megacompile.MegacompileError, match=words):
            compiled(model, torch.float32)
    for change, words in (  # type: ignore[assignment]
        ({"has_fp16_weights": True}, r"bases\.0\.weight is coded anew in each step"),
        ({"data": torch.zeros(WIDTH, WIDTH)}, r"bases\.0\.weight has no codes yet"),
    ):
        model = built(Linear8bitLt)
        for name, value in change.items():
            setattr(model.bases[0].weight, name, value)
        with pytest.raises(megacompile.MegacompileError, match=words):
            compiled(model, torch.float32)
    model = built(in_rows)
    model.bases[0].weight.requires_grad_(True)
    with pytest.raises(megacompile.MegacompileError, match=r"InRows of tests and trained, .* freeze it"):
        compiled(model, torch.float32)
    model = built(Linear4bit)
    model.table = nn.Embedding(4, 4)
    model.table.weight = model.bases[0].weight  # type: ignore[assignment]
    del model.bases[0]
    with pytest.raises(megacompile.MegacompileError, match=r"table\.weight is in a Embedding"):
        compiled(model, torch.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


FOUR: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.float32,
}
EIGHT: dict[str, Any] = {"load_in_8bit": True}


def qlora(checkpoint: Path, coded: dict[str, Any]) -> nn.Module:
    """As QLoRA's users make a model."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing: pip install bitsandbytes")
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    codes = BitsAndBytesConfig(**coded)
    model = LlamaForCausalLM.from_pretrained(checkpoint, quantization_config=codes, device_map="cpu")
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapted: nn.Module = peft.get_peft_model(model, settings)
    return adapted


@pytest.mark.filterwarnings("ignore:.*and other 8-bit weights")
@pytest.mark.parametrize("coded", [FOUR, EIGHT], ids=["4 bits", "8 bits"])
def test_a_trainer_logs_and_saves_what_transformers_does(
    coded: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    import transformers

    from megacompile.integrations.transformers import Trainer

    settings: dict[str, Any] = {
        "max_steps": 2,
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 1,
    }
    both = []
    for kind in (Trainer, transformers.Trainer):
        of = trainer(kind, tmp_path / kind.__module__, make=lambda: qlora(checkpoint, coded), **settings)
        of.train()
        of.save_model(str(tmp_path / kind.__module__ / "last"))
        both.append(of)
    assert_same_logs(*both)
    ours, theirs = (load_file(tmp_path / k.__module__ / "last/adapter_model.safetensors")
                    for k in (Trainer, transformers.Trainer))  # fmt: skip
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(value, theirs[name], atol=1e-6) for name, value in ours.items())
    mine, its = (of.model.state_dict() for of in both)  # of the trainer's, lent
    assert mine.keys() == its.keys()
    assert all(torch.equal(value, its[name]) for name, value in mine.items() if "lora" not in name)
    resumed = trainer(
        Trainer, tmp_path / Trainer.__module__, make=lambda: qlora(checkpoint, coded), **settings
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / Trainer.__module__ / "checkpoint-1"))
    assert logs(resumed)[:2] == logs(both[0])[:2]
    again = load_file(tmp_path / Trainer.__module__ / "checkpoint-2/adapter_model.safetensors")
    assert all(torch.equal(value, again[name]) for name, value in ours.items())


def test_sft_trains_as_trl_does(checkpoint: Path, tmp_path: Path) -> None:
    """TRL trains adapters over codes in bf16, which rounds what FP32 masters do not."""
    import trl

    from megacompile.integrations.trl import SFTTrainer

    both = [
        sft(kind, tmp_path / kind.__module__, lambda: qlora(checkpoint, FOUR))
        for kind in (SFTTrainer, trl.SFTTrainer)
    ]
    for of in both:
        of.train()
    losses = [[entry["loss"] for entry in logs(of) if "loss" in entry] for of in both]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
