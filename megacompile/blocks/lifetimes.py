"""Lifetimes: the bytes that a printed function holds, from what its trace knows of each tensor.

In: the graph of a function, as it is printed. Out: its highest bytes and those that are left at its end,
beyond what was alive when it was called. Values of a trace share storages as those of a run on fake tensors
do, and each is freed where the printed function frees it, so both give the same bytes; a walk takes a small
part of the time.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks.codegen import last_uses
from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.memory_meter import call_bytes, tensors_of

_MAY_COPY = frozenset({torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default})


class _Holdings:
    """Storages that are alive, how many variables show each, and the highest sum of their bytes."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._bytes: dict[int, int] = {}
        self._shown: Counter[int] = Counter()
        self._same: dict[int, int] = {}  # storages that a trace made anew, and a run does not

    def _storage(self, tensor: Tensor) -> int:
        storage: int = tensor.untyped_storage()._cdata
        return self._same.get(storage, storage)

    def show(self, tensor: Tensor, nbytes: int, base: Tensor | None = None) -> None:
        """A variable shows a tensor; its storage takes these bytes if it is new, and not that of ``base``."""
        if base is not None:
            self._same[tensor.untyped_storage()._cdata] = self._storage(base)
        storage = self._storage(tensor)
        if not self._shown[storage]:
            self._bytes[storage] = nbytes
            self.live += nbytes
            self.peak = max(self.peak, self.live)
        self._shown[storage] += 1

    def drop(self, tensor: Tensor) -> None:
        """A variable that showed a tensor is gone."""
        storage = self._storage(tensor)
        self._shown[storage] -= 1
        if not self._shown[storage]:
            self.live -= self._bytes[storage]


def held_bytes(graph: fx.Graph, inputs: Sequence[Ref], mode: FakeTensorMode) -> tuple[int, int] | None:
    """The most bytes of a graph's function on a CPU, and those at its end.

    None where arguments share storages or show parts of them: they do not when the function is called.
    """
    arguments = [n for n in graph.nodes if n.op == "placeholder"]
    if not _are_whole([n.meta["val"] for n in arguments]):
        return None
    holdings, last = _Holdings(), last_uses(graph)
    for node, (kind, _) in zip(arguments, inputs, strict=True):
        value = node.meta["val"]
        holdings.show(value, value.untyped_storage().nbytes() if kind in ("saved", "grad") else 0)
    start = holdings.live
    _drop(holdings, [n for n in arguments if not n.users])
    for node in graph.nodes:
        if node.op == "call_function":
            _hold_results(holdings, node, mode)
            _drop(holdings, last.get(node, []) if node.users else [*last.get(node, []), node])
    return max(0, holdings.peak - start), holdings.live - start


def _hold_results(holdings: _Holdings, node: fx.Node, mode: FakeTensorMode) -> None:
    found = tensors_of(node.meta.get("val"))
    if node.target is operator.getitem:
        for tensor in found:
            holdings.show(tensor, 0)
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    inside, standing = call_bytes(node.target, args, kwargs, found, mode)
    holdings.peak = max(holdings.peak, holdings.live + inside)
    for index, (tensor, nbytes) in enumerate(zip(found, standing, strict=True)):
        holdings.show(tensor, nbytes, _base(node.target, index, args, tensor, mode))


def _base(
    func: Any, index: int, args: tuple[Any, ...], result: Tensor, mode: FakeTensorMode
) -> Tensor | None:
    """The argument in whose memory an operator leaves a result: a view of it, or itself, written to.

    A trace may know another: of a view that was a copy when it was traced, of what is overwritten since.
    """
    returned = func._schema.returns
    alias = returned[index if len(returned) > 1 else 0].alias_info if returned else None
    for argument, value in zip(func._schema.arguments, args, strict=False):
        given = argument.alias_info
        if alias is None or given is None or not alias.before_set & given.before_set:
            continue
        if not isinstance(value, Tensor) or func not in _MAY_COPY:
            return value if isinstance(value, Tensor) else None
        with mode:
            made = func(*args)
        return value if made.untyped_storage()._cdata == value.untyped_storage()._cdata else None
    return None


def _drop(holdings: _Holdings, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        for tensor in tensors_of(node.meta.get("val")):
            holdings.drop(tensor)


def _are_whole(values: Sequence[Tensor]) -> bool:
    """Return whether each is all of a storage of its own."""
    storages = [v.untyped_storage() for v in values]
    if len({s._cdata for s in storages}) < len(storages):
        return False
    return all(s.nbytes() == _extent(v) for s, v in zip(storages, values, strict=True))


def _extent(value: Tensor) -> int:
    if not value.numel():
        return 0
    last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return (1 + last) * value.element_size()
