"""``megacompile plan``: from parsed options to a printed answer, a sweep and its picture, or JSON."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacompile.api.pipeline import prove
from megacompile.api.rollout_forecast import Completions, Forecast, forecast
from megacompile.capture.fingerprint import parameter_forms
from megacompile.capture.padding import reach
from megacompile.cli.alternatives import (
    Fit,
    Largest,
    Mesh,
    Point,
    Split,
    WayOut,
    best_mesh,
    best_split,
    estimate_largest,
    largest,
    size_text,
    sweep,
    ways_out,
)
from megacompile.cli.estimator import (
    CAUSES,
    DTYPES,
    IDLE,
    Answer,
    Prediction,
    Question,
    Study,
    compute_parts,
    waits,
)
from megacompile.cli.main import folder_of, write_json
from megacompile.cli.models import Lora, load_model
from megacompile.cli.plan_arguments import device_budget, host_budget, nvme_budget, sweep_values
from megacompile.errors import CaptureError, MegacompileError
from megacompile.hardware.catalog import THIS_CPU, load_machine, machine_key, override
from megacompile.planner.min_feasible_budget import describe_peak, highest_point
from megacompile.planner.nvme_placement import describe_traffic
from megacompile.report.dump import write_dump
from megacompile.report.plots import canvas, save
from megacompile.report.schedule import Schedule
from megacompile.schedule.op_table import STREAMS
from megacompile.schedule.plan_text import plan_table
from megacompile.state.moment_formats import CODINGS, state_bytes
from megacompile.state.torch_optimizer import Foreign
from megacompile.units import format_bytes, format_count, format_hours, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ------------------------------------------------------------------------------------------------------------
# ``megacompile plan``: from parsed options to a printed answer, a sweep, or JSON.


class PlanProgress:
    """Says on stderr what is going on: on a terminal in one line, elsewhere in a line for each change."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._terminal = sys.stderr.isatty()
        self._said = ""

    def __call__(self, message: str) -> None:
        if message == self._said and not self._terminal:
            return
        self._said = message
        text = f"[{time.perf_counter() - self._start:5.1f} s] {message} …"
        print(f"\r\033[K{text}" if self._terminal else text, end="" if self._terminal else "\n",
              file=sys.stderr, flush=True)  # fmt: skip

    def clear(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def run_plan(options: argparse.Namespace) -> int:
    """Answer what was checked; 0 where it fits, 1 where it does not."""
    progress = PlanProgress()
    if machine_key(options.machine) == THIS_CPU:
        progress("measuring this CPU")
    question = _question(options)
    folder = folder_of(options.dump) if options.dump else None
    progress(f"building {options.model}")
    study = Study(load_model(options.model, _lora(options)), options.dtype, progress, options.optimizer)
    if study.form != "fp32":
        question = replace(question, optimizer_state=study.form)
    clip = not options.no_clip
    try:
        if options.sweep:
            return _run_sweep(options, study, question, clip, progress)
        answer, splits, meshes = _answer(options, study, question, clip)
        extras = replace(_extras(options, study, answer, clip), splits=splits, meshes=meshes)
        if options.rollout:
            progress("predicting the rollout")
            extras = replace(extras, rollout=_forecast(options, study, answer.question))
        shown = answer.prediction(clip)
        schedule = shown.schedule(answer.model) if shown else None
        if folder is not None and shown and schedule:
            _dump(shown, schedule, folder)
    except CaptureError as error:
        raise MegacompileError(f"{options.model}: {error}") from error
    finally:
        progress.clear()
    if options.json:
        write_json(as_json(answer, extras))
    elif options.explain and schedule is not None:
        print(schedule.explain(options.explain))
    else:
        print(render(answer, extras), end="")
    if options.html and schedule is not None:
        _write_page(schedule, options.html)
    fits = answer.fits(clip) and answer.too_long() is None
    return 0 if fits and (extras.rollout is None or _rolls_out(extras.rollout, answer)) else 1


def _forecast(options: argparse.Namespace, study: Study, question: Question) -> Forecast:
    """Predict what ``program.rollout`` does with the rows of a step."""
    completions = Completions(question.batch * question.micro_batches, *options.rollout)
    model, machine = study.model.module, question.profile.rates(question.dtype)
    forms = parameter_forms(model, DTYPES[question.dtype])
    try:
        return forecast(model, forms, machine, question.hbm_budget, completions)
    except Exception as error:  # of the model's own forward
        reason = str(error).partition("\n")[0]
        raise MegacompileError(
            f"--rollout: a cache of {options.model} cannot be predicted, as its forward does not run without "
            f"values ({reason}): leave it out, and measure a rollout."
        ) from error


def _rolls_out(rollout: Forecast, answer: Answer) -> bool:
    tokens = rollout.completions.prompt + rollout.completions.new
    return rollout.at_once > 0 and not _too_long(tokens, reach(answer.model.module))


def _lora(options: argparse.Namespace) -> Lora | None:
    if options.lora is None:
        return None
    return Lora(options.lora, tuple(options.lora_targets or ()), options.frozen or "bf16")


def _answer(
    options: argparse.Namespace, study: Study, question: Question, clip: bool
) -> tuple[Answer, tuple[Split, ...], tuple[Mesh, ...]]:
    """The answer, with the fastest split and mesh where they are to be found."""
    if options.micro_batches != "auto":
        answer, meshes = best_mesh(study, question, clip)
        return answer, (), meshes
    answer, splits = best_split(study, question, clip)
    if question.nodes == 1:
        return answer, splits, ()
    answer, meshes = best_mesh(study, answer.question, clip)
    return answer, splits, meshes


def _dump(shown: Prediction, schedule: Schedule, folder: Path) -> None:
    """Prove the planned step safe in every order, and write every stage's output to ``folder``."""
    proven = prove(shown.compiled, shown.mode, shown.planned, schedule.title, schedule.budget_bytes)
    write_dump(folder / "train", proven, schedule)


def _write_page(schedule: Schedule, path: str) -> None:
    try:
        written = schedule.to_html(path)
    except OSError as error:
        raise MegacompileError(f"--html {path}: {error.strerror or error}.") from error
    print(f"The page is {written}: open it in a browser.", file=sys.stderr)


def _question(options: argparse.Namespace) -> Question:
    profile = override(
        load_machine(options.machine, options.dtype),
        host_bandwidth=options.host_bandwidth and options.host_bandwidth * 1e9,
        link_bandwidth=options.link and options.link * 1e9,
        fabric_bandwidth=options.fabric and options.fabric * 1e9,
        nvme_rates=options.nvme_rates and [rate * 1e9 for rate in options.nvme_rates],
        network_bandwidth=options.network and options.network * 1e9,
        price=options.price,
    )
    return Question(
        profile, options.batch, options.seq, device_budget(options, profile),
        1 if options.micro_batches == "auto" else options.micro_batches,
        options.dtype, host_budget(options, profile), nvme_budget(options), options.gpus, options.nodes,
        optimizer_state=options.optimizer_state,
    )  # fmt: skip


def _extras(options: argparse.Namespace, study: Study, answer: Answer, clip: bool) -> Extras:
    ways, fits = ((), ()) if answer.fits(clip) else ways_out(study, answer, clip)
    commands = tuple(command(options, answer.question, fit) for fit in fits)
    most = largest(study, answer.question) if options.largest else estimate_largest(answer)
    price = answer.question.profile.price_per_hour
    return Extras(clip, options.tokens, price, ways, most, commands=commands)


def _run_sweep(
    options: argparse.Namespace, study: Study, question: Question, clip: bool, progress: PlanProgress
) -> int:
    points = list(sweep(study, question, options.sweep, sweep_values(options), clip))
    progress.clear()
    if options.json:
        extras = Extras(clip, options.tokens, question.profile.price_per_hour)
        write_json([{"value": p.label, **as_json(p.answer, extras)} for p in points])
    else:
        print(sweep_table(points, options.sweep, clip))
        if not clip or question.micro_batches == 1:
            print(sweep_table(points, options.sweep, not clip))
    if not options.json or options.plot:
        _draw(points, options.sweep, Path(options.plot or f"sweep-{options.sweep}.png"), study.model.name)
    return 0 if any(p.answer.fits(clip) and p.answer.too_long() is None for p in points) else 1


def _draw(points: Sequence[Point], over: str, path: Path, name: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: pip install 'megacompile[plots]' draws one.", file=sys.stderr)
        return
    draw_sweep(points, over, path, name)
    print(f"The curve is in {path}.", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------
# The first lines of the printed answer: what is planned, where its state is, and what else was tried.
#
# In: an :class:`~megacompile.cli.estimator.Answer` and the splits and meshes that were tried. Out: text.


def head(answer: Answer, shown: Prediction | None) -> str:
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
    if isinstance(q.optimizer_state, Foreign):
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


def splits_text(splits: tuple[Split, ...]) -> str:
    """Say what other numbers of micro-batches would take."""
    if not splits:
        return ""
    tried = (
        f"{s.micro_batches}: {format_seconds(s.seconds) if s.seconds else 'does not fit'}" for s in splits
    )
    return f"\nmicro-batches tried, the fastest is taken: {', '.join(tried)}"


def meshes_text(answer: Answer, meshes: tuple[Mesh, ...]) -> str:
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


# ------------------------------------------------------------------------------------------------------------
# The printed answer to "will it fit, and how fast": text for people.
#
# In: an :class:`~megacompile.cli.estimator.Answer`. Out: text of about 100 columns. Every figure stands with
# and without clipping; the details follow the mode that was asked for.


_STREAMS = CAUSES | {"h2d": "host to device", "d2h": "device to host", "comm": "between devices"}


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


def render(answer: Answer, extras: Extras) -> str:
    """The whole answer as text."""
    shown = answer.prediction(extras.clip)
    parts = [
        head(answer, shown) + splits_text(extras.splits) + meshes_text(answer, extras.meshes),
        _verdict(answer, extras),
    ]
    if extras.ways:
        parts += [_ways(extras.ways), _commands(extras.commands)]
    if shown is not None:
        parts += [_speed(answer, extras), _bound(shown), _streams(shown)]
        parts += [text for text in (_kernels(shown), _device(answer, shown)) if text]
    if extras.rollout is not None:
        parts.append(_rollout(extras.rollout, answer.question, reach(answer.model.module)))
    parts.append(_host(answer))
    if shown is not None:
        parts.append("Plan\n" + textwrap.indent(plan_table(shown.planned.plan, shown.work), "  "))
    parts.append(_machine(answer, extras))
    text = "\n\n".join(parts) + "\n"
    if not isinstance(answer.question.optimizer_state, Foreign):
        return text
    return text.replace("host Adam", "host updates").replace("Adam moments", "its state   ")


def largest_line(big: Largest, question: Question) -> str:
    """Say what would fit; of what does not fit at all, nothing is told but that."""
    about, sure = ("", "") if big.exact else ("about ", "\n    (--largest makes sure)")
    capped = " (the model's own limit)" if big.seq_limit and big.seq + big.seq_step > big.seq_limit else ""
    batch = f"{about}batch {big.batch}" if big.batch else "no batch"
    seq = f"{about}{big.seq:,} tokens{capped}" if big.seq else "none"
    return (
        f"  largest that fits the device: {batch} at {question.seq:,} tokens, {seq} at batch "
        f"{question.batch}{sure}"
    )


def _verdict(answer: Answer, extras: Extras) -> str:
    q, shown = answer.question, answer.prediction(extras.clip)
    each, on_each = (" each", " on each machine") if q.ranks > 1 else ("", "")
    device = shown.planned.peak_bytes if shown else answer.least.device_bytes
    fits = answer.fits_host(extras.clip)
    need = answer.host(extras.clip).total if fits else answer.least_host(extras.clip)
    mode = "with clipping" if extras.clip else "without clipping"
    host = f"of {format_bytes(q.host_budget)}" if q.host_budget else "(no --host-budget given to check)"
    verb = "uses" if shown else "needs at least"
    cut = "as cut below" if answer.compiled.tiled.cuts else "with weights whole"
    limit, verdict = answer.too_long(), "FITS" if answer.fits(extras.clip) else "DOES NOT FIT"
    if limit is not None and answer.fits(extras.clip):
        verdict = "FITS THE MACHINE, AND IS TOO LONG FOR THE MODEL"
    lines = [
        f"{verdict}, {mode}",
        f"  device  {verb} {format_bytes(device)} of {format_bytes(q.hbm_budget)}{each}"
        + ("" if answer.fits_device() else "  << too small"),
        f"  host    {verb if fits else 'needs at least'} {format_bytes(need)} {host}{on_each}"
        + ("" if fits else "  << too small"),
        *_drive(answer, shown),
        *_too_long(q.seq, limit),
        f"  least budgets: device {format_bytes(answer.least.device_bytes)} {cut}; host "
        f"{format_bytes(answer.least_host(True))} with clipping, "
        f"{format_bytes(answer.least_host(False))} without",
        "    (the least with which some plan fits, each by itself; a faster one takes more)",
    ]
    if extras.largest is not None:
        lines.append(largest_line(extras.largest, q))
    if not answer.fits_device():
        lines.append(
            textwrap.fill(
                describe_peak(answer.least.step, answer.work), 98, initial_indent="  ", subsequent_indent="  "
            )
        )
    return "\n".join(lines)


def _too_long(seq: int, limit: int | None) -> list[str]:
    """Say what positions the model is for, where sequences have more."""
    if limit is None or seq <= limit:
        return []
    return [
        f"  length  {seq:,} tokens, and the model's config is for {limit:,}  << too long: take fewer,",
        "    or a config whose rotary embeddings are scaled so far",
    ]


def _drive(answer: Answer, shown: Prediction | None) -> list[str]:
    """Say what lies on the drive and what moves over it, where anything does."""
    budget = answer.question.nvme_budget
    if shown is None or not shown.host.nvme or budget is None:
        return []
    traffic = describe_traffic(shown.planned.step, shown.seconds, answer.question.gpus)
    line = f"  NVMe    uses {format_bytes(shown.host.nvme)} of {format_bytes(budget)}"
    return [line, textwrap.fill(traffic, 98, initial_indent="    ", subsequent_indent="    ")]


def _ways(ways: Sequence[WayOut]) -> str:
    lines = ["Ways out, each by itself"]
    width = max(len(w.change) for w in ways)
    for way in ways:
        enough = "not enough alone"
        if way.enough:
            speed = way.tokens_per_second
            enough = f"enough, {speed:,.0f} tokens/s" if speed else "enough"
        lines.append(f"  {way.change:<{width}}  saves {format_bytes(way.saves):>7}, {enough}; {way.note}")
    return "\n".join(lines)


def _commands(commands: Sequence[Command]) -> str:
    """The commands that fit, the fastest first, and how to train so."""
    if not commands:
        return "No combination of these fits the machine as it is."
    lines = ["Fits this machine as it is"]
    for c in commands:
        lines.append(f"  {c.tokens_per_second:,.0f} tokens/s: {c.plan}")
        if c.compile:
            keywords = ", ".join(f'{k}="{v}"' if v else f"{k}=None" for k, v in c.compile.items())
            lines.append(f"    compile: {keywords}")
        keys = ", ".join(f"{k}: {v}" for k, v in c.train.items())
        lines.append(f"    train, and the trainers' arguments: {keys}")
    return "\n".join(lines)


def _speed(answer: Answer, extras: Extras) -> str:
    both = (answer.prediction(True), answer.prediction(False))
    peak = answer.question.profile.peak(answer.question.dtype) / 1e12
    each = ", each card" if answer.question.ranks > 1 else ""
    rows: list[tuple[str, list[str]]] = [
        ("", ["with clipping", "without"]),
        ("step", [format_seconds(p.seconds) if p else "–" for p in both]),
        ("tokens per second", [f"{p.tokens_per_second:,.0f}" if p else "–" for p in both]),
        (f"model TFLOP/s{each}", [f"{p.model_flops_per_second / 1e12:.1f}" if p else "–" for p in both]),
        (f"MFU, of {peak:.4g} TFLOP/s", [f"{p.mfu:.1%}" if p else "–" for p in both]),
        ("lower bound of a step", [format_seconds(p.bound.seconds) if p else "–" for p in both]),
        ("  which is", [p.bound.binding if p else "–" for p in both]),
        ("  step over it", [f"+{p.seconds / p.bound.seconds - 1:.0%}" if p else "–" for p in both]),
        ("compute binds from", [_break_even(answer, p) if p else "–" for p in both]),
    ]
    if extras.tokens is not None:
        hours = [extras.tokens / p.tokens_per_second / 3600 if p else None for p in both]
        rows.append((f"{extras.tokens:.3g} tokens take", [format_hours(h) if h else "–" for h in hours]))
        if extras.price is not None:
            cost = [f"{h * extras.price:,.2f}" if h else "–" for h in hours]
            rows.append((f"  at {extras.price:g} an hour", cost))
    width = max(len(cells[0]) for _, cells in rows)
    body = [f"  {name:<26}{a:<{width}}   {b}" for name, (a, b) in rows]
    text = "Predicted\n" + "\n".join(line.rstrip() for line in body)
    if answer.missed_flops:
        text += (
            f"\n  (The captured graph counts {1 - answer.missed_flops:.0%} of the model's FLOPs; the rest, "
            "of grouped\n  products, is spread over its blocks.)"
        )
    return text


def _break_even(answer: Answer, p: Prediction) -> str:
    """Tokens per step from which model FLOPs, not copies or Adam, bound the step."""
    b, deferred = p.bound, p.mode.keeps_gradients
    if deferred:
        ratio = max(max(b.up, b.sums) * 3 / 2, max(b.adam, b.down, b.gathers) * 3, b.drive) / b.compute
    else:
        ratio = max(b.up, b.down, b.adam, b.memory, b.gathers + b.sums, b.drive) / b.compute
    return f"{answer.question.tokens * ratio:,.0f} tokens"


def _bound(shown: Prediction) -> str:
    b = shown.bound
    updates = sum(group.matrices.nbytes for group in shown.work.groups if group.matrices)
    return (
        "What a step must do at least, each by itself\n"
        f"  model FLOPs {format_seconds(b.compute)}; weights down {format_seconds(b.down)}; gradients up "
        f"{format_seconds(b.up)}; host Adam {format_seconds(b.adam)}"
        + (
            f"\n  all that copies and updates move through host memory {format_seconds(b.memory)}"
            if b.memory
            else ""
        )
        + (
            f"\n  gathers between cards {format_seconds(b.gathers)}; "
            f"sums between cards {format_seconds(b.sums)}"
            if b.gathers
            else ""
        )
        + (
            f"\n  updates of matrices, made orthogonal on the device {format_seconds(b.orthogonal)}; "
            f"theirs are {format_bytes(updates)}\n    of what goes each way"
            if updates
            else ""
        )
        + (f"\n  what is read and written of the drive {format_seconds(b.drive)}" if b.drive else "")
    )


def _streams(shown: Prediction) -> str:
    timeline, idle = shown.planned.timeline, waits(shown.planned)
    compute = compute_parts(shown.planned.step, shown.question.terms.machine, shown.model_flops)
    parts = [f"{name} {format_seconds(t)}" for name, t in compute.items() if t > 0.005 * shown.seconds]
    lines = ["Streams"]
    for stream in STREAMS:
        busy = timeline.busy[stream]
        if not busy:
            continue
        share = f"busy {format_seconds(busy):>8}  {busy / shown.seconds:>4.0%} of the step"
        lines.append(f"  {_STREAMS[stream]:<20} {share}")
        if stream == "compute":
            lines.append(_below("; ".join(parts)))
        lines.append(_below(_idle(idle.get(stream, {}))))
    return "\n".join(lines)


def _kernels(shown: Prediction) -> str:
    """Say what each of our kernels is worth, the most first; nothing where there are none."""
    rows = sorted(shown.worth.items(), key=lambda row: row[1].seconds - row[1].without)
    if not rows:
        return ""
    lines = ["Kernels in a step, at their ceilings       calls       with  in plain torch"]
    for name, w in rows:
        times = f"{format_seconds(w.seconds):>11}{format_seconds(w.without):>16}"
        lines.append(f"  {name:<40}{w.calls:>6,}{times}")
    return "\n".join(lines)


def _below(text: str) -> str:
    return textwrap.fill(text, 110, initial_indent=" " * 23, subsequent_indent=" " * 23)


def _idle(causes: Mapping[str, float]) -> str:
    """``waits for compute 6.1 s, host Adam 2.3 s; nothing to do 1 s``."""
    found = ", ".join(f"{name} {format_seconds(t)}" for name, t in causes.items() if name != IDLE)
    rest = f"{IDLE} {format_seconds(causes[IDLE])}" if IDLE in causes else ""
    return "; ".join(filter(None, [found and f"waits for {found}", rest])) or "never waits"


def _device(answer: Answer, shown: Prediction) -> str:
    lines = [f"Device memory at its highest point, {format_bytes(shown.planned.peak_bytes)}"]
    where, parts = highest_point(shown.planned.step, shown.work)
    lines += [
        f"  {name:<34}{format_bytes(n):>8}"
        for name, n in parts.items()
        if n > 10**5 or n == max(parts.values())
    ]
    return "\n".join([*lines, f"  reached in the {where}"])


def _rollout(rollout: Forecast, question: Question, limit: int | None = None) -> str:
    """Say whether a rollout fits, where its weights are, and how many tokens a second it gives."""
    c, fits = rollout.completions, rollout.at_once > 0
    rows = f"{rollout.at_once} of them at a time" if 0 < rollout.at_once < c.rows else "all at once"
    lines = [
        f"Rollout of {c.rows} rows, {c.prompt:,} tokens each and {c.new:,} new ones, in the device's budget",
        f"  weights      {rollout.weights_at}",
        f"  cache        {format_bytes(rollout.cache_bytes)} a row, {rows if fits else 'no room for one'}",
        f"  device       {'uses' if fits else 'needs at least'} {format_bytes(rollout.need_bytes)} of "
        f"{format_bytes(question.hbm_budget)}{'' if fits else '  << too small'}",
        *_too_long(c.prompt + c.new, limit),
    ]
    if fits:
        load, prompts, completions, whole = map(
            format_seconds, (rollout.load, rollout.prefill, rollout.decode, rollout.seconds)
        )
        lines += [
            f"  prompts      {rollout.prefill_rate:,.0f} tokens/s, {prompts}",
            f"  completions  {rollout.decode_rate:,.0f} tokens/s, {completions}",
            f"  in all       {whole}, of which {load} bring weights that stay",
        ]
    return "\n".join(lines)


def _host(answer: Answer) -> str:
    found = answer.hosts()
    lines = ["Host memory            streamed   clipped  accumulated"]
    kinds = (("FP32 masters", "masters"), ("Adam moments", "moments"), ("kept gradients", "gradients"),
             ("gradient buffers", "buffers"), ("waiting activations", "offloaded"),
             ("buffers for NVMe", "window"), ("on NVMe", "nvme"))  # fmt: skip
    for label, field in kinds:
        cells = [getattr(h, field) for h in found.values()]
        if any(cells):
            lines.append(f"  {label:<19}" + _cells([format_bytes(c) if c else "–" for c in cells]))
    if any(500 * h.padding > h.total for h in found.values()):  # else it does not show in three digits
        lines.append(
            f"  {'up to whole pages':<19}" + _cells([format_bytes(h.padding) for h in found.values()])
        )
    lines.append(f"  {'in all':<19}" + _cells([format_bytes(h.total) for h in found.values()]))
    groups = answer.compiled.assembly.groups
    q, in_ram = answer.question, not any(h.nvme for h in found.values())
    for form in CODINGS if q.optimizer_state == "fp32" and in_ram else ():
        moments = q.gpus * state_bytes(groups, form)["moments"]
        totals = [format_bytes(h.total - h.moments + moments) for h in found.values()]
        lines.append(f"  {'with ' + form + ' moments':<19}" + _cells(totals))
    return "\n".join(lines)


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"{t:>{w}}" for t, w in zip(texts, (10, 10, 13), strict=True))


def _machine(answer: Answer, extras: Extras) -> str:
    other = "fp32 rate" if answer.question.dtype == "bf16" else "bf16 rate"
    sources = answer.question.profile.sources
    q = answer.question
    drive = q.nvme_budget is not None or any(w.change.startswith("--nvme-budget") for w in extras.ways)
    hidden = {other} | (set() if drive else {"drive"})
    hidden |= ({"fabric"} if q.ranks == 1 else set()) | ({"network"} if q.nodes == 1 else set())
    lines = ["The machine's figures"]
    lines += [f"  {name:<17} {text}" for name, text in sources.items() if name not in hidden]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------
# What fits, as a command: a question as ``megacompile plan`` takes it, and as whatever trains does.
#
# In: parsed options, an answer, and a :class:`~megacompile.cli.alternatives.Fit`. Out: a :class:`Command`.


_KEPT = ("model", "lora", "lora_targets", "frozen", "optimizer", "max_grad_norm", "machine", "host_budget",
         "host_bandwidth", "nvme_rates", "link", "gpus", "nodes", "fabric", "network", "tokens",
         "price")  # fmt: skip
_FOLDER = "DIR"  # on a drive, which the user has to name


@dataclass(frozen=True)
class Command:
    """A command that fits, with the keywords of ``megacompile.compile`` that differ from what was asked, and
    the keys of ``megacompile train``, which are also fields of TrainingArguments and MegacompileConfig."""

    plan: str
    tokens_per_second: float
    compile: dict[str, str | None]
    train: dict[str, str | int]


def command(options: argparse.Namespace, asked: Question, fit: Fit) -> Command:
    """Tell how to ask for what fits."""
    q = fit.question
    keywords: dict[str, str | None] = {}
    keys: dict[str, str | int] = {}
    if q.hbm_budget != asked.hbm_budget:
        keywords["hbm_budget"] = keys["hbm_budget"] = size_text(q.hbm_budget)
    if q.optimizer_state != asked.optimizer_state:
        keywords["optimizer_state"] = keys["optimizer_state"] = str(q.optimizer_state)
    if q.nvme_budget != asked.nvme_budget:
        keywords["offload_dir"] = keys["offload_dir"] = _FOLDER
    if not fit.clip and not options.no_clip:
        keywords["max_grad_norm"], keys["max_grad_norm"] = None, 0
    if (q.batch, q.micro_batches) != (asked.batch, asked.micro_batches):
        keys["per_device_train_batch_size"] = q.batch
        keys["gradient_accumulation_steps"] = q.micro_batches
    if q.seq != asked.seq:
        keys["max_length"] = q.seq
    return Command(shlex.join(_words(options, asked, fit)), fit.tokens_per_second, keywords, keys)


def _words(options: argparse.Namespace, asked: Question, fit: Fit) -> list[str]:
    q = fit.question
    numbers = {"gpus": 1, "nodes": 1, "optimizer": "adamw"}  # their defaults; others have none
    flags: dict[str, object] = {
        name: value
        for name in _KEPT
        if (value := getattr(options, name)) is not None and value != numbers.get(name)
    }
    if not fit.clip:
        flags.pop("max_grad_norm", None)
    flags |= {"batch": q.batch, "seq": q.seq, "dtype": q.dtype}
    if q.micro_batches > 1:
        flags["micro_batches"] = q.micro_batches
    if q.hbm_budget != asked.hbm_budget:
        flags["hbm_budget"] = size_text(q.hbm_budget)
    elif options.hbm_budget is not None:
        flags["hbm_budget"] = options.hbm_budget
    if q.nvme_budget is not None:
        changed = q.nvme_budget != asked.nvme_budget
        flags["nvme_budget"] = size_text(q.nvme_budget) if changed else options.nvme_budget
    if q.optimizer_state != "fp32" and not isinstance(q.optimizer_state, Foreign):
        flags["optimizer_state"] = q.optimizer_state
    words = ["megacompile", "plan"]
    for name, value in flags.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *(_text(v) for v in values)]
    return words if fit.clip else [*words, "--no-clip"]


def _text(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------------------
# A sweep in print: one answer a row.


def sweep_table(points: Sequence[Point], over: str, clip: bool) -> str:
    """A sweep as a table: per row, whether it fits and what it gives with and without clipping."""
    mode = "with clipping" if clip else "without clipping"
    names = f"{'device':>8} {'host':>8} {'step':>8} {'tokens/s':>9} {'TFLOP/s':>8} {'MFU':>6}"
    lines = [f"{over:>16}  fits  {names}  lower bound, {mode}"]
    for point in points:
        a, p = point.answer, point.answer.prediction(clip)
        start = f"{point.label:>16}  {'yes' if a.fits(clip) and a.too_long() is None else 'no':<4}"
        if p is None:
            lines.append(f"{start}  needs {format_bytes(a.least.device_bytes)} of the device")
            continue
        lines.append(
            f"{start}  {format_bytes(p.planned.peak_bytes):>8} {format_bytes(p.host.total):>8} "
            f"{format_seconds(p.seconds):>8} {p.tokens_per_second:>9,.0f} "
            f"{p.model_flops_per_second / 1e12:>8.1f} {p.mfu:>6.1%}  "
            f"{format_seconds(p.bound.seconds)}: {p.bound.binding}"
            + (", with a copy of the state in each machine" if a.question.replicated else "")
            + ("" if (limit := a.too_long()) is None else f", longer than the model's own {limit:,}")
        )
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------
# The picture of a sweep: tokens per second over the axis, with clipping and without.


_AXES = {"hbm-budget": "device budget (GB)", "batch": "sequences per micro-batch",
         "seq": "tokens per sequence", "gpus": "cards", "machine": ""}  # fmt: skip
_MODES = ((True, "with clipping", "#3b5b8c"), (False, "without clipping", "#5aa9a3"))
_Series = list[tuple[float, float, float]]  # place, predicted tokens per second, those of the bound


def draw_sweep(points: Sequence[Point], over: str, path: Path, model: str) -> None:
    """Write a PNG: what is predicted, and as a dotted line or a mark what the lower bound allows."""
    question = points[0].answer.question
    where = "" if over == "machine" else f" on {question.profile.title}"
    shape = {"batch": f"{question.seq:,} tokens per sequence", "seq": f"{question.batch} sequences"}
    subtitle = shape.get(over, f"{question.batch} × {question.seq:,} tokens per micro-batch")
    name = "/".join(Path(model).parts[-2:])
    figure, axes = canvas(f"Predicted training speed of {name}{where}", subtitle)
    for index, (clip, label, colour) in enumerate(_MODES):
        found = _series(points, clip)
        if found:
            draw = _bars if over == "machine" else _line
            draw(axes, found, index, label, colour)
    _scale(axes, points, over)
    axes.set_xlabel(_AXES[over])
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9.5)
    try:
        save(figure, path)
    except (OSError, ValueError) as error:
        raise MegacompileError(f"--plot {path}: the picture cannot be written: {error}.") from error


def _series(points: Sequence[Point], clip: bool) -> _Series:
    found = [(p.value, p.answer.prediction(clip), p.answer.question.tokens) for p in points]
    return [(x, p.tokens_per_second, tokens / p.bound.seconds) for x, p, tokens in found if p]


def _line(axes: Axes, found: _Series, index: int, label: str, colour: str) -> None:
    x, y, bound = zip(*found, strict=True)
    axes.plot(x, y, marker="o", markersize=5, linewidth=1.8, color=colour, label=label, zorder=3)
    axes.plot(x, bound, linestyle=(0, (1, 2)), linewidth=1.6, color=colour, label=f"its upper limit, {label}")
    axes.annotate(f"{y[-1]:,.0f}", (x[-1], y[-1]), (0, 8 if index else -15), textcoords="offset points",
                  ha="right", color=colour, weight="bold", fontsize=9.5)  # fmt: skip


def _bars(axes: Axes, found: _Series, index: int, label: str, colour: str) -> None:
    width = 0.38
    places = [x + (index - 0.5) * width for x, _, _ in found]
    axes.bar(places, [y for _, y, _ in found], width * 0.94, color=colour, label=label)
    left, right = [p - width / 2 for p in places], [p + width / 2 for p in places]
    axes.hlines([b for _, _, b in found], left, right, color=colour, linewidth=1.6,
                linestyle=(0, (1, 1)), label=f"its upper limit, {label}")  # fmt: skip


def _scale(axes: Axes, points: Sequence[Point], over: str) -> None:
    """Ticks where values were asked for; batches and lengths, which double, on a logarithmic axis."""
    if over in ("batch", "seq"):
        axes.set_xscale("log", base=2)
    if over != "hbm-budget":
        turned = over == "machine" and len(points) > 5
        axes.set_xticks([p.value for p in points], [p.label for p in points],
                        rotation=35 if turned else 0, ha="right" if turned else "center")  # fmt: skip
        axes.minorticks_off()


# ------------------------------------------------------------------------------------------------------------
# The answer to "will it fit, and how fast" for programs: plain JSON values, bytes and seconds.


def as_json(answer: Answer, extras: Extras) -> dict[str, Any]:
    """The answer as plain values: bytes, seconds, and rates per second."""
    q = answer.question
    return {
        "model": answer.model.name,
        "parameters": answer.model.parameters,
        "active_parameters": answer.model.active_parameters,
        "trained_parameters": answer.model.trained_parameters,
        "tower_parameters": answer.model.tower_parameters,
        "machine": q.profile.name,
        "batch": q.batch, "seq": q.seq, "micro_batches": q.micro_batches, "dtype": q.dtype,
        "optimizer_state": str(q.optimizer_state),
        "gpus": q.gpus, "nodes": q.nodes, "replicated": q.replicated,
        "hbm_budget": q.hbm_budget, "host_budget": q.host_budget, "clipping": extras.clip,
        "fits": answer.fits(extras.clip) and answer.too_long() is None,
        "longest": reach(answer.model.module),
        "fits_device": answer.fits_device(),
        "fits_host": answer.fits_host(extras.clip),
        "least_hbm_budget": answer.least.device_bytes,
        "least_host_budget": {
            "clipped": answer.least_host(True), "streamed": answer.least_host(False),
        },
        "host_bytes": {k: asdict(h) | {"total": h.total} for k, h in answer.hosts().items()},
        "with_clipping": _prediction_json(answer.prediction(True), extras),
        "without_clipping": _prediction_json(answer.prediction(False), extras),
        "flops_missed_by_graph": answer.missed_flops,
        "ways_out": [asdict(w) for w in extras.ways],
        "commands": [asdict(c) for c in extras.commands],
        "splits": [asdict(s) for s in extras.splits],
        "meshes": [asdict(m) for m in extras.meshes],
        "largest": asdict(extras.largest) if extras.largest else None,
        "rollout": _rollout_json(extras.rollout, answer) if extras.rollout else None,
        "sources": q.profile.sources,
    }  # fmt: skip


def _rollout_json(rollout: Forecast, answer: Answer) -> dict[str, Any]:
    rates = {
        "prefill_tokens_per_second": rollout.prefill_rate,
        "decode_tokens_per_second": rollout.decode_rate,
    }
    return asdict(rollout) | rates | {"fits": _rolls_out(rollout, answer), "seconds": rollout.seconds}


def _prediction_json(p: Prediction | None, extras: Extras) -> dict[str, Any] | None:
    if p is None:
        return None
    step, work, stream_waits = p.planned.step, p.work, waits(p.planned)
    hours = extras.tokens / p.tokens_per_second / 3600 if extras.tokens else None
    return {
        "step_seconds": p.seconds,
        "tokens_per_second": p.tokens_per_second,
        "model_flops_per_second": p.model_flops_per_second,
        "mfu": p.mfu,
        "lower_bound": asdict(p.bound),
        "busy_seconds": p.planned.timeline.busy,
        "compute_seconds": compute_parts(step, p.question.terms.machine, p.model_flops),
        "kernels": {name: asdict(w) for name, w in p.worth.items()},
        "stream_waits": {s: causes for s, causes in stream_waits.items() if s != "compute"},
        "compute_waits": stream_waits["compute"],
        "peak_bytes": p.planned.peak_bytes,
        "pieces": {name: len(rows) - 1 for name, rows in p.compiled.tiled.cuts.items() if len(rows) > 2},
        "rows_from_the_host": sorted({n for r in p.compiled.part.rows.values() for n in r.pieces}),
        "state_on_device": [work.groups[g].name for g in step.resident],
        "alive_at_peak": highest_point(step, work)[1],
        "evaluations": p.planned.evaluations,
        "hours": hours,
        "cost": hours * extras.price if hours and extras.price else None,
    }
