"""The stages of a campaign, the most telling first, with the seconds that each may and should take.

Expectations are what an H100 with 16 cores took; of stages that never ran whole, arithmetic.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.campaign import Stage

GIB = 1 << 30
# what `some` saves of a layer of Llama-3.1-8B at 32k tokens takes 2.8 GB
_RATES = {"nbytes": GIB, "copied": 2_800_000_000, "updated": 64 << 20}
# batch, heads, key heads, tokens, width
_ATTENTIONS = [[2, 32, 8, 4096, 128], [1, 32, 8, 32768, 128]]
_HEADS = [[4096, 4096, 128256], [32768, 4096, 128256]]  # tokens, width, classes
_TRAIN = {
    "model": "qwen2.5-0.5b", "budget": "8GB", "length": 4096, "rows": 4, "updates": 10, "kill": 6, "wait": 70
}  # fmt: skip
_HOPPER = [*_ATTENTIONS, [2, 32, 8, 4096, 64]]


def stages(*, small: bool = False) -> list[Stage]:
    """All of them; ``small`` ones say nothing of speed, and run on any device."""
    return _small() if small else _whole()


def _whole() -> list[Stage]:
    return [
        Stage("where", "machine.where", {}, 30, 3, here=True),
        Stage("memory", "machine.touch_memory", {"piece": 4 * GIB, "pieces": 27}, 60, 16, "", "rates", True),
        Stage("primitives", "machine.primitives", {"nbytes": GIB}, 60, 16, here=True),
        Stage("kernels", "correct.kernels", {}, 75, 15, "primitives", checks=True),
        Stage("rates", "machine.rates", _RATES, 60, 18, "primitives", here=True),
        Stage("DeepSpeed's Adam", "peers.compile_adam", {}, 150, 60, "", "8B in 80 GB", True),
        _small_models("2GB", 8, 75, 34),
        # what was slow on an H100 and is changed since
        Stage(
            "Hopper attention", "hopper.check", {"shapes": _HOPPER, "repeats": 1000}, 120, 40, "primitives"
        ),
        Stage("head", "head.times", {"shapes": _HEADS}, 60, 15, "primitives"),
        _step("8B in 80 GB", "llama-3.1-8b", 80, 32768, 110, 50),
        _step("8B in 24 GB", "llama-3.1-8b", 24, 32768, 120, 67),
        # the same work by others, and what else is asked for
        _peer("MegaTrain 8B", "megatrain", "llama-3.1-8b", 80, 32768, 180, 100, steps=3, rows=8),
        _step("8B on the whole card", "llama-3.1-8b", 0, 32768, 110, 50),
        Stage("features", "features.features", {}, 100, 56, "small models", checks=True),
        Stage("attention", "correct.attention", {"tokens": 1000}, 60, 12, "primitives", checks=True),
        _races(4, 10, 60, 19),
        _step("3B in 24 GB", "qwen2.5-3b", 24, 16384, 110, 45, completions=[64, 512, 128]),
        _peer("FSDP2 3B", "fsdp2", "qwen2.5-3b", 24, 16384, 150, 70, steps=4, rows=4, profiled=True),
        _peer("DeepSpeed 3B", "deepspeed", "qwen2.5-3b", 24, 16384, 180, 90, steps=4, rows=4),
        Stage("megacompile train", "command.fine_tune", _TRAIN, 150, 80, "small models"),
        _step(
            "1.5B in 24 GB, a sequence of 128k",
            "qwen2.5-1.5b",
            24,
            1 << 17,
            130,
            75,
            sequence=1 << 17,
            steps=2,
        ),
        _step("0.5B, state on the drive", "qwen2.5-0.5b", 8, 16384, 100, 40, host="3GB"),
        _step("8B in 24 GB, clipped", "llama-3.1-8b", 24, 32768, 120, 70, clip=True),
        _step("3B in 24 GB, Muon", "qwen2.5-3b", 24, 16384, 100, 42, muon=True),
        Stage("attention ways", "attention_ways.times", {"shapes": _ATTENTIONS}, 60, 18, "primitives"),
        Stage("kernel times", "kernel_table.table", {}, 180, 149, "primitives"),
        Stage("compute-sanitizer", "kernel_table.sanitize", {"seconds": 110.0}, 120, 60, "small models"),
        Stage("ncu", "kernel_table.slowest", {}, 120, 40, "kernel times"),
        # what an H100 measured before, as far as there is time
        _step("8B in 80 GB, a sequence of 32k", "llama-3.1-8b", 80, 32768, 130, 60, sequence=32768),
        _step("8B in 80 GB, 64k tokens", "llama-3.1-8b", 80, 65536, 130, 88),
        _step("3B in 8 GB", "qwen2.5-3b", 8, 16384, 90, 40),
        _step("3B in 80 GB", "qwen2.5-3b", 80, 16384, 70, 41),
        _peer("plain 3B", "plain", "qwen2.5-3b", 80, 16384, 75, 23),
    ]


def _small() -> list[Stage]:
    tiny = {"tokens": 128, "sequence": 64, "steps": 3, "limit": 120, "expected": 20}
    memory = {"piece": 4 << 20, "pieces": 3}
    train = {"model": "tiny", "budget": "1GB", "length": 64, "rows": 2, "updates": 12, "kill": 6, "wait": 90}
    rates = {"nbytes": 4 << 20, "copied": 4 << 20, "updated": 1 << 20}
    return [
        Stage("where", "machine.where", limit=60, expected=4, here=True),
        Stage("memory", "machine.touch_memory", memory, 60, 1, "", "rates", True),
        Stage("primitives", "machine.primitives", {"nbytes": 4 << 20}, 120, 10, here=True),
        Stage("kernels", "correct.kernels", {}, 300, 30, "primitives", checks=True),
        Stage("rates", "machine.rates", rates, 300, 30, "primitives", here=True),
        _small_models("2GB", 2, 300, 45),
        Stage("features", "features.features", {}, 600, 120, "small models", checks=True),
        Stage("attention", "correct.attention", {"tokens": 50}, 120, 20, "primitives", checks=True),
        _races(2, 2, 120, 20),
        Stage(
            "attention ways", "attention_ways.times", {"shapes": [[1, 4, 2, 128, 128]]}, 120, 10, "primitives"
        ),
        _step("tiny in 1 GB", "tiny", 1, **tiny),
        _step("tiny in 1 GB, clipped, Muon", "tiny", 1, **tiny, clip=True, muon=True),
        _step("tiny, a rollout", "tiny", 1, **tiny, completions=[2, 16, 8]),
        _step("tiny, state on the drive", "tiny", 1, **tiny, host="1GB"),
        Stage("head", "head.times", {"shapes": [[64, 32, 512]]}, 120, 10, "primitives"),
        Stage("megacompile train", "command.fine_tune", train, 200, 60, "small models"),
        Stage("kernel times", "kernel_table.table", {"most": 64}, 300, 40, "primitives"),
        _peer("plain tiny", "plain", "tiny", 4, **tiny),
        _peer("FSDP2 tiny", "fsdp2", "tiny", 4, **tiny, rows=2, profiled=True),
        Stage("DeepSpeed's Adam", "peers.compile_adam", {}, 300, 30, "", "MegaTrain tiny", True),
        _peer("MegaTrain tiny", "megatrain", "tiny", 4, **tiny, rows=2),
    ]


def _small_models(budget: str, steps: int, limit: int, expected: int) -> Stage:
    settings = {"budget": budget, "steps": steps}
    return Stage("small models", "correct.small_models", settings, limit, expected, "primitives", checks=True)


def _races(seeds: int, steps: int, limit: int, expected: int) -> Stage:
    settings = {"seeds": seeds, "steps": steps, "budget": "2GB"}
    return Stage("races", "correct.races", settings, limit, expected, "small models", checks=True)


def _step(name: str, model: str, budget: int, tokens: int, limit: int, expected: int, **more: Any) -> Stage:
    settings = {"model": model, "budget": f"{budget}GB" if budget else "", "tokens": tokens} | more
    return Stage(name, "steps.step", settings, limit, expected, "small models")


def _peer(
    name: str, peer: str, model: str, budget: float, tokens: int, limit: int, expected: int, **more: Any
) -> Stage:
    settings = {"name": peer, "model": model, "budget": budget, "tokens": tokens} | more
    return Stage(name, "peers.peer", settings, limit, expected, "primitives")


def compiled_ahead() -> list[str]:
    """Programs, each for a process of its own, that compile on a simulated device what the stages launch."""
    steps = [s.settings for s in _whole() if s.call == "steps.step" and s.settings["budget"]]
    return [_KERNELS, *(_PROGRAM.format(settings=s) for s in steps)]


_FEW = [[*heads, 256, width] for *heads, _, width in _HOPPER]  # tokens for the same kernels
# Without numbers no step is right, which the stages raise: it is launched all the same.
_KERNELS = f"""
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from benchmarks.gpu import attention_ways, correct, features, head, hopper, kernel_table
from benchmarks.gpu.findings import Recorder
to = Recorder(Path(mkdtemp()), "ahead")
correct.kernels(to)
with suppress(RuntimeError):
    correct.small_models(to, "2GB", 1)
features.features(to)
correct.attention(to, 1000)
attention_ways.times(to, {_FEW[:2]})
hopper.check(to, {_FEW}, 1)
head.times(to, {[[1024, *more] for _, *more in _HEADS[:1]]})
kernel_table.compile_ahead()
"""
_PROGRAM = """
from benchmarks.gpu.steps import compile_ahead
compile_ahead(**{settings})
"""
