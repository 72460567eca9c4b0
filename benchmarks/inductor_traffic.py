"""What Inductor's blocks are worth: bytes that two layers' kernels move, and kernels launched.

    python -m benchmarks.inductor_traffic       # with a CUDA build of torch; nothing is run on a device

Forwards and backwards of all blocks of a micro-batch, nothing recomputed, in bf16, as compiled for a GPU of
132 multiprocessors. Seconds are of the CPU, from capture to sources; Triton compiles kernels after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from megacompile.api.frontend import Compiled, Frontend
from megacompile.capture.batch import read_batch
from megacompile.kernels._triton import Gpu

VOCABULARY = 16000


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=8192, num_hidden_layers=2,
            num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=1024, n_layer=2, n_head=16, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {"Llama": (llama, 4096), "GPT-2": (gpt2, 1024)}


def main() -> None:
    print("| model | kernels | Inductor | GB moved | launches | CPU s |\n|---|---|---|--:|--:|--:|")
    for name, (make, tokens) in MODELS.items():
        with torch.device("meta"):
            model = make().train()
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        for kernels in (True, False):
            for inductor in (None, torch.device("cuda", 0)):
                begun = time.process_time()
                frontend = Frontend(model, torch.bfloat16, kernels=kernels, inductor=inductor, gpu=Gpu(132))
                batch = read_batch({"input_ids": ids, "labels": ids}, model)
                moved, launches = _totals(next(frontend.tilings(batch)).build())
                seconds = time.process_time() - begun
                words = f"{'on' if kernels else 'off'} | {'on' if inductor else 'off'}"
                print(f"| {name} | {words} | {moved / 1e9:.2f} | {launches} | {seconds:.1f} |", flush=True)


def _totals(compiled: Compiled) -> tuple[int, int]:
    moved = launches = 0
    for block in compiled.part.blocks:
        policy = compiled.templates[block.template].policies["all"]
        for function in (policy.forward, policy.backward):
            if function is not None:
                moved, launches = moved + function.moved_bytes, launches + function.launches
    return moved, launches


if __name__ == "__main__":
    main()
