"""Dump: every stage of one program as numbered, deterministic, readable files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from megacompile.blocks.block_functions import BlockFunction
from megacompile.blocks.codegen import function_source
from megacompile.blocks.kernel_calls import Calls, KernelCall, total
from megacompile.errors import MegacompileError
from megacompile.json_codec import to_plain
from megacompile.own_files import make_own_folder, replace_text
from megacompile.passes import PASSES
from megacompile.report.chrome_trace import chrome_trace
from megacompile.schedule.emit import statement
from megacompile.schedule.plan_text import loops_text, plan_table
from megacompile.schedule.step import Step, memory_curve
from megacompile.units import format_bytes

if TYPE_CHECKING:
    from megacompile.api.decisions import Scheduled
    from megacompile.api.frontend import Compiled
    from megacompile.report.schedule import Schedule
    from megacompile.schedule.plan import Mode, Plan


def write_dump(folder: Path, scheduled: Scheduled, schedule: Schedule) -> None:
    """Write the files of one program into ``folder``, over those of an earlier dump there."""
    compiled, planned = scheduled.compiled, scheduled.planned
    calls = step_calls(compiled, planned.plan, scheduled.mode)
    kernels = [to_plain(call) | {"calls": count} for call, count in calls]
    files = {
        "00_capture.py.txt": function_source(compiled.captured.graph, "forward", "The captured loss."),
        "00_fuse.txt": _fusions(scheduled),
        "00_tile.txt": _tiles(scheduled),
        "01_partition.txt": _partition(scheduled),
        "02_policies.txt": _policies(scheduled),
        "03_blocks.py": "\n\n".join(_block_source(f) for t in compiled.templates for f in t.functions()),
        "04_plan.txt": plan_table(planned.plan, schedule.work) + "\n",
        "plan.json": planned.plan.to_json() + "\n",
        "kernel_calls.json": json.dumps(kernels, indent=1) + "\n",
        "08_verify.txt": f"{scheduled.proof}\n",
        "09_step.py": scheduled.source,
        "memory.txt": _memory(planned.step, schedule.budget_bytes),
        "schedule.json": schedule.to_json() + "\n",
        "timeline.json": json.dumps(chrome_trace(schedule), indent=0, allow_nan=False) + "\n",
    }
    files |= _passes(scheduled)
    try:
        make_own_folder(folder)
        for stale in folder.glob("05_*.txt"):  # of other passes
            stale.unlink()
        for name, text in files.items():
            readable = text.encode(errors="backslashreplace").decode()  # modules may have any names
            replace_text(folder / name, readable)
    except OSError as error:
        raise MegacompileError(f"The dump was not written to {folder}: {error}.") from error


def _fusions(scheduled: Scheduled) -> str:
    graph = scheduled.compiled.fused.graph
    return f"{scheduled.compiled.fusions}\n\n" + function_source(graph, "forward", "The loss after fusion.")


def _tiles(scheduled: Scheduled) -> str:
    tiled = scheduled.compiled.tiled
    lines = [
        f"{name}: {len(rows) - 1} pieces of up to {rows[1]} rows"
        for name, rows in tiled.cuts.items()
        if len(rows) > 2
    ]
    lines += [
        f"{name}: rows gathered on the host, by\n{rows.source}" for name, rows in tiled.captured.rows.items()
    ]
    lines += [f"{miss.where}: its logits stay whole: {miss.reason}" for miss in tiled.left]
    return "\n".join(lines or ["no weight is cut"]) + "\n"


def _partition(scheduled: Scheduled) -> str:
    part = scheduled.compiled.part
    lines = []
    for block in part.blocks:
        reads = [f"%{i.value}" for i in block.inputs if i.kind == "value"]
        writes = [f"%{v}" for v in block.outputs]
        lines.append(
            f"{block.name}  template {block.template}, {len(block.weights)} weights, "
            f"({', '.join(reads)}) -> ({', '.join(writes)})"
        )
    values = [
        f"%{v.id} {v.name}: {str(v.dtype).removeprefix('torch.')}{list(v.shape)} "
        f"{format_bytes(v.nbytes)}{' (gradient)' if v.requires_grad else ''}"
        for v in part.values
    ]
    return "\n".join(["blocks", *lines, "", "values between blocks", *values]) + "\n"


def _block_source(function: BlockFunction) -> str:
    return (
        f"# {function.name}, by Inductor: call(args)\n{function.source}"
        if function.fused
        else function.source
    )


def _policies(scheduled: Scheduled) -> str:
    lines = []
    for template in scheduled.compiled.templates:
        uses = sum(b.template == template.index for b in scheduled.compiled.part.blocks)
        lines.append(f"template {template.index}: {template.name} (×{uses})")
        if template.loops is not None:
            lines.append(f"  {loops_text(template.loops)}")
        elif template.not_looped is not None:
            lines.append(f"  sequences whole: {template.not_looped}")
        for policy in template.policies.values():
            lines.append(
                f"  policy {policy.name}: {len(policy.saved)} tensors, {format_bytes(policy.saved_bytes)}"
                + (", computed again before the backward" if policy.recompute else "")
            )
        for function in template.functions():
            lines.append(
                f"    {function.name}: workspace {format_bytes(function.peak_bytes)}, "
                f"{function.flops / 1e9:.3f} GFLOP, moves {format_bytes(function.moved_bytes)}"
                + (", by Inductor" if function.fused else "")
            )
    return "\n".join(lines) + "\n"


def step_calls(compiled: Compiled, plan: Plan, mode: Mode) -> Calls:
    """Our operators' calls in one step: what each block's checkpoint policy runs, for every micro-batch."""
    calls: list[tuple[KernelCall, int]] = []
    for block, decided in zip(compiled.part.blocks, plan.blocks, strict=True):
        template = compiled.templates[block.template]
        functions: list[BlockFunction | None] = [template.forward]
        if mode.kind != "evaluate":
            name = compiled.assembly.work.blocks[block.index].policy(decided.checkpoint).name
            policy = template.policies[name]  # type: ignore[index]
            functions = [policy.forward, policy.recompute, policy.backward]
        calls += [call for f in functions if f is not None for call in f.kernels]
    return total((call, count * mode.micro_batches) for call, count in calls)


def _passes(scheduled: Scheduled) -> dict[str, str]:
    work, plan, mode = scheduled.compiled.assembly.work, scheduled.planned.plan, scheduled.mode
    step = Step((), {}, mode.micro_batches, constant_bytes=work.constant_bytes)
    files = {}
    for number, item in enumerate(PASSES):
        step = item.run(step, work=work, plan=plan, mode=mode)
        head = f"# after {item.name}: {len(step.ops)} operations"
        body = [statement(op) for op in step.ops]
        files[f"05_{number:02}_{item.name}.txt"] = "\n".join([head, *body]) + "\n"
    return files


def _memory(step: Step, budget_bytes: int) -> str:
    lines = [
        f"budget {budget_bytes} bytes; slab {step.slab_bytes}, constants {step.constant_bytes}",
        "device bytes at the highest point of each operation:",
    ]
    lines += [f"{total:>15,}  {statement(step.ops[i])}" for i, total in memory_curve(step)]
    return "\n".join(lines) + "\n"
