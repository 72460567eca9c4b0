"""State formats: what a group's arrays are, how a program trains on coded moments, what it says of bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import megacompile
from megacompile.api.pipeline import Compiler
from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot, padded_elements
from megacompile.state.masters import HostState
from megacompile.state.moment_formats import (
    CODINGS,
    SMALL,
    StateFormat,
    group_arrays,
    shard_runs,
    state_bytes,
)
from tests.support.models import Plain

FORMATS: tuple[StateFormat, ...] = ("fp32", "int8", "int4")


def layout(sizes: list[int], owners: list[int], dtype: torch.dtype = torch.bfloat16) -> GroupLayout:
    slots, offset = [], 0
    for index, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        slots.append(Slot(Parameter(f"p{index}", (size,), (1,), dtype, owner), offset))
        offset += padded_elements(size)
    return GroupLayout(0, "group", dtype, True, tuple(slots), offset)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3 * SMALL), st.integers(0, 2)), min_size=1, max_size=8),
    st.sampled_from(FORMATS),
)
def test_runs_cover_the_bucket_and_fill_the_arrays(parts: list[tuple[int, int]], form: StateFormat) -> None:
    group = layout([n for n, _ in parts], [owner for _, owner in parts])
    runs = shard_runs(group, form, 0)
    assert [r.start for r in runs] == [0, *(r.stop for r in runs[:-1])]
    assert runs[-1].stop == group.elements
    filled = {True: (0, 0), False: (0, 0)}
    for run in runs:
        place = run.place
        elements, blocks = filled[place.coded]
        assert (place.offset, place.block) == (elements, blocks)
        scales = CODINGS[form].blocks(place.elements) if place.coded else 0
        filled[place.coded] = (elements + place.elements, blocks + scales)
    arrays = {a.name: a.elements for a in group_arrays(group, form)}
    assert arrays.get("exp_avg", 0) == filled[False][0]
    if form in CODINGS:
        elements, blocks = filled[True]
        assert arrays.get("exp_avg_codes", 0) == CODINGS[form].code_bytes(elements)
        assert arrays.get("exp_avg_sq_scales", 0) == blocks


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3 * SMALL), min_size=1, max_size=8), st.sampled_from(["int8", "int4"]))
def test_blocks_begin_anew_at_every_parameter(sizes: list[int], form: StateFormat) -> None:
    group = layout(sizes, [0] * len(sizes))
    begins = {slot.offset for slot in group.slots if slot.parameter.numel > SMALL}
    edges = set(
        itertools.chain.from_iterable(
            range(r.start, r.stop, CODINGS[form].block) for r in shard_runs(group, form, 0) if r.place.coded
        )
    )
    assert begins <= edges


def test_bytes_per_parameter_of_a_large_group() -> None:
    group = layout([4096 * 4096], [0])
    per = {f: sum(state_bytes((group,), f).values()) / group.elements for f in FORMATS}
    assert per["fp32"] == 12
    assert per["int8"] == 6 + 8 / 256
    assert per["int4"] == 5 + 8 / 128


@pytest.mark.parametrize(("form", "dtype"), [("int8", torch.bfloat16), ("int4", torch.float32)])
def test_a_program_trains_on_coded_moments(form: str, dtype: torch.dtype) -> None:
    """Close to FP32 moments, and bit for bit the same at another budget and with the coded Adam by hand."""
    generator = torch.Generator().manual_seed(3)
    batch = {k: torch.randn(4, n, generator=generator).to(dtype) for k, n in (("x", 16), ("y", 3))}
    runs: dict[tuple[str, str], list[float]] = {}
    for state, budget in (("fp32", "1GB"), (form, "1GB"), (form, "400kB")):
        torch.manual_seed(0)
        model = Plain(width=80)
        program = megacompile.compile(
            model, budget, compute_dtype=dtype, optimizer_state=state, max_grad_norm=1.0,  # type: ignore[arg-type]
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        )  # fmt: skip
        runs[state, budget] = [float(program.train_step(batch).loss) for _ in range(12)]
        moments = program.memory.host_bytes["moments"]
        plain = sum(8 * padded_elements(p.numel()) for p in model.parameters())
        assert moments == plain if state == "fp32" else moments < 0.4 * plain
        program.close()
    assert runs[form, "1GB"] == runs[form, "400kB"]
    exact, coded = runs["fp32", "1GB"], runs[form, "1GB"]
    assert coded != exact
    assert coded[-1] < 0.7 * coded[0]
    assert max(abs(a - b) for a, b in zip(exact, coded, strict=True)) < 0.1 * exact[0]


SIZES, OWNERS = [5000, 64, 8192, 4096, 6001], [0, 0, 0, 1, 1]
USED = st.sets(st.integers(0, len(SIZES) - 1), min_size=1)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.just(set(range(len(SIZES)))) | USED, min_size=3, max_size=5), st.sampled_from(FORMATS))
def test_update_is_the_step_of_each_parameter_that_has_a_gradient(
    used: list[set[int]], form: StateFormat
) -> None:
    """Whichever of them have, each counts its own steps; nothing is read of a gradient that is not there."""
    from megacompile.state.adam import AdamHyper, adamw_step
    from megacompile.state.coded_adam import Coded, coded_adamw_step

    group = layout(SIZES, OWNERS, torch.float32)
    state = HostState([group], form)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, generator=generator) for n in SIZES]
    moments = []
    for index, weight in enumerate(weights):
        state.write((0, index), weight)
        n = padded_elements(weight.numel())
        if form == "fp32" or weight.numel() <= SMALL:
            moments.append([torch.zeros(n) for _ in range(2)])
            continue
        codes, scales = CODINGS[form].code_bytes(n), CODINGS[form].blocks(n)
        shapes = [(torch.zeros(codes, dtype=torch.uint8), torch.zeros(scales)) for _ in range(2)]
        moments.append([Coded(*s) for s in shapes])
    steps = [0] * len(SIZES)
    hypers = [AdamHyper(lr=1e-2, weight_decay=d) for d in (0.1, 0.0)]
    for slots in used:
        grad = torch.full((group.elements,), float("nan"))
        for index in sorted(slots):
            slot, weight, (m, v) = group.slots[index], weights[index], moments[index]
            steps[index] += 1
            hyper = replace(hypers[OWNERS[index]], step=steps[index])
            n = weight.numel()
            g, padded = torch.zeros(2, padded_elements(n))
            g[:n] = grad[slot.offset : slot.offset + n] = torch.randn(n, generator=generator)
            padded[:n] = weight
            if isinstance(m, Coded):
                coded_adamw_step(padded, m, v, g, hyper, CODINGS[form])
            else:
                adamw_step(padded, m, v, g, hyper)
            weight.copy_(padded[:n])
        state.update(0, grad, hypers, slots, threads=1)
    assert state.steps == [steps]
    for index, weight in enumerate(weights):
        assert torch.equal(state.read((0, index)), weight)


def test_unknown_format_and_a_host_budget_that_int8_would_meet() -> None:
    model = nn.Sequential(nn.Linear(16, 256), nn.Linear(256, 3))
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(megacompile.MegacompileError, match="fp32, int8, int4"):
        megacompile.compile(model, "1GB", optimizer=adamw, optimizer_state="int2")  # type: ignore[arg-type]
    wide = Plain(width=128)
    batch = {"x": torch.randn(2, 16).bfloat16(), "y": torch.randn(2, 3).bfloat16()}
    optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-3)
    with pytest.raises(megacompile.BudgetError, match=r'optimizer_state="int8" saves .*"int4" saves'):
        megacompile.compile(wide, "1GB", host_budget="1MB", optimizer=optimizer, example_batch=batch)


def train_bf16(micro: int) -> tuple[dict[str, torch.Tensor], int]:
    """Three clipped steps; the trained state and the bytes of kept gradients per parameter."""
    torch.manual_seed(0)
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = megacompile.compile(model, "24KB", optimizer=optimizer, max_grad_norm=0.1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        batches = [
            {k: torch.randn(4, n, generator=generator).bfloat16() for k, n in (("x", 16), ("y", 3))}
            for _ in range(micro)
        ]
        program.train_step(batches)
    state, nbytes = program.state_dict(), program.memory.host_bytes["gradients"]
    program.close()
    return state, nbytes // sum(padded_elements(p.numel()) for p in model.parameters())


def test_kept_gradients_wait_in_bf16_where_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiler, "_may_reside", lambda *_: ())  # gradients wait on the host
    clipped, per_parameter = train_bf16(1)
    assert per_parameter == 2
    assert train_bf16(2)[1] == 4
    monkeypatch.setattr("megacompile.runtime.bound_step.kept_gradients", lambda step: {})  # FP32 for all
    wide, per_parameter = train_bf16(1)
    assert per_parameter == 4
    assert all(torch.equal(v, wide[n]) for n, v in clipped.items())
