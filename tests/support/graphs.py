"""Captured graphs: made of a model and a batch, asked for their calls of attention, run with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile.capture import attempts
from megacompile.capture.trace import How, Request
from megacompile.graph.captured import Captured
from megacompile.graph.sequence_dimension import arguments
from megacompile.kernels import attention_choice


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Captured:
    """The graph of a forward; ``options`` are those of a :class:`~megacompile.capture.trace.Request`."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return attempts.capture(Request(model, args, kwargs, **{"trained": trained} | options), How()).get()


def graph_of(model: nn.Module, batch: dict[str, Any], **options: Any) -> Captured:
    """A model captured on a batch."""
    forms = {name: (p.dtype, p.stride()) for name, p in model.named_parameters()}
    return capture(model, (), batch, forms=forms, **options)


def attention_calls(captured: Captured) -> list[dict[str, Any]]:
    """The arguments of each call of attention, by name."""
    ours = torch.ops.megacompile.attention.default
    return [arguments(node) for node in captured.graph.nodes if node.target is ours]


def paths_on_cuda(captured: Captured, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    """Which implementations of attention would run on a GPU."""
    found = set()
    for call in attention_calls(captured):
        q, k, v = (call[name].meta["val"].to("meta", dtype) for name in "qkv")
        has = attention_choice.Features.of(
            call["bias"], call["sinks"], call["causal"], call["window"], call["softcap"], call["dropout_p"],
            call["bias_grad"], call["bounds"],
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "is_cuda", property(lambda _: True))
            found.add(attention_choice.choose(q, k, v, has))
    return found


def forward(captured: Captured, model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """The results of a graph."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    given = {name: parameters[n] for name, n in captured.parameters.items()}
    given |= {name: buffers[n] for name, n in captured.buffers.items()}
    given |= {name: list(batch.values())[i] for name, i in captured.inputs.items()}
    given |= captured.constants | {captured.rng: torch.tensor([3, 0])}
    module = fx.GraphModule(nn.Module(), captured.graph)
    placeholders = [node.name for node in captured.graph.nodes if node.op == "placeholder"]
    return list(module(*(given[name] for name in placeholders)))


def run(captured: Captured, model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """The loss of a graph and the gradients of all parameters."""
    (loss,) = forward(captured, model, batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def check_run(model: nn.Module, batch: dict[str, Any]) -> None:
    """Loss and gradients of a model's graph are the model's own, in parts of a tensor's scale."""
    captured = graph_of(model, batch)
    loss = model(**batch, use_cache=False).loss
    theirs = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    for mine, other in zip(run(captured, model, batch), theirs, strict=True):
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max() + 1e-7
