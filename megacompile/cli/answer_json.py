"""The answer to "will it fit, and how fast" for programs: plain JSON values, bytes and seconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megacompile.api.rollout_forecast import Forecast
from megacompile.capture.padded_length import reach
from megacompile.cli.answer_text import Extras, rolls_out
from megacompile.cli.plan_answer import Answer, Prediction
from megacompile.cli.step_figures import compute_parts, waits
from megacompile.planner.min_feasible_budget import highest_point


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
    return asdict(rollout) | rates | {"fits": rolls_out(rollout, answer), "seconds": rollout.seconds}


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
