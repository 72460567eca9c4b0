"""Seed faults, one at a time, and see each caught by a test of ``make test``.

    python -m tests.support.seeded_faults [--room passes] [--only 7]

In: a table of slips, each a place in the code and another text for it, with the tests that shall catch it.
Out: a line for each, and exit code 1 where one was not caught. A copy of the tree is changed, never this one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_context = multiprocessing.get_context("forkserver")
FAILED = 1  # pytest's exit code for tests that ran and failed, and for nothing else


@dataclass(frozen=True)
class Fault:
    """A slip in a ``file``: ``new`` in the place of ``old``, which stands there once."""

    room: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS: tuple[Fault, ...] = (
    Fault(
        "passes",
        "passes/synchronize.py",
        "            _keep_last(latest, self.compute)  # what it takes",
        "            pass  # what it takes",
        ("tests/unit/schedule/test_orders.py::test_what_lowering_makes_is_proven",),
    ),
    Fault(
        "passes",
        "passes/synchronize.py",
        "if clock[other.stream] < other.tick:\n                    waits",
        "if clock[other.stream] < other.tick - 1:\n                    waits",
        ("tests/unit/passes/test_passes.py",),
    ),
    Fault(
        "passes",
        "passes/assign_slots.py",
        "stays[after][0] < end)",
        "stays[after][0] < start)",
        ("tests/unit/schedule/test_orders.py::test_what_lowering_makes_is_proven",),
    ),
    Fault(
        "passes",
        "passes/insert_frees.py",
        "                last[token] = index\n",
        "                last.setdefault(token, index)\n",
        ("tests/unit/passes/test_passes.py",),
    ),
    Fault(
        "passes",
        "passes/insert_collectives.py",
        "op.with_(reads=(*op.reads, Agreed())) if changes else op",
        "op",
        ("tests/unit/schedule/test_collectives.py",),
    ),
    Fault(
        "passes",
        "passes/insert_collectives.py",
        "constant = step.constant_bytes + sum(shards) + 2 * exchange",
        "constant = step.constant_bytes + sum(shards) + exchange",
        ("tests/unit/schedule/test_collectives.py",),
    ),
    Fault(
        "passes",
        "passes/insert_offload.py",
        "        if step.ops[i].block != step.ops[index].block:\n            return False",
        "        if step.ops[i].block != step.ops[index].block:\n            break",
        ("tests/unit/passes/test_passes.py",),
    ),
    Fault(
        "passes",
        "passes/insert_offloaded_io.py",
        "begin = max(begin, fills[number - plan.window])",
        "begin = max(begin, fills[number - plan.window] - 1)",
        ("tests/unit/passes/test_passes.py",),
    ),
    Fault(
        "schedule",
        "megacompile/schedule/emit_loops.py",
        "times = 2 + even // period",
        "times = 3 + even // period",
        ("tests/unit/schedule/test_emit.py",),
    ),
    Fault(
        "schedule",
        "megacompile/schedule/emit_loops.py",
        "constant = value - slope * origin",
        "constant = value + slope * origin",
        ("tests/unit/schedule/test_emit.py",),
    ),
    Fault(
        "schedule",
        "megacompile/schedule/verify_collectives.py",
        "            here[op.group] = False\n",
        "            here[op.group] = True\n",
        ("tests/unit/schedule/test_collectives.py",),
    ),
    Fault(
        "hardware",
        "megacompile/hardware/simulate.py",
        "return asking + work if machine.shared_cores else max(asking, work)",
        "return asking + work",
        ("tests/unit/hardware/test_simulate.py",),
    ),
    Fault(
        "runtime",
        "megacompile/runtime/step_output.py",
        "weighted = [w * x for w, x in zip(self._weights, losses, strict=True)]",
        "weighted = list(losses)",
        ("tests/e2e/test_against_eager.py",),
    ),
    Fault(
        "state",
        "megacompile/state/host_arena.py",
        "self._set_free(start + need, start + size)",
        "self._set_free(start + nbytes, start + size)",
        ("tests/unit/runtime/test_host_buffers.py",),
    ),
    Fault(
        "state",
        "megacompile/state/host_arena.py",
        "if gap[1] == start or gap[0] == stop]",
        "if gap[1] == start]",
        ("tests/unit/runtime/test_host_buffers.py",),
    ),
    Fault(
        "state",
        "megacompile/state/host_arena.py",
        "self.used_bytes = start + padded(stop - start)",
        "self.used_bytes = stop",
        ("tests/unit/state/test_arena.py",),
    ),
    Fault(
        "state",
        "megacompile/state/adam.h",
        ".correction2_sqrt = (float)sqrt(1 - pow(h->beta2, h->step)),",
        ".correction2_sqrt = (float)(1 - pow(h->beta2, h->step)),",
        ("tests/unit/state/test_adam.py",),
    ),
    Fault(
        "state",
        "megacompile/state/adam.h",
        "return (uint16_t)((bits + 0x8000u) >> 16);",
        "return (uint16_t)(bits >> 16);",
        ("tests/unit/state/test_adam.py",),
    ),
    Fault(
        "state",
        "megacompile/state/adam.h",
        "(float)(adamw ? 1 - h->lr * h->weight_decay : 1)",
        "(float)(adamw ? 1 - h->weight_decay : 1)",
        ("tests/unit/state/test_adam.py",),
    ),
    Fault(
        "distributed",
        "megacompile/distributed/calls.py",
        "        self._noted.clear()\n",
        "",
        (
            "tests/e2e/test_ranks_faults.py::test_unlike_calls_and_ranks_that_leave_are_named_with_the_script_s_line",
        ),
    ),
    Fault(
        "distributed",
        "megacompile/distributed/calls.py",
        "        if self._current is not None:\n            yield\n            return\n",
        "",
        (
            "tests/e2e/test_ranks_faults.py::test_unlike_calls_and_ranks_that_leave_are_named_with_the_script_s_line",
        ),
    ),
    Fault(
        "distributed",
        "megacompile/distributed/ranks.py",
        "return self.size // self.shards",
        "return max(1, self.size // self.shards - 1)",
        ("tests/e2e/test_mesh.py",),
    ),
    Fault(
        "capture",
        "megacompile/capture/padding.py",
        "return padded if longest is None else min(padded, longest)",
        "return padded",
        ("tests/unit/capture/test_padding.py",),
    ),
    Fault(
        "capture",
        "megacompile/capture/batch.py",
        "return output[:, : -self.added].contiguous() if cut else output",
        "return output[:, self.added :].contiguous() if cut else output",
        ("tests/e2e/test_predict.py",),
    ),
    Fault(
        "blocks",
        "megacompile/blocks/costs.py",
        "return int(2 * products * rows * inner * args[1].shape[-1])",
        "return int(products * rows * inner * args[1].shape[-1])",
        ("tests/unit/blocks/test_costs.py",),
    ),
    Fault(
        "blocks",
        "megacompile/blocks/costs.py",
        "return flops(node, share), whole + round(share * sum(",
        "return flops(node, share), whole + round(sum(",
        ("tests/unit/blocks/test_costs.py",),
    ),
    Fault(
        "planner",
        "megacompile/planner/simplex.py",
        "            return float(-reduced[-1])",
        "            return float(reduced[-1])",
        ("tests/unit/planner/test_simplex.py",),
    ),
    Fault(
        "planner",
        "megacompile/planner/simplex.py",
        "        ties = able[ratios <= ratios.min() + 1e-12]",
        "        ties = able[ratios >= ratios.max() - 1e-12]",
        ("tests/unit/planner/test_simplex.py",),
    ),
    Fault(
        "planner",
        "megacompile/planner/simplex.py",
        "    basis[row] = column\n",
        "",
        ("tests/unit/planner/test_simplex.py",),
    ),
    Fault(
        "planner",
        "megacompile/planner/tiling.py",
        "            if activations_bytes(tiling.assembly.work, mode) > most:\n                return",
        "            if activations_bytes(tiling.assembly.work, mode) > most:\n                continue",
        ("tests/unit/planner/test_tiling.py",),
    ),
    Fault(
        "kernels",
        "kernels/rms_norm.py",
        "rstd = 1.0 / tl.sqrt(tl.sum(wide_x * wide_x, axis=1) / columns + eps)",
        "rstd = 1.0 / (tl.sqrt(tl.sum(wide_x * wide_x, axis=1) / columns) + eps)",
        ("tests/unit/kernels/interpreted/test_rms_norm.py",),
    ),
    Fault(
        "kernels",
        "kernels/rms_norm.py",
        "        mean = tl.sum(grad * normal, axis=1) / columns\n        if WIDE:",
        "        mean = tl.sum(grad, axis=1) / columns\n        if WIDE:",
        ("tests/unit/kernels/interpreted/test_rms_norm.py",),
    ),
    Fault(
        "report",
        "megacompile/report/schedule.py",
        "        if not same:\n",
        "        if same is None:\n",
        ("tests/unit/report/test_inspect.py",),
    ),
    Fault(
        "report",
        "megacompile/report/schedule.py",
        "        _check_names(found)\n",
        "",
        ("tests/unit/report/test_inspect.py",),
    ),
    Fault(
        "cli",
        "megacompile/units.py",
        "nbytes = available * number / 100 if",
        "nbytes = available * number if",
        ("tests/e2e/test_bad_input.py",),
    ),
    Fault(
        "integrations",
        "megacompile/integrations/image_buckets.py",
        'empty = IGNORED if name.endswith("labels")',
        'empty = 0 if name.endswith("labels")',
        ("tests/unit/integrations/test_image_buckets.py",),
    ),
    Fault(
        "integrations",
        "megacompile/integrations/image_buckets.py",
        "row[: int(kept.sum())] = old[kept]",
        "row[: len(old)] = old",
        ("tests/unit/integrations/test_image_buckets.py",),
    ),
    Fault(
        "api",
        "megacompile/api/program.py",
        "            session.runtime.state.reset_moments()\n",
        "            pass\n",
        ("tests/e2e/test_faults.py",),
    ),
)


def main() -> int:
    """Seed the faults that were asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--room", choices=sorted({fault.room for fault in FAULTS}), help="those of one room")
    parser.add_argument("--only", type=int, help="the one of this number")
    options = parser.parse_args()
    chosen = [
        (number, fault)
        for number, fault in enumerate(FAULTS)
        if options.room in (None, fault.room) and options.only in (None, number)
    ]
    # Not on import: a process has one fork server, which in ``make test`` has what scripts.py names.
    _context.set_forkserver_preload(["pytest", "hypothesis", "torch", "torch.distributed", "transformers"])
    missed = []
    with copied_tree() as tree:
        for room in dict.fromkeys(
            fault.room for _, fault in chosen
        ):  # not all in one process: there they fail
            own = [(number, fault) for number, fault in chosen if fault.room == room]
            tests = sorted({test for _, fault in own for test in fault.tests})
            if run_tests(tree, tests) != 0:
                print("The tests fail without a fault: " + " ".join(tests))
                return 1
            missed += [number for number, fault in own if not _is_caught(tree, number, fault)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught" + (f", not {missed}" if missed else ""))
    return bool(missed)


def _is_caught(tree: Path, number: int, fault: Fault) -> bool:
    start = time.monotonic()
    with seeded(tree, fault):
        caught = run_tests(tree, fault.tests) == FAILED
    what = "caught" if caught else "NOT caught"
    print(
        f"{number:3} {what:10} {time.monotonic() - start:4.0f} s  {fault.file}: {fault.new.strip()}",
        flush=True,
    )
    return caught


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the files that git knows, whose packages Python finds before those that are installed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        packages = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
        for package, place in packages.items():
            if "." in package:  # a package that lies elsewhere
                (tree / package.replace(".", "/")).symlink_to(tree / place)
        yield tree


@contextmanager
def seeded(tree: Path, fault: Fault) -> Iterator[None]:
    """Within, the tree has the fault."""
    file = tree / fault.file
    sound = file.read_text()
    assert sound.count(fault.old) == 1, f"{fault.file} has {sound.count(fault.old)} times: {fault.old}"
    file.write_text(sound.replace(fault.old, fault.new))
    try:
        yield
    finally:
        file.write_text(sound)


def run_tests(tree: Path, tests: Sequence[str]) -> int:
    """Run tests of ``make test`` in a tree; returns pytest's exit code, of kernels' where others pass."""
    interpreted = [test for test in tests if "/interpreted/" in test]
    others = [test for test in tests if test not in interpreted]
    return (others and _pytest(tree, others, {})) or (
        _pytest(tree, interpreted, {"TRITON_INTERPRET": "1"}) if interpreted else 0
    )


def _pytest(tree: Path, tests: Sequence[str], environment: dict[str, str]) -> int:
    process = _context.Process(target=_test, args=(str(tree), tests, environment))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _test(tree: str, tests: Sequence[str], environment: dict[str, str]) -> None:
    """In a fork of a process that has imported all libraries, and nothing of a tree."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.environ |= {"PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1"} | environment
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os.chdir(tree)
    sys.path.insert(0, tree)
    import pytest

    given = [
        "-x",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=unshrunk",
        "-m",
        "not slow and not nightly",
    ]
    sys.exit(int(pytest.main([*given, *tests])))


if __name__ == "__main__":
    sys.exit(main())
