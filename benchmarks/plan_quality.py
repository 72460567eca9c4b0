"""How good the plans are: against a lower bound, against fixed schedules, and against all plans.

    python -m benchmarks.plan_quality [--only TEXT] [--scaling PNG] [--tiny]

Each instance of ``benchmarks/instances`` is searched; the table gives its distance to the linear relaxation
of the whole-step problem (:mod:`benchmarks.relaxation`) and by how much fixed schedules are slower. A fixed
schedule that does not fit the budget is a dash. ``--tiny`` compares with all plans of small problems,
``--scaling`` times the search at growing depth and draws it. Times of the search are of this machine as
loaded as it is; everything else is the same on every machine.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, TypeVar

from benchmarks.instances import Instance, load_instances, load_workload, shortened
from benchmarks.instances.make import budget_range
from benchmarks.peers import megatrain_step, zero3_step
from benchmarks.relaxation import relaxed_seconds
from benchmarks.report import machine_line
from megacompile.hardware.catalog import load_machine
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import simulate
from megacompile.passes import finish, lower_memory
from megacompile.planner.arrangements import shapes, uniform
from megacompile.planner.baselines import greedysnake_like
from megacompile.planner.plan_floor import Floor
from megacompile.planner.search import search
from megacompile.planner.step_costs import StepCosts
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.step import Step, peak_bytes
from megacompile.schedule.workload import Workload

SavedOn = Literal["device", "host"]
Residency = Literal["stream", "step"]
Update = Literal["immediate", "deferred"]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
BASELINES = ("uniform", "GreedySnake", "MegaTrain", "ZeRO-3")


@dataclass(frozen=True)
class Result:
    """Seconds per step of one instance; a rival that does not fit is None."""

    name: str
    level: str
    bound: float
    found: float
    search_seconds: float
    evaluations: int
    baselines: dict[str, float | None]

    @property
    def distance(self) -> float:
        return self.found / self.bound - 1


def measure(instance: Instance) -> Result:
    """Search one instance and score its baselines."""
    work, mode, machine, budget = instance.work, instance.mode, instance.rates, instance.budget_bytes
    start = time.process_time()
    planned = search(work, mode, machine, budget)
    seconds = time.process_time() - start
    baselines = {
        "uniform": best_plan(work, mode, machine, budget, uniform_plans(work, mode)),
        "GreedySnake": best_plan(work, mode, machine, budget, greedysnake_like(work, mode)),
        "MegaTrain": fitting(megatrain_step(work, mode), machine, budget),
        "ZeRO-3": fitting(zero3_step(work, mode), machine, budget),
    }
    bound = relaxed_seconds(work, mode, machine, budget)
    return Result(
        instance.name, instance.level, bound, planned.seconds, seconds, planned.evaluations, baselines
    )


def uniform_plans(work: Workload, mode: Mode) -> Iterable[Plan]:
    """One treatment for all blocks and one for all groups, in every combination."""
    residencies = ("step", "stream") if mode.micro_batches == 1 else ("step", "micro", "stream")
    for shape in shapes(work, mode):
        for checkpoint, saved_on, residency in product(
            ("all", "some", "none", "least"), ("device", "host"), residencies
        ):
            yield uniform(work, shape, checkpoint, saved_on, residency)


def best_plan(
    work: Workload, mode: Mode, machine: Machine, budget: int, plans: Iterable[Plan]
) -> float | None:
    """Seconds of the fastest of some plans that fits."""
    best = math.inf
    for plan in dict.fromkeys(plans):
        step = lower_memory(work, plan, mode)
        if peak_bytes(step) <= budget:
            best = min(best, simulate(finish(step, work, plan, mode), machine).step_seconds)
    return best if best < math.inf else None


def fitting(step: Step, machine: Machine, budget: int) -> float | None:
    return simulate(step, machine).step_seconds if peak_bytes(step) <= budget else None


def table(results: list[Result]) -> str:
    """Markdown: one row per instance, medians by budget level below."""
    lines = [
        "| instance | bound | found | distance | " + " | ".join(BASELINES) + " |",
        "|---|--:|--:|--:|" + "--:|" * len(BASELINES),
    ]
    for r in results:
        cells = [
            f"{round(100 * (x / r.found - 1)):+d}%" if x is not None else "–"
            for x in (r.baselines[n] for n in BASELINES)
        ]
        lines.append(
            f"| {r.name} | {r.bound:.3f} s | {r.found:.3f} s | {r.distance:.1%} | " + " | ".join(cells) + " |"
        )
    others = [r for r in results if r.level != "least"]
    lines.append("")
    for label, group in (
        ("least budgets", [r for r in results if r.level == "least"]),
        ("all others", others),
    ):
        if group:
            d = [r.distance for r in group]
            lines.append(
                f"{label}: {len(group)} instances, distance to the bound median "
                f"{statistics.median(d):.1%}, worst {max(d):.1%}"
            )
    worse = [(r.name, n) for r in results for n in BASELINES
             if r.baselines[n] is not None and r.baselines[n] < r.found * (1 - 1e-6)]  # type: ignore[operator]  # fmt: skip
    lines.append(f"slower than a fixed schedule: {worse or 'never'}")
    for n in BASELINES:
        gains = [x / r.found for r in results if (x := r.baselines[n]) is not None]
        if gains:
            middle, most = statistics.median(gains), max(gains)
            lines.append(
                f"{n} takes {middle:.2f}× as long (median), {most:.2f}× at most; it fits "
                f"{len(gains)} of {len(results)}"
            )
    cpu = [r.search_seconds for r in results]
    lines.append(f"search: median {statistics.median(cpu):.1f} s of CPU time, most {max(cpu):.1f} s")
    return "\n".join(lines)


def all_plans(work: Workload, mode: Mode) -> Iterable[Plan]:
    """Every checkpoint policy and place of saved activations per block, every residency and update per group,
    every shape."""
    places: tuple[SavedOn, ...] = ("device", "host")
    residencies: tuple[Residency, ...] = ("stream", "step")
    updates: tuple[Update, ...] = ("immediate", "deferred") if not mode.keeps_gradients else ("immediate",)
    per_block = [
        [BlockPlan(n, s) for n in dict.fromkeys(c.name for c in b.policies) for s in places]
        for b in work.blocks
    ]
    for shape in shapes(work, mode):
        group = [GroupPlan(k, shape.prefetch_depth, update=u) for k in residencies for u in updates]
        for blocks, groups in product(product(*per_block), product(group, repeat=len(work.groups))):
            yield Plan(tuple(blocks), tuple(groups), shape.order, shape.grad_lag)


@dataclass(frozen=True)
class Tiny:
    """A model cut to its ends and one layer, and a budget between the least and the most."""

    workload: str
    machine: str
    clip: bool
    part: float

    def row(self) -> str:
        """The search beside the best of all plans."""
        work, mode = shortened(load_workload(self.workload), 3), Mode("train", deferred=self.clip)
        machine = load_machine(self.machine).machine
        low, high = budget_range(work, mode)
        budget = int(low + self.part * (high - low))
        plans = list(all_plans(work, mode))
        best = best_of_all(work, mode, machine, budget, plans)
        found = search(work, mode, machine, budget).seconds
        title = f"{self.workload}, 3 blocks, {self.machine}, {budget / 1e9:.2f} GB" + ", clip" * self.clip
        return f"| {title} | {len(plans)} | {best:.4f} s | {found:.4f} s | {found / best - 1:+.1%} |"


def best_of_all(work: Workload, mode: Mode, machine: Machine, budget: int, plans: list[Plan]) -> float:
    """Seconds of the fastest plan that fits; by rising floors, until these are above the best."""
    floor, best = Floor(StepCosts(work, mode, machine)), math.inf
    for seconds, plan in sorted(((floor.seconds(p), p) for p in plans), key=lambda pair: pair[0]):
        if seconds >= best:
            break
        step = lower_memory(work, plan, mode)
        if peak_bytes(step) <= budget:
            best = min(best, simulate(finish(step, work, plan, mode), machine).step_seconds)
    return best


def tiny() -> str:
    """All tiny problems as a table."""
    models, machines = ("qwen2.5-0.5b-4x2048", "llama-3.1-8b-1x4096"), ("rtx-3090", "gh200")
    problems = [Tiny(*given) for given in product(models, machines, (False, True), (0.2, 0.6))]
    lines = ["| problem | plans | best of all | found | off |", "|---|--:|--:|--:|--:|"]
    for row in in_parallel(Tiny.row, problems):
        lines.append(row)
        print(row, file=sys.stderr, flush=True)
    return "\n".join(lines)


def scaling(png: Path | None) -> str:
    """CPU seconds of the search over depth, for a 70B-like model cut to fewer layers."""
    work = load_workload("llama-3.1-70b-4x4096")
    instance = next(i for i in load_instances() if i.workload == "llama-3.1-70b-4x4096" and i.level == "half")
    rows = []
    for layers in (10, 20, 40, 80):
        part = shortened(work, layers + 2)  # embedding and head
        start = time.process_time()
        planned = search(part, instance.mode, instance.rates, instance.budget_bytes * layers // 80)
        rows.append((layers, time.process_time() - start, planned.evaluations))
    if png is not None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
        axes.plot([r[0] for r in rows], [r[1] for r in rows], "o-", color="#2a6f97", lw=2)
        for layers, seconds, evaluations in rows:
            axes.annotate(f"{seconds:.1f} s\n{evaluations} plans", (layers, seconds), xytext=(0, 9),
                          textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
        axes.axhline(3.0, color="#888888", ls="--", lw=1, zorder=0)
        axes.text(1, 3.05, "target at 80 layers", color="#666666", fontsize=8)
        axes.set(xlabel="layers of a 70B-like model", ylabel="CPU seconds", title="One search")
        axes.set(xlim=(0, 90), ylim=(0, 1.3 * max(3.0, *(r[1] for r in rows))))
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(png, dpi=144)
    lines = ["| layers | search | evaluations |", "|--:|--:|--:|"]
    return "\n".join([*lines, *(f"| {n} | {t:.2f} s | {e} |" for n, t, e in rows)])


def main() -> None:
    """Run what was asked for and print it as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="instances whose name contains this text")
    parser.add_argument("--scaling", type=Path, metavar="PNG", help="time the search over depth instead")
    parser.add_argument("--tiny", action="store_true", help="compare with all plans of tiny problems instead")
    options = parser.parse_args()
    print(f"{machine_line()}\n")
    if options.scaling:
        print(scaling(options.scaling))
        return
    if options.tiny:
        print(tiny())
        return
    chosen = [i for i in load_instances() if options.only in i.name]
    results = []
    for r in in_parallel(measure, chosen):
        results.append(r)
        done = f"{len(results)} of {len(chosen)}"
        print(f"{done}: {r.name}: {r.distance:.1%}, {r.search_seconds:.1f} s", file=sys.stderr, flush=True)
    print(table(results))


def in_parallel(run: Callable[[_Item], _Result], items: list[_Item]) -> Iterator[_Result]:
    """Results in order, as they come from one process per core."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        yield from pool.map(run, items)


if __name__ == "__main__":
    main()
