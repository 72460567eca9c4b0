"""The answer to "will it fit, and how fast", as rows of a report.

In: an :class:`~megacompile.cli.plan_answer.Answer`, and answers to further questions. Out: sections in the
order of the text. Every figure stands with and without clipping; the details follow the mode that was asked
for. The first lines say what is planned, where its state is, and what splits and meshes were tried else.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megacompile.api.rollout_forecast import Forecast
from megacompile.capture.padded_length import reach
from megacompile.cli.alternatives import WayOut
from megacompile.cli.fitting_command import Command
from megacompile.cli.largest_batch import Largest
from megacompile.cli.plan_answer import Answer, Prediction, Question
from megacompile.cli.report_rows import Report, Row, Section, Unit, told
from megacompile.cli.report_text import render_text
from megacompile.cli.rollout_report import rollout_section, too_long
from megacompile.cli.splits_and_meshes import Mesh, Split
from megacompile.cli.step_figures import CAUSES, IDLE, compute_parts, waits
from megacompile.planner.min_feasible_budget import describe_peak, highest_point
from megacompile.planner.nvme_placement import describe_traffic
from megacompile.schedule.op_table import STREAMS
from megacompile.schedule.plan_text import plan_table
from megacompile.state.moment_formats import CODINGS, state_bytes
from megacompile.state.torch_optimizer import TorchOptimizer
from megacompile.units import format_bytes, format_count, format_seconds

_STREAMS = CAUSES | {"h2d": "host to device", "d2h": "device to host", "comm": "between devices"}
_MODES = {True: "with_clipping", False: "without_clipping"}


@dataclass(frozen=True)
class Extras:
    """The further questions beside the plan itself."""

    clip: bool
    tokens: float | None = None
    price: float | None = None
    ways: tuple[WayOut, ...] = ()
    largest: Largest | None = None
    splits: tuple[Split, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    commands: tuple[Command, ...] = ()
    rollout: Forecast | None = None


def plan_report(answer: Answer, extras: Extras) -> Report:
    """Return the whole answer; sections without a title are for programs."""
    shown, rollout = answer.prediction(extras.clip), extras.rollout
    return (
        _head(answer, shown, extras),
        _verdict(answer, extras),
        _ways(extras.ways),
        _commands(extras),
        _speed(answer, extras),
        *((_bound(shown), _streams(shown), _device(shown)) if shown else ()),
        *([rollout_section(rollout, answer)] if rollout else []),
        _host(answer),
        *([_plan(shown)] if shown else []),
        _machine(answer, extras),
        Section("", tuple(_for_programs(answer, extras))),
    )


def plan_text(answer: Answer, extras: Extras) -> str:
    """Return the whole answer as text, which says of another optimizer than Adam what it says of Adam."""
    text = render_text(plan_report(answer, extras))
    if not isinstance(answer.question.optimizer_state, TorchOptimizer):
        return text
    return text.replace("host Adam", "host updates").replace("Adam moments", "its state   ")


def _title(answer: Answer, shown: Prediction | None) -> str:
    """The model, the cards, and the tokens of a step."""
    q, m = answer.question, answer.model
    active = f", {format_count(m.active_parameters)} active" if m.active_parameters < m.parameters else ""
    if m.lora:
        kept = ", the rest frozen and kept in bfloat16, as a checkpoint in it is" if q.dtype == "bf16" else ""
        if m.lora.frozen != "bf16":
            kept = f", the rest frozen, its linear layers but the head in codes ({m.lora.frozen})"
        active += f", {format_count(m.trained_parameters)} trained (LoRA of rank {m.lora.rank}){kept}"
    title = q.profile.title or q.profile.name
    times = f"{q.micro_batches} micro-batches of " if q.micro_batches > 1 else ""
    moments = "Adam state" if q.optimizer_state == "fp32" else f"{q.optimizer_state} moments"
    if isinstance(q.optimizer_state, TorchOptimizer):
        names = [name.rpartition(".")[2] for name in str(q.optimizer_state).split("+")]
        moments = f"state of {' and '.join(names)}"
    if q.ranks > 1:
        times = f"on each card {times}"
    tower = (
        f"\nThe vision tower's {format_count(m.tower_parameters)} parameters are in the host's memory; the "
        "batch is text alone, so what images\ntake of the device and of the time is not counted: train "
        "--dry_run tells it."
    )
    return (
        f"{m.name} on {_cards(q)}{title}\n"
        f"{format_count(m.parameters)} parameters{active}; {q.dtype} blocks, FP32 masters and {moments} "
        f"{_state_at(answer, shown)}\n{times}{q.batch} × {q.seq:,} tokens: {q.tokens:,} tokens per step"
        + (tower if m.tower_parameters else "")
    )


def _state_at(answer: Answer, shown: Prediction | None) -> str:
    """Say where masters and moments are, by the plan shown."""
    host = "on NVMe and in host memory" if shown is not None and shown.host.nvme else "in host memory"
    if shown is None:
        return host
    trained = [g for g in answer.compiled.assembly.groups if g.trainable]
    there = sum(g.elements for g in trained if shown.planned.plan.groups[g.index].state == "device")
    share = there / max(1, sum(g.elements for g in trained))
    devices = "on the devices" if answer.question.ranks > 1 else "on the device"
    if share in (0, 1):
        return devices if share else host
    return f"{share:.0%} {devices}, the rest {host}"


def _cards(question: Question) -> str:
    """``4 machines of 8 × ``; nothing for a single card."""
    cards = f"{question.gpus} × " if question.ranks > 1 else ""
    return f"{question.nodes} machines of {cards}" if question.nodes > 1 else cards


def _splits_text(splits: tuple[Split, ...]) -> str:
    """Say what other numbers of micro-batches would take."""
    if not splits:
        return ""
    tried = (
        f"{s.micro_batches}: {format_seconds(s.seconds) if s.seconds else 'does not fit'}" for s in splits
    )
    return f"\nmicro-batches tried, the fastest is taken: {', '.join(tried)}"


def _meshes_text(answer: Answer, meshes: tuple[Mesh, ...]) -> str:
    """One state of all machines beside a copy in each."""
    q, lines = answer.question, []
    for mesh in meshes:
        name = "state shared by all cards"
        if mesh.replicated:
            name = f"      copied to each machine, mesh=({q.nodes}, {q.gpus})"
        if mesh.seconds is None or mesh.host_bytes is None:
            lines.append(f"\n{name}: does not fit")
            continue
        taken = ", taken" if mesh.replicated == q.replicated else ""
        host = format_bytes(mesh.host_bytes)
        found = f"{format_seconds(mesh.seconds)}, {host} a host, bound by {mesh.binding}"
        lines.append(f"\n{name}{taken}: {found}")
    return "".join(lines)


def _head(answer: Answer, shown: Prediction | None, extras: Extras) -> Section:
    q, m = answer.question, answer.model
    title = _title(answer, shown) + _splits_text(extras.splits) + _meshes_text(answer, extras.meshes)
    values = {
        "model": m.name, "parameters": m.parameters, "active_parameters": m.active_parameters,
        "trained_parameters": m.trained_parameters, "tower_parameters": m.tower_parameters,
        "machine": q.profile.name, "batch": q.batch, "seq": q.seq, "micro_batches": q.micro_batches,
        "dtype": q.dtype, "optimizer_state": str(q.optimizer_state), "gpus": q.gpus, "nodes": q.nodes,
        "replicated": q.replicated, "hbm_budget": q.hbm_budget, "host_budget": q.host_budget,
        "clipping": extras.clip, "fits": answer.fits(extras.clip) and answer.too_long() is None,
        "longest": reach(answer.model.module), "fits_device": answer.fits_device(),
        "fits_host": answer.fits_host(extras.clip),
        "splits": [asdict(s) for s in extras.splits], "meshes": [asdict(m) for m in extras.meshes],
    }  # fmt: skip
    return Section(title, tuple(told(key, value) for key, value in values.items()))


def _verdict(answer: Answer, extras: Extras) -> Section:
    q, shown = answer.question, answer.prediction(extras.clip)
    each, on_each = (" each", " on each machine") if q.ranks > 1 else ("", "")
    device = shown.planned.peak_bytes if shown else answer.least.device_bytes
    fits = answer.fits_host(extras.clip)
    need = answer.host(extras.clip).total if fits else answer.least_host(extras.clip)
    host = f"of {format_bytes(q.host_budget)}" if q.host_budget else "(no --host-budget given to check)"
    verb = "uses" if shown else "needs at least"
    cut = "as cut below" if answer.compiled.tiled.cuts else "with weights whole"
    limit, verdict = answer.too_long(), "FITS" if answer.fits(extras.clip) else "DOES NOT FIT"
    if limit is not None and answer.fits(extras.clip):
        verdict = "FITS THE MACHINE, AND IS TOO LONG FOR THE MODEL"
    large = {True: "", False: "  << too small"}
    rows = [
        Row("device", (device,), "bytes", (), f"{verb} {{}} of {format_bytes(q.hbm_budget)}{each}"
            f"{large[answer.fits_device()]}"),
        Row("host", (need,), "bytes", (), f"{verb if fits else 'needs at least'} {{}} {host}{on_each}"
            f"{large[fits]}"),
        *_drive(answer, shown),
        *too_long(q.seq, limit),
        Row("least budgets:", (answer.least.device_bytes, answer.least_host(True), answer.least_host(False)),
            "bytes", ("least_hbm_budget", "least_host_budget.clipped", "least_host_budget.streamed"),
            f"device {{}} {cut}; host {{}} with clipping, {{}} without",
            ("(the least with which some plan fits, each by itself; a faster one takes more)",)),
    ]  # fmt: skip
    if extras.largest is not None:
        rows.append(largest_row(extras.largest, q))
    if not answer.fits_device():
        rows.append(Row("", text=describe_peak(answer.least.step, answer.work)))
    mode = "with clipping" if extras.clip else "without clipping"
    return Section(f"{verdict}, {mode}", tuple(rows), width=7)


def _drive(answer: Answer, shown: Prediction | None) -> list[Row]:
    """Say what lies on the drive and what moves over it, where anything does."""
    budget = answer.question.nvme_budget
    if shown is None or not shown.host.nvme or budget is None:
        return []
    traffic = describe_traffic(shown.planned.step, shown.seconds, answer.question.gpus)
    return [Row("NVMe", (shown.host.nvme,), "bytes", (), f"uses {{}} of {format_bytes(budget)}", (traffic,))]


def largest_row(big: Largest, question: Question) -> Row:
    """Say what would fit; of what does not fit at all, nothing is told but that."""
    about = "" if big.exact else "about "
    capped = " (the model's own limit)" if big.seq_limit and big.seq + big.seq_step > big.seq_limit else ""
    batch = f"{about}batch {big.batch}" if big.batch else "no batch"
    seq = f"{about}{big.seq:,} tokens{capped}" if big.seq else "none"
    text = f"{batch} at {question.seq:,} tokens, {seq} at batch {question.batch}"
    sure = () if big.exact else ("(--largest makes sure)",)
    return Row("largest that fits the device:", text=text, notes=sure)


def _ways(ways: Sequence[WayOut]) -> Section:
    rows = []
    for way in ways:
        enough = "not enough alone"
        if way.enough:
            speed = way.tokens_per_second
            enough = f"enough, {speed:,.0f} tokens/s" if speed else "enough"
        rows.append(Row(way.change, (way.saves,), "bytes", (), f" saves {{:>7}}, {enough}; {way.note}"))
    width = max((len(way.change) for way in ways), default=0)
    rows.append(told("ways_out", [asdict(way) for way in ways]))
    return Section("Ways out, each by itself" if ways else "", tuple(rows), width=width)


def _commands(extras: Extras) -> Section:
    """The commands that fit, the fastest first, and how to train so."""
    lines = ["Fits this machine as it is"] if extras.commands else []
    for c in extras.commands:
        lines.append(f"  {c.tokens_per_second:,.0f} tokens/s: {c.plan}")
        if c.compile:
            keywords = ", ".join(f'{k}="{v}"' if v else f"{k}=None" for k, v in c.compile.items())
            lines.append(f"    compile: {keywords}")
        keys = ", ".join(f"{k}: {v}" for k, v in c.train.items())
        lines.append(f"    train, and the trainers' arguments: {keys}")
    if extras.ways and not extras.commands:
        lines = ["No combination of these fits the machine as it is."]
    return Section("\n".join(lines), (told("commands", [asdict(c) for c in extras.commands]),))


def _speed(answer: Answer, extras: Extras) -> Section:
    """What is predicted with clipping and without."""
    both = {mode: answer.prediction(clip) for clip, mode in _MODES.items()}
    peak = answer.question.profile.peak(answer.question.dtype) / 1e12
    each = ", each card" if answer.question.ranks > 1 else ""

    def row(label: str | None, unit: Unit, of: Callable[[Prediction], Any], key: str = "") -> Row:
        keys = tuple(f"{mode}.{key}" if key and p else "" for mode, p in both.items())
        return Row(label, tuple(of(p) if p else None for p in both.values()), unit, keys)

    def hours(p: Prediction) -> float | None:
        return extras.tokens / p.tokens_per_second / 3600 if extras.tokens else None

    def cost(p: Prediction) -> float | None:
        time = hours(p)
        return time * extras.price if time and extras.price else None

    rows = [
        Row(" ", ("with clipping", "without"), keys=("", "")),
        row("step", "seconds", lambda p: p.seconds, "step_seconds"),
        row("tokens per second", "count", lambda p: p.tokens_per_second, "tokens_per_second"),
        row(f"model TFLOP/s{each}", "FLOP/s", lambda p: p.model_flops_per_second, "model_flops_per_second"),
        row(f"MFU, of {peak:.4g} TFLOP/s", "share", lambda p: p.mfu, "mfu"),
        row("lower bound of a step", "seconds", lambda p: p.bound.seconds, "lower_bound.seconds"),
        row("  which is", "text", lambda p: p.bound.binding, "lower_bound.binding"),
        row("  step over it", "change", lambda p: p.seconds / p.bound.seconds - 1),
        row("compute binds from", "text", lambda p: f"{_break_even(answer, p):,.0f} tokens"),
        row(f"{extras.tokens:.3g} tokens take" if extras.tokens else None, "hours", hours, "hours"),
        row(
            f"  at {extras.price:g} an hour" if extras.tokens and extras.price else None,
            "money",
            cost,
            "cost",
        ),
    ]
    if answer.missed_flops:
        missed = (
            f"(The captured graph counts {1 - answer.missed_flops:.0%} of the model's FLOPs; the rest, of "
            "grouped products, is spread over its blocks.)"
        )
        rows.append(Row("", text=missed))
    width = max(len(row.texts()[0]) for row in rows if row.label is not None)
    title = "Predicted" if answer.prediction(extras.clip) else ""
    return Section(title, tuple(rows), width=25, cells=(f"<{width + 3}", ""), wrap=80)


def _break_even(answer: Answer, p: Prediction) -> float:
    """Tokens per step from which model FLOPs, not copies or Adam, bound the step."""
    b, deferred = p.bound, p.mode.keeps_gradients
    if deferred:
        ratio = max(max(b.up, b.sums) * 3 / 2, max(b.adam, b.down, b.gathers) * 3, b.drive) / b.compute
    else:
        ratio = max(b.up, b.down, b.adam, b.memory, b.gathers + b.sums, b.drive) / b.compute
    return answer.question.tokens * ratio


def _bound(shown: Prediction) -> Section:
    b = shown.bound
    matrices = sum(group.matrices.nbytes for group in shown.work.groups if group.matrices)
    there = f"updates of matrices, made orthogonal on the device {{}}; theirs are {format_bytes(matrices)}"
    rows = [
        Row("", (b.compute, b.down, b.up, b.adam), "seconds",
            text="model FLOPs {}; weights down {}; gradients up {}; host Adam {}"),
        Row("", (b.memory,), "seconds", text="all that copies and updates move through host memory {}"),
        Row("", (b.gathers, b.sums), "seconds", text="gathers between cards {}; sums between cards {}"),
        Row("", (b.updates if matrices else 0.0,), "seconds",
            text=there, notes=("of what goes each way",)),
        Row("", (b.drive,), "seconds", text="what is read and written of the drive {}"),
    ]  # fmt: skip
    taking = tuple(row for row in rows if row.values[0])
    return Section("What a step must do at least, each by itself", taking)


def _streams(shown: Prediction) -> Section:
    timeline, idle = shown.planned.timeline, waits(shown.planned)
    compute = compute_parts(shown.planned.step, shown.question.terms.machine, shown.model_flops)
    parts = [f"{name} {format_seconds(t)}" for name, t in compute.items() if t > 0.005 * shown.seconds]
    rows = []
    for stream in STREAMS:
        busy = timeline.busy[stream]
        if busy:
            notes = ("; ".join(parts),) if stream == "compute" else ()
            text = f"busy {{:>8}}  {busy / shown.seconds:>4.0%} of the step"
            rows.append(
                Row(_STREAMS[stream], (busy,), "seconds", (), text, (*notes, _idle(idle.get(stream, {}))))
            )
    return Section("Streams", tuple(rows), width=20, indent=23, wrap=110)


def _idle(causes: Mapping[str, float]) -> str:
    """``waits for compute 6.1 s, host Adam 2.3 s; nothing to do 1 s``."""
    found = ", ".join(f"{name} {format_seconds(t)}" for name, t in causes.items() if name != IDLE)
    rest = f"{IDLE} {format_seconds(causes[IDLE])}" if IDLE in causes else ""
    return "; ".join(filter(None, [found and f"waits for {found}", rest])) or "never waits"


def _device(shown: Prediction) -> Section:
    where, parts = highest_point(shown.planned.step, shown.work)
    rows = [Row(name, (n,), "bytes") for name, n in parts.items() if n > 10**5 or n == max(parts.values())]
    rows.append(Row("", text=f"reached in the {where}"))
    title = f"Device memory at its highest point, {format_bytes(shown.planned.peak_bytes)}"
    return Section(title, tuple(rows), width=33, cells=(">8",))


_HOST = {"masters": "FP32 masters", "moments": "Adam moments", "gradients": "kept gradients",
         "buffers": "gradient buffers", "offloaded": "waiting activations", "window": "buffers for NVMe",
         "nvme": "on NVMe"}  # fmt: skip


def _host(answer: Answer) -> Section:
    found = answer.hosts()

    def row(label: str | None, field: str) -> Row:
        values = tuple(getattr(host, field) for host in found.values())
        return Row(label, values, "bytes if any", tuple(f"host_bytes.{name}.{field}" for name in found))

    rows = [row(label, field) for field, label in _HOST.items()]
    rows = [row if any(row.values) else replace(row, label=None) for row in rows]
    rounded = any(500 * h.padding > h.total for h in found.values())  # else three digits do not show it
    rows.append(row("up to whole pages" if rounded else None, "padding"))
    rows += [row(None, "scratch"), row("in all", "total")]
    groups = answer.compiled.assembly.groups
    q, in_ram = answer.question, not any(h.nvme for h in found.values())
    for form in CODINGS if q.optimizer_state == "fp32" and in_ram else ():
        moments = q.gpus * state_bytes(groups, form)["moments"]
        totals = tuple(h.total - h.moments + moments for h in found.values())
        rows.append(Row(f"with {form} moments", totals, "bytes", ("",) * len(totals)))
    title = "Host memory            streamed   clipped  accumulated"
    return Section(title, tuple(rows), width=19, cells=(">9", ">10", ">13"))


def _plan(shown: Prediction) -> Section:
    return Section("Plan\n" + textwrap.indent(plan_table(shown.planned.plan, shown.work), "  "))


def _machine(answer: Answer, extras: Extras) -> Section:
    q = answer.question
    drive = q.nvme_budget is not None or any(w.change.startswith("--nvme-budget") for w in extras.ways)
    hidden = {"fp32 rate" if q.dtype == "bf16" else "bf16 rate"} | (set() if drive else {"drive"})
    hidden |= ({"fabric"} if q.ranks == 1 else set()) | ({"network"} if q.nodes == 1 else set())
    rows = (
        Row(None if name in hidden else name, (text,), keys=(f"sources.{name}",), text="{}")
        for name, text in q.profile.sources.items()
    )
    return Section("The machine's figures", tuple(rows), width=17)


def _for_programs(answer: Answer, extras: Extras) -> Iterator[Row]:
    """Yield what is told to programs alone."""
    yield told("flops_missed_by_graph", answer.missed_flops)
    yield told("largest", asdict(extras.largest) if extras.largest else None)
    if extras.rollout is None:
        yield told("rollout", None)
    for clip, mode in _MODES.items():
        p = answer.prediction(clip)
        if p is None:
            yield told(mode, None)
            continue
        step, work, stream_waits = p.planned.step, p.work, waits(p.planned)
        yield Row(None, (p.planned.peak_bytes,), "bytes", (f"{mode}.peak_bytes",))
        values = {f"lower_bound.{name}": value for name, value in asdict(p.bound).items()}
        values = {name: v for name, v in values.items() if not name.endswith(("seconds", "binding"))} | {
            "busy_seconds": p.planned.timeline.busy,
            "compute_seconds": compute_parts(step, p.question.terms.machine, p.model_flops),
            "stream_waits": {s: causes for s, causes in stream_waits.items() if s != "compute"},
            "compute_waits": stream_waits["compute"],
            "pieces": {name: len(rows) - 1 for name, rows in p.compiled.tiled.cuts.items() if len(rows) > 2},
            "rows_from_the_host": sorted({n for r in p.compiled.part.rows.values() for n in r.pieces}),
            "state_on_device": [work.groups[g].name for g in step.resident],
            "alive_at_peak": highest_point(step, work)[1],
            "evaluations": p.planned.evaluations,
        }
        for name, value in values.items():
            yield told(f"{mode}.{name}", value)
