"""The public entry point :func:`compile`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from megacompile.api.check_arguments import check_model, check_settings, directories
from megacompile.api.device_budget import room_of
from megacompile.api.frontend import Frontend
from megacompile.api.pipeline import Compiler
from megacompile.api.program import Program
from megacompile.api.session import Session
from megacompile.api.settings import Settings
from megacompile.blocks.inductor import check_compiler
from megacompile.capture.module_wrappers import unwrapped
from megacompile.distributed.ranks import find_ranks
from megacompile.distributed.world import World
from megacompile.errors import BudgetError, MegacompileError
from megacompile.kernels._triton import gpu_of
from megacompile.planner.baselines import SEARCH, Planner, chosen_planner
from megacompile.planner.nvme_placement import Tiers
from megacompile.runtime.backends import Backend, open_backend
from megacompile.runtime.device_failures import naming_failures
from megacompile.runtime.triton_check import check_triton
from megacompile.schedule.plan import Plan
from megacompile.state.adam_settings import updates_like_adamw
from megacompile.state.host_arena import collect_dropped_arenas
from megacompile.state.masters import Weights
from megacompile.state.model_ownership import reclaim
from megacompile.state.moment_formats import StateFormat, check_format
from megacompile.state.optimizer import adopt, form_of
from megacompile.state.torch_optimizer import TorchOptimizer
from megacompile.tested_versions import warn_of_newer
from megacompile.units import RESERVE, host_available, parse_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile(
    model: nn.Module,
    hbm_budget: float | str,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    max_grad_norm: float | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
    host_budget: float | str | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    device: str | torch.device | None = None,
    on_nonfinite: Literal["skip", "raise"] | None = None,
    example_batch: Any = None,
    max_seq_len: int | None = None,
    dump: str | os.PathLike[str] | None = None,
    seed: int = 0,
    kernels: Mapping[str, bool] | bool | None = None,
    inductor: bool = False,
    optimizer_state: StateFormat = "fp32",
    weights: Weights | None = None,
    offload_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    planner: str | Planner = SEARCH,
    plan: Plan | str | Path | None = None,
    mesh: DeviceMesh | None = None,
) -> Program:
    """Compile ``model`` for training within ``hbm_budget`` bytes of device memory.

    Parameters
    ----------
    model: any module whose forward returns a scalar loss, or an object with ``.loss``. While a program
        trains it, its parameters hold no values, and reading or writing one is an error:
        ``program.state_dict()`` has them. The module inside of a wrapper (``torch.compile``,
        ``DataParallel``, ``DistributedDataParallel``) is trained, under its own names; methods that
        ``torch.compile`` returned run as they were.
    hbm_budget: the device memory that training may use: a number of GB (1e9 bytes), or "24GiB", "512MB",
        "90%", "auto" (nine tenths of what is free).
    optimizer: an optimizer over the model's parameters, or a list of several; its param groups and settings
        are read at every step, so a learning-rate scheduler goes on working. AdamW and Adam run as a kernel;
        any other class steps itself over each parameter, on the host. None: AdamW, lr 1e-5.
    max_grad_norm: clip the gradient's global 2-norm; updates then wait for the end of the backward.
    compute_dtype: ``torch.bfloat16`` or ``torch.float32``; masters are FP32 in both cases. Frozen weights
        that compute in bfloat16 are kept in it, if it holds their values exactly. A model that is
        mostly bf16 or fp16 computes in FP32 with its FP32 parameters, such as a router, except PEFT's
        adapters.
    host_budget: the host memory that all programs may use, given as ``hbm_budget`` is. None: what this
        process may use, less a reserve. More bytes than are free are taken with a warning: the memory of some
        virtual machines grows as it is used.
    loss_fn: ``loss_fn(outputs, batch)``, if the forward does not return the loss itself. The forward gets
        its part of the batch: from a dict the names that it knows, from a tuple as many of the first entries
        as it needs; the rest is for ``loss_fn``. A criterion of torch, such as
        ``nn.CrossEntropyLoss()`` or ``F.cross_entropy``, is called with the outputs and that rest: on a batch
        ``(x, y)`` it gives ``loss_fn(model(x), y)``. So is a module of your own, and a function whose second
        parameter is named as targets are (``target``, ``labels``, ``y``) or annotated as a tensor, or that
        needs three or more arguments; one whose second parameter is named ``batch`` gets the whole batch. An
        attribute ``inputs`` of ``loss_fn`` names entries of a dict that only ``loss_fn`` is given. Batches of
        varying length share programs if it ignores padding: labels of -100, or positions that
        ``attention_mask`` hides. It is called on random outputs to find out.
    device: "cuda", or "cpu", which emulates the accelerator, budget and all. None: a GPU if there is one.
    on_nonfinite: what becomes of an update whose loss or gradient is not finite: "skip" leaves it out,
        "raise" is an error; both leave all state as it was. None: with a finite gradient train on, as plain
        PyTorch does. A gradient that is not finite is an error if updates wait for its norm, or if the loss
        is not finite either.
    example_batch: compile for this batch now, or for each kind of batch in a list; otherwise the first batch
        is captured.
    max_seq_len: prove at the start that batches padded to this length fit.
    dump: a directory for every stage's output; the environment variable MEGACOMPILE_DUMP also sets it.
    seed: of dropout and other random numbers of the forward; the same seed gives bitwise the same training
        run on one machine.
    kernels: fused kernels in place of subgraphs of the model: True for all, {"rope": False} for all but
        one, False for none, which keeps eager's order of operations: in fp32 on a CPU bitwise. None: all on a
        GPU with Triton, none on a CPU. On a GPU that Triton cannot launch on, False also runs attention,
        dropout and AdamW in plain torch.
    inductor: compile the inside of each block with torch's Inductor, once per kind of block. Numbers are
        then as good as eager's, not bitwise the same. Needs a C++ compiler.
    optimizer_state: how the host keeps Adam's moments: "fp32" (12 bytes per parameter with its master),
        "int8" or "int4" (about 6 or 5; coded in blocks, so training differs a little from FP32).
    weights: a function that returns the value of a parameter on the meta device, by its name.
    offload_dir: a directory on an NVMe drive, or several (striped), for state that ``host_budget`` has no
        room for. Scratch files there belong to this program alone and go with it. Each of several ranks makes
        a folder of its own there.
    planner: "search", or a fixed schedule to compare with: "full-recompute", "double-buffer", "zero3-like";
        or a planner of your own, ``(work, mode, machine, budget_bytes) -> Plan``.
    plan: a :class:`~megacompile.schedule.plan.Plan`, or the path of a plan.json that a dump wrote, as it is
        or edited.
    mesh: a mesh of torch.distributed of all ranks, in two dimensions: (machines, ranks of a machine). Each
        machine then keeps all of the state, and only sums of gradients cross the network; on a mesh of (1,
        ranks) all ranks share one state. None: on one machine they do; several machines with as many ranks
        each take the mesh that fits the first program and is predicted to be faster.

    Started by ``torchrun``, or with a process group of torch.distributed, the ranks train one model together:
    each holds its share of the state, and brings its own batches. With device="cuda" each has the GPU of its
    number on its machine. ``hbm_budget`` is each device's, ``host_budget`` each machine's. All ranks take the
    values that the model has on rank 0.

    Raises :class:`MegacompileError` (a ``ValueError``) for what cannot be compiled, and its subclass
    ``BudgetError`` with the least feasible budget if the given one is too small.
    """
    warn_of_newer()
    check_settings(compute_dtype, max_grad_norm, on_nonfinite, seed, max_seq_len, loss_fn)
    if isinstance(model, nn.Module):
        reclaim(model, optimizer)
    check_model(model, weights)
    model = unwrapped(model)
    world = World(find_ranks(mesh))
    with world.together():
        backend, launches = world.agree(lambda: _open(device, compute_dtype, kernels, inductor))
    with world.connected(backend.device), naming_failures(backend.device):
        budget, host = _budgets(model, hbm_budget, host_budget, backend, world)
        adopted = adopt(optimizer, model)
        form = form_of(adopted, check_format(optimizer_state))
        if isinstance(form, TorchOptimizer) and form.writes_settings and on_nonfinite is not None:
            raise MegacompileError(
                f"on_nonfinite={on_nonfinite!r} is not supported with {form}, whose step counts in its param "
                "groups, before it is known whether an update is made: leave on_nonfinite out."
            )
        settings = Settings(
            device=backend.device,
            open_device=lambda: backend.open(budget, world),
            measure_room=lambda: room_of(backend, budget, world),
            host_budget_bytes=host,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
            seed=seed,
            max_seq_len=max_seq_len,
            optimizer_state=form,
            offload_dirs=world.agree(lambda: directories(offload_dir)),
            world=world,
        )
        frontend = Frontend(
            model,
            compute_dtype,
            optimizer=adopted,
            loss_fn=loss_fn,
            kernels=launches if kernels is None else kernels,
            form=settings.optimizer_state,
            gathers=not settings.offload_dirs and world.size == 1,
            inductor=backend.device if inductor else None,
            gpu=gpu_of(backend.device),
            distributed=world.size > 1,
        )
        compiler = _compiler(frontend, adopted, backend, settings, dump, chosen_planner(planner, plan))
        session = Session(model, adopted, compiler, settings, weights)
        program = Program(session)
        if example_batch is not None:
            try:
                program.prepare(example_batch)
            except BaseException:
                session.close()  # nobody has the program: an ordinary loop may train the model
                raise
        return program


def _open(
    device: str | torch.device | None,
    compute_dtype: torch.dtype,
    kernels: Mapping[str, bool] | bool | None,
    inductor: bool,
) -> tuple[Backend, bool]:
    """The backend, and whether it launches Triton's kernels."""
    if inductor:
        check_compiler()
    with naming_failures(torch.device("cuda")):
        backend = open_backend(device, compute_dtype)
        needed = kernels is not False or inductor
        return backend, backend.device.type == "cuda" and check_triton(backend.device, needed=needed)


def _compiler(
    frontend: Frontend,
    optimizer: torch.optim.Optimizer,
    backend: Backend,
    settings: Settings,
    dump: str | os.PathLike[str] | None,
    planner: Planner | None,
) -> Compiler:
    """Return the compiler of programs for a device."""
    folder = dump if dump is not None else os.environ.get("MEGACOMPILE_DUMP")
    form, stores = settings.optimizer_state, bool(settings.offload_dirs)
    return Compiler(
        frontend,
        machine=backend.machine,
        dump=Path(folder) if folder else None,
        tiers=Tiers(form, settings.host_budget_bytes, stores),
        planner=planner,
        device_state=form == "fp32" and (backend.machine is None or updates_like_adamw(optimizer)),
        world=settings.world,
    )


def _budgets(
    model: nn.Module,
    hbm_budget: float | str,
    host_budget: float | str | None,
    backend: Backend,
    world: World,
) -> tuple[int, int]:
    """Bytes of the device and of the host. The least device of several ranks decides, and the ranks of a
    machine share its memory."""
    collect_dropped_arenas()
    available = host_available() + sum(p.nbytes for p in model.parameters() if not p.is_meta)
    budget = parse_bytes(hbm_budget, what="hbm_budget", available=backend.device_bytes or available)
    if host_budget is None:
        host = int(available * (1 - RESERVE))
    else:
        host = parse_bytes(host_budget, what="host_budget", available=available, grows=True)
    if world.size == 1:
        return budget, host
    with world.together():
        said = world.exchange(lambda: f"{budget} {host // world.local}".encode())
    of_ranks = [[int(number) for number in text.split()] for text in said]
    return min(device for device, _ in of_ranks), min(share for _, share in of_ranks)


__all__ = ["BudgetError", "MegacompileError", "Program", "compile"]
