"""What loops over chunks of a sequence cost: a layer's forward and backward in chunks and as a whole.

    python -m benchmarks.loops_cost [--tokens 8192] [--chunk 2048] [--repeats 5]

FP32 on this CPU, one thread. Both do the same work: the backward derives again what it reads, but for
attention. They take turns. The least CPU seconds of each are compared: other work disturbs those least.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from benchmarks.report import machine_line
from megacompile.api.frontend import Frontend
from megacompile.blocks.block_functions import Boxed
from megacompile.blocks.chunk_roles import two_lengths
from megacompile.blocks.differentiated_template import PolicyFunctions
from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.partition import Template
from megacompile.blocks.policies import _Cutter
from megacompile.capture.batch import read_batch

_CPU = torch.device("cpu")


class Layer:
    """Forward and backward of one layer at equal inputs, as ``policy`` has them."""

    def __init__(self, template: Template, policy: PolicyFunctions) -> None:
        assert policy.backward is not None
        self.order = policy.forward.inputs, policy.backward.inputs
        self.functions: tuple[Boxed, Boxed] = policy.forward.load(_CPU), policy.backward.load(_CPU)
        self.results = policy.forward.outputs
        self.inputs: dict[Ref, Tensor] = {
            ("in", i): torch.randn(e.shape, generator=torch.Generator().manual_seed(i)) / e.shape[-1] ** 0.5
            for i, e in enumerate(template.examples)
        }

    def seconds(self) -> float:
        """CPU time of one forward and backward."""
        start = time.process_time()
        known = dict(self.inputs)
        known |= dict(zip(self.results, self.functions[0]([known[r] for r in self.order[0]]), strict=True))
        known["grad", 0] = torch.ones_like(known["out", 0])
        self.functions[1]([known[r] for r in self.order[1]])
        return time.process_time() - start


def layers(tokens: int, chunk: int) -> tuple[Layer, Layer]:
    """A Llama layer of 512 hidden units, whole and in chunks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    frontend = Frontend(LlamaForCausalLM(config).train(), torch.float32, kernels=False)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    batch = read_batch({"input_ids": ids, "labels": ids}, frontend.model)
    compiled = frontend.build(batch)
    template, mode = compiled.part.templates[1], compiled.fused.fake_mode
    pairs, reason = two_lengths(template, mode, (24, 26))
    assert reason is None, reason

    def made(loops: tuple[int, int] | None) -> Layer:
        found = _Cutter(template, pairs[0][1], mode, None, loops=loops, lean=True).run()
        return Layer(template, found.policies["attention"])

    return made(None), made((tokens, chunk))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    both = layers(options.tokens, options.chunk)
    times = [[layer.seconds() for layer in both] for _ in range(options.repeats + 1)][1:]
    whole, looped = map(min, zip(*times, strict=True))
    ratios = ", ".join(f"{b / a:.3f}" for a, b in times)
    print(machine_line())
    print(f"{options.tokens} tokens in {-(-options.tokens // options.chunk)} chunks, one layer, CPU seconds")
    print(f"whole {whole:.2f}, in chunks {looped:.2f}, ratio {looped / whole:.3f}; of turns {ratios}")


if __name__ == "__main__":
    main()
