"""Trace: a module and a batch become one flat, functional ``torch.fx`` graph of the loss, or of outputs.

In: the module (its values are never read), one batch, what of its forward is wanted (:class:`Request`), and
how it is traced (:class:`How`). Out: :class:`Captured`, or the :class:`Reason` why there is none in this way.
:mod:`~megacompile.capture.attempts` lists the ways.

Invariants: one placeholder per parameter *object* (tied names are merged), no mutation but the last writes of
buffers, no hidden randomness, gradient barriers (``no_grad``, ``detach``) kept, every node still names its
module.
Parameters are traced as fake tensors in the dtype they will compute in, so no weight is touched.
"""

from __future__ import annotations

import logging
import operator
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from megacompile.capture.changed_buffers import write_changes
from megacompile.capture.exported_graph import clean
from megacompile.capture.fake_copy import fake_copy
from megacompile.capture.frozen_parts import frozen_part, run_parts_for_real
from megacompile.capture.functionalise import functionalise
from megacompile.capture.grouped_product_gradient import define_grouped_gradient
from megacompile.capture.host_values import HostValues
from megacompile.capture.loss_cut import LossCut
from megacompile.capture.loss_value import LossFn, apply_loss, divide, divides, find_loss, given_batch
from megacompile.capture.masked_writes import choose_by_masks, refuse_masked_writes
from megacompile.capture.parameter_forms import Form
from megacompile.capture.patches import REFUSED, Patch, graphs_alone, our_operators, replaced
from megacompile.capture.random_draws import replace_draws
from megacompile.capture.refusals import refuse_mixed_products, refuse_mutations, refuse_sparse, refuse_writes
from megacompile.capture.refused_calls import fake_kernels_named, forward_runs
from megacompile.capture.repeated_layers import LayersDifferError, RepeatedLayers
from megacompile.capture.side_effects import Effects, refuse_constants, refuse_other_forward
from megacompile.capture.untraceable import untraceable
from megacompile.capture.written_arguments import return_writes
from megacompile.errors import BudgetError, CaptureError, UntraceableError
from megacompile.graph.captured import Captured, given_gradients, strip
from megacompile.graph.forward_outputs import (
    OutputsFn,
    Returned,
    Structure,
    all_outputs,
    copy_results,
    returned,
    split,
)
from megacompile.graph.right_padding import reads_no_padding

aten = torch.ops.aten

TRACING = threading.RLock()
"""Held while torch traces, one model at a time: it sets flags of the whole process, by which also functions
that other threads call, such as torch's optimizers, compute otherwise."""


_LOGS = GuardOnDataDependentSymNode.__module__, FakeTensorMode.__module__


@dataclass(frozen=True)
class Request:
    """What is captured: ``loss(model(*args, **kwargs))`` in the model's present train/eval mode.

    ``trained`` names the parameters that get a gradient. ``evaluate`` traces in eval mode and without
    gradients instead. What ``outputs`` makes of the forward, if it is given, takes the place of the loss.
    ``padded_right``: :func:`is_padded_right` holds of the batch, and the graph may use this.
    ``hides_nothing``: its mask is all ones.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    forms: Mapping[str, Form]
    trained: Collection[str]
    loss_fn: LossFn | None = None
    evaluate: bool = False
    outputs: OutputsFn | None = None
    padded_right: bool = False
    hides_nothing: bool = False


class Reason:
    """Says why an attempt gave nothing that can be used."""


class LayersDiffer(Reason):
    """Layers that were taken for equal are not."""


class ReadsPadding(Reason):
    """The loss depends on what the batch has at the right of its rows."""


@dataclass(frozen=True)
class ChangesAttributes(Reason):
    """The forward left attributes of modules changed, one of them ``changed``: a second one, on the same
    ``inputs``, tells whether it computes the same."""

    captured: Captured
    changed: str
    forward: _Forward
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Refused(Reason):
    """Something fails that another attempt may avoid; ``error`` is for the user, if none does."""

    error: CaptureError


class NeedsValues(Refused):
    """The forward cannot be traced as long as values of the batch are unknown."""


@dataclass(frozen=True)
class Untraceable(Refused):
    """Nor can it where they are known; the trace failed in the frozen ``part`` of the model, or in none."""

    part: str | None


@dataclass(frozen=True)
class How:
    """The way in which a forward is traced.

    ``repeats``: equal layers are traced once. ``proves_padding``: padding at the right is left out of masks,
    if that can be shown to change nothing. ``reads_values``: what the forward reads of the batch's values is
    computed by a prologue; else it is refused. ``parts`` are the paths of frozen modules that run in eager
    PyTorch, and why each cannot be traced. ``first`` is a forward that another is to be compared with.
    """

    repeats: bool = True
    proves_padding: bool = True
    reads_values: bool = False
    parts: Mapping[str, str] = field(default_factory=dict)
    first: ChangesAttributes | None = None


class _Forward(nn.Module):
    """Runs a copy of the model on (args, kwargs) with our operators and returns what is wanted of it: the
    scalar loss, or the tensors of what ``outputs`` returns.

    ``structure`` is what surrounds them. ``outside``: they are trained on. ``leaves_out``: causal attention
    gets no mask of padding. ``blinds``: this is still to be proven. ``returned`` is what a function of the
    user's was given. ``host`` makes what is needed of the batch's values.
    """

    structure: Structure
    returned: Returned | None = None
    host: HostValues | None = None
    request: Request
    how: How

    def __init__(self, copied: nn.Module, request: Request, how: How) -> None:
        super().__init__()
        self.model, self.effects = copied, Effects()
        vars(self).update(request=request, how=how)
        self.outside = request.outputs is not None and not request.evaluate
        self.blinds = request.padded_right and how.proves_padding
        self.leaves_out = self.blinds or request.hides_nothing

    def forward(self, rng: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        try:
            stays = isinstance(self.request.outputs, LossCut)
            tensors, vars(self)["structure"] = split(self._wanted(rng, args, kwargs), stays=stays)
            for flag in self.effects.finite:
                tensors = [torch.where(flag, x, torch.nan) if x.is_floating_point() else x for x in tensors]
        except GuardOnDataDependentSymNode as error:  # as it is, export would print the graph so far
            raise untraceable(error, self.model, _Forward.forward.__code__) from None
        return tensors

    def _wanted(self, rng: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Where modules are shared, an attribute that is one is export's stand-in, of a class of its own: it
        # is called, so that nodes have its path, and the module's class, which others inherit, is patched.
        model = vars(self)["_modules"]["model"]
        request, outputs_of = self.request, self.request.outputs
        given = kwargs.get("position_ids") is not None
        with (
            replaced(REFUSED),
            forward_runs(),
            fake_kernels_named(),
            self.effects.noted(model, takes_finite=self.how.reads_values),
            self._watched(args, kwargs),
        ):
            taken, named, rest = (args, kwargs, ())
            if divides(kwargs, request.loss_fn, outputs_of):
                taken, named, rest = divide(model, args, kwargs, outputs_of or request.loss_fn)
            padding = kwargs.get("attention_mask") if self.leaves_out else None
            layers = RepeatedLayers(model, rng).patches() if self.how.repeats else ()
            of_ones = request.hides_nothing
            with (
                our_operators(model, rng, positions_given=given, padding=padding, of_ones=of_ones),
                replaced(layers),
            ):
                if isinstance(outputs_of, LossCut):
                    return outputs_of.forward(self.model, taken, named)
                outputs = self.model(*taken, **named)
            if (outputs_of or request.loss_fn) not in (None, all_outputs):
                vars(self)["returned"] = returned(outputs)
            if outputs_of is not None:
                return outputs_of(outputs, given_batch(args, kwargs))
            if request.loss_fn is None:
                return find_loss(outputs)
            return apply_loss(request.loss_fn, outputs, args, kwargs, rest)

    def _watched(self, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        if not self.how.reads_values:
            return nullcontext()
        leaves = pytree.tree_leaves((self.request.args, self.request.kwargs))
        vars(self)["host"] = host = HostValues(self.model, leaves)
        return host.watching(pytree.tree_leaves((args, kwargs)))


def trace(request: Request, how: How) -> Captured | Reason:
    """Trace a forward once.

    Raises :class:`CaptureError` where it writes into a parameter or the batch, draws random numbers that are
    not ours, returns no scalar loss, or one without a gradient for what is trained.
    """
    try:
        captured = _trace_first(request, how) if how.first is None else _trace_again(how.first, request)
    except LayersDifferError:
        return LayersDiffer()
    except UntraceableError as error:
        if not how.reads_values:
            return NeedsValues(error)
        return Untraceable(error, frozen_part(request.model, error.module, request.trained))
    if isinstance(captured, Captured) and request.trained and not request.evaluate:
        _refuse_without_gradient(captured, request)
    return captured


def _trace_first(request: Request, how: How) -> Captured | Reason:
    forward, inputs = _prepared(request, how)
    captured = _trace(forward, inputs, request.model)
    if forward.blinds and not reads_no_padding(captured, *inputs[1:]):
        return ReadsPadding()
    if changed := forward.effects.first:
        return ChangesAttributes(captured, changed, forward, inputs)
    return captured


def _trace_again(first: ChangesAttributes, request: Request) -> Captured:
    """Trace a forward on the model as the first left it, and refuse one that computes otherwise."""
    forward, host = first.forward, first.forward.host
    forward.effects.apply(forward.model)
    again = _trace(forward, first.inputs, request.model)
    other = host is not None and forward.host is not None and not host.same_as(forward.host)
    after = first.changed if other else forward.effects.first
    refuse_other_forward(first.captured.graph, again.graph, first.changed, after)
    return first.captured


def _prepared(request: Request, how: How) -> tuple[_Forward, tuple[Any, ...]]:
    """Return the forward of a copy of the model, and the fake tensors that it is given."""
    define_grouped_gradient()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = fake_copy(request.model, request.forms, mode, request.trained)
    if request.evaluate:
        copied.eval().requires_grad_(False)
    _no_cache(copied)
    _no_draws(copied)
    run_parts_for_real(copied, how.parts)
    args, kwargs = request.args, request.kwargs
    with mode:
        rng = torch.zeros(2, dtype=torch.int64)
        args, kwargs = pytree.tree_map_only(Tensor, _fake_leaf, (args, kwargs))
    return _Forward(copied, request, how), (rng, args, kwargs)


def _refuse_without_gradient(captured: Captured, request: Request) -> None:
    if not captured.trainable:
        what = "loss" if request.outputs is None else "output"
        raise CaptureError(
            f"The {what} of {type(request.model).__name__} has no gradient for any parameter that the "
            "optimizer trains: look for a detach, a no_grad or an argmax on the way to it."
        )


def _trace(forward: _Forward, inputs: tuple[Any, ...], model: nn.Module) -> Captured:
    """Trace a forward.

    Raises :class:`LayersDifferError` where layers that were taken for equal are not.
    """
    try:
        with warnings.catch_warnings(), _quiet(*_LOGS), replaced(_FLAGS):
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # torch copies its own classes
            warnings.filterwarnings("ignore", message=".*assigned during export.*")  # ``effects`` judges it
            with graphs_alone():
                exported = torch.export.export(forward, inputs, strict=False)
            for part in exported.graph_module.modules():
                if isinstance(part, fx.GraphModule):
                    return_writes(part.graph)
            refuse_constants(exported, model, forward.effects.replaced)
            refuse_writes(exported)
            refuse_sparse(exported)
            graph, signature = functionalise(exported)
    except CaptureError as error:
        raise error.with_traceback(None) from None  # torch's frames tell nothing
    except MemoryError as error:
        raise BudgetError(
            f"The host has no memory left to capture {type(model).__name__}: raise the limit of this process."
        ) from error
    except Exception as error:
        raise untraceable(error, forward.model, _Forward.forward.__code__) from None
    return _flatten(graph, signature, exported.constants, forward, model)


def _fake_leaf(leaf: Tensor) -> Tensor:
    """A fake tensor of its own for each leaf: one object passed twice would become one input."""
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence what torch logs of a failure: it says less than the error that is raised for it."""
    logs = [logging.getLogger(name) for name in names]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, disabled in zip(logs, before, strict=True):
            log.disabled = disabled


def _as_they_are(_theirs: Callable[..., Any], *flags: Any) -> tuple[Any, ...]:
    """Export sets cuDNN's flags and sets them back: it reads TF32's older flag, which torch refuses where the
    newer ones say another, and its write fixes them for whatever a user sets later.
    """
    return flags


_FLAGS = (Patch(torch.backends.cudnn, "set_flags", _as_they_are, "TF32 would not be restored"),)


def _no_cache(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        for part in (config, getattr(config, "text_config", None)):
            if part is not None and getattr(part, "use_cache", False):
                part.use_cache = False


def _no_draws(model: nn.Module) -> None:
    """Tell PEFT's LoHa and LoKr that they never drop an adapter, because they would draw whether to."""
    for module in model.modules():
        dropouts = [getattr(module, name, None) for name in ("module_dropout", "rank_dropout")]
        if all(isinstance(values, dict) and not any(values.values()) for values in dropouts):
            module.training = False  # its parts stay as they are


def _flatten(
    graph: fx.Graph,
    signature: ExportGraphSignature,
    held: Mapping[str, Any],
    forward: _Forward,
    original: nn.Module,
) -> Captured:
    refuse_mutations(signature)
    write_changes(graph, signature, original)
    model = forward.model
    nodes = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    names: dict[InputKind, dict[str, Any]] = defaultdict(dict)  # what each placeholder is, by its kind
    for spec in signature.input_specs:
        names[spec.kind][spec.arg.name] = str(spec.target)
    parameters = _merge_tied(model, names[InputKind.PARAMETER], nodes)
    buffers = {name: strip(target) for name, target in names[InputKind.BUFFER].items()}
    rng, *leaves = names[InputKind.USER_INPUT]
    constants = {
        name: held[target]
        for kind, targets in names.items()
        for name, target in targets.items()
        if kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT)
    }
    made = [name for name, value in constants.items() if forward.host and forward.host.makes(value)]
    fake_mode = next(n.meta["val"].fake_mode for n in nodes.values() if "val" in n.meta)
    if forward.request.outputs is not None:
        copy_results(graph, fake_mode, shared=forward.outside)
    replace_draws(graph, nodes[rng])
    clean(graph)
    choose_by_masks(graph)
    refuse_masked_writes(graph, parameters)
    if forward.host:
        _rejoin(graph)
    refuse_mixed_products(graph)
    used = {n.name for n in graph.nodes if n.op == "placeholder"} | {rng}
    made = [name for name in made if name in used]
    prologue = forward.host.prologue([constants[name] for name in made]) if forward.host else None
    given = {parameters[node.name] for node in given_gradients(graph) if node.name in parameters}
    return Captured(
        graph=graph,
        parameters={n: p for n, p in parameters.items() if n in used},
        buffers={n: b for n, b in buffers.items() if n in used},
        inputs={n: i for i, n in enumerate([*leaves, *made]) if n in used},
        constants={n: c for n, c in constants.items() if n in used and n not in made},
        rng=rng,
        trainable=frozenset(n for n, p in model.named_parameters() if p.requires_grad and n in given),
        fake_mode=fake_mode,
        structure=forward.structure,
        outside=forward.outside,
        blind=forward.leaves_out,
        returned=forward.returned,
        prologue=prologue,
    )


def _rejoin(graph: fx.Graph) -> None:
    """Leave out splits whose pieces are put together again, so that their sizes are not the graph's."""
    for node in list(graph.nodes):
        pieces = node.args[0] if node.target is aten.cat.default else ()
        items = [piece for piece in pieces if piece.target is operator.getitem]
        splits = {item.args[0] for item in items}
        split = splits.pop() if len(splits) == 1 and len(items) == len(pieces) else None
        if split is None or split.target is not aten.split_with_sizes.default:
            continue
        parts, joined = split.meta["val"], [item.args[1] for item in items]
        dims = {
            (of.args[at] if len(of.args) > at else 0) % parts[0].dim() for of, at in ((split, 2), (node, 1))
        }
        if joined == list(range(len(parts))) and len(dims) == 1:
            node.replace_all_uses_with(split.args[0])
    graph.eliminate_dead_code()


def _merge_tied(model: nn.Module, targets: Mapping[str, str], nodes: Mapping[str, fx.Node]) -> dict[str, str]:
    """The parameter's first name by placeholder, of which each parameter object keeps one."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    first_name = {id(p): n for n, p in model.named_parameters()}
    by_object: dict[int, fx.Node] = {}
    merged: dict[str, str] = {}
    for name, target in targets.items():
        parameter = tensors[strip(target)]
        original = by_object.setdefault(id(parameter), nodes[name])
        if original is not nodes[name]:
            nodes[name].replace_all_uses_with(original)
        else:
            merged[name] = first_name[id(parameter)]
    return merged
