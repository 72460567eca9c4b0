"""A predicted rollout, as rows of the report of a plan."""

from __future__ import annotations

from dataclasses import asdict

from megacompile.api.rollout_forecast import Forecast
from megacompile.capture.padded_length import reach
from megacompile.cli.plan_answer import Answer
from megacompile.cli.report_rows import Row, Section, told
from megacompile.units import format_bytes, format_seconds


def rollout_section(rollout: Forecast, answer: Answer) -> Section:
    """Return whether a rollout fits, where its weights are, and how many tokens a second it gives."""
    c, fits, limit = rollout.completions, rollout.at_once > 0, reach(answer.model.module)
    at_once = f"{rollout.at_once} of them at a time" if 0 < rollout.at_once < c.rows else "all at once"
    budget = format_bytes(answer.question.hbm_budget)
    values = asdict(rollout) | {
        "prefill_tokens_per_second": rollout.prefill_rate,
        "decode_tokens_per_second": rollout.decode_rate,
        "fits": rolls_out(rollout, answer),
        "seconds": rollout.seconds,
    }
    room, uses, short = at_once, "uses", ""
    if not fits:
        room, uses, short = "no room for one", "needs at least", "  << too small"
    rows = [
        Row("weights", text=rollout.weights_at),
        Row("cache", (rollout.cache_bytes,), "bytes", text=f"{{}} a row, {room}"),
        Row("device", (rollout.need_bytes,), "bytes", text=f"{uses} {{}} of {budget}{short}"),
        *too_long(c.prompt + c.new, limit),
    ]
    if fits:
        load, prompts, completions, whole = map(
            format_seconds, (rollout.load, rollout.prefill, rollout.decode, rollout.seconds)
        )
        rows += [
            Row("prompts", text=f"{rollout.prefill_rate:,.0f} tokens/s, {prompts}"),
            Row("completions", text=f"{rollout.decode_rate:,.0f} tokens/s, {completions}"),
            Row("in all", text=f"{whole}, of which {load} bring weights that stay"),
        ]
    rows += [told(f"rollout.{name}", value) for name, value in values.items()]
    title = (
        f"Rollout of {c.rows} rows, {c.prompt:,} tokens each and {c.new:,} new ones, in the device's budget"
    )
    return Section(title, tuple(rows), width=12)


def rolls_out(rollout: Forecast, answer: Answer) -> bool:
    """Return whether a rollout fits, and is no longer than the model knows."""
    tokens = rollout.completions.prompt + rollout.completions.new
    return rollout.at_once > 0 and not too_long(tokens, reach(answer.model.module))


def too_long(seq: int, limit: int | None) -> list[Row]:
    """Say what positions the model is for, where sequences have more."""
    if limit is None or seq <= limit:
        return []
    text = f"{seq:,} tokens, and the model's config is for {limit:,}  << too long: take fewer,"
    return [Row("length", text=text, notes=("or a config whose rotary embeddings are scaled so far",))]
