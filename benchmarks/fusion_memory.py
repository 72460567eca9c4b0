"""What fusion saves in memory: a Llama-8B block and head at 4k tokens, before and after, as Markdown.

    python -m benchmarks.fusion_memory [--tokens 4096]

Weights are meta tensors; nothing is computed but the check of each placement, on a few rows. Bytes are
what the planner uses: saved sets from the traced graphs, workspaces from a run on fake tensors under the
meter. The CPU runs the fused operators' plain torch references, which hold float32 copies of their operands;
the last column counts what the Triton path allocates instead: results, the head's tile of logits, and its
float32 sums. It is counted by the same meter, not measured on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from megacompile.blocks import memory_meter
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.partition import partition
from megacompile.blocks.policies import differentiate
from megacompile.capture.attempts import capture
from megacompile.capture.batch import read_batch
from megacompile.capture.parameter_forms import parameter_forms
from megacompile.capture.trace import How, Request
from megacompile.graph.captured import Captured
from megacompile.graph.fusion_rewriter import PATTERNS, fuse, read_switches

Rows = dict[str, int]


@contextlib.contextmanager
def triton_path() -> Iterator[None]:
    """Show the meter the allocations of fused operators whose Triton kernels run."""
    implementation = memory_meter.implementation

    def opaque(func: Any) -> Any:
        name = func._schema.name.removeprefix("megacompile::").removesuffix("_backward")
        return None if name in PATTERNS and name != "linear_cross_entropy" else implementation(func)

    head = sys.modules["megacompile.kernels.linear_cross_entropy"]
    with (
        mock.patch.object(memory_meter, "implementation", opaque),
        mock.patch.object(memory_meter, "_SEEN", {}),  # what calls took on the CPU path
        mock.patch.object(head, "add_product_", lambda *args: None),  # within cuBLAS's product
        mock.patch.object(head, "accumulate", lambda *args: None),
        mock.patch.object(head, "gradient_", lambda *args: None),
    ):
        yield


def measure(tokens: int) -> tuple[list[Rows], str]:
    """Bytes by name before fusion, after it, and after it on the Triton path; the placements."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    ids = torch.zeros(1, tokens, dtype=torch.long)
    batch = read_batch({"input_ids": ids, "labels": ids.clone()}, model)
    forms = parameter_forms(model, torch.bfloat16)
    plain = capture(Request(model, batch.args, batch.kwargs, forms, set(forms)), How()).get()
    fused, fusions = fuse(plain, read_switches(True))
    columns = [_rows(plain, tokens), _rows(fused, tokens)]
    with triton_path():
        columns.append(_rows(fused, tokens))
    return columns, str(fusions)


def _rows(graph: Captured, tokens: int) -> Rows:
    templates = [differentiate(t, graph.fake_mode) for t in partition(graph).templates]
    layer = next(t for t in templates if "layers.0" in t.name)
    head = templates[-1]
    rows = {f"layer: saved by `{name}`": layer.policies[name].saved_bytes for name in ("all", "some")}
    rows |= {
        f"layer: workspace of the backward from `{name}`": _backward(layer, name) for name in ("all", "some")
    }
    rows["head: saved by `all`"] = head.policies["all"].saved_bytes
    rows["head: workspace of the forward"] = head.policies["all"].forward.peak_bytes
    rows["head: workspace of the backward"] = _backward(head, "all")
    rows["head: largest value of tokens × vocabulary"] = _largest(head, tokens)
    return rows


def _backward(template: DifferentiatedTemplate, name: str) -> int:
    function = template.policies[name].backward  # type: ignore[index]
    return 0 if function is None else function.peak_bytes


def _largest(template: DifferentiatedTemplate, tokens: int) -> int:
    """Bytes of the largest value in the head's functions that has a logit for each token and class."""
    sizes = {"bfloat16": 2, "float32": 4}
    found = [0]
    for function in template.functions():
        for dtype, shape in re.findall(r"# (bfloat16|float32)\[([\d, ]+)\]", function.source):
            numbers = [int(n) for n in shape.split(", ")]
            if numbers[-1] == 128256 and torch.Size(numbers[:-1]).numel() == tokens:
                found.append(tokens * 128256 * sizes[dtype])
    return max(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    warnings.simplefilter("ignore")
    columns, fusions = measure(tokens)
    print(f"Llama-8B shapes, {tokens} tokens, bfloat16, torch {torch.__version__}; MB are 10⁶ bytes.\n")
    print("| | before fusion | after, CPU | after, Triton |\n|---|--:|--:|--:|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{rows[name] / 1e6:,.1f} MB" for rows in columns) + " |")
    print(f"\n{fusions}")


if __name__ == "__main__":
    main()
