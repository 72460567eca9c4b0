"""Search for a plan: initial plans and baselines, local moves from the best, kept for the next run."""

from __future__ import annotations

import difflib
import functools
import gc
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from megacompile import blocks, hardware, passes, planner, schedule, state
from megacompile.cache_dir import cache_folder
from megacompile.errors import BudgetError, MegacompileError
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import simulate
from megacompile.json_codec import from_plain, parse_json, sealed, unsealed
from megacompile.own_files import replace_text
from megacompile.passes import finish, lower_memory
from megacompile.planner.bounds import lowest_bytes
from megacompile.planner.linear_program import (
    ARRANGEMENTS,
    CHECKPOINT_POLICIES,
    Arrangement,
    Mixer,
    Order,
    Place,
    Shape,
    Treatments,
    arrange,
    orders,
    policies_of,
    shapes,
    shapes_of,
    uniform,
    with_deferred,
    with_state_at,
)
from megacompile.planner.min_feasible_budget import describe_peak, infeasible, small_plans
from megacompile.planner.nvme_placement import WINDOWS, Drive
from megacompile.planner.plan_evaluator import Candidates, EvaluatedPlan, Planned
from megacompile.schedule.plan import BlockPlan, Mode, Plan, check_counts
from megacompile.schedule.step import peak_bytes
from megacompile.schedule.workload import Workload
from megacompile.state.host_budget import step_bytes
from megacompile.text_files import path_of, read_text
from megacompile.units import format_bytes

# ------------------------------------------------------------------------------------------------------------
# Plans that were found before: the second run of a script does not search.
#
# In: all that a search depends on. Out: the plan that it found, from a file in the user's cache folder. The
# name of the file is a hash of these things and of the code that plans; the plan in it is sealed.
# What cannot be read, is damaged or was written by other code is as if it were not there, and a plan that is
# read is lowered, measured and proven like any other.


_MOST = 256  # files; the newest stay
_STAGES = (blocks, hardware, passes, planner, schedule, state)  # whose code decides what is found


def place_of(*given: object) -> Path:
    """The file of a search over these things, which are told apart by their ``repr``."""
    key = "\n".join([_code(), *map(repr, given)])
    return cache_folder() / "plans" / f"{_digest(key)}.json"


def read(path: Path) -> Plan | None:
    """The plan in a file, if it is whole."""
    with suppress(MegacompileError):
        found = unsealed(parse_json(read_text(path), str(path)), str(path))
        return Plan.from_json(from_plain(str, found.get("plan"), str(path)), str(path))
    return None


def write(path: Path, found: Plan) -> None:
    """Keep a plan, and the newest files beside it; where the folder cannot be written, nothing happens."""
    with suppress(OSError):
        replace_text(path, json.dumps(sealed({"plan": found.to_json()})))
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MOST]:
            file.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _code() -> str:
    """A hash of the code of these stages: what other code found is not what this would find."""
    folders = [Path(folder) for stage in _STAGES for folder in stage.__path__]
    return _digest("\n".join(file.read_text() for folder in folders for file in sorted(folder.glob("*.py"))))


# ------------------------------------------------------------------------------------------------------------
# Neighbours of a plan: kinds of moves that local search tries, those that gain most per plan first.
#
# The order is by what was gained over the instances of ``benchmarks/plan_quality``.


Move = Callable[[Plan], Iterator[Plan]]
_LARGE = 1.05  # times the size of the middle group
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def moves(work: Workload, mode: Mode, residents: Collection[int]) -> Iterator[Move]:
    """Each gives plans that differ in one decision, or in one decision for a stretch of blocks or groups."""
    if mode.kind == "train" and not mode.keeps_gradients:
        yield partial(_updates, work)
    yield partial(_prefetch_depths_of_small, work)
    yield partial(_groups, work)
    yield _windows
    if residents:
        yield partial(_states, residents)
    yield _flow
    yield partial(_blocks, work)
    yield _prefetch_depths


def _windows(plan: Plan) -> Iterator[Plan]:
    """Other numbers of buffers for what passes through from a drive: each takes RAM from state."""
    if any(g.state in ("nvme", "nvme-all") for g in plan.groups):
        yield from (replace(plan, window=window) for window in WINDOWS)


def _updates(work: Workload, plan: Plan) -> Iterator[Plan]:
    there = [g for g in work.contributions if plan.groups[g].state != "device"]
    trained = sum(work.groups[g].elements for g in there)
    deferred = sum(work.groups[g].elements for g, p in enumerate(plan.groups) if p.update == "deferred")
    now = deferred / max(1, trained)
    for share in (*_SHARES, now - 0.1, now + 0.1, now - 0.04, now + 0.04):
        if 0 <= share <= 1:
            yield with_deferred(plan, work, share)
    places = [g for g, p in enumerate(plan.groups) if p.update == "deferred"]
    for g in (*places[-3:], *(g for g in range(4) if g not in places)):
        yield _flipped(plan, {g})
    for g in places[-3:]:  # another group's update waits in its stead
        before = [i for i in range(g) if i not in places]
        for other in before[-1:]:
            yield _flipped(plan, {g, other})


def _flipped(plan: Plan, places: set[int]) -> Plan:
    return replace(plan, groups=tuple(
        replace(p, update="immediate" if p.update == "deferred" else "deferred") if g in places else p
        for g, p in enumerate(plan.groups)))  # fmt: skip


def _prefetch_depths(plan: Plan) -> Iterator[Plan]:
    for change in (1, -1):
        yield _with_prefetch_depths(plan, [g.prefetch_depth + change for g in plan.groups])


def _prefetch_depths_of_small(work: Workload, plan: Plan) -> Iterator[Plan]:
    """Earlier fetches where no large group, such as a vocabulary's, fills the slab meanwhile.

    Fetches and gradients each hide the other's wait, so gradients are also given longer to leave.
    """
    sizes = [g.nbytes for g in work.groups]
    used = sorted(sizes[g] for g in work.used)
    usual = used[len(used) // 2] if used else 0
    uses = [{g for c in b.policies for g in c.forward.groups} for b in work.blocks]
    large = [b for b, groups in enumerate(uses) if any(sizes[g] > _LARGE * usual for g in groups)]
    for prefetch_depth in (1, 2, 3) if large else ():
        near = {b for other in large for b in range(other - prefetch_depth, other + prefetch_depth + 1)}
        beside = {g for b, groups in enumerate(uses) if b in near for g in groups}
        ahead = _with_prefetch_depths(
            plan,
            [
                g.prefetch_depth if i in beside else max(g.prefetch_depth, prefetch_depth)
                for i, g in enumerate(plan.groups)
            ],
        )
        yield replace(ahead, grad_lag=plan.grad_lag + 1)
        yield ahead


def _with_prefetch_depths(plan: Plan, prefetch_depths: list[int]) -> Plan:
    groups = (
        replace(g, prefetch_depth=max(0, prefetch_depth))
        for g, prefetch_depth in zip(plan.groups, prefetch_depths, strict=True)
    )
    return replace(plan, groups=tuple(groups))


def _flow(plan: Plan) -> Iterator[Plan]:
    yield replace(plan, grad_lag=plan.grad_lag + 1)
    if plan.grad_lag:
        yield replace(plan, grad_lag=plan.grad_lag - 1)
    for ahead in sorted({1 - b.reload for b in plan.blocks if b.saved_on != "device"}):
        yield replace(plan, blocks=tuple(replace(b, reload=ahead) for b in plan.blocks))
    for ring in (2, 4):
        yield replace(plan, ring=ring)


def _states(residents: Collection[int], plan: Plan) -> Iterator[Plan]:
    """The state of more groups on the device, or of fewer, by stretches from either end."""
    directions: tuple[tuple[Place, Place], ...] = (("host", "device"), ("device", "host"))
    for now, other in directions:
        places = [g for g in sorted(residents) if plan.groups[g].state == now]
        for stretch in _stretches(places):
            yield with_state_at(plan, stretch, other)


def _groups(work: Workload, plan: Plan) -> Iterator[Plan]:
    """Hold more groups, or fewer, by halving stretches from either end."""
    come = [i for i in sorted(work.used) if plan.groups[i].state != "device" or work.ranks > 1]
    streamed = [i for i in come if plan.groups[i].residency == "stream"]
    held = [i for i in come if plan.groups[i].residency != "stream"]
    for places, residency in ((streamed, "step"), (held, "stream")):
        for stretch in _stretches(places):
            yield replace(plan, groups=tuple(
                replace(g, residency=residency) if i in stretch else g for i, g in enumerate(plan.groups)  # type: ignore[arg-type]
            ))  # fmt: skip


def _blocks(work: Workload, plan: Plan) -> Iterator[Plan]:
    """Another treatment for a stretch of the blocks that have one now."""
    names = sorted(policies_of(work), key=lambda n: n == "attention")
    treatments = [BlockPlan(n, s) for n in names for s in ("device", "host")]
    present = sorted(set(plan.blocks), key=lambda p: (p.checkpoint, p.saved_on, p.reload))
    for treatment in treatments:
        for now in present:
            other = replace(treatment, reload=now.reload)
            if other == now:
                continue
            places = [i for i, p in enumerate(plan.blocks) if p == now]
            for stretch in _stretches(places):
                yield replace(
                    plan, blocks=tuple(other if i in stretch else p for i, p in enumerate(plan.blocks))
                )


def _stretches(places: list[int]) -> Iterator[frozenset[int]]:
    """The first and the last n of the places, for n = 1, 4, 16, …; each alone where they are few."""
    if len(places) <= 6:
        yield from (frozenset([p]) for p in places)
        return
    size = 1
    while size < len(places):
        yield frozenset(places[:size])
        yield frozenset(places[-size:])
        size *= 4


# ------------------------------------------------------------------------------------------------------------
# Fixed schedules by name, on the same executor and with the same proof as what the search finds.
#
# For knowing what a schedule is worth: each is one rule for the whole step, whatever the budget. A planner is
# any function ``(work, mode, machine, budget_bytes) -> Plan``, so one's own goes wherever a name goes.


Planner = Callable[[Workload, Mode, Machine, int], Plan]
SEARCH = "search"


def full_recompute(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """Each block keeps its input alone; weights come two operations ahead, for each use."""
    return uniform(work, Shape("depth", 2, 1), "none", "device", "stream")


def double_buffer(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """Two layers' weights on the device at a time, inputs kept, updates after the backward."""
    return with_deferred(uniform(work, Shape("depth", 1, 1), "none", "device", "stream"), work, 1.0)


def zero3_like(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """Weights fetched for each layer's forward and again for its backward, one ahead; inputs wait on the
    host; updates after the backward, as ZeRO-3 with offload does it.
    """
    return with_deferred(uniform(work, Shape("depth", 1, 0), "none", "host", "stream"), work, 1.0)


def greedysnake_like(work: Workload, mode: Mode) -> list[Plan]:
    """All micro-batches through a layer at a time, everything streamed, a share of the updates delayed."""
    shares = (0,) if mode.keeps_gradients else range(9)
    return [
        with_deferred(uniform(work, Shape("breadth", 1, 1), checkpoint, saved_on, "stream"), work, share / 8)
        for checkpoint in ("none", "all")
        for saved_on in ("host", "device")
        for share in shares
    ]


BASELINES: dict[str, Planner] = {
    "full-recompute": full_recompute,
    "double-buffer": double_buffer,
    "zero3-like": zero3_like,
}


def baselines(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Iterator[Plan]:
    """Every fixed schedule, so that a search that scores them is never slower than one of them."""
    for baseline in BASELINES.values():
        yield baseline(work, mode, machine, budget_bytes)
    if "breadth" in orders(work, mode):  # else it is a uniform one, whose deferred updates a search varies
        yield from greedysnake_like(work, mode)


def chosen_planner(planner: str | Planner, plan: Plan | str | Path | None) -> Planner | None:
    """Return what makes the plan instead of the search; None: the search. ``plan`` may name a plan file."""
    if plan is not None:
        if planner != SEARCH:
            raise MegacompileError("Give planner= or plan=, not both.")
        given = plan if isinstance(plan, Plan) else read_plan(plan)
        check_counts(given, "The given plan")
        return lambda work, mode, machine, budget_bytes: given
    if not isinstance(planner, str):
        return planner
    if planner == SEARCH:
        return None
    if planner not in BASELINES:
        near = difflib.get_close_matches(planner, [SEARCH, *BASELINES], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join([SEARCH, *BASELINES])}."
        raise MegacompileError(f"There is no planner {planner!r}: {hint}")
    return BASELINES[planner]


def read_plan(path: str | Path) -> Plan:
    """The plan in a file that ``dump=`` or ``Plan.to_json`` wrote."""
    path = path_of(path, "plan")
    return Plan.from_json(read_text(path), str(path))


# ------------------------------------------------------------------------------------------------------------
# Starts of the search: plans of a linear program over counts, plans that treat everything alike, few blocks.
#
# The program (:mod:`~megacompile.planner.linear_program`) knows bytes by kind; its room is corrected until
# the step that comes of it just fits.


_CLOSE = 0.01  # to what is expected: no other start is tried
_FEW = 4  # blocks
_FIRST = (1, 4)  # groups whose updates end a step, tried on the device: the program does not see them last
_CORRECTIONS = 6  # solutions of the linear program per start
_EVERYTHING = 1e15  # bytes that no device has


def mixtures(candidates: Candidates) -> None:
    """Score what the linear program over counts leads to, in runs and evenly spread."""
    if candidates.mode.kind in ("evaluate", "update"):
        return
    for order in orders(candidates.work, candidates.mode):
        mixer, fits = _mixer(candidates, order), False
        for shape in shapes_of(order):
            if (
                shape.prefetch_depth or not fits
            ):  # with nothing ahead of its use a step is slower, but needs least
                fits |= _arranged(candidates, mixer, shape)
    for count in _FIRST if candidates.residents else ():
        some = frozenset(sorted(candidates.residents)[:count])
        _arranged(candidates, _mixer(candidates, "depth", some), shapes_of("depth")[0])


def _arranged(candidates: Candidates, mixer: Mixer, shape: Shape) -> bool:
    """Return whether a step of this shape fits; the second arrangement begins with the room of the first."""
    room: float | None = None
    for arrangement in ARRANGEMENTS:
        if candidates.best is None or candidates.gap > _CLOSE:
            room = _fill(candidates, mixer, shape, arrangement, room)
    return room is not None


def _mixer(candidates: Candidates, order: Order, resident: frozenset[int] = frozenset()) -> Mixer:
    drive = None if candidates.host_budget is None else candidates.drive
    found = Treatments(
        candidates.work, candidates.mode, candidates.machine, order,
        candidates.residents, resident | candidates.resident,
    )  # fmt: skip
    return Mixer(found, None if drive is None else drive.spare)


def _fill(
    candidates: Candidates, mixer: Mixer, shape: Shape, arrangement: Arrangement, room: float | None
) -> float | None:
    """Correct the program's room until the step that comes of it just fits; score it, return its room."""
    budget = candidates.budget_bytes
    room, host_room = room or float(budget), None if candidates.spills else candidates.host_budget
    fits_at, fails_at = 0.0, _EVERYTHING
    fitting: EvaluatedPlan | None = None
    for _ in range(_CORRECTIONS):
        mixture = mixer.solve(room, host_room)
        if mixture is None or (candidates.best and mixture.seconds >= candidates.best.seconds):
            break
        plan = arrange(candidates.work, shape, mixture, arrangement)
        if not candidates.mode.keeps_gradients:
            plan = with_deferred(plan, candidates.work, mixture.deferred)
        if fitting is not None and plan == fitting.asked:
            break
        found = None if plan in candidates.misfits else candidates.measure(plan)
        if found is not None and found.fits:
            fitting, peak, fits_at = found, found.peak, room
            expected = mixture.seconds
            if budget - peak < 0.01 * budget:
                break
        else:
            fails_at = room
            peak, over = candidates.misfits[plan]
            if host_room is not None:
                host_room -= over
        room += 0.98 * (budget - peak)
        if not fits_at < room < fails_at:
            room = (fits_at + min(fails_at, budget)) / 2
    if fitting is None:
        return None
    candidates.expect(expected)
    if fitting.asked not in candidates.seen:
        candidates.seen.add(fitting.asked)
        candidates.simulate(fitting)
    return fits_at


def fixed(candidates: Candidates) -> None:
    """Plans that treat everything alike, and the schedules of other systems.

    Of each the shape whose transfers run furthest ahead of those that fit; others where that one helps. Where
    streamed groups do not fit, held ones do not either.
    """
    residencies = ("stream", "step") if candidates.mode.micro_batches == 1 else ("stream", "micro", "step")
    for order, checkpoint, saved_on in product(
        orders(candidates.work, candidates.mode), policies_of(candidates.work), ("device", "host")
    ):
        for residency in residencies:
            for shape in shapes_of(order):
                plan = uniform(candidates.work, shape, checkpoint, saved_on, residency)
                better = candidates.score(plan)
                fits = plan not in candidates.misfits
                if fits and not better:
                    break
            if not fits:
                break
    if candidates.mode.kind == "train":
        for plan in baselines(candidates.work, candidates.mode, candidates.machine, candidates.budget_bytes):
            candidates.score(plan)


def all_resident(candidates: Candidates) -> None:
    """All state on the device, where that leaves room: of each shape the plan that keeps most and fits."""
    groups = [candidates.work.groups[g] for g in candidates.residents]
    if not groups or sum(g.resident_bytes for g in groups) > candidates.budget_bytes:
        return
    for shape in shapes(candidates.work, candidates.mode):
        # of frozen groups, and of what ranks gather
        for checkpoint, residency in product(policies_of(candidates.work), ("step", "stream")):
            plan = uniform(candidates.work, shape, checkpoint, "device", residency)
            plan = with_state_at(plan, candidates.residents, "device")
            candidates.score(plan)
            if plan not in candidates.misfits:
                break


def few_blocks(candidates: Candidates) -> None:
    """Yield plans where counts are too coarse: keep everything, then step by step what lowers the peak
    most."""
    if len(candidates.work.blocks) > _FEW or candidates.mode.kind in ("evaluate", "update"):
        return
    names = policies_of(candidates.work)
    for shape in shapes(candidates.work, candidates.mode):
        if not shape.reload:  # nothing here waits on the host
            continue
        plan = uniform(candidates.work, shape, names[0], "device", "stream")
        now = candidates.measure(plan)
        while not now.fits:
            less = (candidates.measure(p) for p in _keeping_less(now.plan, names))
            least = min(less, key=lambda other: other.peak, default=now)
            if least.peak >= now.peak:
                break
            now = least
        if now.fits:
            candidates.score(now.plan)


def _keeping_less(plan: Plan, names: Sequence[str]) -> Iterator[Plan]:
    for b, now in enumerate(plan.blocks):
        for checkpoint in names[names.index(now.checkpoint) + 1 :]:
            yield replace(
                plan, blocks=(*plan.blocks[:b], replace(now, checkpoint=checkpoint), *plan.blocks[b + 1 :])
            )


# ------------------------------------------------------------------------------------------------------------
# The planner: search for the fastest plan that fits, scored by simulating the step it leads to.
#
# Candidates are lowered by the very passes that make the final step; their peak is exact and their time
# simulated. Starts come from a linear program over counts (:mod:`~megacompile.planner.linear_program`) whose
# room is corrected until the step just fits, and from plans that treat everything alike; local search
# improves the best of them. The search is deterministic: it is limited by the operations that it lowers, not
# by time.


_GAIN = 0.9995  # of the seconds before: less is not worth another round


def search(
    work: Workload,
    mode: Mode,
    machine: Machine,
    budget_bytes: int,
    *,
    host_budget: int | None = None,
    drive: Drive | None = None,
    residents: Collection[int] = (),
    resident: Collection[int] = (),
    also: Sequence[Plan] = (),
) -> Planned:
    """The fastest plan found whose step never holds more than ``budget_bytes`` on the device.

    ``host_budget`` bounds the host bytes of a step beyond masters and moments: kept gradients, buffers,
    offloaded activations; where no plan meets it, it is as if not given, and the caller refuses. A
    ``drive`` bounds them instead: by what all state leaves in RAM, where a plan meets that, so that nothing
    wears the drive; else each plan is scored over the state's best placement beside what its step takes.
    The state of the groups ``residents`` may be on the device, that of ``resident`` is. ``also`` are plans
    to score as well, such as those of smaller budgets: what is found is never slower than one of them that
    fits. On an interrupt the best plan so far is returned, if any. What was found is kept for later
    searches for the same.

    Raises :class:`BudgetError` with the least feasible budget where nothing fits.
    """
    states = tuple(group.state_bytes for group in work.groups)  # the digest leaves them out
    places = sorted(residents), sorted(resident), drive and drive.digest
    kept = place_of(work.digest, states, mode, machine, budget_bytes, host_budget, places, also)
    with suppress(MegacompileError):
        if (known := read(kept)) is not None:
            return follow(known, work, mode, machine, budget_bytes)
    if lowest_bytes(work, mode) > budget_bytes:
        raise infeasible(work, mode, budget_bytes)
    for limit, spills in _host_limits(host_budget, drive):
        found = Candidates(work, mode, machine, budget_bytes, limit, drive, spills, residents, resident)
        try:
            with without_garbage_collection():
                _run(found, also)
            whole = True
        except KeyboardInterrupt:
            whole = False
            if found.best is None:
                raise
        if found.best is not None:
            plan = replace(found.best.plan, workload=work.digest)
            if whole:
                write(kept, plan)
            return replace(found.best, plan=plan, evaluations=found.evaluations)
    raise infeasible(work, mode, budget_bytes)


def _host_limits(host_budget: int | None, drive: Drive | None) -> Iterator[tuple[int | None, bool]]:
    """Bounds of a step's host bytes to try in turn, and whether activations may leave for the drive."""
    if drive is None:
        limits = [(host_budget, False)]
    else:
        limits = [(drive.spare, False), (drive.room, False), (drive.room, drive.takes_activations)]
    yield from dict.fromkeys(x for x in (*limits, (None, False)) if x[0] is None or x[0] >= 0)


def follow(
    plan: Plan,
    work: Workload,
    mode: Mode,
    machine: Machine,
    budget_bytes: int,
    *,
    drive: Drive | None = None,
) -> Planned:
    """The step of a given plan, if the plan was made for this workload and fits.

    Its state stays where the plan says, unless a ``drive`` has decided that or the host budget demands it.

    Raises :class:`MegacompileError` for a plan of another model or batch, :class:`BudgetError` for one
    that holds more than ``budget_bytes``.
    """
    check_fits(plan, work)
    step = lower_memory(work, plan, mode)
    peak = peak_bytes(step)
    if peak > budget_bytes:
        raise BudgetError(
            f"The given plan holds {format_bytes(peak)} on the device and hbm_budget is "
            f"{format_bytes(budget_bytes)}: {describe_peak(step, work)}. Give a plan that keeps less.",
            least_bytes=peak,
        )
    taken = step_bytes(step, work)
    if drive is not None and (drive.decided or taken > drive.spare):
        plan = drive.place(plan, taken)
        step = lower_memory(work, plan, mode)
    step = finish(step, work, plan, mode)
    return Planned(plan, step, simulate(step, machine), peak, 1)


def check_fits(plan: Plan, work: Workload) -> None:
    """Raise :class:`MegacompileError` where a plan is not one for this workload."""
    groups = zip(plan.groups, work.groups, strict=False)
    if any(group.state == "device" and other.update_moved for group, other in groups):
        raise MegacompileError(
            "The plan keeps state on the device where Adam alone has it, and another optimizer updates it: "
            "plan again with that optimizer."
        )
    if plan.workload and plan.workload != work.digest:
        raise MegacompileError(
            "The plan was made for another model, batch or version (its digest is "
            f"{plan.workload[:8]}…, this workload's {work.digest[:8]}…): plan again."
        )
    if (len(plan.blocks), len(plan.groups)) != (len(work.blocks), len(work.groups)):
        raise MegacompileError(
            f"The plan has {len(plan.blocks)} blocks and {len(plan.groups)} weight groups, this model has "
            f"{len(work.blocks)} and {len(work.groups)}: plan again."
        )
    for block, planned in zip(work.blocks, plan.blocks, strict=True):
        if planned.checkpoint not in CHECKPOINT_POLICIES:
            raise MegacompileError(
                f"The plan keeps {planned.checkpoint!r} of {block.name}: choose from "
                f"{', '.join(CHECKPOINT_POLICIES)}."
            )


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the collector of cycles: each of its collections would walk all that the process has, of which
    steps hold no cycles, and a trace of a whole model few."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(found: Candidates, also: Sequence[Plan]) -> None:
    for plan in also:
        others = {i for i, g in enumerate(plan.groups) if i not in found.residents or g.state != "device"}
        blocks = tuple(replace(b, saved_on="host") if b.saved_on == "nvme" else b for b in plan.blocks)
        found.score(replace(with_state_at(plan, others, "host"), blocks=blocks, workload=""))
    for start in (mixtures, few_blocks, fixed, _least, all_resident):  # those that cost most, last
        before = found.best
        start(found)
        if found.best is not before:
            found.restart()
            _improve(found)


def _least(found: Candidates) -> None:
    """Plans of small peak, where nothing else fits."""
    for small in small_plans(found.work, found.mode) if found.best is None else ():
        found.score(small.plan)


def _improve(found: Candidates) -> None:
    """Each kind of move from the best plan, again while it gains; until none gains or the effort is spent."""
    gains = True
    while gains:
        gains = False
        for move in moves(found.work, found.mode, found.residents):
            while _tried(found, move):
                gains = True


def _tried(found: Candidates, move: Move) -> bool:
    """Return whether a kind of move from the best plan gained enough to go on with it."""
    assert found.best is not None
    before = found.best
    for plan in move(before.plan):
        if found.spent:
            return False
        found.score(plan)
    return found.best.seconds < before.seconds * _GAIN
