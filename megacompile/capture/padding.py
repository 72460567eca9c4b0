"""Padding: which lengths are padded to which, and whether a model and a user's loss ignore padding."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megacompile.capture.batch import Batch, apply_loss, divide, is_transformers
from megacompile.graph.captured import Captured, Returned, module_stack, results_of, split, written_buffers
from megacompile.graph.sequence_dimension import masked, mixes

# ------------------------------------------------------------------------------------------------------------
# Padding: sequences made longer, to one of few lengths, where the model hides that behind a mask.


Function = Callable[..., Any]  # of what the forward returned and the batch: the loss, or outputs
IGNORED = -100  # the label of what no loss counts
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED, "attention_mask": 0}
_TOKENS = {"input_ids", "attention_mask", "labels", "shift_labels", "token_type_ids", "position_ids"}
_SCALED = 1 << 20  # times that no rotary embedding is stretched
_LIBRARIES = {"torch", "transformers", "peft", "bitsandbytes"}


def reach(model: nn.Module) -> int | None:
    """Return the number of positions that the model has embeddings for, or says that it is for; where rotary
    embeddings are scaled, those that this reaches."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("max_position_embeddings", "max_seq_len")  # GPT-2's n_positions is the first of these, too
    given = [value for name in names if isinstance(value := getattr(text, name, None), int) and value > 0]
    if not given:
        return None
    rotary = getattr(text, "rope_parameters", None) or {}
    kinds = rotary.values() if all(isinstance(kind, dict) for kind in rotary.values()) else [rotary]
    scaled = [
        int(factor * kind.get("original_max_position_embeddings", given[0]))
        for kind in kinds
        if isinstance(factor := kind.get("factor"), (int, float)) and 1 < factor < _SCALED
    ]
    return max([given[0], *scaled])


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
            (name in _TOKENS or name in own)
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


def bucket_length(length: int, *, longest: int | None = None) -> int:
    """The padded length: at most a quarter longer (at least 8), so that few programs serve all lengths."""
    step = max(8, 1 << max(0, length.bit_length() - 3))
    padded = -(-length // step) * step
    return padded if longest is None else min(padded, longest)


def pad_batch(batch: Any, length: int, pad_token: int = 0, *, own: Collection[str] = ()) -> dict[str, Any]:
    """A token batch padded on the right to ``length``, hidden by its attention mask, or cut to it.

    Of the entries that are a function's ``own``, integers are padded as labels are, others with zeros.
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
            padding = _PADDING.get(name, IGNORED if wide else 0 if name in own else pad_token)
            padded[name] = nn.functional.pad(value, (0, missing), value=padding)
    return padded


def length_of(batch: Batch) -> int:
    """The length of a token batch's sequences."""
    length: int = batch.kwargs["input_ids"].shape[1]
    return length


def kind_of(batch: Batch) -> tuple[Any, ...]:
    """Return what batches share that differ in the length of their sequences alone."""
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


# ------------------------------------------------------------------------------------------------------------
# Whether a function of the user's ignores padding: found out by calling it, as its code may do anything.
#
# In: the function, what the forward returns, a batch. Out: whether the loss of a padded batch, and its
# gradient by what the forward returned, are those of the batch itself; of a function whose results are
# wanted, whether these are, at the batch's positions. Two things have to hold.
#
# **Numbers**, at short lengths: on random outputs and on labels like the batch's, the padded loss and
# gradient,
# or the results, are equal within rounding, and the gradient is zero at padding, where the outputs are
# random
# too. Outputs without an axis of positions are others in the padded call, and get no gradient; but a number
# that the model computes itself, whose graph is judged, may be a result.
#
# **Calls**, at each length that is relied on: the function makes the same calls of operators as at short
# lengths, with sizes and numbers that grow evenly with the length. So it does not compute otherwise from
# some
# length on.


_SHORT, _LONG = (3, 5), 8
_ROUNDING = 1e-5  # of sums in FP32 over so few positions


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator that is called, and what it is given: shapes, numbers, other constants."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(func)
        for leaf in pytree.tree_leaves((args, kwargs)):
            self.made += [leaf.dtype, *leaf.shape] if isinstance(leaf, Tensor) else [leaf]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class LossAtLengths:
    """A loss function that can be called at any length; ``returned`` is what the forward made of a batch of
    this ``length``, the size of nothing but positions; ``kwargs`` are a batch as it was given.
    """

    function: Callable[..., Any]
    model: nn.Module
    returned: Returned
    length: int
    kwargs: dict[str, Any]

    def ignores_padding(self) -> bool:
        """Return whether the numbers are equal; not, where the function fails on random outputs."""
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                return all(self._ignores(n) for n in _SHORT)
        except Exception:  # whatever a user's function raises: nothing is known of it then
            return False

    def computes_alike(self, n: int, *, padded: bool) -> bool:
        """Return whether it calls at this length what it calls at short ones."""
        try:
            short, long, found = (self._calls(at, padded) for at in (_SHORT[0], _LONG, n))
        except Exception:
            return False
        if not len(short) == len(long) == len(found):
            return False
        span, steps = _LONG - _SHORT[0], n - _SHORT[0]
        return all(_grows(*of, span, steps) for of in zip(short, long, found, strict=True))

    def _ignores(self, n: int) -> bool:
        short, batch, long, padded_batch = self._pair(n)
        loss, gradients = self._run(short, batch)
        of_padded, gradients_of_padded = self._run(long, padded_batch)
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not used or not set(used) <= set(self._with_positions) or not _equal(of_padded, loss):
            return False
        for gradient, padded in zip(gradients, gradients_of_padded, strict=True):
            if gradient is None or padded is None:
                if gradient is not padded:
                    return False
            elif bool(padded[:, n:].any()) or not _equal(padded[:, :n], gradient):
                return False
        return True

    def _pair(self, n: int) -> tuple[list[Tensor], dict[str, Any], list[Tensor], dict[str, Any]]:
        """Random outputs and a batch of this length, and both with padding."""
        random = torch.Generator().manual_seed(n)
        batch, long = self._batch(n, random), self._outputs(_LONG, random)
        short = self._outputs(n, random)
        for i in self._with_positions:
            short[i] = long[i][:, :n].clone()
        return short, batch, long, pad_batch(batch, _LONG, own=self._own)

    def _run(self, outputs: Sequence[Tensor], batch: dict[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
        """The loss and its gradient by each output; None: it has none, or does not depend on it."""
        leaves = [x.requires_grad_(x.is_floating_point()) for x in outputs]
        loss = self._call(leaves, batch)
        floats = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(loss, floats, allow_unused=True))
        return loss.detach(), [next(found) if x.requires_grad else None for x in leaves]

    def _calls(self, n: int, padded: bool) -> list[Any]:
        """The operators that are called at a length, and what they are given; nothing is computed."""
        with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
            sizes = [(self._shape(shape, n), dtype) for shape, dtype in self.returned.tensors]
            outputs = [torch.empty(shape, dtype=dtype) for shape, dtype in sizes]
            batch = {
                name: torch.empty_like(value, device="cpu").resize_(self._rows, n) if varies else value
                for name, value, varies in self._entries
            }
            if padded:
                batch = pad_batch(batch, n, own=self._own)
            calls = _Calls()
            with calls:
                self._call(outputs, batch)
        return calls.made

    def _call(self, outputs: Sequence[Tensor], batch: dict[str, Any]) -> Any:
        rest = divide(self.model, (), batch, self.function)[2]
        return apply_loss(self.function, self.returned.structure.around(outputs), (), batch, rest)

    def _outputs(self, n: int, random: torch.Generator) -> list[Tensor]:
        """Random outputs of this length, in FP32 where they are of lower precision."""
        return [_random(self._shape(shape, n), dtype, random) for shape, dtype in self.returned.tensors]

    def _batch(self, n: int, random: torch.Generator) -> dict[str, Any]:
        """A batch of this length, without padding, of values that the batch itself holds."""
        made = dict(self.kwargs)
        for name, value, varies in self._entries:
            if varies and name == "attention_mask":
                made[name] = torch.ones(self._rows, n, dtype=value.dtype)
            elif varies:
                drawn = value[value != IGNORED] if bool((value != IGNORED).any()) else torch.zeros_like(value)
                drawn = drawn.flatten()
                made[name] = drawn[torch.randint(len(drawn), (self._rows, n), generator=random)]
        return made

    def _shape(self, shape: Sequence[int], n: int) -> list[int]:
        return [n if size == self.length else size for size in shape]

    @property
    def _with_positions(self) -> list[int]:
        """Return which outputs are [rows, positions, ...], so that padding is at their end."""
        return [
            i
            for i, (shape, dtype) in enumerate(self.returned.tensors)
            if dtype.is_floating_point
            and tuple(shape[:2]) == (self._rows, self.length)
            and tuple(shape).count(self.length) == 1
        ]

    @property
    def _entries(self) -> list[tuple[str, Any, bool]]:
        """The name and value of each entry of a batch, and whether it has one for each token."""
        tokens = self.kwargs["input_ids"].shape
        return [(n, v, isinstance(v, Tensor) and v.shape == tokens) for n, v in self.kwargs.items()]

    @property
    def _rows(self) -> int:
        rows: int = self.kwargs["input_ids"].shape[0]
        return rows

    @property
    def _own(self) -> set[str]:
        return own_entries(self.model, self.kwargs, self.function)


class OutputsAtLengths(LossAtLengths):
    """The same of a function whose results, with positions or one number each, are wanted."""

    def _ignores(self, n: int) -> bool:
        short, batch, long, padded_batch = self._pair(n)
        for i, (shape, _) in enumerate(self.returned.tensors):
            if not shape:
                short[i] = long[i]
        found, structure = split(self._call(short, batch))
        padded, of_padded = split(self._call(long, padded_batch))
        own = [x[:, : n - _LONG] if x.dim() > 1 else x for x in padded]
        alike = structure == of_padded and [x.shape for x in own] == [x.shape for x in found]
        return alike and all(_equal(x.double(), y.double()) for x, y in zip(own, found, strict=True))

    def _call(self, outputs: Sequence[Tensor], batch: dict[str, Any]) -> Any:
        return self.function(self.returned.structure.around(outputs), batch)


def _random(shape: Sequence[int], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(2, shape, generator=random).to(dtype)
    return torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32), generator=random)


def _equal(found: Tensor, wanted: Tensor) -> bool:
    """Within rounding, and finite."""
    largest = wanted.abs().max()
    return bool(largest.isfinite()) and bool((found - wanted).abs().max() <= _ROUNDING * largest)


def _grows(short: Any, long: Any, found: Any, span: int, steps: int) -> bool:
    """Return whether a size or number is the same at all lengths, or lies on a line with those at short
    ones."""
    if short == long == found:
        return True
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in (short, long, found)):
        return False
    return bool((found - short) * span == (long - short) * steps)
