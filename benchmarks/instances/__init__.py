"""Planning problems as files: what a plan is made for, a machine, a budget, a mode.

``workloads/NAME.json`` is a model and a batch as numbers (:meth:`Workload.to_json`); ``instances.json``
lists (workload, machine, link, device bytes, clipping, micro-batches). They are made once from built-in
models by ``python -m benchmarks.instances.make`` and do not change afterwards, so that results that cite
them stay comparable.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

from megacompile.hardware.catalog import load_machine, override
from megacompile.hardware.machine import Machine
from megacompile.schedule.plan import Mode
from megacompile.schedule.workload import BlockWork, Call, Workload

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Instance:
    """One problem. ``level`` names the budget: "least" is the least that the model was found to need."""

    workload: str
    machine: str
    link_gigabytes: float | None
    level: str
    budget_bytes: int
    clip: bool
    micro_batches: int = 1

    @property
    def name(self) -> str:
        link = f" at {self.link_gigabytes:g} GB/s" if self.link_gigabytes else ""
        micro = f" ×{self.micro_batches}" if self.micro_batches > 1 else ""
        return f"{self.workload}{micro} on {self.machine}{link}, {self.level}" + (", clip" * self.clip)

    @property
    def mode(self) -> Mode:
        return Mode("train", self.micro_batches, deferred=self.clip)

    @property
    def rates(self) -> Machine:
        link = self.link_gigabytes * 1e9 if self.link_gigabytes else None
        return override(load_machine(self.machine), link_bandwidth=link).rates("bf16")

    @property
    def work(self) -> Workload:
        return load_workload(self.workload)


@functools.cache
def load_workload(name: str) -> Workload:
    return Workload.from_json((FOLDER / "workloads" / f"{name}.json").read_text())


def load_instances() -> list[Instance]:
    return [Instance(**row) for row in json.loads((FOLDER / "instances.json").read_text())]


def shortened(work: Workload, blocks: int) -> Workload:
    """A chain cut to its first ``blocks`` - 1 blocks and its last, which reads what its predecessor did."""
    gone = range(blocks - 1, len(work.blocks) - 1)
    if not gone:
        return work
    links = [b.outputs[0] for b in work.blocks]
    renamed = {links[gone[-1]]: links[gone[0] - 1]}
    kept = [b for i, b in enumerate(work.blocks) if i not in gone]
    groups = sorted({g for b in kept for c in b.policies for g in c.forward.groups})
    places = {g: i for i, g in enumerate(groups)}

    def call(given: Call | None) -> Call | None:
        return given and replace(
            given,
            reads=tuple(renamed.get(v, v) for v in given.reads),
            groups=tuple(places[g] for g in given.groups),
        )

    def cut(block: BlockWork) -> BlockWork:
        policies = tuple(
            replace(
                c,
                forward=call(c.forward) or c.forward,
                recompute=call(c.recompute),
                backward=call(c.backward),
            )
            for c in block.policies
        )
        return replace(
            block,
            policies=policies,
            grad_values=tuple(renamed.get(v, v) for v in block.grad_values),
            grad_groups=tuple((places[g], n) for g, n in block.grad_groups),
        )

    return replace(work, blocks=tuple(cut(b) for b in kept), groups=tuple(work.groups[g] for g in groups))
