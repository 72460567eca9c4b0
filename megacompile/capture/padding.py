"""Padding: sequences made longer, to one of few lengths, where the model hides that behind a mask."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from megacompile.capture.batch import Batch, is_transformers
from megacompile.capture.captured import Captured, module_stack, results_of
from megacompile.capture.loss import LossFn, divide

IGNORED = -100  # the label of what no loss counts
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED, "attention_mask": 0}
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


def reach(model: nn.Module) -> int | None:
    """How many positions the model has embeddings for, or says that it is for."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def own_entries(model: nn.Module, kwargs: dict[str, Any], loss_fn: LossFn | None) -> set[str]:
    """The names of what in a batch is for a loss function alone."""
    return kwargs.keys() - divide(model, (), kwargs, loss_fn)[1].keys() if loss_fn is not None else set()


def may_be_padded(batch: Batch, model: nn.Module, loss_fn: LossFn | None) -> bool:
    """Whether a batch is one of tokens, and labels where the model computes the loss of them, whose padding a
    mask that the forward takes would hide.
    """
    ids = batch.kwargs.get("input_ids")
    needed = loss_fn is None and batch.outputs is None
    labels = batch.kwargs.get("labels", None if needed else ids)
    if not (isinstance(ids, Tensor) and isinstance(labels, Tensor) and is_transformers(model)):
        return False
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return False  # one that lands in ``**kwargs`` may be dropped
    if batch.kwargs.get("position_ids") is not None and batch.kwargs.get("attention_mask") is None:
        return False  # possibly packed, which a mask would hide from transformers
    own = own_entries(model, batch.kwargs, loss_fn)
    return labels.shape == ids.shape and ids.dim() == 2 and _made_of_tokens(batch, own)


def _made_of_tokens(batch: Batch, own: Collection[str]) -> bool:
    """Whether nothing in the batch but what has an entry for each token depends on the length."""
    ids = batch.kwargs["input_ids"]
    for name, value in batch.kwargs.items():
        tokens = isinstance(value, Tensor) and value.shape == ids.shape
        if (
            (name in _TOKENS or name in own)
            and tokens
            and not (name.endswith("labels") and value.is_floating_point())
        ):
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
    """The padded length: at most a quarter longer (at least 8), so that few programs serve all lengths."""
    step = max(8, 1 << max(0, length.bit_length() - 3))
    padded = -(-length // step) * step
    return padded if longest is None else min(padded, longest)


def pad_batch(batch: Any, length: int, pad_token: int = 0, *, own: Collection[str] = ()) -> dict[str, Any]:
    """A token batch padded on the right to ``length``, hidden by its attention mask, or cut to it.

    Of the entries that are a loss function's ``own``, integers are padded as labels are, others with zeros.
    """
    ids = batch["input_ids"]
    missing = length - ids.shape[1]
    padded = dict(batch.items())
    if padded.get("attention_mask") is None:
        padded["attention_mask"] = torch.ones_like(ids)
    for name, value in padded.items():
        if isinstance(value, Tensor) and value.shape == ids.shape:
            wide = value.dtype is torch.int64 and name in own
            padding = _PADDING.get(name, IGNORED if wide else 0 if name in own else pad_token)
            padded[name] = nn.functional.pad(value, (0, missing), value=padding)
    return padded


def length_of(batch: Batch) -> int:
    """The length of a token batch's sequences."""
    length: int = batch.kwargs["input_ids"].shape[1]
    return length


def kind_of(batch: Batch) -> tuple[Any, ...]:
    """What batches share that differ in the length of their sequences alone."""
    return _without_length(batch.key, tuple(batch.kwargs["input_ids"].shape))


def _without_length(key: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    spec, leaves, *others = key
    return spec, tuple((shape[:1], *of[1:]) if of[0] == shape else of for of in leaves), *others


def lengths_of_kind(keys: Iterable[tuple[Any, ...]], batch: Batch) -> list[int]:
    """The lengths, in order, for which there is the key of a batch of the same kind."""
    kind, shape = kind_of(batch), tuple(batch.kwargs["input_ids"].shape)
    place = next(i for i, leaf in enumerate(batch.key[1]) if leaf[0] == shape)
    alike = [
        key[1][place][0]
        for key in keys
        if key[0] == kind[0] and _without_length(key, key[1][place][0]) == kind
    ]
    return sorted({other[1] for other in alike})


def telling_length(length: int, graphs: Iterable[Captured]) -> int:
    """This length, or one near it, that is the size of nothing in graphs of other lengths.

    In a graph of that length, a dimension of this size is one of positions.
    """
    values = (node.meta.get("val") for captured in graphs for node in captured.graph.nodes)
    sizes = {size for value in pytree.tree_leaves(list(values)) for size in getattr(value, "shape", ())}
    near = itertools.chain(range(length, 1, -1), itertools.count(length + 1))
    return next(n for n in near if n not in sizes)


def hides_padding(model: nn.Module, captured: Captured, batch: Batch) -> bool:
    """Whether the loss of a padded batch, whose graph this is, is known to be that of the batch itself; of a
    graph with a loss function of the user's, whether what the forward returns is, at its positions.

    The graph must read the mask, or be blind to padding, and nothing but attention may mix positions: no
    recurrence, no convolution, no product, sum or softmax over a dimension as long as the sequence. Nothing
    else may be of that length.
    """
    mask, length = batch.kwargs["attention_mask"], batch.kwargs["input_ids"].shape[1]
    judged = set(captured.graph.nodes) if captured.returned is None else _of_model(captured.graph)
    read = {node.name for node in judged}
    masks = {n for n, index in captured.inputs.items() if batch.leaves[index] is mask and n in read}
    if not (masks or captured.blind) or any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return False
    masked = _masked(
        captured.graph, _below(captured, masks) - _below(captured, captured.inputs.keys() - masks)
    )
    of_batch = _below(captured, captured.inputs.keys())
    return not any(_mixes(node, length) for node in judged & of_batch - masked)


def gives_positions(captured: Captured, batch: Batch) -> bool:
    """Whether each result of a graph is one number, or [rows, positions, ...] of the batch, so that those of
    padding may be cut off.
    """
    rows, length = batch.kwargs["input_ids"].shape
    shapes = [tuple(node.meta["val"].shape) for node in results_of(captured.graph)]
    return all(not of or (of[:2] == (rows, length) and of.count(length) == 1) for of in shapes)


def _of_model(graph: fx.Graph) -> set[fx.Node]:
    """The calls of a model's modules, and what they depend on; all others are a loss function's."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in found for user in node.users) or any(module_stack(node)):
            found.add(node)
    return found


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
