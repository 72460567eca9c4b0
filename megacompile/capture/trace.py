"""Capture: a module and a batch become one flat, functional ``torch.fx`` graph of the loss, or of outputs.

In: the module (its values are never read), one batch, what of its forward is wanted. Out:
:class:`Captured`. Invariants: one placeholder per parameter *object* (tied names are merged), no mutation,
no hidden randomness, gradient barriers (``no_grad``, ``detach``) kept, every node still names its module.
Parameters are traced as fake tensors in the dtype they will compute in, so no weight is touched.
"""

from __future__ import annotations

import logging
import operator
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import MappingProxyType
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
from megacompile.capture.frozen_parts import run_parts_for_real
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
from megacompile.errors import BudgetError, CaptureError
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


_NO_PARTS: Mapping[str, str] = MappingProxyType({})
_LOGS = GuardOnDataDependentSymNode.__module__, FakeTensorMode.__module__


class _Forward(nn.Module):
    """Runs the model on (args, kwargs) with our operators and returns what is wanted of it: the scalar loss,
    or the tensors of what ``outputs`` returns.

    ``structure`` is what surrounds them; ``outside`` says that they are trained on; ``leaves_out`` that
    causal attention gets no mask of padding, ``of_ones`` that no attention needs one; ``repeats`` that equal
    layers may be traced once. ``returned`` is what a function of the user's was given. ``leaves`` are the
    batch's for real, where ``host`` is to make what is needed of their values.
    """

    structure: Structure
    returned: Returned | None = None
    outside = of_ones = repeats = False
    leaves: list[Any] | None = None
    host: HostValues | None = None
    _loss_fn: LossFn | None
    _outputs: OutputsFn | None

    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, outputs: OutputsFn | None, effects: Effects
    ) -> None:
        super().__init__()
        self.model, self.leaves_out = model, False
        vars(self)["_loss_fn"] = loss_fn  # where it is a module, none of the model's
        vars(self)["_outputs"] = outputs
        self.effects = effects

    def forward(self, rng: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        try:
            stays = isinstance(self._outputs, LossCut)
            tensors, vars(self)["structure"] = split(self._wanted(rng, args, kwargs), stays=stays)
            for flag in self.effects.finite:
                tensors = [torch.where(flag, x, torch.nan) if _is_float(x) else x for x in tensors]
        except GuardOnDataDependentSymNode as error:  # as it is, export would print the graph so far
            raise untraceable(error, self.model, _Forward.forward.__code__) from None
        return tensors

    def _wanted(self, rng: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Where modules are shared, an attribute that is one is export's stand-in, of a class of its own: it
        # is called, so that nodes have its path, and the module's class, which others inherit, is patched.
        model = vars(self)["_modules"]["model"]
        given = kwargs.get("position_ids") is not None
        with (
            replaced(REFUSED),
            forward_runs(),
            fake_kernels_named(),
            self.effects.noted(model, takes_finite=self.leaves is not None),
            self._watched(args, kwargs),
        ):
            taken, named, rest = (args, kwargs, ())
            if divides(kwargs, self._loss_fn, self._outputs):
                function = self._outputs or self._loss_fn
                taken, named, rest = divide(model, args, kwargs, function)
            padding = kwargs.get("attention_mask") if self.leaves_out else None
            layers = RepeatedLayers(model, rng).patches() if self.repeats else ()
            of_ones = self.of_ones
            with (
                our_operators(model, rng, positions_given=given, padding=padding, of_ones=of_ones),
                replaced(layers),
            ):
                if isinstance(self._outputs, LossCut):
                    return self._outputs.forward(self.model, taken, named)
                outputs = self.model(*taken, **named)
            if (self._outputs or self._loss_fn) not in (None, all_outputs):
                vars(self)["returned"] = returned(outputs)
            if self._outputs is not None:
                return self._outputs(outputs, given_batch(args, kwargs))
            if self._loss_fn is None:
                return find_loss(outputs)
            return apply_loss(self._loss_fn, outputs, args, kwargs, rest)

    def _watched(self, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        if self.leaves is None:
            return nullcontext()
        vars(self)["host"] = host = HostValues(self.model, self.leaves)
        return host.watching(pytree.tree_leaves((args, kwargs)))


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point()


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    forms: Mapping[str, Form],
    trained: Collection[str] | None = None,
    loss_fn: LossFn | None = None,
    evaluate: bool = False,
    outputs: OutputsFn | None = None,
    padded_right: bool = False,
    hides_nothing: bool = False,
    reads_values: bool = False,
    parts: Mapping[str, str] = _NO_PARTS,
) -> Captured:
    """Trace ``loss(model(*args, **kwargs))`` in the model's present train/eval mode.

    ``trained`` names the parameters that get a gradient; None: all that require one. ``evaluate``
    traces in eval mode and without gradients instead. What ``outputs`` makes of the forward, if it is given,
    takes the place of the loss. ``padded_right`` says that :func:`is_padded_right` holds of the batch, of
    which the graph may then make use; ``hides_nothing`` that its mask is all ones. ``reads_values``: what the
    forward reads of the batch's values is computed by a prologue; else it is refused. ``parts`` are the paths
    of frozen modules that run in eager PyTorch, and why each cannot be traced.

    Raises :class:`CaptureError` where the forward branches on data, mutates a buffer, draws random
    numbers that are not ours, returns no scalar loss, or one without a gradient for what is trained.
    """
    define_grouped_gradient()
    if trained is None:
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
    options = (loss_fn, evaluate, outputs, padded_right, hides_nothing, reads_values, parts)
    if not reads_values:
        with suppress(LayersDifferError):
            return _captured(model, args, kwargs, forms, trained, *options, repeats=True)
    return _captured(model, args, kwargs, forms, trained, *options, repeats=False)


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    forms: Mapping[str, Form],
    trained: Collection[str],
    loss_fn: LossFn | None,
    evaluate: bool,
    outputs: OutputsFn | None,
    padded_right: bool,
    hides_nothing: bool,
    reads_values: bool,
    parts: Mapping[str, str],
    *,
    repeats: bool,
) -> Captured:
    """Trace a model of which a copy is made, whose equal layers may be traced once."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = fake_copy(model, forms, mode, trained)
    if evaluate:
        copied.eval().requires_grad_(False)
    _no_cache(copied)
    _no_draws(copied)
    run_parts_for_real(copied, parts)
    effects = Effects()
    forward = _Forward(copied, loss_fn, outputs, effects)
    forward.repeats = repeats
    vars(forward)["leaves"] = pytree.tree_leaves((args, kwargs)) if reads_values else None
    with mode:
        rng = torch.zeros(2, dtype=torch.int64)
        args, kwargs = pytree.tree_map_only(Tensor, _fake_leaf, (args, kwargs))
    inputs = (rng, args, kwargs)
    forward.outside = outputs is not None and not evaluate
    forward.leaves_out = padded_right or hides_nothing
    forward.of_ones = hides_nothing
    captured = _trace(forward, inputs, model)
    if padded_right and not reads_no_padding(captured, args, kwargs):
        forward.leaves_out = False
        captured = _trace(forward, inputs, model)
    changed = effects.first
    if changed:  # by the first forward: all later ones must compute the same
        effects.apply(copied)
        first = forward.host
        again = _trace(forward, inputs, model)
        other = first is not None and forward.host is not None and not first.same_as(forward.host)
        refuse_other_forward(captured.graph, again.graph, changed, changed if other else effects.first)
    if trained and not evaluate and not captured.trainable:
        raise _without_gradient("loss" if outputs is None else "output", model)
    return captured


def _without_gradient(what: str, model: nn.Module) -> CaptureError:
    return CaptureError(
        f"The {what} of {type(model).__name__} has no gradient for any parameter that the optimizer "
        "trains: look for a detach, a no_grad or an argmax on the way to it."
    )


def _trace(forward: _Forward, inputs: tuple[Any, ...], model: nn.Module) -> Captured:
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
    """Let PEFT's LoHa and LoKr, which draw whether to drop an adapter, know that they never do."""
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
    if forward._outputs is not None:
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
