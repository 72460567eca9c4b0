"""Gradients of one's own: what a ``torch.autograd.Function`` computes, as operators of the graph.

In: a call of a function under capture. Out: its forward, traced where it stands and cut off from torch's
gradients, and :func:`own_gradient`, which hands its results on and whose gradient is the function's backward,
traced once as a graph by itself. Of a template's joint graph it is gone: what is left are the operators of
forward and backward, so that saved tensors are planned as any.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from megacompile.capture.refusals import none_refused
from megacompile.errors import CaptureError
from megacompile.kernels.registry import OpSpec, declare

aten = torch.ops.aten
_RULES: dict[str, fx.GraphModule] = {}  # backwards, by what they compute


@torch.library.custom_op("megacompile::own_gradient", mutates_args=())
def own_gradient(
    results: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Tensor], rule: str
) -> list[Tensor]:
    """Hand on ``results``, whose gradients become those of ``inputs`` by a rule that reads ``saved``."""
    return [result.clone() for result in results]


@own_gradient.register_fake
def _(
    results: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Tensor], rule: str
) -> list[Tensor]:
    return [torch.empty_like(result) for result in results]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    results, _, saved, rule = inputs
    ctx.save_for_backward(*saved)
    ctx.rule, ctx.counts = rule, (len(results), len(saved))


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    results, saved = ctx.counts
    rule = fx.Interpreter(_RULES[ctx.rule])
    found = rule.run(*ctx.saved_tensors, *(grad.contiguous() for grad in grads))
    return [None] * results, list(found), [None] * saved, None


own_gradient.register_autograd(_backward, setup_context=_setup)
declare(OpSpec("own_gradient"))
_OPERATOR = own_gradient._opoverload


def hand_on(graph: fx.Graph) -> None:
    """Let what reads results of :func:`own_gradient` read the function's, where gradients are traced."""
    for node in [n for n in graph.nodes if n.target is _OPERATOR]:
        for item in list(node.users):
            item.replace_all_uses_with(node.args[0][item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)


@dataclass
class _Marks:
    """The tensors that a forward marked."""

    constant: tuple[Tensor, ...] = ()
    dirty: tuple[Tensor, ...] = ()
    materialize: bool = True


class _Context:
    """Holds what a forward leaves for its backward, beside attributes of its own."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self._marks = _Marks()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Keep nothing: no program differentiates forward."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._marks.constant = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        self._marks.dirty = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._marks.materialize = value


_AS_TORCH_WOULD = {
    "transformers.models.bloom.modeling_bloom.GeLUFunction",
    "peft.tuners.loha.layer.HadaWeight",  # HadaWeightCP's is none: two of its gradients differ
}
"""Functions whose own gradient is the derivative of their forward, which torch's rules give as well."""


def apply(theirs: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.Function.apply`` in a forward that is captured."""
    name = f"{function.__module__}.{function.__name__}"
    checkpoint = "checkpoint" in function.__module__
    if name in _AS_TORCH_WOULD or (function.__module__.startswith("torch.") and not checkpoint):
        return theirs(function, *args, **kwargs)
    if checkpoint:
        raise _refusal(
            name,
            "is a checkpoint: use checkpoint(..., use_reentrant=False), or none, as the plan decides "
            "what is recomputed",
        )
    return _traced(function, name, args)


def _traced(function: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Trace a call of a function whose gradient is its own."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise _refusal(name, "is called within a transform such as vmap or jvp: call it outside of that")
    context = _Context(tuple(isinstance(x, Tensor) and x.requires_grad for x in args))
    marks = context._marks
    with torch.no_grad():
        if function.setup_context is _SingleLevelFunction.setup_context:
            output = function.forward(context, *args)
        else:
            output = function.forward(*args)
            function.setup_context(context, args, output)
    if marks.dirty:
        raise _refusal(name, "writes over an argument, which it marks as dirty: let it return a new tensor")
    results = list(output) if isinstance(output, tuple) else [output]
    graded = {i: x for i, x in enumerate(results) if _has_gradient(x, marks)}
    if not graded or not torch.is_grad_enabled() or not any(context.needs_input_grad):
        return output
    if len(graded) > 1 and not marks.materialize:
        raise _refusal(name, "has several results and set_materialize_grads(False): leave that out")
    rule = _Rule(function, name, context, results, list(graded))
    inputs = [args[i] for i in rule.inputs]
    made = own_gradient([x.detach() for x in graded.values()], inputs, rule.saved, rule.digest)
    for i, x in zip(graded, made, strict=True):
        results[i] = x
    return tuple(results) if isinstance(output, tuple) else results[0]


def _has_gradient(result: Any, marks: _Marks) -> bool:
    differentiable = isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex())
    return differentiable and not any(result is x for x in marks.constant)


def _refusal(name: str, why: str) -> CaptureError:
    return CaptureError(f"The forward calls {name}, a torch.autograd.Function, which {why}.")


class _Rule:
    """A backward as a graph: (saved, gradients of results) -> gradients of ``inputs``, arguments by their
    places. ``saved`` are tensors of the forward's trace, and constants."""

    def __init__(
        self, function: Any, name: str, context: _Context, results: list[Any], graded: list[int]
    ) -> None:
        self._function, self._context, self._graded = function, context, graded
        self._leaves, self._spec = pytree.tree_flatten(vars(context))
        self._forms = [(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in results]
        self.inputs: list[int] = []
        kept = [x for x in self._leaves if isinstance(x, Tensor)]
        try:
            module = self._trace([(tuple(x.shape), x.stride(), x.dtype) for x in kept])
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise _refusal(name, f"has a backward that cannot be traced: {said}") from None
        self.saved = [x.detach() for x in kept] + _as_inputs(module, len(kept))
        lines = [f"{n.format_node()} {n.meta.get('val')}" for n in module.graph.nodes]
        self.digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        _RULES[self.digest] = module

    def _trace(self, forms: list[tuple[Any, Any, torch.dtype]]) -> fx.GraphModule:
        with _aside(), FakeTensorMode():
            saved = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in forms]
            grads = [torch.empty(form[0], dtype=form[1]) for i in self._graded if (form := self._forms[i])]
            module = make_fx(lambda *given: self._backward(*given))(saved, grads)
            hand_on(module.graph)
            if any(map(_writes, module.graph.nodes)):
                module = make_fx(torch.func.functionalize(module, remove="mutations"))(saved, grads)
        module.graph.eliminate_dead_code()
        return module

    def _backward(self, saved: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Run the function's backward, of a context that holds these."""
        rest, known = iter(saved), dict(zip(self._graded, grads, strict=True))
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in self._leaves]
        context = _Context(())
        vars(context).update(pytree.tree_unflatten(leaves, self._spec))
        given = [
            known.get(i) if i in known or form is None else torch.zeros(form[0], dtype=form[1])
            for i, form in enumerate(self._forms)
        ]
        found = self._function.backward(context, *given)
        found = found if isinstance(found, tuple) else (found,)
        needs = context.needs_input_grad
        self.inputs = [i for i, needed in enumerate(needs) if needed and found[i] is not None]
        return [found[i] for i in self.inputs]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Within the context torch computes beside the forward's trace, and takes gradients of its own."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        disable_proxy_modes_tracing(),
        torch.no_grad(),
        none_refused(),
    ):
        yield


def _as_inputs(module: fx.GraphModule, count: int) -> list[Tensor]:
    """Let a graph take its constants as inputs, behind the first ``count``, and return them."""
    graph, constants = module.graph, []
    before = [n for n in graph.nodes if n.op == "placeholder"][count:]
    for node in list(graph.nodes):
        if node.target is aten.view.default:  # of a result that may be laid out in another way
            node.target = aten.reshape.default
        if node.op == "get_attr":
            constants.append(getattr(module, str(node.target)))
            with graph.inserting_before(before[0]):
                place = graph.placeholder(node.name)
            node.replace_all_uses_with(place)
            graph.erase_node(node)
    module.recompile()
    return constants
