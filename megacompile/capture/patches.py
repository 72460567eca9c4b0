"""The patches of a capture: what of torch and transformers is replaced while a forward is traced."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._functorch import eager_transforms
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megacompile.capture import changed_buffers, own_gradients, recurrent, refusals, replacements
from megacompile.capture.refusals import refused
from megacompile.errors import CaptureError, UntraceableError

# ------------------------------------------------------------------------------------------------------------
# Casts of operands in a model's forward: float32 beside weights of a lower precision, as autocast treats it.
#
# A batch's floats come in float32, whatever the model computes in. Where a product gets them beside a tensor
# of bfloat16 or float16, they are cast down to it. Where a norm gets them beside weights of such a dtype, the
# weights are cast up. A parameter that is kept in float32 is never cast: a product casts up what it gets
# beside it. Without this, each such call is an error of torch's. Operands that agree stay as they are.


_LOW = (torch.bfloat16, torch.float16)
_PRODUCTS = frozenset(
    {
        F.linear, F.bilinear, torch.bilinear, F.scaled_dot_product_attention,
        torch.conv1d, torch.conv2d, torch.conv3d,
        torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
        torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.addmv, torch.addbmm, torch.baddbmm,
        torch.einsum, torch.chain_matmul, torch.prelu,
        torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu,
        Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.mv, Tensor.addmm,
        Tensor.addmv, Tensor.addbmm, Tensor.baddbmm,
    }
)  # fmt: skip
_NORMS = frozenset({F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm, torch.layer_norm,
                    torch.group_norm, torch.batch_norm, torch.instance_norm, torch.rms_norm})  # fmt: skip


class MixedDtypes(TorchFunctionMode):
    """Cast mixed operands of products and norms within."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            args, kwargs = _in_one_dtype(args, kwargs)
        elif func in _NORMS:
            if func in (F.batch_norm, torch.batch_norm) and _trains(args, kwargs):
                return _by_its_own_statistics(func, args, kwargs)
            args, kwargs = _raised(args, kwargs)
        return func(*args, **kwargs)


def _in_one_dtype(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The operands, those of float32 in the lower dtype that stands beside them; all in float32 where a
    parameter is."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    low = {x.dtype for x in tensors if x.dtype in _LOW}
    if len(low) != 1:
        return args, kwargs
    (before, after) = torch.float32, low.pop()
    # codes are decoded in the dtype that the subclass around them chooses
    given = [x for x in tensors if x.dtype == before and not is_traceable_wrapper_subclass(x)]
    if any(isinstance(of, nn.Parameter) for x in given for of in (x, x._base)):
        before, after = after, before

    def cast(x: Tensor) -> Tensor:
        return x.to(after) if x.dtype == before and not is_traceable_wrapper_subclass(x) else x

    return pytree.tree_map_only(Tensor, cast, (args, kwargs))  # type: ignore[no-any-return]


def _trains(args: Any, kwargs: Any) -> bool:
    """Return whether a batch norm is one by the batch's own statistics."""
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


def _by_its_own_statistics(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A batch norm in float32 where its weights or running statistics are: of an input in 16 bits, torch's
    fake operators give mean and deviation in so few, and its kernels do not.

    Refuse one that would change a raised copy of its running statistics, and not these.
    """
    first, *others = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    low = [x for x in others if x.dtype in _LOW and not isinstance(x, nn.Parameter)]
    if low and first.dtype == torch.float32:
        raise CaptureError(
            f"A batch norm has running statistics of {low[0].dtype} beside an input of torch.float32: call "
            "float() on that module."
        )
    if first.dtype not in _LOW or all(x.dtype in _LOW for x in others):
        args, kwargs = _raised(args, kwargs)
        return func(*args, **kwargs)
    args, kwargs = pytree.tree_map(lambda x: x.float() if x is first else x, (args, kwargs))
    return func(*args, **kwargs).to(first.dtype)


def _raised(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The operands of a norm, its weights in float32 where its input is."""
    first = args[0] if args else kwargs.get("input")
    if not isinstance(first, Tensor) or first.dtype != torch.float32:
        return args, kwargs
    raised: tuple[Any, Any] = pytree.tree_map_only(
        Tensor, lambda x: x.float() if x.dtype in _LOW else x, (args, kwargs)
    )
    return raised


# ------------------------------------------------------------------------------------------------------------
# Rotary embeddings of transformers whose frequencies depend on how long the sequence is.
#
# A model's own forward keeps the frequencies of the batch at hand in a buffer. Here they are a value of the
# graph: LongRoPE (arXiv 2402.13753) chooses by the largest position, as transformers does; dynamic NTK
# scaling is the original embedding up to the original length, and beyond it depends on all batches before:
# refused.


_UPDATES = "transformers.modeling_rope_utils"


def turning_lengths(model: nn.Module) -> frozenset[int]:
    """The lengths beyond which some rotary embedding of the model computes otherwise."""
    rotary: list[Any] = [module for module in model.modules() if depends_on_length(module)]
    return frozenset(length for module in rotary for length in _limits(module))


def _limits(rotary: Any) -> Iterator[int]:
    types = rotary.rope_type if isinstance(rotary.rope_type, dict) else {None: rotary.rope_type}
    for layer_type, name in types.items():
        if name == "longrope":
            yield _original_length(rotary, layer_type)
        elif "dynamic" in name:
            yield rotary.original_max_seq_len


def _original_length(rotary: Any, layer_type: str | None) -> int:
    parameters = rotary.config.rope_parameters
    length: int = (parameters if layer_type is None else parameters[layer_type])[
        "original_max_position_embeddings"
    ]
    return length


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding whose frequencies depend on the length."""
    types = getattr(module, "rope_type", None)
    named = list(types.values()) if isinstance(types, dict) else [types]
    if not any(isinstance(name, str) and (name == "longrope" or "dynamic" in name) for name in named):
        return False
    forward: Any = type(module).forward
    while forward := getattr(forward, "__wrapped__", None):
        if getattr(forward, "__globals__", {}).get("__name__") == _UPDATES:
            return True
    return False


@torch.no_grad()
def rotary_forward(
    positions_given: bool,
    theirs: Any,
    rotary: Any,
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> Any:
    """The forward of an embedding that depends on the length, which writes no frequencies into its buffers.

    ``positions_given`` says that positions come with the batch, so that no shape tells the largest.
    """
    named = {} if layer_type is None else {"layer_type": layer_type}
    name: Any = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
    frequencies = None
    if "dynamic" in name:
        frequencies = _original(rotary, position_ids, layer_type, positions_given)
    elif name == "longrope":
        frequencies = _short_or_long(rotary, position_ids, layer_type, x.device)
    buffer = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    module = rotary if frequencies is None else _With(rotary, buffer, frequencies)
    return inspect.unwrap(theirs)(module, x, position_ids, **named)


class _With:
    """A module as its forward sees it, with other frequencies."""

    def __init__(self, module: nn.Module, buffer: str, frequencies: Tensor) -> None:
        self._module = module
        setattr(self, buffer, frequencies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _prefixed(module: nn.Module, layer_type: str | None, name: str) -> Any:
    return getattr(module, name if layer_type is None else f"{layer_type}_{name}")


def _original(rotary: Any, positions: Tensor, layer_type: str | None, positions_given: bool) -> Tensor:
    """Dynamic NTK scaling where it scales nothing, or refused."""
    limit = rotary.original_max_seq_len
    if positions_given or positions.dim() != 2 or positions.shape[-1] > limit:
        raise CaptureError(
            "The dynamic rotary embedding of this model depends on all batches before, where positions may "
            f"reach {limit}: give batches of at most {limit} tokens and no position_ids, or set another "
            "rope_type, such as yarn."
        )
    frequencies: Tensor = _prefixed(rotary, layer_type, "original_inv_freq")
    return frequencies


def _short_or_long(rotary: Any, positions: Tensor, layer_type: str | None, device: torch.device) -> Tensor:
    """LongRoPE's frequencies [dim / 2] for the largest of these positions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    limit = _original_length(rotary, layer_type)
    short: Tensor = _prefixed(rotary, layer_type, "original_inv_freq").to(device)
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, device, seq_len=limit + 1, layer_type=layer_type)
    return torch.where(positions.max() + 1 > limit, long, short)


# ------------------------------------------------------------------------------------------------------------
# What is replaced while a forward is captured: the one table of it, and the one way of replacing.
#
# In: functions of the other modules of this stage, each of which is given what it replaces, then the call's
# arguments. Functions of the whole process are replaced for the calls of one thread; other threads run
# torch's own, and wait for their turn where they want to replace some themselves.


_ABSENT = object()
_THEIRS = "_in_whose_place"  # of a function that stands in the place of another, as long as it is patched
_lock = threading.RLock()  # what is replaced is the whole process's


class Patch(NamedTuple):
    """An attribute, or a dict's entry, with what takes its place, a function or a plain value, and why."""

    owner: Any
    name: str
    ours: Any
    why: str


_RECURRENCES: dict[str, tuple[Callable[..., Any], str]] = {  # of transformers, in the file of each model
    "torch_chunk_gated_delta_rule": (replacements.gated_delta_rule, "loops over rows and chunks, unrolled"),
    "mamba2_chunk_scan": (
        replacements.mamba2_chunk_scan,
        "scores of all pairs of a chunk, for all chunks at once",
    ),
}
_AUGMENTS = "_mask_input_features"  # SpecAugment of Whisper
_NO_GRADIENTS = "a graph holds a forward alone"
_UNROLLED = "fused ones hide their dropout, and are traced step by step"
_BY_VALUES = "depends on values, which tracing does not know"
_NEVER = "would never run"
_ONCE = "a program would draw once"
_COUNTED = "random numbers come from a counter, so that a recompute repeats them"

REFUSED: tuple[Patch, ...] = (
    Patch(
        torch.autograd.Function, "apply", own_gradients.apply, "a graph knows torch's gradient rules alone"
    ),
    Patch(torch.autograd, "_engine_run_backward", refused(refusals.BACKWARD), _NO_GRADIENTS),
    Patch(eager_transforms, "grad_increment_nesting", refused(refusals.GRAD), _NO_GRADIENTS),
    Patch(eager_transforms, "_construct_standard_basis_for", refused(refusals.JACFWD), _NO_GRADIENTS),
    Patch(Tensor, "register_hook", refusals.gradient_hook, _NEVER),
    Patch(random.Random, "seed", refusals.unseeded, _ONCE),
    Patch(
        random, "_urandom", refused(refusals.DRAWS, UntraceableError), _ONCE
    ),  # NumPy's seeds where none is given, too
    Patch(FakeTensor, "is_cuda", property(refusals.is_cuda), "a graph has one side of a branch"),
    Patch(saved_tensors_hooks, "__enter__", refusals.no_packing, _NEVER),
    Patch(torch.inference_mode, "__enter__", refusals.no_inference, "a trace does not hold the mode"),
    Patch(torch._VF, "_pack_padded_sequence", refused(recurrent.PACKED), _BY_VALUES),
    Patch(torch, "ctc_loss", refused(refusals.CTC, UntraceableError), _BY_VALUES),
    Patch(F, "gaussian_nll_loss", refused(refusals.GAUSSIAN, UntraceableError), _BY_VALUES),
    Patch(Distribution, "__init__", refusals.unchecked, _BY_VALUES),
    Patch(Distribution, "_validate_sample", refusals.nothing, _BY_VALUES),
    Patch(
        torch.utils.checkpoint,
        refusals.CHECKPOINT,
        refusals.once,
        "the plan decides what is recomputed; export takes how nested ones save inputs for no_grad's end",
    ),
)
"""In a forward that is captured, and its loss: what a graph would lose is refused, or done without."""

_OURS: tuple[Patch, ...] = (
    Patch(F, "dropout", replacements.dropout, _COUNTED),
    Patch(torch, "dropout", replacements.dropout, _COUNTED),
    Patch(
        F, "scaled_dot_product_attention", replacements.attention, "one node of known cost on every device"
    ),
    Patch(transformer, "_detect_is_causal_mask", replacements.said_to_be_causal, _BY_VALUES),
    Patch(torch, "bincount", replacements.bincount, _BY_VALUES),
    Patch(nn.modules.batchnorm._BatchNorm, "forward", changed_buffers.batch_norm, _BY_VALUES),
    Patch(
        nn.SyncBatchNorm, "forward", changed_buffers.sync_batch_norm, "a program of one rank has one batch"
    ),
    Patch(nn.RNNBase, "check_input", recurrent.check_input, "a batch's floats may come in float32"),
    Patch(torch._VF, "lstm", recurrent.lstm, _UNROLLED),
    Patch(torch._VF, "gru", recurrent.without_cells("gru"), _UNROLLED),
    Patch(torch._VF, "rnn_tanh", recurrent.without_cells("tanh"), _UNROLLED),
    Patch(torch._VF, "rnn_relu", recurrent.without_cells("relu"), _UNROLLED),
)
"""In a model's forward, captured or eager: our operators in the place of torch's."""


def _of_transformers(
    model: nn.Module, sites: replacements.CallSites, positions_given: bool
) -> Iterator[Patch]:
    """The same for transformers. A model keeps the name of its attention, "sdpa" or "eager": it asks for it
    before it does what a boolean mask needs, or an additive one; others become "eager".
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or "transformers.modeling_utils" not in sys.modules:
        return  # no model of theirs; what is imported within an export misses its registration as a pytree
    held = {id(v): v for m in model.modules() for v in vars(m).values()}
    for config in held.values():
        if (
            isinstance(config, transformers.PreTrainedConfig)
            and config._attn_implementation_internal != "sdpa"
        ):
            yield Patch(config, "_attn_implementation_internal", "eager", "the names that we stand for")
    attention, makers = transformers.AttentionInterface, transformers.AttentionMaskInterface
    for name in ("eager", "sdpa"):
        ours = replacements.transformers_attention
        yield Patch(attention._global_mapping, name, ours, "one node of known cost on every device")
        yield Patch(makers._global_mapping, name, sites.masks.make, "plain bands are computed, not read")
    masking, masks = sys.modules["transformers.masking_utils"], sites.masks
    for name, own, why in (
        ("_preprocess_mask_arguments", masks.prepare, "a batch's own mask of padding is told"),
        ("packed_sequence_compatibility_function", masks.pack, "documents are told by their bounds"),
    ):
        if hasattr(masking, name):
            yield Patch(masking, name, own, why)
    if not positions_given:
        yield Patch(
            masking, "find_packed_sequence_indices", refusals.nothing, "a model's own are never packed"
        )
    for name in ("longt5", "switch_transformers", "udop"):
        file = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
        if file is not None:
            yield Patch(
                file, "is_torchdynamo_compiling", refusals.nothing, "they make a mask of ones, but not then"
            )
    for name in {kind.__module__ for module in model.modules() for kind in type(module).__mro__}:
        for function, (recurrence, why) in _RECURRENCES.items():
            if name.startswith("transformers.") and hasattr(sys.modules.get(name), function):
                yield Patch(sys.modules[name], function, recurrence, why)
    flash = "is_flash_attention_requested"
    for kind in {type(module) for module in model.modules()}:
        file, forward = sys.modules.get(kind.__module__), vars(kind).get("forward")
        if hasattr(file, flash) and forward and "cu_seqlens" in inspect.signature(forward).parameters:
            yield Patch(kind, "forward", replacements.packed_forward, "one call for all images of a row")
            yield Patch(file, flash, replacements.packs, "one call for all images of a row")
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if kind.__module__.startswith("transformers.") and _AUGMENTS in vars(kind):
            yield Patch(kind, _AUGMENTS, replacements.augmented_copy, "it writes into the batch")
    for kind in {type(module) for module in model.modules() if depends_on_length(module)}:
        forward = functools.partial(rotary_forward, positions_given)
        yield Patch(kind, "forward", forward, "frequencies are values of the graph, not writes into a buffer")


@contextlib.contextmanager
def our_operators(
    model: nn.Module,
    rng: Tensor,
    *,
    positions_given: bool = False,
    padding: Tensor | None = None,
    of_ones: bool = False,
) -> Iterator[None]:
    """Within the context ``model`` runs :mod:`~megacompile.capture.sdpa` and
    :mod:`~megacompile.capture.counter_rng` that are ours.

    ``rng`` is int64 [2], (seed, 0). One forward per context: call sites are numbered from 0.
    ``positions_given`` says that the batch brings its own ``position_ids``, so that transformers must
    look for packed sequences in them; positions that a model makes itself are never packed. ``padding`` is a
    batch's mask of padding that causal attention is to leave out, and all attention where it is ``of_ones``.

    Used by ``capture``, so that the graph holds them, and by eager reference runs, so that eager PyTorch
    computes the same function with the same dropout masks.
    """
    with (
        _lock,
        replacements.numbered(rng, padding, of_ones) as sites,
        replaced((*_OURS, *_of_transformers(model, sites, positions_given))),
        MixedDtypes(),
    ):
        yield


@contextlib.contextmanager
def replaced(patches: Iterable[Patch]) -> Iterator[None]:
    """Within the context each patch is in the place of what it replaces, functions for this thread alone."""
    with _lock, contextlib.ExitStack() as undo:
        for patch in patches:
            _replace(patch, undo)
        yield


def _replace(patch: Patch, undo: contextlib.ExitStack) -> None:
    owner, name, ours, _ = patch
    if isinstance(owner, dict):
        own, put, drop = owner, owner.__setitem__, owner.__delitem__
        theirs = owner.get(name)
    else:
        own, put, drop = vars(owner), functools.partial(setattr, owner), functools.partial(delattr, owner)
        theirs = getattr(owner, name)
    before = own.get(name, _ABSENT)
    if isinstance(before, classmethod):
        ours = classmethod(_in_this_thread(ours, before.__func__))
    elif isinstance(before, types.ClassMethodDescriptorType):  # a class method in C
        ours = classmethod(_in_this_thread(ours, functools.partial(_called_on, before)))
    elif callable(ours):  # without an original there is nothing else for other threads
        ours = functools.partial(ours, None) if theirs is None else _in_this_thread(ours, theirs)
    put(name, ours)
    if before is _ABSENT:
        undo.callback(drop, name)
    else:
        undo.callback(put, name, before)


def _in_this_thread(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """``ours``, given ``theirs`` first, for calls from the thread that asks for it, else ``theirs``."""
    thread = threading.get_ident()

    @functools.wraps(theirs, assigned=("__name__", "__doc__"))
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return ours(theirs, *args, **kwargs)
        return theirs(*args, **kwargs)

    vars(call)[_THEIRS] = theirs
    return call


def unpatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in whose place patches stand."""
    while _THEIRS in getattr(function, "__dict__", ()):
        function = vars(function)[_THEIRS]
    return function


def _called_on(method: types.ClassMethodDescriptorType, kind: type, *args: Any, **kwargs: Any) -> Any:
    return method.__get__(None, kind)(*args, **kwargs)


@contextlib.contextmanager
def graphs_alone() -> Iterator[None]:
    """Let torch make graphs alone, without their Python source and a stack trace for each node."""
    with replaced(_ALONE):
        yield


def _later(theirs: Callable[[fx.GraphModule], Any], module: fx.GraphModule) -> None:
    """Write a graph's source when it is called."""

    def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        theirs(self)
        return self.forward(*args, **kwargs)

    type(module).forward = forward  # each module of a graph has a class of its own


def _without_stacks(theirs: Callable[..., None], tracer: _ModuleStackTracer, *given: Any) -> None:
    """Make export's tracer, which else walks and formats the stack at each of its nodes."""
    theirs(tracer, *given)
    tracer.record_stack_traces = False


_ALONE = (
    Patch(fx.GraphModule, "recompile", _later, "nobody reads the source of most graphs"),
    Patch(_ModuleStackTracer, "__init__", _without_stacks, "nobody reads the stack of a node"),
)
