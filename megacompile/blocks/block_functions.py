"""Block functions: one part of a joint graph as a function that can be loaded, and what it costs.

In: the extracted graph of a forward, a recompute or a backward. Out: :class:`BlockFunction`. What it holds
most is measured by running it on fake tensors under the meter that also measures real runs, or is known
from its trace, which gives the same (:mod:`~megacompile.blocks.lifetimes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks import inductor
from megacompile.blocks.chunk_loops import looped_source
from megacompile.blocks.codegen import function_source, load_functions
from megacompile.blocks.costs import attention_flops, flops, grouped, is_heavy, launches, moved
from megacompile.blocks.cpu_products import float32_products
from megacompile.blocks.inplace_reuse import add_in_place, reuse
from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.kernel_calls import Calls, is_ours, kernel_calls
from megacompile.blocks.lifetimes import held_bytes
from megacompile.blocks.memory_meter import StorageMeter, tensors_of
from megacompile.graph.node_storage import storage_nbytes
from megacompile.kernels._triton import Gpu, recording

Boxed = Callable[[list[Any]], list[Any]]
"""A function that takes one list, which it empties, and returns one."""


@dataclass(frozen=True)
class Asked:
    """The requests of a function to a GPU's allocator: (number of a storage, its bytes, or 0 where it is
    given back), in order, and of each result its storage and its own bytes. The storages of arguments come
    first."""

    requests: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BlockFunction:
    """One generated function and what it costs.

    ``inputs`` and ``outputs`` name what the list argument and the returned list hold: ("in", i) the
    template's input i, ("out", k) its output k, ("saved", j) a saved tensor, and ("grad", n) the gradient of
    output n (as an argument) or of input n (as a result). ``peak_bytes`` is the most that the function holds
    beyond what was alive when it was called; saved tensors and gradients among its arguments are donated, so
    they count as freed at their last use. ``end_bytes`` is what is left when it returns: results less
    donations. ``launches`` counts the kernels that a GPU is asked to run, ``attention_flops`` what of
    ``flops`` is attention's forward and its backward, ``grouped`` what is of grouped products, with the bytes
    that these read and write. ``kernels`` counts the calls of our own operators. ``fused``: ``source`` is
    Inductor's, not our own. ``looped``: it runs over chunks of the sequence. ``narrow``: it computes in bf16
    somewhere. ``asked`` is known where the function is for a GPU.
    """

    name: str
    source: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    result_bytes: tuple[int, ...]
    peak_bytes: int
    end_bytes: int
    flops: int
    moved_bytes: int
    launches: int
    attention_flops: tuple[int, int]
    grouped: tuple[int, int]
    kernels: Calls = ()
    fused: bool = False
    looped: bool = False
    narrow: bool = False
    asked: Asked | None = None

    def load(self, device: torch.device) -> Boxed:
        """The function, ready to be called on tensors of a device."""
        if self.fused:
            return inductor.load(self.source)
        return load_functions(self.source, device)[self.name]

    def products(self) -> AbstractContextManager[object]:
        """The context in which a CPU calls the function, entered before any meter."""
        return float32_products() if self.narrow else nullcontext()


def block_function(
    name: str,
    graph: fx.Graph,
    inputs: Sequence[Ref],
    results: Sequence[tuple[Ref, fx.Node]],
    owned: set[fx.Node],
    mode: FakeTensorMode,
    share: float,
    gpu: Gpu | None,
    loops: tuple[int, int] | None = None,
) -> BlockFunction:
    """Print and measure a graph. ``owned`` are the arguments that the function may overwrite, ``share`` is
    the part of its rows that a grouped product computes, ``gpu`` its device. ``loops`` are the positions of
    its sequence and those of a chunk, if it is to run chunk by chunk.
    """
    counted = [n for n in graph.nodes if n.op == "call_function"]
    _name_devices(counted)
    work = sum(flops(n, share) for n in counted)
    attention = [attention_flops(n) for n in counted]
    experts = [grouped(n, share) for n in counted]
    if loops is None:  # after FLOPs are counted, as torch's counter does not know products in place
        add_in_place(graph, owned)
        counted = [n for n in graph.nodes if n.op == "call_function"]
    with recording(gpu=gpu):  # which kernels run depends on the GPU
        asked, traffic = sum(map(launches, counted)), sum(map(moved, counted))
        kernels = kernel_calls(graph)
    doc = f"{_signature(inputs)} -> {_signature(r for r, _ in results)}"
    source = looped_source(graph, name, doc, *loops) if loops else None
    looped = source is not None
    if source is None:
        reuse(graph, owned)
        source = function_source(graph, name, doc)
    peak, end, requests = _held(source, name, graph, inputs, mode, gpu, looped)
    return BlockFunction(
        name=name,
        source=source,
        inputs=tuple(inputs),
        outputs=tuple(r for r, _ in results),
        result_bytes=tuple(storage_nbytes(n.meta["val"]) for _, n in results),
        peak_bytes=peak,
        end_bytes=end,
        flops=work,
        moved_bytes=traffic,
        launches=asked * -(-loops[0] // loops[1]) if loops and looped else asked,
        attention_flops=(sum(a for a, _ in attention), sum(b for _, b in attention)),
        grouped=(sum(f for f, _ in experts), sum(b for _, b in experts)),
        kernels=kernels,
        looped=looped,
        narrow=any(t.dtype == torch.bfloat16 for n in graph.nodes for t in tensors_of(n.meta.get("val"))),
        asked=requests,
    )


def _held(
    source: str,
    name: str,
    graph: fx.Graph,
    inputs: Sequence[Ref],
    mode: FakeTensorMode,
    gpu: Gpu | None,
    looped: bool,
) -> tuple[int, int, Asked | None]:
    """Bytes of a printed function at most and at its end, and what it asks of a GPU's allocator."""
    held = held_bytes(graph, inputs, mode) if gpu is None and not looped else None
    if held is not None:
        return *held, None
    cpu = torch.device("cpu")
    taken = _measure(load_functions(source, cpu)[name], _examples(graph), inputs, mode, cpu, gpu)
    return taken.peak_bytes, taken.end_bytes, taken.asked


def fused(
    function: BlockFunction,
    graph: fx.Graph,
    mode: FakeTensorMode,
    device: torch.device,
    gpu: Gpu | None,
) -> BlockFunction:
    """The same function by Inductor, with its own workspace and traffic; the plain one where its results
    would lie in memory in another way, or where the order of sums would be left to chance."""
    examples = _examples(graph)
    source = inductor.wrapper_source(function.name, graph, examples, mode, device)
    if source is None:
        return function
    cpu, by_kernels = torch.device("cpu"), list[int]()
    expected = _measure(function.load(cpu), examples, function.inputs, mode, cpu, gpu)
    taken = _measure(inductor.dry(source, by_kernels), examples, function.inputs, mode, device, gpu)
    if (taken.forms, taken.end_bytes) != (expected.forms, expected.end_bytes):
        return function
    by_ours = sum(moved(n) for n in graph.nodes if is_ours(n))
    with recording(gpu=gpu):
        others = sum(launches(n) for n in graph.nodes if is_heavy(n) or is_ours(n))
    return replace(
        function,
        source=source,
        peak_bytes=taken.peak_bytes,
        moved_bytes=sum(by_kernels) + by_ours,
        launches=len(by_kernels) + others,
        fused=True,
        asked=taken.asked,
    )


def _name_devices(nodes: Iterable[fx.Node]) -> None:
    """Name the device of tensors that are made from no other tensor, because they would be on the host
    otherwise."""
    for node in nodes:
        made = isinstance(node.target, torch._ops.OpOverload) and not node.all_input_nodes
        if made and any(a.name == "device" for a in node.target._schema.arguments):  # type: ignore[union-attr]
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}


@dataclass(frozen=True)
class _Taken:
    """Bytes beyond what is alive at entry, at most and at the end, how each result lies in memory, and what a
    GPU's allocator is asked for."""

    peak_bytes: int
    end_bytes: int
    forms: tuple[tuple[Any, ...], ...]
    asked: Asked | None


def _measure(
    run: Boxed,
    examples: Sequence[Tensor],
    inputs: Sequence[Ref],
    mode: FakeTensorMode,
    device: torch.device,
    gpu: Gpu | None,
) -> _Taken:
    """Measure the bytes that a function takes, by a run on fake tensors."""
    meter = StorageMeter(gpu=gpu)
    with mode, torch.no_grad(), recording(gpu=gpu):  # our kernels are not launched
        kept, arguments = [], []
        for value, (kind, _) in zip(examples, inputs, strict=True):
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            if kind in ("saved", "grad"):
                meter.track(fake)
            else:
                meter.ignore(fake)
                kept.append(fake)
            arguments.append(fake)
            del fake
        start, begin = meter.live, len(meter.requests)
        with meter:
            results = run(arguments)
        end = meter.live
        places: dict[int, int] = {}
        forms = tuple(_shape_and_dtype(r, places) for r in results)
        asked = None
        if gpu is not None:
            given = tuple((meter.number(r), r.nbytes) for r in results)
            asked = Asked(tuple(meter.requests[begin:]), given)
        del results
    return _Taken(max(0, meter.peak - start), end - start, forms, asked)


def _shape_and_dtype(result: Tensor, places: dict[int, int]) -> tuple[Any, ...]:
    """Shape, strides, dtype, bytes of the storage, and which earlier result has the same one."""
    storage = result.untyped_storage()
    place = places.setdefault(storage._cdata, len(places))
    return tuple(result.shape), tuple(result.stride()), result.dtype, storage.nbytes(), place


def _examples(graph: fx.Graph) -> list[Tensor]:
    return [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]


def _signature(refs: Iterable[Ref]) -> str:
    return "(" + ", ".join(f"{kind} {i}" for kind, i in refs) + ")"
