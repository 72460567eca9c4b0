"""What one node of a graph costs: floating-point operations, bytes moved, kernels launched on a GPU."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from megacompile.capture import sdpa
from megacompile.capture.attention import attention, attention_backward
from megacompile.capture.positions import arguments
from megacompile.capture.views import is_view
from megacompile.differentiate.scratch import SORTED_FROM
from megacompile.kernels import mamba2_reference as scan
from megacompile.kernels._triton import ceil_div, wide
from megacompile.kernels.gated_delta_launchers import LAUNCHES, parts_of, runs_kernels
from megacompile.kernels.gated_delta_reference import CHUNK, SPAN
from megacompile.kernels.linear_cross_entropy import tile_width
from megacompile.kernels.mamba2_launchers import runs_kernels as runs_scan_kernels

aten = torch.ops.aten
ATTENTION, _BACKWARD = attention._opoverload, attention_backward._opoverload
_LAUNCHES = {  # others that compute launch one kernel; ``tests/simulated/test_blocks.py`` counts them
    torch.ops.megacompile.rms_norm_backward.default: 3,  # a sum of shares, and its conversion
    torch.ops.megacompile.add_rms_norm_backward.default: 3,
    torch.ops.megacompile.qk_norm_rope_backward.default: 3,
    torch.ops.megacompile.layer_norm_backward.default: 5,
    aten.constant_pad_nd.default: 2,
    aten.nll_loss_backward.default: 2,
    aten.slice_backward.default: 2,
    aten.select_backward.default: 2,
}
# The hidden states' place among the arguments, launches, and launches for each tile of logits.
_HEADS: dict[Any, tuple[int, int, int]] = {
    torch.ops.megacompile.linear_cross_entropy.default: (0, 16, 2),
    torch.ops.megacompile.linear_cross_entropy_backward.default: (1, 2, 4),
}
# In plain torch, launches for each span of tokens, and for each chunk.
_DELTA_RULES: dict[Any, tuple[int, int]] = {
    torch.ops.megacompile.gated_delta_rule.default: (45, 11),
    torch.ops.megacompile.gated_delta_rule_backward.default: (125, 17),
}
# Of Mamba-2: launches as above; how often numbers of the sizes of ``_scan_bytes`` are moved.
_SCANS: dict[Any, tuple[int, int, tuple[int, ...]]] = {
    torch.ops.megacompile.mamba2_chunk_scan.default: (41, 2, (13, 25, 6, 10)),
    torch.ops.megacompile.mamba2_chunk_scan_backward.default: (94, 4, (24, 48, 15, 25)),
}
_SCAN_KERNELS: dict[Any, int] = {  # launches in our kernels, with the gradient's copy and sums of tokens
    torch.ops.megacompile.mamba2_chunk_scan.default: 4,
    torch.ops.megacompile.mamba2_chunk_scan_backward.default: 11,
}
_GROUPED = {  # products of sorted rows with stacked weights that an operator forms; torch has no formula yet
    "aten::_grouped_mm": 1,
    "transformers::grouped_mm_fallback": 1,  # in a loop over the experts
    "transformers::grouped_mm_fallback_backward": 2,
}
_BY_ROWS = tuple(
    getattr(torch.ops.megacompile, name + suffix).default
    for name in ("rms_norm", "add_rms_norm", "layer_norm")
    for suffix in ("", "_backward")
)
_ATTENTION = 9, 3  # of a backward: torch's, with sums of rows and of heads, zeros, conversions; ours
_SORTING = 21  # of a gradient of an embedding that sorts its indices
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")

_HEAVY_PARTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "attention", "cross_entropy", "lstm",
                "gru", "sort", "topk", "grouped", "einsum", "linear", "scan", "fft", "cumsum")  # fmt: skip


def is_heavy(node: fx.Node) -> bool:
    """Whether an operator is worth keeping the result of: products, attention, searches."""
    if node.target is operator.getitem:
        return is_heavy(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target._overloadpacket in flop_registry:
        return True
    name = node.target._schema.name.split("::")[1]
    return any(part in name for part in _HEAVY_PARTS)


def flat(value: Any) -> list[Any]:
    """The leaves of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in flat(part)]
    return [value]


def _value(argument: Any) -> Tensor:
    """The tensor of an argument that is a node."""
    value: Tensor = argument.meta["val"]
    return value


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in flat(value) if isinstance(v, Tensor)]


def flops(node: fx.Node, share: float = 1.0) -> int:
    """Floating-point operations of the products and attention in one node.

    ``share`` is the part of its rows that a grouped product computes.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    if products := _GROUPED.get(node.target._schema.name):
        first, second = map(_value, node.args[:2])
        rows, inner = first.shape[-2:]
        return round(int(2 * products * rows * inner * second.shape[-1]) * share)
    formula = flop_registry.get(node.target._overloadpacket)
    if formula is None:
        return 0
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*arguments, **keywords, out_val=node.meta["val"]))


def attention_flops(node: fx.Node) -> tuple[int, int]:
    """What of a node's :func:`flops` is attention's: forward, backward."""
    work = flops(node) if node.target in (ATTENTION, _BACKWARD) else 0
    return (work, 0) if node.target is ATTENTION else (0, work)


def grouped(node: fx.Node, share: float = 1.0) -> tuple[int, int]:
    """:func:`flops` of a grouped product, and the bytes that it reads and writes: stacked weights and their
    gradients whole, of rows the ``share`` that it computes. Of any other node, nothing."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in _GROUPED:
        return 0, 0
    tensors = _operands(node)
    whole = sum(v.nbytes for v in tensors if v.ndim != 2)
    return flops(node, share), whole + round(share * sum(v.nbytes for v in tensors if v.ndim == 2))


def _operands(node: fx.Node) -> list[Tensor]:
    """The tensors that a node reads, each once, and those that it returns."""
    return _tensors([a.meta["val"] for a in node.all_input_nodes]) + _tensors(node.meta.get("val"))


def moved(node: fx.Node) -> int:
    """Bytes that one node reads and writes; views and products, counted by FLOPs, move nothing (those of
    :func:`grouped` ones stand apart), but for the logits that a head's kernels read, and in its backward
    write, and what a scan in plain torch does beside its products."""
    if node.target in _HEADS:
        return _logits_bytes(node)
    if node.target in _SCANS:
        return _scan_bytes(node)
    if is_view(node) or node.target is operator.getitem or flops(node):
        return 0
    return sum(v.nbytes for v in _operands(node))


def launches(node: fx.Node) -> int:
    """Kernels that one node launches on a GPU; views and fresh memory take none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_view(node):
        return 0
    if target._schema.name.removeprefix("aten::") in _EMPTY:
        return 0
    if target is aten.embedding_dense_backward.default:
        return _SORTING if _value(node.args[1]).numel() >= SORTED_FROM else 2
    if target in _HEADS:
        return _head_launches(node)
    if (name := target._schema.name) in _GROUPED and target.namespace != "aten":
        return _GROUPED[name] * (1 + len(_value(node.args[1])))
    if target in _DELTA_RULES:
        return _delta_rule_launches(node)
    if target in _SCANS:
        return _scan_launches(node)
    if target is _BACKWARD:
        return _ATTENTION[runs_our_attention(node)]
    copies = sum(not _has_rows(a.meta["val"]) for a in node.all_input_nodes) if target in _BY_ROWS else 0
    return _LAUNCHES.get(target, 1) + copies


def _delta_rule_launches(node: fx.Node) -> int:
    """Our kernels', or plain torch's, span by span and chunk by chunk."""
    q = arguments(node)["q"].meta["val"]
    if runs_delta_kernels(node):
        forward, part = LAUNCHES
        backward = 1 + part * len(parts_of(*q.shape[:2]))
        return forward if node.target is torch.ops.megacompile.gated_delta_rule.default else backward
    spans, chunks = (ceil_div(q.shape[1], n) for n in (SPAN, CHUNK))
    return sum(map(operator.mul, _DELTA_RULES[node.target], (spans, chunks)))


def _scanned(node: fx.Node) -> list[Tensor]:
    """x, B and C of a scan."""
    return [arguments(node)[name].meta["val"] for name in "xBC"]


def _scan_launches(node: fx.Node) -> int:
    if runs_scan_kernels(*(given := _scanned(node))):
        rounded = [arguments(node)[name].meta["val"].dtype != torch.float32 for name in "AD"]
        backward = node.target is torch.ops.megacompile.mamba2_chunk_scan_backward.default
        copies = sum(t.stride(-1) != 1 for t in given) + backward * sum(rounded)
        return int(_SCAN_KERNELS[node.target] + copies)
    tokens = given[0].shape[1]
    by_span, by_chunk, _ = _SCANS[node.target]
    return by_span * ceil_div(tokens, scan.SPAN) + by_chunk * ceil_div(tokens, scan.CHUNK)


def _scan_bytes(node: fx.Node) -> int:
    """Those of plain torch: of scores, heads, states and groups, whose numbers for each token these are."""
    x, inner, _ = given = _scanned(node)
    if runs_scan_kernels(*given):
        return 0
    batch, tokens, heads, width = x.shape
    groups, state = inner.shape[2:]
    size, chunk = wide(x.dtype).itemsize, scan.CHUNK
    numbers = heads * chunk, heads * width, heads * width * state // chunk, groups * state
    each = sum(map(operator.mul, _SCANS[node.target][2], numbers))
    return int(batch * ceil_div(tokens, chunk) * chunk * each * size)


def runs_recurrence_kernels(node: fx.Node) -> bool:
    """Whether our kernels run a gated delta rule or a scan of Mamba-2."""
    return runs_scan_kernels(*_scanned(node)) if node.target in _SCANS else runs_delta_kernels(node)


def runs_delta_kernels(node: fx.Node) -> bool:
    """Whether our kernels run a gated delta rule: on a GPU, while what is for one is ``recording``."""
    q, k, v = (arguments(node)[name].meta["val"] for name in "qkv")
    return runs_kernels(q, k, v)


def runs_our_attention(node: fx.Node) -> bool:
    """Whether our kernel runs an attention: on a GPU, while what is for one is ``recording``."""
    given = {n: a.meta["val"] if isinstance(a, fx.Node) else a for n, a in arguments(node).items()}
    names = "bias", "sinks", "causal", "window", "softcap", "dropout_p", "bias_grad", "bounds"
    has = sdpa.Features.of(*(given[name] for name in names))
    return sdpa.choose(given["q"], given["k"], given["v"], has) == "triton"


def _has_rows(x: Tensor) -> bool:
    """Whether the last dimension's rows follow each other at one distance: else a kernel takes a copy."""
    try:
        x.view(-1, x.shape[-1])
    except (RuntimeError, ValueError):  # of real tensors, of fake ones
        return False
    return True


def _head(node: fx.Node) -> tuple[Tensor, Tensor]:
    """The hidden states and the weight of a fused head."""
    place = _HEADS[node.target][0]
    hidden, weight = map(_value, node.args[place : place + 2])
    return hidden, weight


def _logits_bytes(node: fx.Node) -> int:
    hidden, weight = _head(node)
    passes = 1 + _HEADS[node.target][0]
    return passes * len(hidden) * len(weight) * hidden.element_size()


def _head_launches(node: fx.Node) -> int:
    """Those of a fused head, which makes its logits tile by tile."""
    _, fixed, each = _HEADS[node.target]
    hidden, weight = _head(node)
    vocabulary, workspace = len(weight), arguments(node)["workspace"]
    width = tile_width(len(hidden), vocabulary, hidden.element_size(), workspace)
    return fixed + each * -(-vocabulary // width)
