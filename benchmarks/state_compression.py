"""Would lossless compression of optimizer state on NVMe pay? Ratio and speed on the state of a real run.

    pip install zstandard blosc2
    python -m benchmarks.state_compression [--steps 300]

Trains a small byte-level Llama on Python's own sources, then compresses each array of its state as it
lies on storage (the low halves of masters, both moments, and the bf16 weights) in blocks of 4 MiB:
zstd on plain bytes, zstd on byte planes, blosc2 with byte and with bit shuffle. Every result is
decompressed and compared. The last line tells below which speed of the drive it pays: a transfer of n
bytes becomes one of n / ratio, but passes the (de)compressor on the cores that host Adam and, on the CPU
backend, the blocks need too.
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import machine_line

BLOCK_BYTES = 4 << 20
Codec = tuple[Callable[[Any, int], bytes], Callable[[bytes, int], Any]]
WIDTHS = {"weights": 2, "low": 2, "exp_avg": 4, "exp_avg_sq": 4}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_compression")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    print(machine_line() + f", {options.threads} threads")
    arrays = state_of_a_run(options.steps)
    print(f"{'codec':<20}{'array':<12}{'ratio':>7}{'compress':>10}{'restore':>9}  GB/s")
    totals: dict[str, list[tuple[float, float, float]]] = {}
    for codec, functions in codecs().items():
        for name, array in arrays.items():
            ratio, down, up = measure(functions, array, WIDTHS[name], options.threads)
            print(f"{codec:<20}{name:<12}{ratio:>7.3f}{down:>10.2f}{up:>9.2f}")
            totals.setdefault(codec, []).append(
                (array.nbytes / ratio, array.nbytes / down, array.nbytes / up)
            )
    for codec, parts in totals.items():
        whole = sum(a.nbytes for a in arrays.values())
        ratio = whole / sum(p[0] for p in parts)
        down, up = whole / sum(p[1] for p in parts), whole / sum(p[2] for p in parts)
        # a pipeline of drive and codec gains where drive / ratio, and the codec, are faster than the drive
        pays = min(down, up)
        verdict = f"pays below {pays:.2f} GB/s of the drive" if ratio > 1.05 else "saves too little to pay"
        print(
            f"{codec}: all state {ratio:.3f}, compress {down:.2f}, restore {up:.2f} GB/s: {verdict}, "
            f"and then makes it {ratio:.2f} times as fast at most"
        )


def codecs() -> dict[str, Codec]:
    """By name: compress(block, bytes per element), restore(bytes, bytes per element)."""
    import blosc2
    import zstandard

    def zstd(level: int, planes: bool) -> Codec:
        def compress(block: Any, width: int) -> bytes:
            data = block.reshape(-1, width).T.copy() if planes else block
            return zstandard.ZstdCompressor(level=level).compress(data)

        def restore(data: bytes, width: int) -> Any:
            plain = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
            return plain.reshape(width, -1).T.reshape(-1) if planes else plain

        return compress, restore

    def blosc(kind: Any, codec: Any) -> Codec:
        def compress(block: Any, width: int) -> bytes:
            data: bytes = blosc2.compress2(
                block, typesize=width, clevel=1, codec=codec, filters=[kind], nthreads=1
            )
            return data

        def restore(data: bytes, width: int) -> Any:
            return np.frombuffer(blosc2.decompress2(data, nthreads=1), np.uint8)

        return compress, restore

    shuffle, bits = blosc2.Filter.SHUFFLE, blosc2.Filter.BITSHUFFLE
    return {
        "zstd 1": zstd(1, planes=False),
        "zstd 1, planes": zstd(1, planes=True),
        "zstd 3, planes": zstd(3, planes=True),
        "blosc2 lz4, bytes": blosc(shuffle, blosc2.Codec.LZ4),
        "blosc2 lz4, bits": blosc(bits, blosc2.Codec.LZ4),
        "blosc2 zstd, bytes": blosc(shuffle, blosc2.Codec.ZSTD),
    }


def measure(codec: Codec, array: Any, width: int, threads: int) -> tuple[float, float, float]:
    """(ratio, GB/s compressing, GB/s restoring) of one array over all threads, each block checked."""
    compress, restore = codec
    blocks = [array[i : i + BLOCK_BYTES] for i in range(0, array.nbytes, BLOCK_BYTES)]
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        packed = list(pool.map(lambda b: compress(b, width), blocks))
        middle = time.perf_counter()
        plain = list(pool.map(lambda p: restore(p, width), packed))
        end = time.perf_counter()
    for block, again in zip(blocks, plain, strict=True):
        assert np.array_equal(block, again), "not lossless"
    size = sum(len(p) for p in packed)
    return array.nbytes / size, array.nbytes / (middle - start) / 1e9, array.nbytes / (end - middle) / 1e9


def state_of_a_run(steps: int) -> dict[str, Any]:
    """Bytes of each kind of array after training on text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import megacompile

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=256, tie_word_embeddings=False,
    ))  # fmt: skip
    program = megacompile.compile(model, 1, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4))
    first = last = 0.0
    for ids in itertools.islice(_text(), steps):
        last = float(program.train_step({"input_ids": ids, "labels": ids}).loss)
        first = first or last
    program.synchronize()
    print(f"{steps} steps on Python's sources: loss {first:.2f} to {last:.2f}")
    arrays = program._session.runtime.state.arrays  # type: ignore[union-attr]
    return {
        name: np.concatenate([a[name].view(torch.uint8).numpy() for a in arrays if name in a])
        for name in WIDTHS
    }


def _text() -> Iterator[torch.Tensor]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)
    generator = np.random.default_rng(0)
    while True:
        starts = generator.integers(0, len(data) - 128, 4)
        yield torch.from_numpy(np.stack([data[s : s + 128] for s in starts]).astype(np.int64))


if __name__ == "__main__":
    main()
