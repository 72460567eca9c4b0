"""Published figures beside simulated ones: fixed schedules of other systems on the machines they report.

    python -m benchmarks.validation [--write docs/validation.md]

The schedules of :mod:`benchmarks.peers` run in the simulator on built-in machine profiles; the largest power
of two of sequences of 1,024 tokens that the schedule fits on the card is taken, up to 64, since the batch
of most published rows is not known. TFLOP/s are the model's (6·P·T and attention), over one step.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import megatrain_step, zero3_step
from megacompile.cli.estimator import Study
from megacompile.cli.models import load_model
from megacompile.cli.plan_answer import Question
from megacompile.hardware.catalog import load_machine
from megacompile.hardware.simulate import simulate
from megacompile.schedule.plan import Mode
from megacompile.schedule.step import Step, peak_bytes
from megacompile.schedule.workload import Workload

SEQ = 1024
BATCHES = (64, 32, 16, 8, 4, 2, 1)
MODE = Mode("train")


@dataclass(frozen=True)
class Row:
    """A published figure: TFLOP/s that authors report for a system on a machine; None: only simulated."""

    machine: str
    model: str
    megatrain: float | None
    zero3: float | None = None


ROWS = (
    Row("gh200", "qwen2.5-7b", 284), Row("gh200", "qwen2.5-14b", 264, 264 / 1.84),
    Row("gh200", "qwen2.5-32b", None),
    Row("a100-80gb-pcie", "qwen2.5-7b", None), Row("a100-80gb-pcie", "qwen2.5-14b", 122),
    Row("rtx-3090", "qwen2.5-7b", None), Row("rtx-3090", "qwen2.5-14b", 30),
    Row("h100-sxm", "qwen2.5-7b", 272), Row("h100-sxm", "qwen2.5-14b", None),
    Row("h100-sxm", "qwen2.5-32b", None),
)  # fmt: skip


class Validation:
    """Keeps one study per model and one workload per batch."""

    def __init__(self) -> None:
        self._studies: dict[str, Study] = {}

    def study(self, model: str) -> Study:
        if model not in self._studies:
            self._studies[model] = Study(load_model(model), "bf16", lambda message: None)
        return self._studies[model]

    def fixed(self, row: Row, build: Callable[[Workload, Mode], Step]) -> tuple[int, float] | None:
        """(batch, TFLOP/s) of a fixed schedule at the largest batch that fits; None where none does."""
        profile = load_machine(row.machine)
        for batch in BATCHES:
            work = self.study(row.model).captured(batch, SEQ).assembly.work
            step = build(work, MODE)
            if peak_bytes(step) <= 0.9 * (profile.device_bytes or 0):
                return batch, self._rate(row.model, batch, simulate(step, profile.machine).step_seconds)
        return None

    def ours(self, row: Row, batch: int) -> float | None:
        """TFLOP/s of what ``megacompile plan`` finds for the same batch, without clipping."""
        profile = load_machine(row.machine)
        question = Question(profile, batch, SEQ, int(0.9 * (profile.device_bytes or 0)))
        predictions = self.study(row.model).answer(question, both=False, clip=False).predictions
        return self._rate(row.model, batch, predictions[False].seconds) if predictions else None

    def _rate(self, model: str, batch: int, seconds: float) -> float:
        return self.study(model).model.step_flops(batch, SEQ) / seconds / 1e12


def table() -> str:
    """Markdown, one row per machine and model."""
    validation = Validation()
    lines = [
        "| machine | model | batch × 1,024 | MegaTrain published | simulated | ratio | ZeRO-3 published "
        "| simulated | ratio | ours simulated |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in ROWS:
        mega, zero = validation.fixed(row, megatrain_step), validation.fixed(row, zero3_step)
        ours = validation.ours(row, mega[0]) if mega is not None else None
        cells = [row.machine, row.model, str(mega[0]) if mega else "–"]
        for published, found in ((row.megatrain, mega), (row.zero3, zero)):
            rate = found[1] if found is not None else None
            cells += [
                f"{published:.0f}" if published else "–",
                f"{rate:.0f}" if rate else "does not fit",
                f"{rate / published:.2f}" if rate and published else "–",
            ]
        lines.append(f"| {' | '.join(cells)} | {f'{ours:.0f}' if ours else '–'} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Print the table; with ``--write`` put it between the marks of a document."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table in this document")
    options = parser.parse_args()
    text = table()
    if options.write:
        before, rest = options.write.read_text().split("<!-- table -->\n")
        after = rest.split("<!-- end -->")[1]
        options.write.write_text(f"{before}<!-- table -->\n{text}\n<!-- end -->{after}")


if __name__ == "__main__":
    main()
