"""Padding: sequences made longer, where the model hides that behind a mask.

To what length, :mod:`megacompile.capture.padded_length` says.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from megacompile.capture.batch import Batch, BatchKey, is_transformers
from megacompile.capture.loss_value import divide
from megacompile.graph.captured import Captured, module_stack, results_of
from megacompile.graph.node_storage import written_buffers
from megacompile.graph.position_mixing import masked, mixes

Function = Callable[..., Any]  # of what the forward returned and the batch: the loss, or outputs
IGNORED = -100  # the label of what no loss counts
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED, "attention_mask": 0}
_TOKEN_ENTRIES = {"input_ids", "attention_mask", "labels", "shift_labels", "token_type_ids", "position_ids"}
_LIBRARIES = {"torch", "transformers", "peft", "bitsandbytes"}


def own_entries(model: nn.Module, kwargs: dict[str, Any], function: Function | None) -> set[str]:
    """The names of what in a batch is for a function of the user's alone."""
    return kwargs.keys() - divide(model, (), kwargs, function)[1].keys() if function is not None else set()


def may_be_padded(batch: Batch, model: nn.Module, function: Function | None) -> bool:
    """Return whether a batch is one of tokens, and labels where the model computes the loss of them, whose
    padding a mask that the forward takes would hide."""
    ids = batch.kwargs.get("input_ids")
    needed = function is None and batch.outputs is None
    labels = batch.kwargs.get("labels", None if needed else ids)
    if not (isinstance(ids, Tensor) and isinstance(labels, Tensor) and is_transformers(model)):
        return False
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return False  # one that lands in ``**kwargs`` may be dropped
    if batch.kwargs.get("position_ids") is not None and batch.kwargs.get("attention_mask") is None:
        return False  # possibly packed, which a mask would hide from transformers
    own = own_entries(model, batch.kwargs, function)
    return labels.shape == ids.shape and ids.dim() == 2 and _made_of_tokens(batch, own)


def _made_of_tokens(batch: Batch, own: Collection[str]) -> bool:
    """Return whether nothing in the batch but what has an entry for each token depends on the length."""
    ids = batch.kwargs["input_ids"]
    for name, value in batch.kwargs.items():
        tokens = isinstance(value, Tensor) and value.shape == ids.shape
        if (
            (name in _TOKEN_ENTRIES or name in own)
            and tokens
            and not (name.endswith("labels") and value.is_floating_point())
        ):
            continue
        if ids.shape[1] in (value.shape if isinstance(value, Tensor) else (value,)):
            return False
    return not batch.args


def computes_as_libraries_do(model: nn.Module) -> bool:
    """Return whether all modules, and losses, are computed by functions of transformers, PEFT or torch alone.

    A loss of the user's own may count all positions, in ways that a graph does not show.
    """
    return all(map(_is_a_library_s, model.modules()))


def _is_a_library_s(module: nn.Module) -> bool:
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    loss = getattr(module, "_loss_function", None)
    made = {owner.__module__.split(".")[0], getattr(loss, "__module__", "torch").split(".")[0]}
    return made <= _LIBRARIES and "forward" not in vars(module)


def pad_batch(batch: Any, length: int, *, own: Collection[str] = ()) -> dict[str, Any]:
    """A token batch padded on the right to ``length``, hidden by its attention mask, or cut to it.

    A function's ``own`` integer entries are padded as labels are, its others with zeros.
    """
    ids = batch["input_ids"]
    missing = length - ids.shape[1]
    padded = dict(batch.items())
    if padded.get("attention_mask") is None:
        padded["attention_mask"] = torch.ones_like(ids)
    for name, value in padded.items():
        of_several = name == "position_ids"  # rows and columns of images beside the place in the text
        if isinstance(value, Tensor) and ids.shape in (value.shape, value.shape[-2:] if of_several else None):
            wide = value.dtype is torch.int64 and name in own
            padding = _PADDING.get(name, IGNORED if wide else 0)
            padded[name] = nn.functional.pad(value, (0, missing), value=padding)
    return padded


def length_of(batch: Batch) -> int:
    """The length of a token batch's sequences."""
    length: int = batch.kwargs["input_ids"].shape[1]
    return length


def kind_of(batch: Batch) -> BatchKey:
    """Return what batches share that differ in the length of their sequences alone."""
    return _without_length(batch.key, tuple(batch.kwargs["input_ids"].shape))


def _without_length(key: BatchKey, shape: tuple[int, ...]) -> BatchKey:
    leaves = tuple((shape[:1], *of[1:]) if of[0] == shape else of for of in key.leaves)
    return key._replace(leaves=leaves)


def lengths_of_kind(keys: Iterable[BatchKey], batch: Batch) -> list[int]:
    """The lengths, in order, for which there is the key of a batch of the same kind."""
    kind, shape = kind_of(batch), tuple(batch.kwargs["input_ids"].shape)
    place = next(i for i, leaf in enumerate(batch.key.leaves) if leaf[0] == shape)
    alike = [
        key.leaves[place][0]
        for key in keys
        if key.structure == kind.structure and _without_length(key, key.leaves[place][0]) == kind
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
    """Return whether the loss of a padded batch, whose graph this is, is known to be that of the batch
    itself; of a graph with a function of the user's, whether what the forward returns is, at its positions.

    The graph must read the mask, or be blind to padding, and nothing but attention may mix positions, unless
    it is causal: no recurrence in loops, no product, sum or softmax over a dimension as long as the sequence.
    Nothing else may be of that length.
    """
    mask, length = batch.kwargs["attention_mask"], batch.kwargs["input_ids"].shape[1]
    judged = set(captured.graph.nodes) if captured.returned is None else _of_model(captured.graph)
    read = {node.name for node in judged}
    masks = {n for n, index in captured.inputs.items() if batch.leaves[index] is mask and n in read}
    if not (masks or captured.blind) or any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return False
    if written_buffers(captured.graph):  # by padding, too
        return False
    of_masks = _below(captured, masks) - _below(captured, captured.inputs.keys() - masks)
    of_batch = _below(captured, captured.inputs.keys())
    return not any(mixes(node, length) for node in judged & of_batch - masked(captured.graph, of_masks))


def gives_positions(captured: Captured, batch: Batch, *, once: bool = True) -> bool:
    """Return whether each result of a graph is one number, or [rows, positions, ...] of the batch, so that
    those of padding may be cut off; ``once``: and no other dimension of it is as long.

    A function's results may leave out a position, as what predicts the next token does.
    """
    rows, length = batch.kwargs["input_ids"].shape
    starts = {(rows, length), (rows, length if captured.returned is None else length - 1)}
    shapes = [tuple(node.meta["val"].shape) for node in results_of(captured.graph)]
    return all(not of or (of[:2] in starts and not (once and length in of[2:])) for of in shapes)


def _of_model(graph: fx.Graph) -> set[fx.Node]:
    """The calls of a model's modules, and what they depend on; all others are a user's function's."""
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
