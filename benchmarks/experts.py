"""Bytes of a layer with experts, with routing weights behind their last product and before it, as Markdown.

    python -m benchmarks.experts [--tokens 4096]

One layer of Qwen3-MoE 30B-A3B and of GPT-OSS 20B on the meta device, one sequence, bfloat16, as plans for a
GPU count them: what is saved, the FLOPs of a recompute of all, the bytes that operators beside products
and attention move in a forward and in a backward from all that is saved, those of the experts' products in
both, and what these wait for an H100's memory beyond their FLOPs, at sustained rates. Then how much longer
the product of the gathered rows could take if it gathered them itself, until nothing were won. Nothing is
timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from benchmarks.one_layer import compiled_layer, tokens_asked
from megacompile.blocks.costs import grouped
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.hardware.catalog import load_machine
from megacompile.hardware.simulate import traffic_seconds
from megacompile.schedule.step import Op

_COLUMNS = ("layer", "weights", "saved, `all`", "saved, `some`", "recompute", "forward", "backward",
            "experts", "wait")  # fmt: skip
_CHIPS = "h100-sxm", "h200"


def qwen3_moe() -> nn.Module:
    """Qwen3-MoE 30B-A3B's layer."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True,
    )  # fmt: skip
    made: nn.Module = transformers.Qwen3MoeForCausalLM(config)
    return made


def gpt_oss() -> nn.Module:
    """GPT-OSS 20B's layer with full attention."""
    import transformers

    config = transformers.GptOssConfig(
        num_hidden_layers=1, num_local_experts=32, layer_types=["full_attention"]
    )
    made: nn.Module = transformers.GptOssForCausalLM(config)
    return made


def layer(
    make: Callable[[], nn.Module], tokens: int, *, before: bool
) -> tuple[DifferentiatedTemplate, fx.Graph, int]:
    """The layer's functions, its forward, and how often routing weights were placed before the product."""
    kernels: dict[str, Any] = {} if before else {"routing_weights": False}
    compiled, template = compiled_layer(make, tokens, kernels=kernels)
    graph = compiled.part.templates[template.index].graph
    return template, graph, compiled.fusions.counts.get("routing_weights", 0)


def row(name: str, template: DifferentiatedTemplate, placed: int) -> str:
    """One line of the table."""
    every, some = template.policies["all"], template.policies["some"]
    recompute = template.policies["none"].recompute
    assert every.backward is not None and recompute is not None
    sizes = every.saved_bytes, some.saved_bytes
    moved = every.forward.moved_bytes, every.backward.moved_bytes
    experts = every.forward.grouped, every.backward.grouped
    machine = load_machine(_CHIPS[0]).machine
    waits = (traffic_seconds(Op("forward", "compute", grouped=pair), machine) for pair in experts)
    cells = [
        name, "before" if placed else "behind", *(f"{n / 1e6:,.1f} MB" for n in sizes),
        f"{recompute.flops / 1e9:,.1f} GFLOP", *(f"{n / 1e6:,.0f} MB" for n in moved),
        f"{sum(nbytes for _, nbytes in experts) / 1e6:,.0f} MB", f"{sum(waits) * 1e3:.2f} ms",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def gather_row(name: str, graph: fx.Graph) -> str:
    """One line of the second table: a copy of the rows is gathered and read, or the tokens' rows are read."""
    (product,) = (n for n in graph.nodes if grouped(n)[0] and n.args[0].target is torch.ops.aten.index.Tensor)
    copied, tokens = (n.meta["val"].nbytes for n in (product.args[0], product.args[0].args[0]))
    work, nbytes = grouped(product)
    cells = [name, f"{copied / 1e6:,.1f} MB"]
    for machine in (load_machine(chip).machine for chip in _CHIPS):
        bandwidth, least = machine.memory_bandwidth, work / machine.flops
        apart = (tokens + copied) / bandwidth + max(least, nbytes / bandwidth)
        cells.append(f"{apart / max(least, (nbytes - copied + tokens) / bandwidth) - 1:.1%}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the tables; where nothing is placed, "behind" stands in both lines."""
    tokens = tokens_asked(__doc__.splitlines()[0])
    print(f"| {' | '.join(_COLUMNS)} |\n|---|---|" + "--:|" * 7)
    gathers = []
    for name, make in (("Qwen3-MoE 30B-A3B", qwen3_moe), ("GPT-OSS 20B", gpt_oss)):
        for before in (False, True):
            template, graph, placed = layer(make, tokens, before=before)
            print(row(name, template, placed), flush=True)
        gathers.append(gather_row(name, graph))
    print(f"\n| layer | gathered rows | {' | '.join(_CHIPS)} |\n|---|" + "--:|" * (1 + len(_CHIPS)))
    print(*gathers, sep="\n")


if __name__ == "__main__":
    main()
