"""``megacompile new``: a commented example of the file that ``megacompile train`` reads."""

from __future__ import annotations

import argparse

from megacompile.errors import MegacompileError
from megacompile.text_files import path_of

_EXAMPLE = """\
# Run: megacompile train {name}      Look first: megacompile train {name} --dry_run true
# Every key is also a flag: --learning_rate 1e-5. Run it again after an interruption, and it goes on.

# ---- what is trained, on what
model_name_or_path: ./model        # a folder as from_pretrained takes it, or a hub id
{data}
test_split_size: 0.05              # a share of the data, kept for evaluation
output_dir: ./out                  # checkpoints, logs, report.md, and the trained model in out/model

# ---- where: the memory to use
hbm_budget: auto                   # of the device: 22GB, 90%, or auto
# host_budget: 200GB               # of RAM; what it has no room for goes to offload_dir
# offload_dir: /mnt/nvme
# optimizer_state: int8            # Adam's moments in a quarter of the bytes
# optimizer: muon                  # for the layers' matrices; optim (adamw_torch) is for the rest

# ---- how
max_length: 2048                   # tokens of a row, at most
# chat_template_path: chat.jinja   # where the tokenizer has none, or none that TRL knows
per_device_train_batch_size: 1
per_device_eval_batch_size: 1      # default: as in training
gradient_accumulation_steps: 16
num_train_epochs: 1
learning_rate: {rate}
lr_scheduler_type: cosine
warmup_steps: 0.03
max_grad_norm: 1.0
bf16: true                         # computes in bf16, over FP32 masters
# use_peft: true                   # LoRA adapters instead of all weights
seed: 0

# ---- what is told and kept
logging_steps: 0.01                # below 1: a share of the training; else a number of updates
# report_to: wandb                 # default: tensorboard where it is installed (tensorboard --logdir out)
include_num_input_tokens_seen: true   # logs tokens per second, padding left out
eval_strategy: steps
eval_steps: 0.1
sample_prompts:                    # answered at each evaluation: shown, and kept in out/samples.jsonl
  - What can you do?
# sample_tokens: 64                # of each answer, at most
save_steps: 0.1                    # what an interruption costs at most
save_total_limit: 2
"""
_DATA = {
    "sft": "method: sft\n"
    "data: ./chats.jsonl                # chats (messages, or ShareGPT's conversations), Alpaca's\n"
    "                                   # instructions, prompt and completion, or a file of plain text;\n"
    "                                   # chats may name files of images, in a column images\n"
    "assistant_only_loss: true          # chats: train on what the assistant says, in all turns\n"
    "packing: false                     # true: sequences share rows, each seeing itself alone",
    "dpo": "method: dpo\n"
    "data: ./preferences.jsonl         # prompt, chosen and rejected, as texts or as chats\n"
    "beta: 0.1                          # how near the policy stays to the model as it was",
}


def run_new(options: argparse.Namespace) -> int:
    """Write a commented example; 2 where the file exists."""
    path = path_of(options.file)
    rate = {"sft": "1.0e-5", "dpo": "1.0e-6"}[options.method]
    try:
        with path.open("x") as file:
            file.write(_EXAMPLE.format(name=path.name, data=_DATA[options.method], rate=rate))
    except OSError as error:
        raise MegacompileError(f"{path} was not written: {error.strerror}. Give another name.") from error
    print(f"{path}: edit it, then run megacompile train {path}")
    return 0
