"""Refuse what a graph would lose: forbidden calls, side effects, writes; by name, with the way out."""

from __future__ import annotations

import contextlib
import gc
import inspect
import pickle
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch.autograd.graph import saved_tensors_hooks
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from megacompile.capture.fingerprint import attributes, tensors_of
from megacompile.capture.sdpa import attention
from megacompile.errors import CaptureError, UntraceableError
from megacompile.graph.captured import module_path, strip

# ------------------------------------------------------------------------------------------------------------
# What a forward may not do, because a captured graph would lose it: refused by name, with the way out.


aten = torch.ops.aten
_PRODUCTS = {
    attention._opoverload,
    *(
        getattr(aten, name).default
        for name in ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "convolution")
    ),
}


def gradient_hook(theirs: Any, tensor: Tensor, hook: Any) -> None:
    """``Tensor.register_hook``, refused."""
    raise CaptureError(
        f"The forward registers a gradient hook on a tensor of shape {tuple(tensor.shape)}, which would "
        "never run: scale the tensor itself, or its loss."
    )


def is_cuda(tensor: Tensor) -> bool:
    """``Tensor.is_cuda`` of what is captured: no, which a model that asks is told of where there is a GPU."""
    asked = sys._getframe(1)
    if _has_gpu() and asked.f_globals.get("__name__", "").split(".")[0] not in ("torch", "megacompile"):
        place = f"{Path(asked.f_code.co_filename).name}:{asked.f_lineno}"
        warnings.warn(
            f"The forward asks at {place} whether a tensor is on a GPU: it is captured as on a CPU, and "
            "every device runs the branch that a CPU takes.",
            stacklevel=2,
        )
    return bool(Tensor.is_cuda.__get__(tensor))  # type: ignore[attr-defined]


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def refuse_writes(exported: torch.export.ExportedProgram) -> None:
    """Refuse a forward that writes into a parameter (through ``.data``): only buffers are looked at later."""
    constants = {
        spec.arg.name
        for spec in exported.graph_signature.input_specs
        if spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.PARAMETER)
    }
    for node in exported.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            written = node.args[0] if node.args else None
            if isinstance(written, fx.Node) and written.op == "placeholder" and written.name in constants:
                raise CaptureError(
                    f"{module_path(node) or 'The forward'} writes into a parameter ({target}): do that "
                    "between steps, on program.state_dict() and load_state_dict()."
                )


def refuse_sparse(exported: torch.export.ExportedProgram) -> None:
    """Refuse a forward that makes a sparse tensor: kernels, and the schedule's bytes, are of dense ones."""
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                f"{module_path(node) or 'The forward'} makes a sparse tensor ({node.target}), which is not "
                "supported: compute with dense ones; of PEFT's adapters take LoRA in place of SHiRA."
            )


def refuse_mixed_products(graph: fx.Graph) -> None:
    """Refuse a product of two dtypes, which tracing lets pass and running does not.

    What :mod:`~megacompile.capture.patches` leaves: integers, float64, and attention.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _PRODUCTS:
            continue
        values = [a.meta["val"] for a in node.args[:3] if isinstance(a, fx.Node)]
        dtypes = sorted({str(v.dtype) for v in values if isinstance(v, Tensor)})
        if "torch.float64" in dtypes[1:]:
            raise CaptureError(
                f"{module_path(node) or 'The forward'} multiplies {' by '.join(dtypes)}: a program computes "
                "in float32 at most, so give the batch's floats in float32, or cast in the forward."
            )
        if len(dtypes) > 1:
            raise CaptureError(
                f"{module_path(node) or 'The forward'} multiplies {' by '.join(dtypes)}: cast one to the "
                "dtype of the other."
            )


def refuse_mutations(signature: ExportGraphSignature) -> None:
    """Refuse a forward that writes into parameters or the batch."""
    for name in signature.user_inputs_to_mutate.values():
        raise CaptureError(
            f"The forward writes in place into {name} of the batch: clone it there first, or compute a new "
            "tensor."
        )
    for spec in signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.BUFFER_MUTATION):
            raise CaptureError(
                f"The forward writes into {strip(str(spec.target))}: do that between steps, on "
                "program.state_dict() and load_state_dict()."
            )


# ------------------------------------------------------------------------------------------------------------
# Calls that no graph can hold: refused by name before torch's tracing stumbles over them.


_GRADIENT = (
    "The forward computes gradients itself, by {}, and a program cannot hold them: write the derivative as a "
    "formula, or take it along a direction by torch.func.jvp."
)
BACKWARD = _GRADIENT.format("torch.autograd.grad or backward()")
GRAD = _GRADIENT.format("torch.func.grad, vjp or jacrev")
JACFWD = _GRADIENT.format("torch.func.jacfwd")
CTC = (
    "The forward calls ctc_loss, whose memory depends on the values of its lengths, so that torch cannot "
    "trace it: wrap it in a torch.library.custom_op, with another one as its gradient that calls "
    "torch.ops.aten._ctc_loss and _ctc_loss_backward."
)
GAUSSIAN = (
    "The forward calls gaussian_nll_loss, which looks at the values of var: write it out, as "
    "0.5 * (var.log() + (input - target).square() / var).mean()."
)
FLEX = (
    "which is not supported: use F.scaled_dot_product_attention, with is_causal=True, or with attn_mask= "
    "what torch.nn.attention.flex_attention.create_mask makes of the mask_mod, plus what the score_mod adds"
)


CHECKPOINT = next(  # what surrounds the function of a checkpoint; its name from torch 2.15 on, and before
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(torch.utils.checkpoint, name)
)


def refused(reason: str, kind: type[CaptureError] = CaptureError) -> Callable[..., Any]:
    """A function that takes no call but those of torch itself, where it traces scan: by a compilation of its
    own within the export's (:func:`forward_runs`)."""

    def refuse(theirs: Any, *args: Any, **kwargs: Any) -> Any:
        if CompileContext.current_compile_id() != _exports.get():
            return theirs(*args, **kwargs)
        raise kind(reason)

    return refuse


_exports: ContextVar[Any] = ContextVar("exports", default=None)


@contextlib.contextmanager
def none_refused() -> Iterator[None]:
    """Within the context, which is beside a forward's trace, what :func:`refused` replaces is torch's own."""
    token = _exports.set(object())
    try:
        yield
    finally:
        _exports.reset(token)


@contextlib.contextmanager
def forward_runs() -> Iterator[None]:
    """Within the context a forward is exported: what it calls, it calls in this compilation, or in none."""
    token = _exports.set(CompileContext.current_compile_id())
    try:
        yield
    finally:
        _exports.reset(token)


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Within the context torch computes for real, as it does in an eager run."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = False
    try:
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            disable_proxy_modes_tracing(),
            torch.no_grad(),
        ):
            yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags


def unchecked(
    theirs: Any,
    distribution: Any,
    batch_shape: torch.Size = torch.Size(),  # noqa: B008
    event_shape: torch.Size = torch.Size(),  # noqa: B008
    validate_args: bool | None = None,
) -> None:
    """A distribution that checks no values, as under ``torch.compile``."""
    theirs(distribution, batch_shape, event_shape, False)


def nothing(theirs: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of a look that is not taken."""


def once(theirs: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of a checkpoint: what it holds runs as it is."""
    yield


@contextlib.contextmanager
def fake_kernels_named() -> Iterator[None]:
    """Say which operator of the forward has no fake kernel."""
    try:
        yield
    except UnsupportedOperatorException as error:
        raise CaptureError(_no_fake_kernel(str(error.func))) from None
    except RuntimeError as error:
        unknown = re.search(r"no fake impl registered for <CustomOpDef\((.*?)\)>", str(error))
        if unknown is None:
            raise
        raise CaptureError(_no_fake_kernel(unknown[1])) from None


def _no_fake_kernel(operator: str) -> str:
    return (
        f"The forward calls {operator}, which has no fake kernel, so that torch cannot trace it: give it one "
        "by torch.library.register_fake."
    )


# ------------------------------------------------------------------------------------------------------------
# What a forward does besides computing, and what autograd does not see: refused by name, with the way out.
#
# A captured graph would hold neither: a program would do it once, or never. :class:`Effects` watches a
# forward as it runs; ``refuse_constants`` looks at what it read, ``refuse_other_forward`` at what it computes
# the next time.


_WAY_OUT = "a program would not, so pass what changes in the batch, or change it between steps."


_OF_ELEMENTS = {"isfinite": True, "isinf": False, "isnan": False}


class _Watch(TorchFunctionMode):
    """Refuses calls whose effect on gradients is lost, and takes ``.data`` for ``detach()``.

    Where a forward asks whether all elements of a tensor are finite, they are, and ``finite`` keeps what says
    so; None: such a question is not answered.
    """

    def __init__(self, finite: list[Tensor] | None) -> None:
        super().__init__()
        self._detached: dict[int, torch.UntypedStorage] = {}  # of tensors that have a gradient elsewhere
        self._finite = finite
        self._asked: dict[int, tuple[Tensor, bool]] = {}  # by id, what each holds where all is finite

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            func, name = Tensor.detach, "detach"
        elif func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise CaptureError("The forward assigns the .data of a tensor: compute a new tensor instead.")
        elif name == "detach_":
            raise CaptureError("The forward calls detach_(), which is lost: write t = t.detach().")
        elif func in (Tensor.requires_grad_, Tensor.requires_grad.__set__):  # type: ignore[attr-defined]
            _refuse_toggle(args[0], bool(args[1]) if len(args) > 1 else True)
        elif args and isinstance(args[0], Tensor) and writes(name):
            self._refuse_hidden_write(args[0], name)
        elif self._finite is not None and name == "__bool__" and id(args[0]) in self._asked:
            flag, holds = self._asked[id(args[0])]
            self._finite.append(flag if holds else ~flag)
            return holds
        elif name in _OF_ELEMENTS or (name in ("all", "any") and id(args[0]) in self._asked and not args[1:]):
            result = func(*args, **(kwargs or {}))
            holds = _OF_ELEMENTS.get(name, name == "all")
            if name in _OF_ELEMENTS or self._asked[id(args[0])][1] == holds:
                self._asked[id(result)] = result, holds
            return result
        if name == "detach" and args[0].requires_grad:
            storage = _storage(args[0])
            self._detached[storage._cdata] = storage
        return func(*args, **(kwargs or {}))

    def _refuse_hidden_write(self, target: Tensor, name: str) -> None:
        unseen = target.requires_grad and not torch.is_grad_enabled()
        behind = not target.requires_grad and _storage(target)._cdata in self._detached
        if unseen or behind:
            raise CaptureError(
                f"The forward calls {name} on a tensor of shape {tuple(target.shape)} that has a gradient, "
                "where autograd does not see it: compute a new tensor instead."
            )


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of what a transform such as vmap has wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name in vars(Tensor))


def _refuse_toggle(tensor: Tensor, wanted: bool) -> None:
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad != wanted:
        raise CaptureError(
            f"The forward sets requires_grad of a parameter of shape {tuple(tensor.shape)} to {wanted}: set "
            "it before compile, or detach what shall have no gradient."
        )


_GENERATORS = (random.Random, numpy.random.BitGenerator)
_GLOBAL: tuple[Any, ...] = random._inst, numpy.random.mtrand._rand._bit_generator
_CLOSED = (*_GENERATORS, types.ModuleType, type, Tensor)
_LIBRARIES = {"torch", "numpy", "transformers", *sys.stdlib_module_names}
_DEEP, _LARGE = 8, 2000  # levels that are looked into, and items of one that may hold a generator
DRAWS = (
    "The forward draws random numbers from Python or NumPy by a generator that it keeps, or by a function "
    "that a program cannot call in each step: call those of numpy.random or random by the module's name, use "
    "torch.rand, or put the random numbers into the batch."
)


class Effects:
    """The effects that a forward left behind: attributes by name with what they hold now, tensors that it
    replaced; and ``finite``, what it took for true of its values."""

    def __init__(self) -> None:
        self.changed: dict[str, Any] = {}
        self.replaced: list[object] = []
        self.finite: list[Tensor] = []

    @property
    def first(self) -> str:
        """The name of one attribute that was left changed, if there is one."""
        return min(self.changed, default="")

    def apply(self, model: nn.Module) -> None:
        """Make the model as the forward left it, and forget that it was not."""
        for name, value in self.changed.items():
            prefix, _, attribute = name.rpartition(".")
            vars(model.get_submodule(prefix))[attribute] = value
        self.changed = {}

    @contextlib.contextmanager
    def noted(self, model: nn.Module, *, takes_finite: bool = False) -> Iterator[None]:
        """Note what a forward in this thread does besides computing, and refuse what can't be noted.
        ``takes_finite``: where it asks whether numbers are finite, they are."""
        before, tensors, generators = attributes(model), tensors_of(model), _generators(model)
        states = random_states(generators)
        python, arrays = random.getstate(), numpy.random.get_state()  # noqa: NPY002
        buffers = dict(model.named_buffers())
        self.finite.clear()
        with _Watch(self.finite if takes_finite else None):
            yield
        for name, (value, described) in attributes(model).items():
            if name not in before or before[name][1] != described:
                self.changed[name] = value
        left = set(map(id, tensors_of(model)))
        self.replaced += [tensor for tensor in tensors if id(tensor) not in left]
        for name, buffer in model.named_buffers():
            if buffers.get(name) is not buffer:
                raise CaptureError(f"The forward assigns the buffer {name}: {_WAY_OUT}")
        if random_states(generators) != states:
            random.setstate(python)
            numpy.random.set_state(arrays)  # noqa: NPY002
            raise UntraceableError(DRAWS)


def refuse_other_forward(first: fx.Graph, second: fx.Graph, before: str, after: str) -> None:
    """Refuse a forward that leaves an attribute changed and does not compute the same again."""
    if after or computation(first) != computation(second):
        raise CaptureError(f"The forward changes {before or after}, and what it computes with it: {_WAY_OUT}")


def computation(graph: fx.Graph) -> tuple[list[str], list[str]]:
    """A graph's inputs and operations; in which order modules hold parameters, a parametrization changes."""
    inputs = sorted(str(node.format_node()) for node in graph.nodes if node.op == "placeholder")
    return inputs, [str(node.format_node()) for node in graph.nodes if node.op != "placeholder"]


def _generators(model: nn.Module) -> list[Any]:
    """Return Python's and NumPy's generators: the global ones, and those that modules, the files of their
    forwards, and what these hold and call hold."""
    found = [*_GLOBAL]
    level: list[Any] = [space for m in model.modules() for space in (vars(m), _globals_of(m))]
    seen: set[int] = set()
    for _ in range(_DEEP):
        level = [x for x in {id(x): x for x in level if gc.is_tracked(x)}.values() if id(x) not in seen]
        seen.update(map(id, level))
        found += [x for x in level if isinstance(x, _GENERATORS)]
        inside = [gc.get_referents(x) for x in level if not isinstance(x, _CLOSED) and not _of_library(x)]
        level = [x for held in inside if len(held) <= _LARGE for x in held]
    return found


def _of_library(x: Any) -> bool:
    """Return whether something is a function that draws from no generator of a model's."""
    return isinstance(x, types.FunctionType) and str(x.__module__).partition(".")[0] in _LIBRARIES


def _globals_of(module: nn.Module) -> dict[str, Any] | None:
    return getattr(inspect.unwrap(type(module).forward), "__globals__", None)


def random_states(generators: Sequence[Any] = _GLOBAL) -> bytes:
    """Return the states of generators, of those of a class of its own what the base class knows."""
    python = [x for x in generators if isinstance(x, random.Random)]
    others = [x for x in generators if not isinstance(x, random.Random)]
    states = [super(random.Random, x).getstate() for x in python]
    return pickle.dumps((states, [x.state for x in others]))


def unseeded(theirs: Any, generator: random.Random, a: Any = None, version: int = 2) -> None:
    """``random.Random.seed``, refused without a seed: its numbers are others in each step."""
    if a is None:
        raise UntraceableError(DRAWS)
    theirs(generator, a, version)


def no_inference(theirs: Any, context: torch.inference_mode) -> None:
    """``torch.inference_mode``, refused where it is one."""
    if context.mode:
        raise CaptureError("The forward enters torch.inference_mode: use torch.no_grad() there.")
    theirs(context)


def no_packing(theirs: Any, context: saved_tensors_hooks) -> None:
    """``saved_tensors_hooks``, refused but for torch's own."""
    if not type(context).__module__.startswith("torch.") or type(context) is saved_tensors_hooks:
        raise CaptureError(
            "The forward enters saved_tensors_hooks, which would never run: remove them, as the plan decides "
            "what is kept."
        )
    theirs(context)


def refuse_constants(
    exported: torch.export.ExportedProgram, model: nn.Module, replaced: list[object]
) -> None:
    """Refuse a forward that reads tensors which are others the next time, or are parameters."""
    owners = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}
    for spec in exported.graph_signature.input_specs:
        if spec.kind != InputKind.CONSTANT_TENSOR:
            continue
        name = strip(str(spec.target))
        constant = exported.constants[str(spec.target)]
        if isinstance(constant, FakeTensor) or any(constant is tensor for tensor in replaced):
            raise CaptureError(
                f"The forward reads a tensor that another one left behind ({name}): {_WAY_OUT}"
            )
        owner = owners.get(constant.untyped_storage()._cdata)
        if owner is not None:
            raise CaptureError(
                f"The forward reads the parameter {owner} around its module, as a function that closes over "
                "it does: read it through the module that is called."
            )
