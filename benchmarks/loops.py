"""Run what reads tokens in ``docs/models.md`` over chunks of one sequence, and write ``docs/loops.md``.

    python -m benchmarks.loops                   # some seconds each; goes on where it stopped
    python -m benchmarks.loops --only llama
    python -m benchmarks.loops --again           # forget earlier results

Where they differ from whole functions, a block stays whole, in a program too; the page says by how much.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.children import BAD, Result, judged
from benchmarks.report import cell

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "build" / "loops"
PAGE = ROOT / "docs" / "loops.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="an architecture's name; may be given several times")
    parser.add_argument("--again", action="store_true", help="do not use earlier results")
    options = parser.parse_args(arguments)
    from tests.support.looped import names

    asked = options.only or names()
    if unknown := sorted(set(asked) - set(names())):
        parser.error(f"{unknown[0]} is no architecture that is known here and reads tokens")
    results = {name: _result(name, again=options.again) for name in asked}
    if not options.only:
        PAGE.write_text(page(results))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    bad = {n: r for n, r in results.items() if r["status"] in BAD}
    for name, result in (results if options.only else bad).items():
        print(name, json.dumps(result, indent=1))
    return 1 if bad else 0


def _result(name: str, *, again: bool) -> Result:
    RESULTS.mkdir(parents=True, exist_ok=True)
    place = RESULTS / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}.json"
    if again:
        place.unlink(missing_ok=True)
    return json.loads(place.read_text()) if place.exists() else judged(_judge, (name,), place)


def _judge(name: str) -> Result:
    from megacompile.errors import MegacompileError
    from tests.support.looped import NO_PRODUCT, UnknownModel, looped

    try:
        found = [t for t in looped(name) if t.whole != NO_PRODUCT]
    except UnknownModel as error:
        return {"status": "eager fails", "reason": str(error)}
    except MegacompileError as error:
        return {"status": "refused", "reason": str(error)}
    mixes = sorted({operator for t in found if not t.whole for operator in t.mixes})
    whole = {t.name: t.whole or t.wrong for t in found if t.whole or t.wrong}
    return {"status": "right", "mixes": mixes, "whole": whole, "looped": len(found) - len(whole)}


_INTRODUCTION = """# Loops of architectures

Made by `python -m benchmarks.loops`: every set-up of [the models' page](models.md) that reads tokens, at one
sequence of {lengths} tokens in FP32 on the CPU backend. Its blocks run over chunks of {chunks} tokens, over
one of all tokens, and as a whole on the same random numbers, forward and backward. Where all results are
within 1e-5 of scale, a block has loops. One that stays whole trains too, in more memory.
[How loops are made](architecture/blocks.md).
"""


def page(results: dict[str, Result]) -> str:
    """The whole page in Markdown: architectures by what mixes their positions."""
    from tests.support.looped import CHUNKS, LENGTHS

    lengths, chunks = (" and ".join(map(str, numbers)) for numbers in (LENGTHS, CHUNKS[:-1]))
    right = {n: r for n, r in results.items() if r["status"] == "right"}
    mixes = _grouped((", ".join(r["mixes"]) or "–", n) for n, r in right.items() if r["looped"])
    parts = [_INTRODUCTION.format(lengths=lengths, chunks=chunks)]
    parts += ["| mixes positions, in blocks with loops | set-ups | |", "|---|--:|---|"]
    parts += [f"| {what} | {len(which)} | {'; '.join(which)} |" for what, which in mixes]
    parts += ["", "## Blocks that stay whole", "", "| set-up | blocks | why |", "|---|---|---|"]
    for name, result in right.items():
        for why, blocks in _grouped((why, block) for block, why in result["whole"].items()):
            parts.append(f"| {name} | {', '.join(blocks)} | {cell(why, 160)} |")
    rest = _grouped((r["status"], n) for n, r in results.items() if r["status"] != "right")
    parts += ["", *(f"- {status}: {'; '.join(which)}" for status, which in rest)]
    return "\n".join(parts) + "\n"


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Names by what they have in common, the largest group first."""
    found: dict[str, list[str]] = defaultdict(list)
    for common, name in pairs:
        found[common].append(name)
    return sorted(found.items(), key=lambda group: -len(group[1]))


if __name__ == "__main__":
    sys.exit(main())
