"""The patches of a capture: the one table of what of torch and transformers is replaced while a forward is
traced, and the one way of replacing.

In: functions of the other modules of this stage, each of which is given what it replaces, then the call's
arguments. Functions of the whole process are replaced for the calls of one thread; other threads run
torch's own, and wait for their turn where they want to replace some themselves.
"""

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

from megacompile.capture import (
    autograd_functions,
    changed_buffers,
    recurrent,
    refusals,
    refused_calls,
    replacements,
    side_effects,
)
from megacompile.capture.mixed_dtypes import MixedDtypes
from megacompile.capture.refused_calls import refused
from megacompile.capture.rotary_frequencies import depends_on_length, rotary_forward
from megacompile.errors import UntraceableError

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
        torch.autograd.Function,
        "apply",
        autograd_functions.apply,
        "a graph knows torch's gradient rules alone",
    ),
    Patch(torch.autograd, "_engine_run_backward", refused(refused_calls.BACKWARD), _NO_GRADIENTS),
    Patch(eager_transforms, "grad_increment_nesting", refused(refused_calls.GRAD), _NO_GRADIENTS),
    Patch(eager_transforms, "_construct_standard_basis_for", refused(refused_calls.JACFWD), _NO_GRADIENTS),
    Patch(Tensor, "register_hook", refusals.gradient_hook, _NEVER),
    Patch(random.Random, "seed", side_effects.unseeded, _ONCE),
    Patch(
        random, "_urandom", refused(side_effects.DRAWS, UntraceableError), _ONCE
    ),  # NumPy's seeds where none is given, too
    Patch(FakeTensor, "is_cuda", property(refusals.is_cuda), "a graph has one side of a branch"),
    Patch(saved_tensors_hooks, "__enter__", side_effects.no_packing, _NEVER),
    Patch(torch.inference_mode, "__enter__", side_effects.no_inference, "a trace does not hold the mode"),
    Patch(torch._VF, "_pack_padded_sequence", refused(recurrent.PACKED), _BY_VALUES),
    Patch(torch, "ctc_loss", refused(refused_calls.CTC, UntraceableError), _BY_VALUES),
    Patch(F, "gaussian_nll_loss", refused(refused_calls.GAUSSIAN, UntraceableError), _BY_VALUES),
    Patch(Distribution, "__init__", refused_calls.unchecked, _BY_VALUES),
    Patch(Distribution, "_validate_sample", refused_calls.nothing, _BY_VALUES),
    Patch(
        torch.utils.checkpoint,
        refused_calls.CHECKPOINT,
        refused_calls.once,
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
            masking, "find_packed_sequence_indices", refused_calls.nothing, "a model's own are never packed"
        )
    for name in ("longt5", "switch_transformers", "udop"):
        file = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
        if file is not None:
            yield Patch(
                file,
                "is_torchdynamo_compiling",
                refused_calls.nothing,
                "they make a mask of ones, but not then",
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
    """Within the context ``model`` runs :mod:`~megacompile.kernels.sdpa` and
    :mod:`~megacompile.kernels.dropout` that are ours.

    ``rng`` is int64 [2], (seed, 0). One forward per context: call sites are numbered from 0.
    ``positions_given``: the batch brings its own ``position_ids``, so transformers must look for packed
    sequences in them. A model's own positions are never packed. ``padding`` is a batch's mask of padding:
    causal attention leaves it out, all attention does if it is ``of_ones``.

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
            _put_in_place(patch, undo)
        yield


def _put_in_place(patch: Patch, undo: contextlib.ExitStack) -> None:
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
    """Keep torch from writing a graph's Python source, and a stack trace for each node."""
    with replaced(_ALONE):
        yield


def _source_when_called(theirs: Callable[[fx.GraphModule], Any], module: fx.GraphModule) -> None:
    """Write a graph's source when it is called."""

    def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        theirs(self)
        return self.forward(*args, **kwargs)

    type(module).forward = forward  # each module of a graph has a class of its own


def _without_stacks(theirs: Callable[..., None], tracer: _ModuleStackTracer, *given: Any) -> None:
    """Create export's tracer without stack traces, which it would format at each node."""
    theirs(tracer, *given)
    tracer.record_stack_traces = False


_ALONE = (
    Patch(fx.GraphModule, "recompile", _source_when_called, "nobody reads the source of most graphs"),
    Patch(_ModuleStackTracer, "__init__", _without_stacks, "nobody reads the stack of a node"),
)
