"""Arguments of training: what each field of ``transformers.TrainingArguments`` means here; none is ignored in
silence.

The fields are those of transformers 5.23; earlier versions, from 5.17 on, lack some. What is not named here
is done by upstream's own code; the others are mapped to options of :func:`megacompile.compile`, said to have
no effect, or refused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from megacompile.distributed.ranks import find_ranks
from megacompile.errors import MegacompileError
from megacompile.state.moment_formats import StateFormat
from megacompile.user_warning import warn_user

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Arguments = TypeVar("_Arguments")
_NO_DDP = "gradients of several devices are exchanged by the program"
MAPPED = {
    "bf16": "compute_dtype=torch.bfloat16, over FP32 masters; without it, and for an FP32 model, float32",
    "max_grad_norm": "max_grad_norm; at 0 no norm is computed, and updates overlap the backward",
    "seed": "also the seed of the program's dropout",
    "use_cpu": 'device="cpu"',
    "optim": "AdamW on the host, its 8-bit and 4-bit kinds set optimizer_state; or another optimizer's class",
    "optim_args": "given to an optimizer's own class, as upstream does; refused with AdamW",
    "torch_compile": "inductor=True",
    "use_liger_kernel": "kernels=True, the kernels of megacompile",
    "enable_jit_checkpoint": "always on: SIGTERM and Ctrl-C save a checkpoint, and end the training",
    "auto_find_batch_size": "a batch that does not fit the budget is made smaller, by what its rows need",
    "average_tokens_across_devices": "always on: a loss counts the tokens of all devices",
}
NO_EFFECT = {
    "activation_checkpointing": "the plan decides what is recomputed",
    "activation_checkpointing_kwargs": "the plan decides what is recomputed",
    "gradient_checkpointing": "the plan decides what is recomputed",
    "gradient_checkpointing_kwargs": "the plan decides what is recomputed",
    "torch_compile_backend": "Inductor compiles each block",
    "torch_compile_mode": "Inductor compiles each block",
    "torch_empty_cache_steps": "the plan holds every byte",
    "bf16_full_eval": "evaluation computes as training does",
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "ddp_backend": _NO_DDP,
    "ddp_timeout": _NO_DDP,
}
_TOGETHER = {  # what several devices need, and why
    "average_tokens_across_devices": (True, "a loss counts the tokens of all"),
    "save_on_each_node": (False, "the first rank writes, where all have to see it"),
}
REFUSED = {
    "fp16": "use bf16=True, which needs no loss scaling",
    "fp16_full_eval": "evaluation computes as training does",
    "deepspeed": "megacompile does the offloading",
    "fsdp": "started by torchrun, devices share the state as they are",
    "fsdp_config": "started by torchrun, devices share the state as they are",
    "parallelism_config": "devices bring batches of their own, and nothing else is parallel",
    "optim_target_modules": "an optimizer is over all trainable parameters",
    "liger_kernel_config": "give kernels= of MegacompileConfig",
    "debug": "hooks cannot look into a streamed model; on_nonfinite is an option of megacompile.compile",
}
_FORMERLY = {  # names that a field also has, by which TRL sets a default
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
_OPTIMIZERS: dict[str, StateFormat] = {
    "adamw_torch": "fp32",
    "adamw_torch_fused": "fp32",
    "paged_adamw_32bit": "fp32",
    "adamw_8bit": "int8",
    "adamw_bnb_8bit": "int8",
    "paged_adamw_8bit": "int8",
    "adamw_torch_8bit": "int8",
    "adamw_torch_4bit": "int4",
}
OWN_CLASSES = (
    "sgd",
    "adafactor",
    "adagrad",
    "rmsprop",
    "schedule_free_adamw",
    "schedule_free_radam",
    "schedule_free_sgd",
)
"""Names of ``optim`` whose classes step on the host themselves, made as upstream makes them."""
_ADAM8 = "use optim='adamw_8bit', whose moments are kept in codes"
_WAYS_OUT = {  # of other names, by a part of them: why, and what to do
    "lion": "its kernel is bitsandbytes': give optimizers=(lion_pytorch.Lion(model.parameters(), lr=1e-5), "
    "None)",
    "rmsprop": "its kernel is bitsandbytes': use optim='rmsprop'",
    "ademamix": f"its kernel is bitsandbytes': {_ADAM8}",
    "galore": f"it projects gradients to save the device memory that moments take: {_ADAM8}, on the host",
    "apollo": f"it projects gradients to save the device memory that moments take: {_ADAM8}, on the host",
    "lomo": "it updates inside the backward: use optim='adafactor', whose state is as small",
    "adamw_torch": "the host or a CUDA device makes the update: use optim='adamw_torch'",
}


@dataclass(frozen=True)
class MegacompileConfig:
    """The options of a trainer beside its TrainingArguments: those of :func:`megacompile.compile`.

    ``optimizer_state`` None: as ``optim`` of the arguments says.
    """

    hbm_budget: float | str = "auto"
    host_budget: float | str | None = None
    offload_dir: str | None = None
    optimizer_state: StateFormat | None = None
    device: str | None = None
    kernels: bool | None = None
    max_seq_len: int | None = None
    dump: str | None = None
    mesh: DeviceMesh | None = None


def plans_recompute(arguments: type[_Arguments]) -> type[_Arguments]:
    """Set ``gradient_checkpointing`` of a class of arguments to None, so that the plan decides what is
    recomputed; TRL's asks for all activations. Returns the class, a dataclass."""
    arguments.__annotations__ = {"gradient_checkpointing": bool | None}
    arguments.gradient_checkpointing = None  # type: ignore[attr-defined]
    return dataclass(arguments)


def settle(arguments: Any, config: MegacompileConfig) -> MegacompileConfig:
    """The config with what ``transformers.TrainingArguments`` say of it.

    Refuses by name, as :class:`MegacompileError`, what cannot be done; says once what has no effect, and
    switches it off.
    """
    for name, way_out in REFUSED.items():
        if _is_set(arguments, name):
            raise MegacompileError(f"TrainingArguments({name}=...) is not supported: {way_out}.")
    name = str(arguments.optim.value)
    if name not in _OPTIMIZERS and name not in OWN_CLASSES:
        way_out = (
            f"use one of {', '.join((*_OPTIMIZERS, *OWN_CLASSES))}, or give the optimizer's object, as "
            "optimizers=(optimizer, None)"
        )
        way_out = next((way for part, way in _WAYS_OUT.items() if part in name), way_out)
        raise MegacompileError(f"TrainingArguments(optim={name!r}) is not supported: {way_out}.")
    if _is_set(arguments, "optim_args") and name not in OWN_CLASSES:
        raise MegacompileError(
            f"TrainingArguments(optim_args=...) is not supported with optim={name!r}: give an AdamW in "
            "optimizers=."
        )
    _join(arguments)
    if arguments.save_only_model and arguments.load_best_model_at_end:
        raise MegacompileError(
            "load_best_model_at_end needs whole checkpoints: leave out save_only_model=True."
        )
    idle = [name for name in NO_EFFECT if _is_set(arguments, name)]
    if idle and arguments.process_index == 0:
        reasons = "; ".join(dict.fromkeys(NO_EFFECT[name] for name in idle))
        text = f"TrainingArguments that have no effect here: {', '.join(idle)} ({reasons})."
        warn_user(text)
    arguments.activation_checkpointing = arguments.gradient_checkpointing = False
    arguments.enable_jit_checkpoint = False  # else its handler is left behind
    kernels, arguments.use_liger_kernel = arguments.use_liger_kernel, False  # else the model is patched
    return dataclasses.replace(
        config,
        optimizer_state=config.optimizer_state or _OPTIMIZERS.get(name, "fp32"),
        device=config.device or ("cpu" if arguments.use_cpu else None),
        kernels=config.kernels if config.kernels is not None else kernels or None,
    )


def _join(arguments: Any) -> None:
    """Show upstream the ranks that :func:`megacompile.compile` will see."""
    size = find_ranks().size
    _stay_on_host(arguments)
    if arguments.world_size != size:
        raise MegacompileError(
            f"torch.distributed has {size} ranks, and transformers sees {arguments.world_size}: start them "
            "by torchrun."
        )
    for name, (needed, why) in _TOGETHER.items():
        if size > 1 and getattr(arguments, name) != needed:
            raise MegacompileError(
                f"TrainingArguments({name}={not needed}) is not there for several devices, where {why}: "
                "leave it out."
            )


def _stay_on_host(arguments: Any) -> None:
    """Keep upstream's own tensors on the host, and make batches for one device: the program alone uses
    the accelerator."""
    on_cpu, arguments.use_cpu = arguments.use_cpu, True
    vars(arguments).pop("_setup_devices", None)  # a cached property
    assert arguments.device.type == "cpu"
    arguments.use_cpu = on_cpu


def _is_set(arguments: Any, name: str) -> bool:
    """Return whether somebody gave this field a value; what a switch left off brings with it does not
    count."""
    if name.startswith("torch_compile_"):
        return arguments.torch_compile and getattr(arguments, name) not in (None, "inductor")
    names = (name, _FORMERLY.get(name))
    defaults = [f.default for f in dataclasses.fields(arguments) if f.name in names]
    default = next((default for default in defaults if default is not None), None)
    value = getattr(arguments, name, None)  # not in every version
    return bool(value) and value != default


def compile_options(arguments: Any, model: nn.Module, config: MegacompileConfig) -> dict[str, Any]:
    """The keyword arguments of :func:`megacompile.compile` for these TrainingArguments and this model."""
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    in_bf16 = arguments.mixed_precision == "bf16" or any(
        p.dtype == torch.bfloat16 for p in model.parameters()
    )
    options["compute_dtype"] = torch.bfloat16 if in_bf16 else torch.float32
    options["max_grad_norm"] = arguments.max_grad_norm or None
    options["seed"] = arguments.seed
    options["inductor"] = bool(arguments.torch_compile)
    return options
