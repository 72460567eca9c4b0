"""Price the parts of a step: of what a group's fetch, gradient and update, or a block's offload, are made.

In: a workload, a mode, a machine. Out: seconds by part of a step and stream. The passes alone say which
operations a step has, and :data:`~megacompile.schedule.op_table.SPECS` which part of it each is. So a few
reference steps are lowered, and bounds, floors and the program over counts sum what is in them: a new kind
of operation is in all of them once a pass inserts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import cached_property

from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import duration
from megacompile.passes import lower_memory
from megacompile.passes.insert_offload import moves, tokens_of_own_backward
from megacompile.schedule.op_table import SPECS, Part, Stream
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import Workload

Seconds = dict[tuple[Part, Stream], float]


def seconds_by_part(ops: Iterable[Op], machine: Machine) -> Seconds:
    """Seconds of operations by the part of a step that they are and the stream that they run on."""
    found: Seconds = defaultdict(float)
    for op in ops:
        found[SPECS[op.kind].part, op.stream] += duration(op, machine)
    return found


class StepCosts:
    """The operations of groups and blocks in any step of one workload and mode, on a machine.

    The state of the groups ``residents`` may be on the device.
    """

    def __init__(self, work: Workload, mode: Mode, machine: Machine, residents: Collection[int] = ()) -> None:
        self.work, self.mode, self.machine = work, mode, machine
        self.residents = frozenset(residents)
        self._offloads: dict[str, dict[int, tuple[Op, ...]]] = {}

    @cached_property
    def on_host(self) -> dict[int, list[Op]]:
        """Each group's operations in a step that fetches it once and has all state on the host."""
        return _by_group(self._lower("none"))

    @cached_property
    def on_device(self) -> dict[int, list[Op]]:
        """The same, where the state of the residents is on the device."""
        return _by_group(self._lower("none", self.residents))

    def offload(self, block: int, policy: str) -> tuple[Op, ...]:
        """A micro-batch's operations that move away and back what only a block's own backward still reads."""
        if policy not in self._offloads:
            step = self._lower(policy)
            self._offloads[policy] = {
                step.ops[index].block: moves(step, index, tokens)
                for index, _, tokens in tokens_of_own_backward(step, self.work)
                if step.ops[index].micro == 0
            }
        return self._offloads[policy].get(block, ())

    def _lower(self, policy: str, resident: Collection[int] = ()) -> Step:
        places = ("device" if g in resident else "host" for g in range(len(self.work.groups)))
        groups = tuple(GroupPlan("step", state=place) for place in places)  # type: ignore[arg-type]
        return lower_memory(self.work, Plan((BlockPlan(policy),) * len(self.work.blocks), groups), self.mode)


def _by_group(step: Step) -> dict[int, list[Op]]:
    found: dict[int, list[Op]] = defaultdict(list)
    for op in step.ops:
        if op.group >= 0:
            found[op.group].append(op)
    return found
