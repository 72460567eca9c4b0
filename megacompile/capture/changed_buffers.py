"""Buffers that a forward changes, such as running statistics, as reads and writes of a graph.

In: a functional graph that export made, whose outputs begin with the new values of buffers. Out: the same
graph, which returns its results alone and writes each new value into its buffer, once, behind all that reads
the buffer. Invariant: whoever computes a part of the graph again, without its writes, computes the same. So
what the results read of such a buffer is a :func:`buffer_snapshot`, which is kept for that. What new values
alone read is the buffer itself: nobody computes those again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind

from megacompile.capture.call_tensors import storage_id
from megacompile.errors import CaptureError
from megacompile.graph.captured import results_of, strip
from megacompile.graph.node_storage import BATCH_NORM, WRITE, reached
from megacompile.kernels.registry import OpSpec, declare

_STATISTICS = slice(3, 5)  # places of running statistics among a batch norm's arguments, and its results


@torch.library.custom_op("megacompile::buffer_snapshot", mutates_args=())
def buffer_snapshot(buffer: Tensor) -> Tensor:
    """Copy a buffer as it is before this forward changes it."""
    return buffer.clone()


@buffer_snapshot.register_fake
def _(buffer: Tensor) -> Tensor:
    return torch.empty_like(buffer)


@torch.library.custom_op("megacompile::average_statistics", mutates_args=())
def average_statistics(
    x: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor
) -> tuple[Tensor, Tensor]:
    """Average mean and variance over so many batches, of which ``x`` is the last."""
    mean, var = running_mean.clone(), running_var.clone()
    if not isinstance(x, FakeTensor):
        torch.batch_norm_update_stats(x, mean, var, 1.0 / float(batches))
    return mean, var


@average_statistics.register_fake
def _(x: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_var)


declare(OpSpec("buffer_snapshot"))
declare(OpSpec("average_statistics"))
SNAPSHOT = buffer_snapshot._opoverload


def batch_norm(theirs: Any, norm: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
    """The forward of a norm with ``momentum=None``, whose average takes the count of batches as a tensor."""
    count, mean, var = norm.num_batches_tracked, norm.running_mean, norm.running_var
    averages = norm.momentum is None and norm.training and norm.track_running_stats
    if not averages or count is None or mean is None or var is None:
        return theirs(norm, x)  # type: ignore[no-any-return]
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]
    count.add_(1)
    y = F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
    for buffer, new in zip((mean, var), average_statistics(x.detach(), mean, var, count), strict=True):
        buffer.copy_(new)
    return y


def sync_batch_norm(theirs: Any, norm: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """The forward of a norm over several ranks, of one; refused where there are several."""
    if not norm.training:
        return theirs(norm, x)  # type: ignore[no-any-return]
    if dist.is_initialized() and dist.get_world_size(norm.process_group) > 1:
        raise CaptureError(
            "The forward calls SyncBatchNorm, whose ranks exchange statistics within a forward, which is not "
            "supported: train on one rank, put it into eval mode, or replace it by GroupNorm."
        )
    return nn.modules.batchnorm._BatchNorm.forward(norm, x)


def write_changes(graph: fx.Graph, signature: ExportGraphSignature, model: nn.Module) -> None:
    """Turn outputs that are new values of buffers into writes of these; ``model`` has them."""
    output = graph.output_node()
    changes, results = [], []
    for spec, node in zip(signature.output_specs, results_of(graph), strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            changes.append((str(spec.target), node))
        else:
            results.append(node)
    output.args = (tuple(results),)
    if not changes:
        return
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    buffers = {
        str(spec.target): placeholders[spec.arg.name]
        for spec in signature.input_specs
        if spec.kind == InputKind.BUFFER
    }
    _refuse_shared(model, [strip(name) for name, _ in changes])
    needed = reached(results, _computed_from)
    for name, new in changes:
        buffer = buffers[name]
        if buffer in needed:
            _put_snapshot(graph, buffer)
        _put_write(graph, buffer, new)


def _computed_from(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes that a value comes of: of a norm by a batch's own statistics, not the running ones."""
    if node.target is operator.getitem:
        norm, place = node.args
        assert isinstance(norm, fx.Node) and isinstance(place, int)
        if norm.target is BATCH_NORM and place < _STATISTICS.start:
            return [
                a
                for a in (*norm.args[: _STATISTICS.start], *norm.args[_STATISTICS.stop :])
                if isinstance(a, fx.Node)
            ]
    return node.all_input_nodes


def _refuse_shared(model: nn.Module, changed: Iterable[str]) -> None:
    """Refuse to change a buffer of which another one, not the same, shows a part."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name in changed:
        for other, tensor in buffers.items():
            if storage_id(tensor) == storage_id(buffers[name]) and tensor is not buffers[name]:
                raise CaptureError(
                    f"The forward changes the buffer {name}, which shares its memory with {other}: register "
                    "a copy of one of them."
                )


def _put_snapshot(graph: fx.Graph, buffer: fx.Node) -> None:
    """Redirect all readers of a buffer to a copy of it, made before the first of them."""
    users = set(buffer.users)
    first = next(n for n in graph.nodes if n in users)
    with graph.inserting_before(first):
        copy = graph.call_function(SNAPSHOT, (buffer,))
    copy.meta = {**first.meta, "val": buffer.meta["val"]}
    for user in users:
        user.replace_input_with(buffer, copy)


def _put_write(graph: fx.Graph, buffer: fx.Node, new: fx.Node) -> None:
    """Write a buffer's new value as soon as it is there and nothing reads the old one any more."""
    before = {new, *buffer.users}
    last = [n for n in graph.nodes if n in before and n.op != "placeholder"][-1:]
    place = last[0] if last else [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(place):
        write = graph.call_function(WRITE, (buffer, new))
    write.meta = {**place.meta, "val": buffer.meta["val"]}
