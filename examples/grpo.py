"""Teach a small model, by GRPO, to write the letter "a", with a third of its state on the device.

The reward is the share of "a" in a completion; nothing is downloaded. It takes about a minute on a CPU:

    python examples/grpo.py
"""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models

from megacompile.integrations.trl import GRPOConfig, GRPOTrainer

LETTERS = "abcdefghijklmnopqrstuvwxyz "
UPDATES = 30


def share_of_a(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion: its share of the letter."""
    return [text.count("a") / max(len(text), 1) for text in completions]


class Curve(transformers.TrainerCallback):
    """Prints the reward of each update as a bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:
            reward = logs["reward"]
            print(f"{state.global_step:3d}  {reward:.2f}  {'█' * round(60 * reward)}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", *LETTERS])}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    letters.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters,
        pad_token="<pad>",
        eos_token="</s>",
    )
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    draw = random.Random(0)
    prompts = ["".join(draw.choices(LETTERS, k=8)) for _ in range(64)]
    trainer = GRPOTrainer(
        transformers.LlamaForCausalLM(config),
        share_of_a,
        GRPOConfig(
            output_dir="runs/grpo",
            num_generations=8,
            max_completion_length=16,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            max_steps=UPDATES,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,  # TRL's default, bf16=True, needs a GPU or use_cpu=True
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Curve()],
        hbm_budget="6MB",
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    print(trainer.program.memory)


if __name__ == "__main__":
    main()
