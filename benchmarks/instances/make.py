"""Write the instance files from built-in models; needs transformers, a minute or two, no weights.

python -m benchmarks.instances.make
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict

from benchmarks.instances import FOLDER, Instance
from megacompile.cli.estimator import Study
from megacompile.cli.models import load_model
from megacompile.passes import lower_memory
from megacompile.planner.min_feasible_budget import infeasible
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.step import peak_bytes
from megacompile.schedule.workload import Workload

# model, batch, tokens, machine, link in GB/s where it is not the machine's own, micro-batches
_ROWS = (
    ("qwen2.5-0.5b", 4, 2048, "rtx-3090", 12.8, 1),  # PCIe 3
    ("qwen3-4b", 1, 4096, "rtx-4090", None, 1),
    ("llama-3.1-8b", 1, 4096, "rtx-4090", None, 1),
    ("llama-3.1-8b", 1, 4096, "rtx-4090", None, 4),
    ("qwen3-14b", 2, 4096, "rtx-5090", None, 1),
    ("gemma3-27b", 2, 4096, "a100-80gb-pcie", None, 1),
    ("mixtral-8x7b", 2, 4096, "h100-pcie", None, 1),
    ("qwen2.5-32b", 4, 4096, "gh200", None, 1),
    ("llama-3.1-70b", 4, 4096, "h100-pcie", None, 1),
    ("llama-3.1-70b", 4, 4096, "gh200", None, 1),
    ("llama-3.1-405b", 1, 4096, "h200", None, 1),
)
_LEVELS = {"least": 0.0, "tight": 0.15, "half": 0.5, "plenty": 1.0}


def main() -> None:
    """Capture each workload once and write all files."""
    warnings.simplefilter("ignore")
    (FOLDER / "workloads").mkdir(exist_ok=True)
    instances: list[Instance] = []
    works: dict[str, Workload] = {}
    for number, (model, batch, seq, machine, link, micro) in enumerate(_ROWS):
        name = f"{model}-{batch}x{seq}"
        if name not in works:
            works[name] = Study(load_model(model), "bf16", print).captured(batch, seq).assembly.work
            (FOLDER / "workloads" / f"{name}.json").write_text(works[name].to_json() + "\n")
        for place, (level, part) in enumerate(_LEVELS.items()):
            clip = bool((number + place) % 2)
            low, high = budget_range(works[name], Mode("train", micro, deferred=clip))
            budget = int(low + part * (high - low))
            instances.append(Instance(name, machine, link, level, budget, clip, micro))
    rows = ",\n".join(json.dumps(asdict(i)) for i in instances)
    (FOLDER / "instances.json").write_text(f"[\n{rows}\n]\n")


def budget_range(work: Workload, mode: Mode) -> tuple[int, int]:
    """Least bytes that any plan needs, and what the plan that keeps everything needs."""
    low = infeasible(work, mode, 1).least_bytes
    assert low is not None
    everything = Plan(
        (BlockPlan("all"),) * len(work.blocks), (GroupPlan("step", 2),) * len(work.groups), "depth", 1
    )
    return low, peak_bytes(lower_memory(work, everything, mode))


if __name__ == "__main__":
    main()
