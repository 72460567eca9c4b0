"""Count the bytes of host memory that a planned step takes, as the arena gives them out.

In:  the layout of the weight groups, a state format, a plan and its step. Out: :class:`HostBytes`, by kind.
The search, the error messages, the reports and the arena all count by it, so for a plan that fits a host
budget to the byte memory is found. Every buffer takes whole pages
(:func:`~megacompile.state.host_arena.padded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from megacompile.blocks.weight_groups import Assembly, GroupLayout
from megacompile.schedule.plan import Plan
from megacompile.schedule.step import Step, kept_gradients, offload_buffers, offloads, pushed_rows
from megacompile.schedule.workload import GroupWork, Workload
from megacompile.state.host_arena import padded
from megacompile.state.moment_formats import Form
from megacompile.state.nvme_offload import buffer_bytes, host_state_bytes, place_groups, scratch_bytes


@dataclass(frozen=True)
class HostBytes:
    """Host bytes by kind; ``buffers`` are the ring that gradients pass, ``offloaded`` offloaded activations.

    ``window`` are the buffers that state on NVMe passes through, ``padding`` what rounding up to pages
    adds; ``nvme`` lies on the drive and is not in ``total``; ``scratch`` is what an update by an optimizer's
    own class takes beside the state.
    """

    masters: int
    moments: int
    gradients: int
    buffers: int
    offloaded: int
    window: int
    padding: int
    nvme: int
    scratch: int = 0

    @property
    def total(self) -> int:
        return int(sum(astuple(self))) - self.nvme

    def of_ranks(self, count: int) -> HostBytes:
        """Return what that many ranks take together where each takes this."""
        return HostBytes(*(count * nbytes for nbytes in astuple(self)))


def host_bytes(assembly: Assembly, form: Form, plan: Plan, step: Step) -> HostBytes:
    """Return what a plan's step takes of the host. It has room for what is on the device, which may come
    back."""
    states, window = host_states(plan), storage_window(plan)
    places = place_groups(assembly.groups, form, states)
    held = [array for place in places for array in place.in_ram]
    masters, moments = (sum(a.nbytes for a in held if a.kind == kind) for kind in ("masters", "moments"))
    passing = window * sum(buffer_bytes(places))
    gradients, buffers, offloaded = map(sum, _buffers(step, assembly.work))
    total = host_state_bytes(places, window) + step_bytes(step, assembly.work)
    scratch = scratch_bytes(places)
    padding = total - masters - moments - gradients - buffers - offloaded - passing - scratch
    stored = sum(offloads(step, "nvme_write").values())
    nvme = sum(p.storage_bytes for p in places) + stored
    return HostBytes(masters, moments, gradients, buffers, offloaded, passing, padding, nvme, scratch)


def step_bytes(step: Step, work: Workload) -> int:
    """Host bytes of a step beside the state: kept gradients, the ring, offloaded activations."""
    return sum(padded(nbytes) for kind in _buffers(step, work) for nbytes in kind)


def _buffers(step: Step, work: Workload) -> tuple[list[int], ...]:
    """Bytes of each buffer for a kept gradient, of the ring, and for offloaded activations.

    Gradients that are summed are kept in FP32, others as they come; of a table whose named rows are updated
    apart, theirs alone.
    """
    rows = pushed_rows(step)
    kept = [_kept_bytes(work.groups[g], own, rows.get(g)) for g, own in kept_gradients(step).items()]
    return kept, list(step.ring), list(offload_buffers(step).values())


def _kept_bytes(group: GroupWork, own: bool, rows: int | None) -> int:
    whole = group.nbytes if own else group.gradient_bytes or 4 * group.elements
    return whole if rows is None else whole * min(rows, group.nbytes) // group.nbytes


def state_in_ram(groups: Sequence[GroupLayout], form: Form) -> int:
    """Host bytes of masters and moments where nothing is on storage."""
    return host_state_bytes(place_groups(groups, form, ("host",) * len(groups)), 0)


def host_states(plan: Plan) -> tuple[str, ...]:
    """Return where each group's state has its place on the host: "host" too for one that is on the device."""
    return tuple("host" if g.state == "device" else g.state for g in plan.groups)


def storage_window(plan: Plan) -> int:
    """Return how many buffers of each kind the plan has for what is on storage; 0 where nothing is."""
    stored = any(s != "host" for s in host_states(plan)) or any(b.saved_on == "nvme" for b in plan.blocks)
    return plan.window if stored else 0
