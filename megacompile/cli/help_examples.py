"""The examples that ``--help`` shows below the options of each command."""

from __future__ import annotations

ALL = """examples:
  megacompile plan --model llama-3.1-8b --machine rtx-4090 --batch 1 --seq 4096
  megacompile plan --model llama-3.1-70b --machine h100-pcie --batch 4 --hbm-budget 80 --dump out
  megacompile inspect out -o schedule.html
  megacompile doctor

`megacompile COMMAND --help` says more. Exit code: 0 yes, 1 no (it does not fit, the plans differ),
2 the question is wrong."""
PLAN = """examples:
  megacompile plan --model llama-3.1-8b --machine rtx-4090 --batch 1 --seq 4096
  megacompile plan --model llama-3.1-70b --machine h100-pcie --batch 4 --seq 4096 \\
      --hbm-budget 80 --host-budget 1500GB --tokens 1e9 --price 2.5
  megacompile plan --model ./config.json --machine machine.json --sweep hbm-budget
  megacompile plan --model qwen2.5-7b --machine a6000 --explain layers.7 --html schedule.html

Budgets are GB (10^9 bytes) or text such as 24GiB, 90%, auto. Exit code: 0 it fits, 1 it does not,
2 the question is wrong. No weights, no GPU and no triton are needed."""
INSPECT = """examples:
  megacompile plan --model llama-3.1-8b --machine rtx-4090 --dump out
  megacompile inspect out -o schedule.html
  megacompile inspect out/train/plan.json --trace trace.json    # after editing the plan

A dump is what --dump, compile(dump=…) or MEGACOMPILE_DUMP wrote. The page needs no network; the trace
opens at ui.perfetto.dev. Nothing in a dump is executed."""
DIFF = """examples:
  megacompile diff out-24GB out-48GB
  megacompile diff a/plan.json b/plan.json

Exit code: 0 the plans are equal, 1 they differ, 2 they cannot be compared."""
MODELS = """example:
  megacompile models

Any path to a config.json, any hub id and any config's class of transformers, such as LlamaConfig, work
as well; of these only the geometry is read."""
PROFILE = """example:
  megacompile profile --out machine.json --nvme /mnt/drive
  megacompile plan --model llama-3.1-8b --machine machine.json"""
MACHINES = """example:
  megacompile machines

Each figure stands with its source; what no datasheet says is marked as assumed. A machine.json
replaces a built-in machine."""
TRAIN = """examples:
  megacompile new config.yaml
  megacompile train config.yaml --dry_run true
  megacompile train config.yaml --learning_rate 2e-5

The keys are those of TRL's scripts and configs, and method, data, hbm_budget, host_budget, offload_dir,
optimizer_state, optimizer, device, from_scratch, sample_prompts, sample_tokens. The same command goes on
after an interruption. Needs megacompile[trl,plots]."""
NEW = """examples:
  megacompile new config.yaml
  megacompile new preferences.yaml --method dpo"""
EXPORT = """examples:
  megacompile export out out-model
  megacompile export out/checkpoint-200 out-model --dtype bfloat16
  megacompile export out out-model --merge    # adapters, into their model

The weights come from the FP32 masters. Needs megacompile[transformers], and no training script."""
DOCTOR = """examples:
  megacompile doctor
  megacompile doctor --gpu    # exit code 1 where something failed"""
BENCH = """examples:
  megacompile bench kernels
  megacompile bench kernels --op rms_norm --shape 8192x4096 --check
  megacompile bench nvme --dir /mnt/nvme"""
