"""What the backward of a head with its cross-entropy costs by tokens, counted on meta tensors, as Markdown.

    python -m benchmarks.head_traffic [--tokens 4096 65536 131072]

Llama-8B's head in bfloat16: first with a tile of logits of an eighth of the weight, whose part of the
gradient of hidden states is a product that is then added to the sum; then as it is, with a tile as large as
the hidden states at least, and the sum within the product. FLOPs are those of all products that run. Bytes
are those of float32 [tokens, width] that are read and written. Times are both at an H100's rates in the
catalog: nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import megacompile.kernels
from megacompile.graph.lm_head_patterns import workspace_bytes
from megacompile.hardware.catalog import load_machine

WIDTH, VOCABULARY = 4096, 128256
HEAD = sys.modules[f"{megacompile.kernels.__name__}.linear_cross_entropy"]
Product = Callable[[Tensor, Tensor, Tensor], None]


class Count(TorchDispatchMode):
    """FLOPs of products; bytes of the float32 matrices as wide as the model that calls read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.nbytes = self.sums = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm"):
            a, b = args[-2:] if isinstance(args[-1], Tensor) else args[-3:-1]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        if name in ("mm", "addmm", "add_"):
            found = [x for x in (*args, result) if isinstance(x, Tensor) and x.dtype == torch.float32]
            self.nbytes += sum(x.numel() * x.element_size() for x in found)
            self.sums += bool(found) and name != "add_"
        return result


def apart(total: Tensor, a: Tensor, b: Tensor) -> None:
    """The product, then the sum."""
    total += torch.mm(a, b, out_dtype=total.dtype)


def operands(tokens: int) -> tuple[Tensor, Tensor]:
    """Hidden states and the head's weight."""
    with torch.device("meta"):
        dtype = torch.bfloat16
        return torch.empty(tokens, WIDTH, dtype=dtype), torch.empty(VOCABULARY, WIDTH, dtype=dtype)


def counted(tokens: int, workspace: int, add_product: Product) -> Count:
    """The backward of this many tokens."""
    hidden, weight = operands(tokens)
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    stats = torch.empty(2, tokens, device="meta")
    with (
        mock.patch.object(HEAD, "add_product_", add_product),
        mock.patch.object(HEAD, "gradient_", lambda *args: None),
        Count() as count,
    ):
        HEAD.linear_cross_entropy_backward_op._init_fn(
            stats[0], hidden, weight, None, labels, stats, -100, 0.0, 0.0, workspace
        )
    return count


def row(tokens: int) -> str:
    """One line of the table."""
    machine = load_machine("h100-sxm").machine
    hidden, weight = operands(tokens)
    cells, eighth = [f"{tokens:,}"], weight.nbytes // 8
    for workspace, product in ((eighth, apart), (workspace_bytes(hidden, weight), HEAD.add_product_)):
        count = counted(tokens, workspace, product)
        cells += [
            f"{count.sums}",
            f"{count.nbytes / 1e9:,.1f} GB",
            f"{1e3 * count.nbytes / machine.memory_bandwidth:,.1f} ms",
        ]
    cells += [f"{count.flops / 1e12:,.1f} T", f"{1e3 * count.flops / machine.flops:,.1f} ms"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 65536, 131072])
    print(
        "| tokens | tiles, an eighth | bytes of sums | time | tiles | bytes of sums | time | FLOPs | time |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for tokens in parser.parse_args().tokens:
        print(row(tokens))


if __name__ == "__main__":
    main()
