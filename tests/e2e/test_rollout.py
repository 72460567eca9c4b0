"""``program.rollout``: the model alone on the device between steps, generating as with plain transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megacompile
from megacompile.api.rollout_forecast import Completions, Forecast
from tests.e2e.test_generate import NEW, left_padded, prompts
from tests.e2e.test_predict import trained
from tests.support.coded_weights import Linear4bit
from tests.support.models import batch_for, build, gpt2

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}


def pair(
    make: Callable[[], nn.Module], budget: str = "1GB", dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[megacompile.Program, megacompile.Program]:
    """Two programs of equal models: one rolls out, the other one only trains."""
    models = make(), make()
    first, second = (
        megacompile.compile(m, budget, compute_dtype=dtype, optimizer=adam(m), max_grad_norm=1.0, **options)
        for m in models
    )
    first.model.train(), second.model.train()
    return first, second


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def alone(model: nn.Module, budget: str) -> megacompile.Program:
    return megacompile.compile(model, budget, compute_dtype=torch.float32, optimizer=adam(model))


def step(programs: tuple[megacompile.Program, ...], seed: int, name: str = "llama") -> None:
    """Train all alike, bit for bit."""
    losses = [program.train_step(batch_for(name, seed, size=2, length=8)).loss for program in programs]
    states = [program.state_dict() for program in programs]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in state)


def sampled(generate: Callable[..., Any], **options: Any) -> Any:
    torch.manual_seed(11)
    return generate(**options | NEW)


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """A model whose weights are rounded as programs round them, ties away from zero, and nothing else is."""
    for parameter in model.parameters():
        if dtype == torch.bfloat16:
            bits = parameter.data.view(torch.int32) + 0x8000
            parameter.data = (bits & ~0xFFFF).view(torch.float32).to(dtype)
    return model.eval()


def bytes_of(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@pytest.mark.slow_cases(r"(0.8|100.0-dtype1)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [100.0, 0.8])
def test_tokens_are_transformers_and_training_goes_on_bitwise(dtype: torch.dtype, share: float) -> None:
    """With weights that are kept, and with those of blocks that come one by one."""
    weights = bytes_of(build("llama")) * dtype.itemsize // 4
    programs = pair(lambda: build("llama"), f"{int(share * weights)}B", dtype)
    program = programs[0]
    with program.rollout() as rolled:  # before anything is laid out
        plain = in_dtype(build("llama"), dtype)
        assert all(torch.equal(p, plain.get_parameter(n)) for n, p in rolled.named_parameters() if p.numel())
    for seed in range(2):
        step(programs, seed)
        plain = in_dtype(trained(program), dtype)
        with program.rollout() as rolled:
            runtime: Any = program._session.runtime
            assert not runtime.resident.weights and runtime.device._slab.nbytes == 0
            assert rolled._rollout._streams == (share < 1)
            for options in (left_padded(), left_padded() | SAMPLED, {"input_ids": prompts()}):
                assert torch.equal(sampled(rolled.generate, **options), sampled(plain.generate, **options))
            with torch.no_grad():
                assert torch.equal(rolled(input_ids=prompts()).logits, plain(input_ids=prompts()).logits)
        assert program.memory.device_peak_bytes <= program.memory.budget_bytes
    step(programs, 2)


def test_the_budget_is_held_to_the_byte() -> None:
    """A rollout fits a budget of what it took; with a byte less it takes fewer rows at once, which draw as if
    nobody had tried more."""
    ids = prompts(rows=16, length=2)  # so that the cache is largest at the last token
    program = alone(build("llama"), "1GB")
    with program.rollout() as model:
        whole = sampled(model.generate, input_ids=ids, **SAMPLED)
        peak = model._rollout.device.peak_bytes
        torch.manual_seed(11)
        halves = torch.cat([model.generate(part, **SAMPLED | NEW) for part in ids.chunk(2)])
    parts = []
    for budget, expected in ((peak, whole), (peak - 1, halves)):
        program = alone(build("llama"), f"{budget}B")
        with program.rollout() as model:
            run, calls = model._rollout.run, list[str]()
            model._rollout.run = lambda f, *rest, calls=calls, run=run: (
                calls.append(f.__name__) or run(f, *rest)
            )
            assert torch.equal(sampled(model.generate, input_ids=ids, **SAMPLED), expected)
            assert model._rollout.device.peak_bytes <= budget
        parts.append(calls.count("generate"))
    assert parts == [1, 3]


@pytest.mark.slow
def test_rows_in_parts_end_where_they_do_together() -> None:
    """Parts of other lengths are padded, and draw as rows of their own would."""
    ids = prompts(rows=8, length=20)
    model: Any = build("llama")
    model.generation_config.update(eos_token_id=list(range(3, 30)))
    expected = sampled(model.eval().generate, input_ids=ids)
    assert bool((expected[:, 20:] == 0).any())
    program = alone(model, f"{bytes_of(model) + 60_000}B")
    with program.rollout() as rolled:
        assert torch.equal(sampled(rolled.generate, input_ids=ids), expected)
        assert torch.equal(
            sampled(rolled.generate, input_ids=ids, return_dict_in_generate=True).sequences, expected
        )
        with pytest.raises(megacompile.BudgetError, match=r"give \d rows at a time"):
            rolled.generate(ids, return_dict_in_generate=True, output_scores=True, **NEW)
        assert rolled.generate(ids[:1], return_dict_in_generate=True, **NEW).sequences.shape[0] == 1


@pytest.mark.slow_cases(r"10000")
@pytest.mark.parametrize("beside", [0, 10_000])
def test_weights_that_leave_no_room_for_one_row_are_streamed(beside: int) -> None:
    """At once, or when generating has met the budget."""
    model: Any = build("llama")
    expected = sampled(model.eval().generate, input_ids=prompts())
    program = alone(model, f"{bytes_of(model) + beside}B")
    with program.rollout() as rolled:
        assert rolled._rollout._streams == (beside == 0)
        assert torch.equal(sampled(rolled.generate, input_ids=prompts()), expected)
        assert rolled._rollout._streams


def test_tied_weights_dropout_and_modes() -> None:
    programs = pair(lambda: seeded(lambda: gpt2(dropout=0.3, layers=1)))
    step(programs, 0, "gpt2")
    plain: Any = trained(programs[0]).eval()
    with programs[0].rollout() as model:
        assert model.lm_head.weight is model.transformer.wte.weight and not model.training
        assert torch.equal(sampled(model.generate, **left_padded()), sampled(plain.generate, **left_padded()))
    assert programs[0].model.training
    step(programs, 1, "gpt2")


def test_adapters_before_anything_is_laid_out_and_after() -> None:
    from tests.e2e.test_trainer import lora

    programs = pair(lora)
    for seed in range(2):
        plain: Any = trained(programs[0]).eval() if seed else copy.deepcopy(programs[0].model).eval()
        with programs[0].rollout() as model:
            assert torch.equal(
                sampled(model.generate, **left_padded()), sampled(plain.generate, **left_padded())
            )
        step(programs, seed)


def test_coded_weights_compute_as_in_steps() -> None:
    def make() -> nn.Module:
        model: Any = build("llama", layers=1).requires_grad_(False)
        model.model.layers[0].mlp.up_proj = seeded(lambda: Linear4bit(32, 64))
        model.lm_head.requires_grad_(True)
        return model  # type: ignore[no-any-return]

    programs = pair(make)
    step(programs, 0)
    batch = {"input_ids": prompts()}
    with programs[0].rollout() as rolled:
        logits = rolled(**batch).logits
    torch.testing.assert_close(logits, programs[0].predict(batch).logits, rtol=1e-5, atol=1e-6)
    step(programs, 1)


def test_gradients_that_wait_stay_and_so_does_state_on_storage(tmp_path: Path) -> None:
    for options in ({}, {"offload_dir": str(tmp_path), "host_budget": "3MB"}):
        programs = pair(lambda: build("llama", layers=1), **options)
        for seed in range(2):
            for number, program in enumerate(programs):
                program.forward_backward(batch_for("llama", seed, size=2, length=8))
                if number == 0:
                    with program.rollout() as model:
                        model.generate(prompts(), **NEW)
                program.forward_backward(batch_for("llama", seed + 5, size=2, length=8))
                program.optimizer_step()
        step(programs, 2)


def test_an_exception_inside_and_calls_out_of_place() -> None:
    programs = pair(lambda: build("llama", layers=1))
    step(programs, 0)
    with pytest.raises(KeyboardInterrupt), programs[0].rollout() as model:
        with pytest.raises(megacompile.ProgramError, match="after the with block of its rollout"):
            programs[0].train_step(batch_for("llama"))
        with pytest.raises(IndexError):
            model.generate(torch.full((1, 3), 10_000), **NEW)
        assert model.generate(prompts(), **NEW).shape == (2, 17)
        raise KeyboardInterrupt
    with pytest.raises(megacompile.ProgramError, match="a rollout, which has ended"):
        model.generate(prompts(), **NEW)
    step(programs, 1)


@pytest.mark.filterwarnings("ignore:module forward hook with")  # of torch, beside the error
def test_too_small_a_budget_is_refused_with_the_least_one() -> None:
    least: Any = None
    for budget in ("10000B", None):
        program = alone(build("llama"), budget or f"{least}B")
        message = r"hbm_budget has to be at least (\d+) bytes" if least is None else "the cache of one row"
        with pytest.raises(megacompile.BudgetError, match=message) as refused, program.rollout() as model:
            model.generate(prompts(), **NEW)
        least = refused.value.least_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("gpt2", 3.0), ("llama", 100.0), ("llama", 0.9)])
def test_a_rollout_is_foretold_once_as_it_comes(
    name: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Where its weights are, how many rows come at once, and the bytes that they take."""
    ids = prompts(rows=16, length=20)
    model = build(name)
    budget = int(share * bytes_of(model))
    program = alone(model, f"{budget}B")
    with caplog.at_level("INFO", "megacompile.compiler"), program.rollout() as rolled:
        rollout, parts = rolled._rollout, list[int]()
        run = rollout.run
        rollout.run = lambda f, args, kwargs: parts.append(len(kwargs["input_ids"])) or run(f, args, kwargs)
        for _ in range(2):
            rolled.generate(ids, eos_token_id=None, **NEW)
    (said,) = (record.args[0] for record in caplog.records if record.msg == "%s")  # type: ignore[index]
    assert isinstance(said, Forecast) and said.completions == Completions(16, 20, 10)
    assert said.streams == rollout._streams and said.at_once == parts[-1]
    assert said.need_bytes == pytest.approx(rollout.device.peak_bytes, rel=0.05) or said.at_once < 16
    assert said.need_bytes <= budget and said.decode_rate > 0


@pytest.mark.slow_cases(r"dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_handed_over_by_name_within_the_budget(dtype: torch.dtype) -> None:
    """As programs compute with them; those that are kept have to fit together."""
    budget = int(0.8 * bytes_of(build("llama")) * dtype.itemsize // 4)
    programs = pair(lambda: build("llama"), f"{budget}B", dtype)
    program = programs[0]
    for seed in range(2):
        plain = in_dtype(trained(program) if seed else build("llama"), dtype)
        names = []
        for name, value in program.named_weights():
            assert torch.equal(value, plain.get_parameter(name))
            names.append(name)
            with pytest.raises(megacompile.ProgramError):
                program.train_step(batch_for("llama"))
        assert names == [name for name, _ in plain.named_parameters()]
        with pytest.raises(megacompile.BudgetError, match="taken before and not let go"):
            list(program.named_weights())
        step(programs, seed)
    for _ in program.named_weights():
        break  # and leave the rest
    step(programs, 2)
