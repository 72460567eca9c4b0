"""Calls of a ``torch.autograd.Function`` in a forward under capture.

In: a call of a function under capture. Out: its forward, traced where it stands and cut off from torch's
gradients, and :func:`~megacompile.capture.own_gradients.own_gradient` with the function's backward.

A function that torch cannot trace (NumPy, ``.item()``, kernels of others) is two operators with a real call
each (:mod:`~megacompile.capture.opaque_functions`), between which it keeps tensors of the graph.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from megacompile.capture.call_tensors import tensors_in
from megacompile.capture.function_context import (
    FunctionContext,
    call_forward,
    first_line_of,
    function_refusal,
    has_gradient,
    refuse_several,
)
from megacompile.capture.opaque_functions import call_for_real, draws_undone
from megacompile.capture.own_gradients import BACKWARD_GRAPHS, hand_on, own_gradient
from megacompile.capture.refused_calls import none_refused
from megacompile.capture.side_effects import random_states
from megacompile.capture.written_arguments import return_writes
from megacompile.graph.node_storage import is_mutable
from megacompile.kernels.registry import OpSpec, declare

aten = torch.ops.aten
declare(OpSpec("own_gradient"))


_AS_TORCH_WOULD = {
    "transformers.models.bloom.modeling_bloom.GeLUFunction",
    "peft.tuners.loha.layer.HadaWeight",  # HadaWeightCP's is none: two of its gradients differ
}
"""Functions whose own gradient is the derivative of their forward, which torch's rules give as well."""


def apply(theirs: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.Function.apply`` in a forward that is captured."""
    path = f"{function.__module__}.{function.__name__}"
    name, checkpoint = f"{path}, a torch.autograd.Function", "checkpoint" in function.__module__
    if path in _AS_TORCH_WOULD or (function.__module__.startswith("torch.") and not checkpoint):
        return theirs(function, *args, **kwargs)
    if checkpoint:
        raise function_refusal(
            name,
            "is a checkpoint: use checkpoint(..., use_reentrant=False), or none, as the plan decides "
            "what is recomputed",
        )
    return _traced(function, name, args)


def _traced(function: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Trace a call of a function whose gradient is its own; one that cannot be traced runs for real."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise function_refusal(
            name, "is called within a transform such as vmap or jvp: call it outside of that"
        )
    needs = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
    if (why := _not_traced(function, needs, args)) is not None:
        return call_for_real(function, name, needs, args, why)
    context = FunctionContext(needs)
    with torch.no_grad():
        output = call_forward(function, context, args)
    marks = context._marks
    results = list(output) if isinstance(output, tuple) else [output]
    graded = {i: x for i, x in enumerate(results) if has_gradient(x, marks)}
    if not graded or not torch.is_grad_enabled() or not any(needs):
        return output
    refuse_several(name, graded, marks)
    try:
        rule = _Rule(function, context, results, list(graded))
    except Exception as error:
        return call_for_real(function, name, needs, args, f"in its backward: {first_line_of(error)}")
    inputs = [args[i] for i in rule.inputs]
    made = own_gradient([x.detach() for x in graded.values()], inputs, rule.saved, rule.digest)
    for i, x in zip(graded, made, strict=True):
        results[i] = x
    return tuple(results) if isinstance(output, tuple) else results[0]


def _not_traced(function: Any, needs: tuple[bool, ...], args: tuple[Any, ...]) -> str | None:
    """Say why a forward cannot be traced, by calling it on tensors without values beside the trace."""
    tensors = tensors_in(args)
    mode = next((x.fake_mode for x in tensors if isinstance(x, FakeTensor)), None)
    if mode is None:
        return None
    context, shapes = FunctionContext(needs), mode.shape_env
    mode.shape_env = None  # by which a number that is taken out of a tensor would be a symbol
    try:
        with _aside(), draws_undone(), mode:
            before = random_states()
            call_forward(function, context, pytree.tree_map_only(Tensor, _without_values, args))
            drawn = random_states() != before
    except Exception as error:
        return first_line_of(error)
    finally:
        mode.shape_env = shapes
    if drawn:
        return "it draws random numbers"
    return "it writes over an argument" if context._marks.dirty else None


def _without_values(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).requires_grad_(x.requires_grad)


class _Rule:
    """A backward as a graph: (saved, gradients of results) -> gradients of ``inputs``, arguments by their
    places. ``saved`` are tensors of the forward's trace, and constants."""

    def __init__(
        self, function: Any, context: FunctionContext, results: list[Any], graded: list[int]
    ) -> None:
        self._function, self._context, self._graded = function, context, graded
        self._leaves, self._spec = pytree.tree_flatten(vars(context))
        self._forms = [(x.shape, x.dtype) if isinstance(x, Tensor) else None for x in results]
        self.inputs: list[int] = []
        kept = [x for x in self._leaves if isinstance(x, Tensor)]
        module = self._trace([(tuple(x.shape), x.stride(), x.dtype) for x in kept])
        self.saved = [x.detach() for x in kept] + _as_inputs(module, len(kept))
        lines = [f"{n.format_node()} {n.meta.get('val')}" for n in module.graph.nodes]
        self.digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        BACKWARD_GRAPHS[self.digest] = module

    def _trace(self, forms: list[tuple[Any, Any, torch.dtype]]) -> fx.GraphModule:
        with _aside(), FakeTensorMode():
            saved = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in forms]
            grads = [torch.empty(form[0], dtype=form[1]) for i in self._graded if (form := self._forms[i])]
            module = make_fx(lambda *given: self._backward(*given))(saved, grads)
            hand_on(module.graph)
            return_writes(module.graph)
            if any(map(is_mutable, module.graph.nodes)):
                module = make_fx(torch.func.functionalize(module, remove="mutations"))(saved, grads)
        module.graph.eliminate_dead_code()
        return module

    def _backward(self, saved: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Run the function's backward, of a context that holds these."""
        rest, known = iter(saved), dict(zip(self._graded, grads, strict=True))
        leaves = [next(rest) if isinstance(x, Tensor) else x for x in self._leaves]
        context = FunctionContext(())
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
    """Turn a graph's constants into inputs, behind the first ``count``, and return the constants."""
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
