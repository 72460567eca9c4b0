"""What is replaced while a forward is captured: the one table of it, and the one way of replacing.

In: functions of the other modules of this stage, each of which is given what it replaces, then the call's
arguments. Functions of the whole process are replaced for the calls of one thread; other threads run torch's
own, and wait for their turn where they want to replace some themselves.
"""

from __future__ import annotations

import contextlib
import functools
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
from torch.fx import config as fx_config
from torch.nn.modules import transformer

from megacompile.capture import calls, coded_weights, effects, recurrent, refusals, rotary, substitute
from megacompile.capture.calls import refused
from megacompile.capture.mixed_dtypes import MixedDtypes

_ABSENT = object()
_lock = threading.RLock()  # what is replaced is the whole process's


class Patch(NamedTuple):
    """An attribute, or a dict's entry, with what takes its place, a function or a plain value, and why."""

    owner: Any
    name: str
    ours: Any
    why: str


_RECURRENCES: dict[str, tuple[Callable[..., Any], str]] = {  # of transformers, in the file of each model
    "torch_chunk_gated_delta_rule": (substitute.gated_delta_rule, "loops over rows and chunks, unrolled"),
    "mamba2_chunk_scan": (
        substitute.mamba2_chunk_scan,
        "scores of all pairs of a chunk, for all chunks at once",
    ),
}
_NO_GRADIENTS = "a graph holds a forward alone"
_BY_VALUES = "depends on values, which tracing does not know"
_NEVER = "would never run"
_COUNTED = "random numbers come from a counter, so that a recompute repeats them"

REFUSED: tuple[Patch, ...] = (
    Patch(
        torch.autograd.Function, "apply", refusals.own_gradient, "a graph knows torch's gradient rules alone"
    ),
    Patch(torch.autograd, "_engine_run_backward", refused(calls.BACKWARD), _NO_GRADIENTS),
    Patch(eager_transforms, "grad_increment_nesting", refused(calls.GRAD), _NO_GRADIENTS),
    Patch(eager_transforms, "_construct_standard_basis_for", refused(calls.JACFWD), _NO_GRADIENTS),
    Patch(Tensor, "register_hook", refusals.gradient_hook, _NEVER),
    Patch(FakeTensor, "is_cuda", property(refusals.is_cuda), "a graph has one side of a branch"),
    Patch(saved_tensors_hooks, "__enter__", effects.no_packing, _NEVER),
    Patch(torch.inference_mode, "__enter__", effects.no_inference, "a trace does not hold the mode"),
    Patch(torch._VF, "_pack_padded_sequence", refused(recurrent.PACKED), _BY_VALUES),
    Patch(torch, "ctc_loss", refused(calls.CTC), _BY_VALUES),
    Patch(F, "gaussian_nll_loss", refused(calls.GAUSSIAN), _BY_VALUES),
    Patch(Distribution, "__init__", calls.unchecked, _BY_VALUES),
    Patch(Distribution, "_validate_sample", calls.nothing, _BY_VALUES),
    Patch(
        torch.utils.checkpoint,
        calls.CHECKPOINT,
        calls.once,
        "the plan decides what is recomputed; export takes how nested ones save inputs for no_grad's end",
    ),
)
"""In a forward that is captured, and its loss: what a graph would lose is refused, or done without."""

_OURS: tuple[Patch, ...] = (
    Patch(F, "dropout", substitute.dropout, _COUNTED),
    Patch(torch, "dropout", substitute.dropout, _COUNTED),
    Patch(F, "scaled_dot_product_attention", substitute.attention, "one node of known cost on every device"),
    Patch(transformer, "_detect_is_causal_mask", substitute.said_to_be_causal, _BY_VALUES),
    Patch(torch, "bincount", substitute.bincount, _BY_VALUES),
    Patch(torch._VF, "lstm", recurrent.lstm, "fused ones hide their dropout"),
    Patch(torch._VF, "gru", recurrent.gru, "fused ones hide their dropout"),
    Patch(torch._VF, "rnn_tanh", recurrent.rnn(torch.tanh), "fused ones hide their dropout"),
    Patch(torch._VF, "rnn_relu", recurrent.rnn(torch.relu), "fused ones hide their dropout"),
)
"""In a model's forward, captured or eager: our operators in the place of torch's."""


def _of_transformers(model: nn.Module, sites: substitute.CallSites, positions_given: bool) -> Iterator[Patch]:
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
        ours = substitute.transformers_attention
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
        yield Patch(masking, "find_packed_sequence_indices", calls.nothing, "a model's own are never packed")
    for name in ("longt5", "switch_transformers", "udop"):
        file = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
        if file is not None:
            yield Patch(
                file, "is_torchdynamo_compiling", calls.nothing, "they make a mask of ones, but not then"
            )
    for name in {kind.__module__ for module in model.modules() for kind in type(module).__mro__}:
        for function, (recurrence, why) in _RECURRENCES.items():
            if name.startswith("transformers.") and hasattr(sys.modules.get(name), function):
                yield Patch(sys.modules[name], function, recurrence, why)
    for kind in {type(module) for module in model.modules() if rotary.depends_on_length(module)}:
        forward = functools.partial(rotary.forward, positions_given)
        yield Patch(kind, "forward", forward, "frequencies are values of the graph, not writes into a buffer")


def _of_bitsandbytes(model: nn.Module) -> Iterator[Patch]:
    for kind in {type(module) for module in model.modules() if coded_weights.is_marked(module)}:
        yield Patch(kind, "forward", coded_weights.linear, "its weight is decoded where it is read")


@contextlib.contextmanager
def our_operators(
    model: nn.Module, rng: Tensor, *, positions_given: bool = False, padding: Tensor | None = None
) -> Iterator[None]:
    """Within the context ``model`` runs :mod:`~megacompile.capture.attention` and
    :mod:`~megacompile.capture.dropout` that are ours.

    ``rng`` is int64 [2], (seed, 0). One forward per context: call sites are numbered from 0.
    ``positions_given`` says that the batch brings its own ``position_ids``, so that transformers must
    look for packed sequences in them; positions that a model makes itself are never packed. ``padding`` is a
    batch's mask of padding that causal attention is to leave out.

    Used by ``capture``, so that the graph holds them, and by eager reference runs, so that eager PyTorch
    computes the same function with the same dropout masks.
    """
    with (
        _lock,
        substitute.numbered(rng, padding) as sites,
        replaced((*_OURS, *_of_bitsandbytes(model), *_of_transformers(model, sites, positions_given))),
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

    return call


def _called_on(method: types.ClassMethodDescriptorType, kind: type, *args: Any, **kwargs: Any) -> Any:
    return method.__get__(None, kind)(*args, **kwargs)


@contextlib.contextmanager
def graphs_alone() -> Iterator[None]:
    """Let torch make graphs alone, without their Python source and a stack trace for each node."""
    patches = [Patch(fx.GraphModule, "recompile", _later, "nobody reads the source of most graphs")]
    if hasattr(fx_config, "do_not_emit_stack_traces"):  # new in later torchs
        patches.append(Patch(fx_config, "do_not_emit_stack_traces", True, "nobody reads them"))
    with replaced(patches):
        yield


def _later(theirs: Callable[[fx.GraphModule], Any], module: fx.GraphModule) -> None:
    """Write a graph's source when it is called."""

    def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        theirs(self)
        return self.forward(*args, **kwargs)

    type(module).forward = forward  # each module of a graph has a class of its own
