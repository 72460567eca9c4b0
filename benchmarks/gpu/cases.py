"""The cases of each part, the most telling first, and a small version of all of them for any CPU."""

from __future__ import annotations

from benchmarks.gpu.record import Case, Result
from megacompile.bench.cases import OPERATIONS

PARTS = ("correctness", "machine", "kernels", "steps", "peers", "endurance")
PART_SECONDS = 480  # in which a part's first cases are over; what is left is for the next call
SEQUENCE = 4096
BUDGETS = (80, 24, 8, 16, 48, 120)
TOKENS = (16384, 65536, 4096, 262144)


def cases(*, dry: bool, rates: Result | None = None) -> list[Case]:
    """All cases, part by part, in the order in which they run; ``rates`` are what the machine sustains."""
    steps = _steps(dry, rates or {})
    return [*_correctness(dry), *_machine(dry), *_kernels(dry), *steps, *_peers(dry), *_endurance(dry)]


def _correctness(dry: bool) -> list[Case]:
    found = []
    for model in ("llama",) if dry else ("llama", "gemma3", "mixtral"):
        for dtype, kernels in (("bfloat16", False),) if dry else (("float32", False), ("bfloat16", True)):
            settings = {"model": model, "dtype": dtype, "kernels": kernels, "steps": 2 if dry else 20,
                        "budget": "5MB" if dry else "4GB"}  # fmt: skip
            found.append(Case("correctness", f"{model} {dtype}", "ours.against_eager", settings, seconds=180))
    settings = {"seeds": 2 if dry else 4, "steps": 2 if dry else 10, "budget": "5MB" if dry else "2GB"}
    found.append(Case("correctness", "races", "ours.races", settings, seconds=180))
    found.append(Case("correctness", "attention", "attention.paths", {"tokens": 50 if dry else 1000}))
    found.append(Case("correctness", "compute-sanitizer", "ours.sanitize", {}, seconds=300))
    return found


def _machine(dry: bool) -> list[Case]:
    settings = {"megabytes": 4 if dry else 1024, "size": 128 if dry else 8192, "repeats": 2 if dry else 10}
    return [Case("machine", "rates", "machine.rates", settings)]


def _kernels(dry: bool) -> list[Case]:
    names = ("glu",) if dry else tuple(OPERATIONS)
    return [Case("kernels", name, "machine.kernels", {"operation": name, "dry": dry}) for name in names]


def _steps(dry: bool, rates: Result) -> list[Case]:
    if dry:
        shapes = [("tiny", "5MB", 128, 64, clip, "fp32") for clip in (False, True)]
    else:
        small = [("qwen2.5-3b", b, t) for b in BUDGETS for t in TOKENS]
        large = [("qwen2.5-7b", b, t) for b in BUDGETS for t in TOKENS]
        huge = [("qwen2.5-14b", b, t) for b in BUDGETS[:2] for t in TOKENS[:2]]
        shapes = [
            (model, f"{budget}GB", tokens, SEQUENCE, clip, "int8" if model == "qwen2.5-14b" else "fp32")
            for model, budget, tokens in [*large, *small, *huge]
            for clip in ((False, True) if budget == 80 else (False,))
        ]
    return [
        Case("steps", f"{model} {budget} {tokens} tokens{' clipped' if clip else ''}", "ours.step",
             {"model": model, "budget": budget, "tokens": tokens, "sequence": sequence, "clip": clip,
              "repeats": 2 if dry else 4, "state": state, "kernels": not dry, "rates": rates}, seconds=300)
        for model, budget, tokens, sequence, clip, state in shapes
    ]  # fmt: skip


def _peers(dry: bool) -> list[Case]:
    names = ("plain", "fsdp2", "deepspeed", "superoffload", "megatrain")
    works = [("tiny", 128, 1.0)] if dry else [("qwen2.5-3b", t, b) for b in (80.0, 24.0) for t in TOKENS]
    return [
        Case("peers", f"{name} {model} {tokens} tokens {budget:g} GB", "peers.peer",
             {"name": name, "model": model, "tokens": tokens, "sequence": 64 if dry else SEQUENCE,
              "repeats": 2 if dry else 3, "budget_gb": budget}, seconds=300)
        for model, tokens, budget in works
        for name in names
    ]  # fmt: skip


def _endurance(dry: bool) -> list[Case]:
    settings = {"steps": 8 if dry else 300, "tokens": 128 if dry else 4096, "budget": "5MB" if dry else "2GB"}
    return [Case("endurance", "small llama", "ours.endurance", settings, seconds=240)]
