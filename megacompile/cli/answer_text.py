"""The printed answer to "will it fit, and how fast": text for people.

In: an :class:`~megacompile.cli.plan_answer.Answer`. Out: text of about 100 columns. Every figure stands with
and without clipping; the details follow the mode that was asked for. The first lines say what is planned,
where its state is, and what splits and meshes were tried else.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megacompile.api.rollout_forecast import Forecast
from megacompile.capture.padded_length import reach
from megacompile.cli.alternatives import WayOut
from megacompile.cli.fitting_command import Command
from megacompile.cli.largest_batch import Largest
from megacompile.cli.plan_answer import Answer, Prediction, Question
from megacompile.cli.splits_and_meshes import Mesh, Split
from megacompile.cli.step_figures import CAUSES, IDLE, compute_parts, waits
from megacompile.planner.min_feasible_budget import describe_peak, highest_point
from megacompile.planner.nvme_placement import describe_traffic
from megacompile.schedule.op_table import STREAMS
from megacompile.schedule.plan_text import plan_table
from megacompile.state.moment_formats import CODINGS, state_bytes
from megacompile.state.torch_optimizer import TorchOptimizer
from megacompile.units import format_bytes, format_count, format_hours, format_seconds


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
        parts += [_speed_table(answer, extras), _bound(shown), _streams(shown), _device(answer, shown)]
    if extras.rollout is not None:
        parts.append(_rollout(extras.rollout, answer.question, reach(answer.model.module)))
    parts.append(_host(answer))
    if shown is not None:
        parts.append("Plan\n" + textwrap.indent(plan_table(shown.planned.plan, shown.work), "  "))
    parts.append(_machine_figures(answer, extras))
    text = "\n\n".join(parts) + "\n"
    if not isinstance(answer.question.optimizer_state, TorchOptimizer):
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


def _speed_table(answer: Answer, extras: Extras) -> str:
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
            f"\n  updates of matrices, made orthogonal on the device {format_seconds(b.updates)}; "
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


def rolls_out(rollout: Forecast, answer: Answer) -> bool:
    """Return whether a rollout fits, and is no longer than the model knows."""
    tokens = rollout.completions.prompt + rollout.completions.new
    return rollout.at_once > 0 and not _too_long(tokens, reach(answer.model.module))


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


def _machine_figures(answer: Answer, extras: Extras) -> str:
    other = "fp32 rate" if answer.question.dtype == "bf16" else "bf16 rate"
    sources = answer.question.profile.sources
    q = answer.question
    drive = q.nvme_budget is not None or any(w.change.startswith("--nvme-budget") for w in extras.ways)
    hidden = {other} | (set() if drive else {"drive"})
    hidden |= ({"fabric"} if q.ranks == 1 else set()) | ({"network"} if q.nodes == 1 else set())
    lines = ["The machine's figures"]
    lines += [f"  {name:<17} {text}" for name, text in sources.items() if name not in hidden]
    return "\n".join(lines)
