"""``megacompile plan``: from parsed options to a printed answer, a sweep, or JSON."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megacompile.cli.as_json import as_json
from megacompile.cli.fits import command
from megacompile.cli.main import folder_of, write_json
from megacompile.cli.plot import draw_sweep
from megacompile.cli.report import Extras, render
from megacompile.cli.sweep_table import sweep_table
from megacompile.compiler import prove
from megacompile.errors import MegacompileError
from megacompile.estimate.answer import Answer, Prediction, Question
from megacompile.estimate.largest import estimate_largest, largest
from megacompile.estimate.models import Lora, load_model
from megacompile.estimate.study import Study
from megacompile.estimate.sweeps import Mesh, Point, Split, best_mesh, best_split, sweep
from megacompile.estimate.ways import ways_out
from megacompile.machine.catalog import PROFILES, THIS_CPU, MachineProfile, load_machine, override
from megacompile.schedule.dump import write_dump
from megacompile.schedule.schedule import Schedule
from megacompile.units import parse_bytes

_ANY = 1 << 60


class Progress:
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
    progress = Progress()
    if options.machine == THIS_CPU:
        progress("measuring this CPU")
    question = _question(options)
    folder = folder_of(options.dump) if options.dump else None
    progress(f"building {options.model}")
    study = Study(load_model(options.model, _lora(options)), options.dtype, progress)
    clip = not options.no_clip
    try:
        if options.sweep:
            return _run_sweep(options, study, question, clip, progress)
        answer, splits, meshes = _answer(options, study, question, clip)
        extras = replace(_extras(options, study, answer, clip), splits=splits, meshes=meshes)
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
    return 0 if answer.fits(clip) else 1


def _lora(options: argparse.Namespace) -> Lora | None:
    if options.lora_targets and options.lora is None:
        raise MegacompileError("--lora-targets needs --lora RANK.")
    return None if options.lora is None else Lora(options.lora, tuple(options.lora_targets or ()))


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
        for name in ("dump", "largest", "explain", "html"):
            if getattr(options, name):
                raise MegacompileError(
                    f"--sweep makes many plans, --{name} is about one: give one of the two."
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
    options: argparse.Namespace, study: Study, question: Question, clip: bool, progress: Progress
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
