"""Allocation: the host state of a planned program, made within the host budget, or refused with the ways
out."""

from __future__ import annotations

from collections.abc import Sequence

from megacompile.assemble.assembly import Assembly, GroupLayout
from megacompile.assemble.plan import Plan
from megacompile.assemble.workload import Workload
from megacompile.errors import BudgetError
from megacompile.host.formats import Form, smaller_formats
from megacompile.host.needs import host_bytes, host_states, step_bytes, storage_window
from megacompile.host.offload import Placement, host_state_bytes, place_groups
from megacompile.host.scratch import folders_of
from megacompile.host.state import HostState
from megacompile.step.operations import Step
from megacompile.units import format_bytes
from megacompile.world.control import World


def allocate_host_state(
    step: Step,
    plan: Plan,
    assembly: Assembly,
    form: Form,
    directories: Sequence[str],
    host_budget_bytes: int,
    world: World,
) -> tuple[HostState, Placement]:
    """Host memory, and storage where the plan wants it, for all state and for what steps need beside it; of a
    rank of ``world``, for its shards.

    Raises :class:`~megacompile.errors.BudgetError` where that is more than ``host_budget_bytes``, or more
    than the host gives.
    """
    layouts, window = assembly.groups, storage_window(plan)
    placement = Placement(host_states(plan), window, folders_of(world, directories) if window else ())
    need, transient = host_bytes(assembly, form, plan, step).total, step_bytes(step, assembly.work)
    if need > host_budget_bytes:
        numbers = (host_budget_bytes, need, transient)
        raise _too_large(layouts, form, bool(directories), *numbers, world.local)
    try:
        return HostState(layouts, form, placement, transient, world), placement
    except (RuntimeError, MemoryError) as error:
        raise BudgetError(
            f"The host did not give the {format_bytes(need)} that masters, moments and kept gradients "
            "take: set host_budget to what it has, and see what fits."
        ) from error


def check_beside(state: HostState, step: Step, work: Workload, host_budget_bytes: int) -> None:
    """Refuse a further program whose gradients and offloaded activations do not fit beside the state as it
    lies."""
    held, transient = state.total_bytes, step_bytes(step, work)
    if held + transient > host_budget_bytes:
        raise BudgetError(
            f"host_budget={format_bytes(host_budget_bytes)} is too small for this batch: beside "
            f"{format_bytes(held)} of masters and moments its program keeps {format_bytes(transient)} of "
            "gradients and offloaded activations on the host. Compile with the batch, or list of them, that "
            "needs the most "
            "as example_batch, so that room is left for it; or raise host_budget, or give smaller batches."
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
    """What a machine's ranks, each of which needs that much, lack together."""
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
        + smaller_formats(layouts, form)
        + "."
    )
