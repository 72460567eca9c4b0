"""``megacompile plan``: from parsed options to a printed answer, a sweep, or JSON."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megacompile.api.pipeline import prove
from megacompile.api.rollout_forecast import Completions, Forecast, forecast
from megacompile.capture.fingerprint import parameter_forms
from megacompile.cli.estimator import DTYPES, Answer, Prediction, Question, Study, compute_parts, waits
from megacompile.cli.main import folder_of, write_json
from megacompile.cli.models import Lora, load_model
from megacompile.cli.plan_report import Extras, command, draw_sweep, render
from megacompile.cli.remedies import estimate_largest, largest, ways_out
from megacompile.cli.sweeps import Mesh, Point, Split, best_mesh, best_split, sweep
from megacompile.errors import MegacompileError
from megacompile.hardware.catalog import PROFILES, THIS_CPU, MachineProfile, load_machine, override
from megacompile.planner.min_feasible_budget import highest_point
from megacompile.report.dump import write_dump
from megacompile.report.schedule import Schedule
from megacompile.units import format_bytes, format_seconds, parse_bytes

# ------------------------------------------------------------------------------------------------------------
# A sweep in print: one answer a row.


def sweep_table(points: Sequence[Point], over: str, clip: bool) -> str:
    """A sweep as a table: per row, whether it fits and what it gives with and without clipping."""
    mode = "with clipping" if clip else "without clipping"
    names = f"{'device':>8} {'host':>8} {'step':>8} {'tokens/s':>9} {'TFLOP/s':>8} {'MFU':>6}"
    lines = [f"{over:>16}  fits  {names}  lower bound, {mode}"]
    for point in points:
        a, p = point.answer, point.answer.prediction(clip)
        start = f"{point.label:>16}  {'yes' if a.fits(clip) else 'no':<4}"
        if p is None:
            lines.append(f"{start}  needs {format_bytes(a.least.device_bytes)} of the device")
            continue
        lines.append(
            f"{start}  {format_bytes(p.planned.peak_bytes):>8} {format_bytes(p.host.total):>8} "
            f"{format_seconds(p.seconds):>8} {p.tokens_per_second:>9,.0f} "
            f"{p.model_flops_per_second / 1e12:>8.1f} {p.mfu:>6.1%}  "
            f"{format_seconds(p.bound.seconds)}: {p.bound.binding}"
            + (", with a copy of the state in each machine" if a.question.replicated else "")
        )
    return "\n".join(lines) + "\n"


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
        "fits": answer.fits(extras.clip),
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
        "rollout": _rollout_json(extras.rollout) if extras.rollout else None,
        "sources": q.profile.sources,
    }  # fmt: skip


def _rollout_json(rollout: Forecast) -> dict[str, Any]:
    rates = {
        "prefill_tokens_per_second": rollout.prefill_rate,
        "decode_tokens_per_second": rollout.decode_rate,
    }
    return asdict(rollout) | rates | {"fits": rollout.at_once > 0, "seconds": rollout.seconds}


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


# ------------------------------------------------------------------------------------------------------------
# ``megacompile plan``: from parsed options to a printed answer, a sweep, or JSON.


_ANY = 1 << 60


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
    """Answer; 0 where it fits, 1 where it does not."""
    _check(options)
    progress = PlanProgress()
    if options.machine == THIS_CPU:
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
            extras = replace(extras, rollout=_rollout(options, study, answer.question))
        shown = answer.prediction(clip)
        schedule = shown.schedule(answer.model) if shown else None
        if folder is not None and shown and schedule:
            _dump(shown, schedule, folder)
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
    return 0 if answer.fits(clip) and (extras.rollout is None or extras.rollout.at_once) else 1


def _rollout(options: argparse.Namespace, study: Study, question: Question) -> Forecast:
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


def _lora(options: argparse.Namespace) -> Lora | None:
    if options.lora_targets and options.lora is None:
        raise MegacompileError("--lora-targets needs --lora RANK.")
    if options.frozen and options.lora is None:
        raise MegacompileError("--frozen needs --lora RANK: what is trained is kept in FP32.")
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


def _check(options: argparse.Namespace) -> None:
    if options.price is not None and options.tokens is None and options.sweep is None:
        raise MegacompileError("--price needs --tokens: how many tokens are to be trained on?")
    if options.sweep is None and (options.values or options.plot):
        raise MegacompileError("--values and --plot belong to a --sweep.")
    if options.sweep:
        if options.micro_batches == "auto":
            raise MegacompileError("--micro-batches auto is about one plan: give a --sweep a number.")
        for name in ("dump", "largest", "explain", "html", "rollout"):
            if getattr(options, name):
                raise MegacompileError(
                    f"--sweep makes many plans, --{name} is about one: give one of the two."
                )
    if options.rollout and options.gpus * options.nodes > 1:
        raise MegacompileError("--rollout is of one card, as a rollout is: leave --gpus and --nodes out.")
    if options.optimizer != "adamw" and options.optimizer_state != "fp32":
        raise MegacompileError(
            f"--optimizer-state is a format of Adam's moments, which {options.optimizer} does not keep: "
            "leave it out, or plan with --optimizer adamw."
        )
    if options.explain and options.json:
        raise MegacompileError("--explain prints text, --json the whole answer: give one of the two.")


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
        profile, options.batch, options.seq, _device_budget(options, profile),
        1 if options.micro_batches == "auto" else options.micro_batches,
        options.dtype, _host_budget(options, profile), _nvme_budget(options), options.gpus, options.nodes,
        optimizer_state=options.optimizer_state,
    )  # fmt: skip


def _device_budget(options: argparse.Namespace, profile: MachineProfile) -> int:
    given = options.hbm_budget
    available = profile.device_bytes or profile.host_bytes
    if available is None and (given is None or _relative(given)):
        raise MegacompileError(f"--hbm-budget: {profile.name} does not say how much it has; give a size.")
    return parse_bytes(_size(given or "auto"), what="--hbm-budget", available=available or _ANY)


def _host_budget(options: argparse.Namespace, profile: MachineProfile) -> int | None:
    given = options.host_budget
    if given is None:
        return profile.host_bytes
    if profile.host_bytes is None and _relative(given):
        raise MegacompileError(f"--host-budget {given}: of what? Give a size, as 512GB.")
    # a user's own host may be larger than the profile's
    available = profile.host_bytes if _relative(given) else _ANY
    return parse_bytes(_size(given), what="--host-budget", available=available or _ANY)


def _nvme_budget(options: argparse.Namespace) -> int | None:
    given = options.nvme_budget
    if given is None:
        return None
    if _relative(given):
        raise MegacompileError(f"--nvme-budget {given}: of what? Give a size, as 4TB.")
    if options.host_budget is None:
        raise MegacompileError("--nvme-budget needs --host-budget: what does not fit there goes to NVMe.")
    return parse_bytes(_size(given), what="--nvme-budget", available=_ANY)


def _relative(text: str) -> bool:
    return text.endswith("%") or text == "auto"


def _size(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _values(text: str, over: str) -> Sequence[int | MachineProfile]:
    """The values of a sweep that the user gave."""
    values = [value.strip() for value in text.split(",")]
    if over == "hbm-budget":
        return [parse_bytes(_size(v), what="--values", available=_ANY) for v in values]
    for value in values:
        if over == "machine" and value not in PROFILES:
            raise MegacompileError(f"--values: {value!r} is no built-in machine.")
        if over != "machine" and not (value.isdigit() and int(value)):
            raise MegacompileError(f"--values: {value!r} is no {over}; give whole numbers, as 1,2,4.")
    return [PROFILES[value] if over == "machine" else int(value) for value in values]


def _extras(options: argparse.Namespace, study: Study, answer: Answer, clip: bool) -> Extras:
    ways, fits = ((), ()) if answer.fits(clip) else ways_out(study, answer, clip)
    commands = tuple(command(options, answer.question, fit) for fit in fits)
    most = largest(study, answer.question) if options.largest else estimate_largest(answer)
    price = answer.question.profile.price_per_hour
    return Extras(clip, options.tokens, price, ways, most, commands=commands)


def _run_sweep(
    options: argparse.Namespace, study: Study, question: Question, clip: bool, progress: PlanProgress
) -> int:
    values = _values(options.values, options.sweep) if options.values else ()
    points = list(sweep(study, question, options.sweep, values, clip))
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
    return 0 if any(p.answer.fits(clip) for p in points) else 1


def _draw(points: Sequence[Point], over: str, path: Path, name: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: pip install 'megacompile[plots]' draws one.", file=sys.stderr)
        return
    draw_sweep(points, over, path, name)
    print(f"The curve is in {path}.", file=sys.stderr)
