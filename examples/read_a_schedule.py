"""Compile a 12-layer Qwen3 for a 32 MB budget, take one step, and print the schedule that ran.

    python examples/read_a_schedule.py [--budget 32MB]

docs/architecture.md walks through what it prints.
"""

from __future__ import annotations

import argparse

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

import megacompile


def main() -> None:
    """Print the plan, the proof and the emitted program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budget", default="32MB", help="device memory, for example 24MB or 1GB")
    budget = parser.parse_args().budget
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=12,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    ids = torch.randint(0, 256, (4, 256))
    program = megacompile.compile(
        model,
        budget,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_grad_norm=1.0,
        compute_dtype=torch.float32,
    )
    program.train_step({"input_ids": ids, "labels": ids})
    print(program.schedule)
    print(program.memory)
    program.close()


if __name__ == "__main__":
    main()
