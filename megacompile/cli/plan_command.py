"""``megacompile plan``: from parsed options to a printed answer, a sweep and its picture, or JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megacompile.api.pipeline import prove
from megacompile.api.rollout_forecast import Completions, Forecast, forecast
from megacompile.capture.parameter_forms import parameter_forms
from megacompile.cli.alternatives import ways_out
from megacompile.cli.check_plan_arguments import device_budget, host_budget, nvme_budget, sweep_values
from megacompile.cli.estimator import DTYPES, Study
from megacompile.cli.fitting_command import command
from megacompile.cli.largest_batch import estimate_largest, largest
from megacompile.cli.models import Lora, load_model
from megacompile.cli.output import folder_of, write_json
from megacompile.cli.plan_answer import Answer, Prediction, Question
from megacompile.cli.plan_report import Extras, plan_report, plan_text
from megacompile.cli.report_json import as_json
from megacompile.cli.report_rows import Report
from megacompile.cli.rollout_report import rolls_out
from megacompile.cli.splits_and_meshes import Mesh, Split, best_mesh, best_split
from megacompile.cli.sweep import sweep
from megacompile.cli.sweep_plot import draw_sweep
from megacompile.cli.sweep_table import sweep_table
from megacompile.errors import CaptureError, MegacompileError
from megacompile.hardware.catalog import THIS_CPU, load_machine, machine_key, override
from megacompile.report.dump import write_dump
from megacompile.report.plots import NO_PICTURE, can_draw
from megacompile.report.schedule import Schedule


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
        write_json(as_json(plan_report(answer, extras)))
    elif options.explain and schedule is not None:
        print(schedule.explain(options.explain))
    else:
        print(plan_text(answer, extras), end="")
    if options.html and schedule is not None:
        _write_page(schedule, options.html)
    fits = answer.fits(clip) and answer.too_long() is None
    return 0 if fits and (extras.rollout is None or rolls_out(extras.rollout, answer)) else 1


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
    price, labels = question.profile.price_per_hour, [point.label for point in points]
    reports = {
        mode: [plan_report(point.answer, Extras(mode, options.tokens, price)) for point in points]
        for mode in (True, False)
    }
    if options.json:
        write_json([
            {"value": label, **as_json(report)} for label, report in zip(labels, reports[clip], strict=True)
        ])  # fmt: skip
    else:
        print(sweep_table(labels, reports[clip], options.sweep, clip))
        if not clip or question.micro_batches == 1:
            print(sweep_table(labels, reports[not clip], options.sweep, not clip))
    if options.plot:
        drawn = [
            (point.label, point.value, report) for point, report in zip(points, reports[clip], strict=True)
        ]
        _draw(drawn, options.sweep, Path(options.plot), question.profile.title)
    return 0 if any(p.answer.fits(clip) and p.answer.too_long() is None for p in points) else 1


def _draw(points: Sequence[tuple[str, float, Report]], over: str, path: Path, machine: str) -> None:
    if not can_draw():
        print(NO_PICTURE, file=sys.stderr)
        return
    draw_sweep(points, over, path, machine)
    print(f"The curve is in {path}.", file=sys.stderr)
