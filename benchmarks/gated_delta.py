"""A small Qwen3-Next with its gated delta rule as an operator, and with transformers' loops traced: Markdown.

    python -m benchmarks.gated_delta [--tokens 256 1024 4096]

Three layers of linear attention and one of attention, width 256, float32. CPU seconds, of one thread: of the
capture, and of a step, the faster of two, beside plain PyTorch's. Nodes are those of the captured graph; the
least budget is the one that a refusal names.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import megacompile
from megacompile.capture import replacements
from megacompile.capture.attempts import capture
from megacompile.capture.parameter_forms import parameter_forms
from megacompile.capture.trace import How, Request

_COLUMNS = ("tokens", "", "capture", "nodes", "step", "least budget")


def model() -> nn.Module:
    """8 M parameters."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=64, linear_value_head_dim=64, mlp_only_layers=[0, 1, 2, 3], num_experts=4,
    )  # fmt: skip
    made: nn.Module = Qwen3NextForCausalLM(config).train()
    return made


def traced(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What capture puts in the place of transformers' function: that function."""
    return theirs(*args, **kwargs)


def seconds(run: Callable[[], object], times: int = 1) -> float:
    """The fewest CPU seconds of a call."""
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def program_of(budget: str) -> megacompile.Program:
    """One for a model made anew."""
    trained = model()
    adamw = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    return megacompile.compile(trained, budget, optimizer=adamw, compute_dtype=torch.float32)


def compiled(batch: dict[str, Tensor], how: str) -> list[str]:
    """The row of programs that hold the operator, or the loops."""
    forms = parameter_forms(model(), torch.float32)
    nodes = []

    def captured() -> None:
        graph = capture(Request(model(), (), batch, forms, set(forms)), How()).get().graph
        nodes.append(len(graph.nodes))

    capturing = seconds(captured)
    program = program_of("8GB")
    program.train_step(batch)
    step = seconds(lambda: float(program.train_step(batch).loss), 2)
    program.close()
    least = 0
    try:
        program_of("1kB").prepare([batch])
    except megacompile.BudgetError as error:
        least = error.least_bytes or 0
    return [how, f"{capturing:.1f} s", f"{nodes[0]:,}", f"{step:.2f} s", f"{least / 1e6:,.0f} MB"]


def eager(batch: dict[str, Tensor]) -> list[str]:
    """The row of plain PyTorch."""
    trained = model()
    adamw = torch.optim.AdamW(trained.parameters(), lr=1e-4)

    def step() -> None:
        trained(**batch, use_cache=False).loss.backward()
        adamw.step()
        adamw.zero_grad()

    step()
    return ["eager", "", "", f"{seconds(step, 2):.2f} s", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| " + " | ".join(_COLUMNS) + " |\n|--:|---|" + "--:|" * 4)
    for tokens in parser.parse_args().tokens:
        ids = torch.randint(0, 1024, (1, tokens), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "labels": ids}
        rows = [eager(batch)]
        for how in ("loops", "operator"):
            loops = mock.patch.object(replacements, "gated_delta_rule", traced)
            with loops if how == "loops" else contextlib.nullcontext():
                rows.append(compiled(batch, how))
        for row in rows:
            print("| " + " | ".join([f"{tokens:,}", *row]) + " |", flush=True)


if __name__ == "__main__":
    main()
