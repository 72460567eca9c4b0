"""State on the device: no transfers where a model fits, the same bits at every budget, one state for all."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import megacompile
from benchmarks.instances import load_workload, shortened
from megacompile.hardware.catalog import load_machine
from megacompile.hardware.machine import nominal_cpu
from megacompile.hardware.simulate import simulate
from megacompile.passes import lower
from megacompile.planner.arrangements import with_state_at
from megacompile.planner.group_state import may_reside, trained_groups
from megacompile.planner.search import search
from megacompile.schedule.plan import Mode
from megacompile.schedule.step import peak_bytes
from megacompile.schedule.verify import verify
from megacompile.schedule.workload import Workload
from tests.support.fake_cuda import FakeCuda
from tests.support.models import batch_for, build
from tests.support.problems import chain, uniform

pytestmark = pytest.mark.filterwarnings("ignore:Compiling another program")
TRANSFERS = {"prefetch", "evict", "push_grad", "offload", "reload"}


def compiled(model: nn.Module, budget: str, **options: Any) -> megacompile.Program:
    options.setdefault("compute_dtype", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return megacompile.compile(model, budget, optimizer=optimizer, **options)


def least_budget(model: nn.Module, batch: Any, **options: Any) -> int:
    with pytest.raises(megacompile.BudgetError) as error:
        compiled(copy.deepcopy(model), "1kB", example_batch=batch, **options)
    assert error.value.least_bytes is not None
    return error.value.least_bytes


@pytest.mark.slow_cases(r"gpt2-options2")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("gpt2-dropout", {"max_grad_norm": 0.5}),  # a tied table: two contributions to one gradient
        ("gpt2", {"compute_dtype": torch.bfloat16}),
    ],
)
def test_a_model_that_fits_runs_without_transfers_and_bitwise_the_same(
    name: str, options: dict[str, Any]
) -> None:
    model = build(name)
    batches = [batch_for(name, i) for i in range(3)]
    least = least_budget(model, batches[0], **options)
    states, losses = [], []
    for budget in (f"{least}B", "1GB"):
        program = compiled(copy.deepcopy(model), budget, **options)
        losses.append([float(program.train_step(batch).loss) for batch in batches])
        states.append(program.state_dict())
        kinds = {op.kind for op in program.schedule.step.ops}
        assert bool(kinds & TRANSFERS) == (budget != "1GB")
        memory = program.memory
        assert 0.97 * memory.predicted_peak_bytes <= memory.device_peak_bytes <= memory.predicted_peak_bytes
        program.close()
    assert losses[0] == losses[1]
    assert all(torch.equal(states[1][n], v) for n, v in states[0].items())


def test_between_all_and_nothing_some_groups_stay() -> None:
    model, batch = build("plain"), batch_for("plain")
    whole = compiled(copy.deepcopy(model), "1GB", example_batch=batch)
    need = whole.memory.predicted_peak_bytes
    groups = len(whole.plan.groups)
    whole.close()
    counts = []
    for fraction in (1.0, 0.8, 0.6):
        program = compiled(copy.deepcopy(model), f"{int(need * fraction)}B", example_batch=batch)
        program.train_step(batch)
        assert program.memory.device_peak_bytes <= need * fraction
        counts.append(sum(g.state == "device" for g in program.plan.groups))
        program.close()
    assert counts[0] == groups > counts[1] > counts[2]


def test_accumulation_evaluation_and_state_with_state_on_the_device() -> None:
    """All programs of a model find its state, wherever it is."""
    model = build("plain")
    least = least_budget(model, batch_for("plain"), max_grad_norm=0.5)
    streamed = compiled(copy.deepcopy(model), f"{least}B", max_grad_norm=0.5)
    held = compiled(copy.deepcopy(model), "1GB", max_grad_norm=0.5)
    values = []
    for program in (streamed, held):
        program.train_step(batch_for("plain"))
        for i in range(3):
            program.forward_backward(batch_for("plain", i), weight=1 / 3)
        seen = [float(program.evaluate(batch_for("plain")))]
        norm = program.optimizer_step().grad_norm
        assert norm is not None
        program.train_step([batch_for("plain", 5), batch_for("plain", 6)])
        state = program.state_dict()
        program.load_state_dict({n: v + 1 for n, v in state.items()})
        seen += [float(norm), float(program.train_step(batch_for("plain", 7)).loss)]
        values.append((seen, program.state_dict()))
        assert all(torch.equal(values[0][1][n], v) for n, v in program.state_dict().items())
        program.close()
    assert values[0][0] == values[1][0]
    assert held.plan.groups[0].state == "device"


def test_a_gradient_that_is_not_finite_leaves_state_on_the_device_alone() -> None:
    program = compiled(build("plain"), "1GB", on_nonfinite="skip")
    batch = batch_for("plain")
    program.train_step(batch)
    before = program.state_dict()
    program.train_step({k: v * float("inf") for k, v in batch.items()})
    assert all(torch.equal(v, before[n]) for n, v in program.state_dict().items())
    program.train_step(batch)
    assert any(not torch.equal(v, before[n]) for n, v in program.state_dict().items())
    program.close()


def test_a_longer_batch_takes_the_place_of_state() -> None:
    """A program for which not all of it fits moves some to the host; the numbers do not notice."""
    model, short, long = build("plain"), batch_for("plain", size=4), batch_for("plain", size=16)
    need = compiled(copy.deepcopy(model), "1GB", example_batch=short).memory.predicted_peak_bytes
    tight = compiled(copy.deepcopy(model), f"{need}B")
    wide = compiled(copy.deepcopy(model), "1GB")
    losses = [
        [float(p.train_step(batch).loss) for batch in (short, long, short, long)] for p in (tight, wide)
    ]
    assert losses[0] == losses[1]
    plans = [[g.state for g in s.planned.plan.groups] for s in tight._session.decided.programs.values()]
    assert set(plans[0]) == {"device"} != set(plans[1])
    assert tight.memory.device_peak_bytes <= need
    for program in (tight, wide):
        program.close()


def test_the_device_kernel_takes_the_same_steps() -> None:
    """What CUDA runs on such groups, by its reference here, against host Adam."""
    from megacompile.runtime.cuda import CudaDevice
    from megacompile.state.adam import AdamHyper
    from megacompile.state.masters import HostState

    program = compiled(build("plain"), "1GB", example_batch=batch_for("plain"))
    layouts = program._session.decided.layout.groups
    ours, theirs = HostState(layouts), HostState(layouts)
    device = CudaDevice(FakeCuda(), 10**9)
    torch.manual_seed(0)
    for state in (ours, theirs):
        torch.manual_seed(1)
        for weights in state.traveling:
            weights.copy_(torch.randn_like(weights))
    for step in range(1, 4):
        for layout in layouts:
            grad = torch.randn(layout.elements)
            hyper = AdamHyper(1e-2, weight_decay=0.1, grad_scale=0.5)
            slots = range(step % 2, len(layout.slots))  # the first has no gradient in every other step
            with device.start([]):
                device.update(ours, layout.index, grad, [hyper], slots)
            theirs.update(layout.index, grad, [hyper], slots, threads=1)
    for place in [(g.index, i) for g in layouts for i in range(len(g.slots))]:
        torch.testing.assert_close(ours.read(place), theirs.read(place), rtol=1e-6, atol=1e-6)
    device.close()
    program.close()


def test_the_choice_follows_time() -> None:
    """State goes to the device only where the simulated step gets faster by it."""
    work, machine = chain(6), nominal_cpu(torch.float32)
    mode = Mode("train")
    groups = may_reside(work)
    found = search(work, mode, machine, 10**6, residents=groups)
    assert all(g.state == "device" for g in found.plan.groups)
    assert not search(work, mode, machine, 10**6).step.resident
    slow = replace(machine, memory_bandwidth=1e6)
    assert not search(work, mode, slow, 10**6, residents=groups).step.resident
    assert with_state_at(found.plan, (0,), "device") == found.plan


def layers_of_8b() -> Workload:
    """Ten layers of an 8B model, 39 GB of state."""
    work = shortened(load_workload("llama-3.1-8b-1x4096"), 12)
    groups = (
        replace(g, state_bytes=12 * g.elements - g.nbytes, gradient_bytes=4 * g.elements) for g in work.groups
    )
    return replace(work, groups=tuple(groups))


@pytest.mark.slow_cases(r"True")
@pytest.mark.parametrize("clip", [False, True])
def test_state_on_the_device_is_worth_more_than_activations(clip: bool) -> None:
    """What is left when activations have taken their part is less than what the state of all groups gains."""
    work, mode = layers_of_8b(), Mode("train", deferred=clip)
    machine = load_machine("h200").rates("bf16")
    budget, groups = 30 * 10**9, trained_groups(work)
    last = search(work, mode, machine, budget, resident=groups)  # all of which has no place
    assert 0 < len(last.step.resident) < len(groups)
    found = search(work, mode, machine, budget, residents=groups)
    assert found.step.resident and found.peak_bytes <= budget
    assert found.seconds < 0.8 * last.seconds
    verify(found.step, work, budget_bytes=budget)
    again = search(work, mode, machine, budget, resident=groups[:3])
    assert again.step.resident == groups[:3]


def test_gradients_that_wait_move_with_the_state() -> None:
    """Micro-batches of two lengths, whose programs keep different groups on the device."""
    model, short, long = build("plain"), batch_for("plain", size=4), batch_for("plain", size=16)
    probe = compiled(copy.deepcopy(model), "1GB")
    probe.forward_backward(short)
    tight = compiled(copy.deepcopy(model), f"{probe.memory.predicted_peak_bytes}B")
    wide = compiled(copy.deepcopy(model), "1GB")
    for batches in ([short, long], [long, short, long], [short, long, short]):
        losses = [float(p.train_step(batches).loss) for p in (tight, wide)]
        assert losses[0] == losses[1]
    plans = [s.planned.step.resident for s in tight._session.decided.programs.values()]
    assert len({len(r) for r in plans}) > 1
    first, second = tight.state_dict(), wide.state_dict()
    assert all(torch.equal(first[n], second[n]) for n in first)
    for program in (probe, tight, wide):
        program.close()


def test_frozen_weights_that_a_plan_holds_stay_from_step_to_step() -> None:
    """As with adapters, most weights are frozen: those held through a step are fetched once for all steps."""
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "q_proj" in name)
    batches = [batch_for("llama", i, size=4, length=64) for i in range(3)]
    found = []
    for budget in ("620kB", "760kB"):
        mine = copy.deepcopy(model)
        optimizer = torch.optim.AdamW([p for p in mine.parameters() if p.requires_grad], lr=1e-2)
        program = megacompile.compile(mine, budget, optimizer=optimizer, compute_dtype=torch.float32, seed=1)
        losses = [float(program.train_step(batch).loss) for batch in batches]
        schedule = program.schedule
        layers = {
            g
            for g, group in enumerate(schedule.work.groups)
            if not group.trainable and "layers" in group.name
        }
        fetched = {op.group for op in schedule.step.ops if op.kind == "prefetch"}
        assert fetched and bool(fetched & layers) == (budget == "620kB")
        assert (layers <= set(schedule.step.resident)) == (budget == "760kB")
        found.append((losses, program.state_dict()))
        program.close()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_with_memory_for_everything_nothing_is_slower_than_all_state_on_the_device() -> None:
    work, mode = layers_of_8b(), Mode("train", deferred=True)
    machine, groups = load_machine("h200").rates("bf16"), trained_groups(work)
    step = lower(work, with_state_at(uniform(work, "some"), groups, "device"), mode)
    found = search(work, mode, machine, peak_bytes(step), residents=groups)
    assert found.seconds <= simulate(step, machine).step_seconds
