"""Allocate the host state of a planned program within the host budget, or refuse it with the ways out.

In: a :class:`~megacompile.api.decisions.Scheduled` program, settings. Out: the state and the device that all
programs of a model share.
"""

from __future__ import annotations

from collections.abc import Sequence

from megacompile.api.decisions import Scheduled
from megacompile.api.settings import Settings
from megacompile.blocks.weight_groups import Assembly, GroupLayout
from megacompile.distributed.world import World
from megacompile.errors import BudgetError
from megacompile.runtime.device import Device
from megacompile.schedule.plan import Plan
from megacompile.schedule.step import Step
from megacompile.schedule.workload import Workload
from megacompile.state.host_budget import host_bytes, host_states, step_bytes, storage_window
from megacompile.state.masters import HostState
from megacompile.state.moment_formats import Form, describe_savings
from megacompile.state.nvme_offload import StatePlacement, host_state_bytes, place_groups
from megacompile.state.scratch_files import folders_of
from megacompile.units import format_bytes


def allocate_host_state(
    step: Step,
    plan: Plan,
    assembly: Assembly,
    form: Form,
    directories: Sequence[str],
    host_budget_bytes: int,
    world: World,
) -> HostState:
    """Host memory, and storage where the plan wants it, for all state and for what steps need beside it; of a
    rank of ``world``, for its shards.

    Raises :class:`~megacompile.errors.BudgetError` where that is more than ``host_budget_bytes``, or more
    than the host gives.
    """
    need = check_state(step, plan, assembly, form, directories, host_budget_bytes, world)
    window, transient = storage_window(plan), step_bytes(step, assembly.work)
    placement = StatePlacement(host_states(plan), window, folders_of(world, directories) if window else ())
    try:
        return HostState(assembly.groups, form, placement, transient, world)
    except (RuntimeError, MemoryError) as error:
        raise BudgetError(
            f"The host did not give the {format_bytes(need)} that masters, moments and kept gradients "
            "take: set host_budget to what it has, and see what fits."
        ) from error


def check_state(
    step: Step,
    plan: Plan,
    assembly: Assembly,
    form: Form,
    directories: Sequence[str],
    host_budget_bytes: int,
    world: World,
) -> int:
    """Return the host bytes of the state and a first program; refused where they are more than the budget."""
    need, transient = host_bytes(assembly, form, plan, step).total, step_bytes(step, assembly.work)
    if need > host_budget_bytes:
        numbers = (host_budget_bytes, need, transient)
        raise _too_large(assembly.groups, form, bool(directories), *numbers, world.local)
    return need


def check_beside(stored_bytes: int, step: Step, work: Workload, host_budget_bytes: int) -> None:
    """Refuse a further program whose gradients and offloaded activations do not fit beside the state as it
    lies."""
    transient = step_bytes(step, work)
    if stored_bytes + transient > host_budget_bytes:
        raise BudgetError(
            f"host_budget={format_bytes(host_budget_bytes)} is too small for this batch: beside "
            f"{format_bytes(stored_bytes)} of masters and moments its program keeps "
            f"{format_bytes(transient)} of gradients and offloaded activations on the host. Compile with the "
            "batch, or list of them, that needs the most as example_batch, so that room is left for it; or "
            "raise host_budget, or give smaller batches."
        )


def _too_large(
    layouts: tuple[GroupLayout, ...],
    form: Form,
    has_storage: bool,
    given_bytes: int,
    need: int,
    transient: int,
    ranks: int,
) -> BudgetError:
    """Describe what a machine's ranks, each of which needs that much, lack together."""
    stored = host_state_bytes(place_groups(layouts, form, ("nvme-all",) * len(layouts)), 1)
    least, need, transient = (ranks * nbytes for nbytes in (stored + transient, need, transient))
    given = format_bytes(ranks * given_bytes)
    if has_storage:
        return BudgetError(
            f"host_budget={given} is too small even with all state on NVMe: its window, and "
            f"{format_bytes(transient)} of gradients and offloaded activations, take {format_bytes(least)} "
            "of RAM."
        )
    return BudgetError(
        f"host_budget={given} is too small: masters, moments and kept gradients of this model take "
        f"{format_bytes(need)} on the host. Raise it, train fewer parameters, give an offload_dir "
        f"(then {format_bytes(least)} suffice), or train without clipping and accumulation"
        + describe_savings(layouts, form)
        + "."
    )


def allocate(scheduled: Scheduled, settings: Settings) -> tuple[HostState, Device]:
    """The state that a model's first program asks for, and the device, opened."""
    state = allocate_host_state(
        scheduled.planned.step,
        scheduled.planned.plan,
        scheduled.compiled.assembly,
        settings.optimizer_state,
        settings.offload_dirs,
        settings.host_budget_bytes,
        settings.world,
    )
    return state, settings.open_device()
