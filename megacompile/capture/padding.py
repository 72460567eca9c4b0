"""Padding: sequences made longer, to one of few lengths, where the model hides that behind a mask."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn

from megacompile.capture.batch import Batch, is_transformers
from megacompile.capture.captured import Captured

_PADDING = {"labels": -100, "shift_labels": -100, "attention_mask": 0}
_TOKENS = {"input_ids", "attention_mask", "labels", "shift_labels", "token_type_ids", "position_ids"}
_LIBRARIES = {"torch", "transformers", "peft"}
_MIXING = ("_fft_", "conv", "im2col", "pool", "flip", "roll", "einsum")  # positions, whatever a mask says
_PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear"}  # over the left one's last dimension
_WHOLE = {"sum", "mean", "max", "min", "prod", "std", "var", "norm", "linalg_vector_norm"}  # of all elements
_MOVING = {
    "cat",
    "stack",
    "squeeze",
    "unsqueeze",
    "permute",
    "gather",
    "index_select",
    "scatter",
    "index_add",
}
_LAYING = {"add", "sub", "masked_fill", "where"}  # a mask over scores
_SOFTMAX = {"softmax", "_softmax"}
_KEEPING = {
    *("_to_copy", "to", "type_as", "view", "reshape", "_unsafe_view"),
    *("expand", "clone", "alias", "dropout", "mul", "div"),
}


def bucketed(
    item: Any, batch: Batch, model: nn.Module, *, longest: int | None, turning: Collection[int]
) -> Any:
    """``item`` padded to one of few lengths, or None where that is not known to be right, or not needed.

    Beyond a ``turning`` length the model computes otherwise: no sequence is padded past one.
    """
    ids, labels = batch.kwargs.get("input_ids"), batch.kwargs.get("labels")
    if not (isinstance(ids, Tensor) and isinstance(labels, Tensor) and is_transformers(model)):
        return None
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return None  # one that lands in ``**kwargs`` may be dropped
    if labels.shape != ids.shape or ids.dim() != 2 or not _made_of_tokens(batch):
        return None
    if batch.kwargs.get("position_ids") is not None and batch.kwargs.get("attention_mask") is None:
        return None  # possibly packed, which a mask would hide from transformers
    own, length = ids.shape[1], bucket_length(ids.shape[1], longest=longest)
    if length <= own or any(own <= turn < length for turn in turning):
        return None
    return pad_batch(item, length)


def _made_of_tokens(batch: Batch) -> bool:
    """Whether nothing in the batch but what has an entry for each token depends on the length."""
    ids = batch.kwargs["input_ids"]
    for name, value in batch.kwargs.items():
        tokens = isinstance(value, Tensor) and value.shape == ids.shape
        if name in _TOKENS and tokens and not (name.endswith("labels") and value.is_floating_point()):
            continue
        if ids.shape[1] in (value.shape if isinstance(value, Tensor) else (value,)):
            return False
    return not batch.args


def computes_as_libraries_do(model: nn.Module) -> bool:
    """Whether all modules, and losses, are computed by functions of transformers, PEFT or torch alone.

    A loss of the user's own may count all positions, in ways that a graph does not show.
    """
    return all(map(_is_a_library_s, model.modules()))


def _is_a_library_s(module: nn.Module) -> bool:
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    loss = getattr(module, "_loss_function", None)
    made = {owner.__module__.split(".")[0], getattr(loss, "__module__", "torch").split(".")[0]}
    return made <= _LIBRARIES and "forward" not in vars(module)


def bucket_length(length: int, *, longest: int | None = None) -> int:
    """The padded length: at most an eighth longer, so that few programs serve all lengths."""
    step = max(8, 1 << max(0, length.bit_length() - 3))
    padded = -(-length // step) * step
    return padded if longest is None else min(padded, longest)


def pad_batch(batch: Any, length: int, pad_token: int = 0) -> Any:
    """Pad the sequences of a token batch on the right to ``length``, hidden by the attention mask."""
    ids = batch["input_ids"]
    short = length - ids.shape[1]
    if short <= 0:
        return batch
    padded = dict(batch.items())
    padded.setdefault("attention_mask", torch.ones_like(ids))
    for name, value in padded.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape == ids.shape:
            padded[name] = nn.functional.pad(value, (0, short), value=_PADDING.get(name, pad_token))
    return padded


def hides_padding(model: nn.Module, captured: Captured, batch: Batch) -> bool:
    """Whether the loss of a padded batch, whose graph this is, is known to be that of the batch itself.

    The graph must read the mask, and nothing but attention may mix positions: no recurrence, no convolution,
    no product, sum or softmax over a dimension as long as the sequence.
    """
    mask, length = batch.kwargs["attention_mask"], batch.kwargs["input_ids"].shape[1]
    masks = {name for name, index in captured.inputs.items() if batch.leaves[index] is mask}
    if not masks or any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return False
    masked = _masked(
        captured.graph, _below(captured, masks) - _below(captured, captured.inputs.keys() - masks)
    )
    of_batch = _below(captured, captured.inputs.keys())
    return not any(_mixes(node, length) for node in of_batch - masked)


def _below(captured: Captured, names: Collection[str]) -> set[fx.Node]:
    """The calls whose results depend on some of the inputs."""
    found: set[fx.Node] = set()
    for node in captured.graph.nodes:
        if node.name in names or any(a in found for a in node.all_input_nodes):
            found.add(node)
    return {node for node in found if node.op == "call_function"}


def _masked(graph: fx.Graph, masks: set[fx.Node]) -> set[fx.Node]:
    """A model's own attention: softmaxes over what a mask was laid over, and products with their results."""
    laid: set[fx.Node] = set()
    shares: set[fx.Node] = set()
    products: set[fx.Node] = set()
    for node in graph.nodes:
        first, name = next(iter(node.all_input_nodes), None), _name(node)
        if name in _LAYING and any(a in masks for a in node.all_input_nodes):
            laid.add(node)
        if (name in _SOFTMAX and first in laid) or (name in _KEEPING and first in shares):
            shares.add(node)
        elif name in _KEEPING and first in laid:
            laid.add(node)
        elif name in _PRODUCTS and first in shares:
            products.add(node)
    return shares | products


def _name(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _mixes(node: fx.Node, length: int) -> bool:
    """Whether a node mixes positions of a sequence of this length by other means than attention."""
    target, name = node.target, _name(node)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return isinstance(target, torch._ops.HigherOrderOperator)
    given = [v for v in (a.meta.get("val") for a in node.all_input_nodes) if _is_float(v)]
    if any(part in name for part in _MIXING):
        made = node.meta.get("val")
        return any(length in v.shape for v in (*given[:1], made) if _is_float(v))
    if name in _PRODUCTS:
        left = node.args[1 if "add" in name else 0]
        return isinstance(left, fx.Node) and left.meta["val"].shape[-1] == length
    if not given or length not in given[0].shape or name in _MOVING:
        return False
    return any(given[0].shape[d] == length for d in _dimensions(node, target, given[0].dim()))


def _dimensions(node: fx.Node, target: torch._ops.OpOverload, rank: int) -> list[int]:
    """The dimensions over which an operator works; where it only takes the start of one, none."""
    names = [a.name for a in target._schema.arguments]
    arguments: dict[str, Any] = {a.name: a.default_value for a in target._schema.arguments}
    arguments |= {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if arguments.get("start", 1) in (0, None) or arguments.get("index", 1) == 0:
        return []
    if "dim" not in arguments and "dims" not in arguments:
        return list(range(rank)) if _name(node) in _WHOLE else []
    dims = arguments.get("dim", arguments.get("dims"))
    dims = range(rank) if dims is None or dims == [] else dims
    return [dims] if isinstance(dims, int) else list(dims)


def _is_float(found: Any) -> TypeGuard[Tensor]:
    return isinstance(found, Tensor) and (found.is_floating_point() or found.is_complex())
