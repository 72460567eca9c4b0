"""Capture: a module and a batch become one flat, functional ``torch.fx`` graph of the loss, or of outputs.

In: the module (its values are never read), one batch, what of its forward is wanted. Out: :class:`Captured`.
Invariants: one placeholder per parameter *object* (tied names are merged), no mutation, no hidden
randomness, gradient barriers (``no_grad``, ``detach``) kept, every node still names its module.
Parameters are traced as fake tensors in the dtype they will compute in, so no weight is touched.
"""

from __future__ import annotations

import inspect
import logging
import re
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from megacompile.capture.calls import FLEX, fake_kernels_named, forward_runs
from megacompile.capture.captured import Captured, given_gradients, strip
from megacompile.capture.clean import clean
from megacompile.capture.draws import replace_draws
from megacompile.capture.effects import Effects, refuse_constants, refuse_other_forward
from megacompile.capture.forms import Form, fake_copy
from megacompile.capture.functional import functionalise
from megacompile.capture.grouped import define_grouped_gradient
from megacompile.capture.loss import LossFn, apply_loss, divide, divides, find_loss, given_batch
from megacompile.capture.outputs import (
    OutputsFn,
    Returned,
    Structure,
    all_outputs,
    copy_results,
    returned,
    split,
)
from megacompile.capture.patching import REFUSED, Patch, graphs_alone, our_operators, replaced
from megacompile.capture.refusals import (
    refuse_mixed_products,
    refuse_mutations,
    refuse_sparse,
    refuse_writes,
)
from megacompile.capture.right_padding import reads_no_padding
from megacompile.errors import BudgetError, CaptureError

aten = torch.ops.aten
_LOGS = GuardOnDataDependentSymNode.__module__, FakeTensorMode.__module__


class _Forward(nn.Module):
    """Runs the model on (args, kwargs) with our operators and returns what is wanted of it: the scalar loss,
    or the tensors of what ``outputs`` returns.

    ``structure`` is what surrounds them; ``outside`` says that they are trained on; ``leaves_out`` that
    causal attention gets no mask of padding. ``returned`` is what a function of the user's was given.
    """

    structure: Structure
    returned: Returned | None = None
    outside = False
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
            tensors, vars(self)["structure"] = split(self._wanted(rng, args, kwargs))
        except GuardOnDataDependentSymNode as error:  # as it is, export would print the graph so far
            raise CaptureError(_explain(error, self.model)) from None
        return tensors

    def _wanted(self, rng: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("position_ids") is not None
        with replaced(REFUSED), forward_runs(), fake_kernels_named(), self.effects.noted(self.model):
            taken, named, rest = (args, kwargs, ())
            if divides(kwargs, self._loss_fn, self._outputs):
                function = self._outputs or self._loss_fn
                taken, named, rest = divide(self.model, args, kwargs, function)
            padding = kwargs.get("attention_mask") if self.leaves_out else None
            with our_operators(self.model, rng, positions_given=given, padding=padding):
                outputs = self.model(*taken, **named)
            if (self._outputs or self._loss_fn) not in (None, all_outputs):
                vars(self)["returned"] = returned(outputs)
            if self._outputs is not None:
                return self._outputs(outputs, given_batch(args, kwargs))
            if self._loss_fn is None:
                return find_loss(outputs)
            return apply_loss(self._loss_fn, outputs, args, kwargs, rest)


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
) -> Captured:
    """Trace ``loss(model(*args, **kwargs))`` in the model's present train/eval mode.

    ``trained`` names the parameters that get a gradient; None: all that require one. ``evaluate``
    traces in eval mode and without gradients instead. What ``outputs`` makes of the forward, if it is given,
    takes the place of the loss. ``padded_right`` says that :func:`is_padded_right` holds of the batch, of
    which the graph may then make use.

    Raises :class:`CaptureError` where the forward branches on data, mutates a buffer, draws random
    numbers that are not ours, returns no scalar loss, or one without a gradient for what is trained.
    """
    define_grouped_gradient()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if trained is None:
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
    copied = fake_copy(model, forms, mode, trained)
    if evaluate:
        copied.eval().requires_grad_(False)
    _no_cache(copied)
    _no_draws(copied)
    with mode:
        rng = torch.zeros(2, dtype=torch.int64)
        args, kwargs = pytree.tree_map_only(Tensor, _fake_leaf, (args, kwargs))
    effects = Effects()
    forward, inputs = _Forward(copied, loss_fn, outputs, effects), (rng, args, kwargs)
    forward.outside = outputs is not None and not evaluate
    forward.leaves_out = padded_right
    captured = _trace(forward, inputs, model)
    if padded_right and not reads_no_padding(captured, args, kwargs):
        forward.leaves_out = False
        captured = _trace(forward, inputs, model)
    changed = effects.first
    if changed:  # by the first forward: all later ones must compute the same
        effects.apply(copied)
        again = _trace(forward, inputs, model)
        refuse_other_forward(captured.graph, again.graph, changed, effects.first)
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
        raise CaptureError(_explain(error, forward.model)) from None
    return _flatten(graph, signature, exported.constants, forward)


def _fake_leaf(leaf: Tensor) -> Tensor:
    """A fake tensor of its own for each leaf: one object passed twice would become one input."""
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """What torch logs of a failure says less than the error that is raised for it."""
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
    graph: fx.Graph, signature: ExportGraphSignature, held: Mapping[str, Any], forward: _Forward
) -> Captured:
    refuse_mutations(signature)
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
    fake_mode = next(n.meta["val"].fake_mode for n in nodes.values() if "val" in n.meta)
    if forward._outputs is not None:
        copy_results(graph, fake_mode, shared=forward.outside)
    replace_draws(graph, nodes[rng])
    clean(graph)
    refuse_mixed_products(graph)
    used = {n.name for n in graph.nodes if n.op == "placeholder"} | {rng}
    given = {parameters[node.name] for node in given_gradients(graph) if node.name in parameters}
    return Captured(
        graph=graph,
        parameters={n: p for n, p in parameters.items() if n in used},
        buffers={n: b for n, b in buffers.items() if n in used},
        inputs={n: i for i, n in enumerate(leaves) if n in used},
        constants={n: c for n, c in constants.items() if n in used},
        rng=rng,
        trainable=frozenset(n for n, p in model.named_parameters() if p.requires_grad and n in given),
        fake_mode=fake_mode,
        structure=forward.structure,
        outside=forward.outside,
        blind=forward.leaves_out,
        returned=forward.returned,
    )


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


def _explain(error: Exception, model: nn.Module) -> str:
    """Return one sentence that names the line of the user's code, and the module, at which tracing failed."""
    stack = list(traceback.walk_tb(error.__traceback__))
    summary = traceback.StackSummary.extract(iter(stack))
    where = _line(summary)
    at = f" at {where}{_module_of(stack, model)}" if where else ""
    hint = "its control flow and shapes must not depend on the values of tensors"
    if any(frame.filename.endswith("flex_attention.py") for frame in summary):
        return f"The forward of {type(model).__name__} calls flex attention{at}, {FLEX}."
    if isinstance(error, GuardOnDataDependentSymNode):
        made = _making(error)
        if (origin := _line(made)) not in ("", where):
            return (
                f"The forward of {type(model).__name__} cannot be captured: {origin}"
                f"{_module_of(_still_running(stack, made), model)} makes a size that depends on the values "
                f"of tensors, and {where} needs it. Keep all rows there, and hide some by a mask, or select "
                "them before the batch comes to the program."
            )
        if "layerdrop" in at:
            hint = "layers that are dropped at random are not supported: set layerdrop to 0"
        elif "module_dropout" in at:
            hint = "adapters that are dropped at random are not supported: set both their dropouts to 0"
        return f"The forward of {type(model).__name__} cannot be captured{at}: {hint}."
    first_line = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    if isinstance(error, (TypeError, AttributeError, LookupError)):  # as it would raise without us
        return f"The forward of {type(model).__name__} fails{at}: {type(error).__name__}: {first_line}."
    if re.search(r"dtype int|types: Long", first_line):
        hint = "token ids and labels of classes are whole numbers: give them as .long()"
    elif "should be the same" in first_line or "dtype" in first_line:
        hint = "the batch's floats must have the dtype in which the model computes, compute_dtype="
    return f"The forward of {type(model).__name__} cannot be captured{at}: {first_line}; {hint}."


def _line(stack: Iterable[traceback.FrameSummary]) -> str:
    """Return the file, number and text of the innermost line of the user's code, or nothing."""
    torch_root = str(Path(inspect.getfile(torch)).parent)
    here = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in stack
        if not frame.filename.startswith((torch_root, here)) and "<" not in frame.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _module_of(stack: Iterable[tuple[FrameType, int]], model: nn.Module) -> str:
    """Return in which module below the model, the innermost, a stack is."""
    names = {id(module): f" of {name}" for name, module in model.named_modules() if name}
    inside = [names.get(id(frame.f_locals.get("self")), "") for frame, _ in stack]
    return next((name for name in reversed(inside) if name), "")


def _still_running(
    stack: list[tuple[FrameType, int]], earlier: list[traceback.FrameSummary]
) -> list[tuple[FrameType, int]]:
    """Return the part of a stack that was under way at an earlier moment."""
    running: list[tuple[FrameType, int]] = []
    for (frame, line), before in zip(stack, earlier, strict=False):
        if frame.f_code.co_name != before.name:
            break
        running.append((frame, line))
        if line != before.lineno:
            break
    return running


def _making(error: GuardOnDataDependentSymNode) -> list[traceback.FrameSummary]:
    """Return the stack, from our forward on, at which the size was made that an error does not know."""
    mode = detect_fake_mode()
    made = mode.shape_env.var_to_stack if mode is not None and mode.shape_env is not None else {}
    symbol = min((s for s in error.cond.free_symbols if s in made), key=str, default=None)
    frames = list(made[symbol].summary()) if symbol is not None else []  # type: ignore[no-untyped-call]
    ours = [i for i, f in enumerate(frames) if f.filename == __file__ and f.name == _Forward.forward.__name__]
    return frames[ours[-1] :] if ours else []
