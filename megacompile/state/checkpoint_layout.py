"""Find which parameters a checkpoint holds and where a program's parameters lie in them.

In:  the layout in a checkpoint's manifest, and the host state that is to be filled from it. Out:
:class:`Layout`: the tensors that the checkpoint must hold, and of every parameter of the program the parts
of saved ones that it consists of.

A weight that is too large to be on the device whole is cut by rows, and another budget cuts it otherwise.
Pieces are ranges of the model's parameters, so a program reads the ranges that it needs, bit for bit; codes
of moments allow cuts between two of their blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from torch import Tensor

from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot, padded_elements
from megacompile.errors import MegacompileError
from megacompile.state.masters import HostState
from megacompile.state.moment_formats import CODINGS, Form, array_range, is_coded
from megacompile.state.optimizer_state import shared_by_pieces
from megacompile.state.snapshot import Snapshot
from megacompile.state.state_views import shapes_of
from megacompile.state.torch_optimizer import TorchOptimizer


@dataclass(frozen=True)
class Facts:
    """The facts of a saved parameter: how it lies, the step that it is at, and of which rows it is a piece,
    if it is one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    computes_in: str
    step: int
    whole: str = ""
    first_row: int = 0


@dataclass(frozen=True)
class SavedLayout:
    """The layout in the manifest: the format, and the facts of each parameter."""

    optimizer_state: str
    parameters: dict[str, Facts]


@dataclass(frozen=True, slots=True)
class Part:
    """``count`` elements from ``start`` on of a saved parameter, which begin at ``to`` in one of ours.

    ``ends`` says that both end there, whatever padding follows.
    """

    saved: str
    start: int
    to: int
    count: int
    ends: bool


@dataclass(frozen=True)
class Layout:
    """The tensors of a checkpoint by name, on the meta device; the parts and the step of every parameter."""

    tensors: dict[str, Tensor]
    parts: dict[str, tuple[Part, ...]]
    steps: dict[str, int]


def layout_of(state: HostState | Snapshot) -> SavedLayout:
    """The layout of a state, as it is saved."""
    slots = [
        (slot.parameter, step)
        for g in state.groups
        for slot, step in zip(g.slots, state.steps[g.index], strict=True)
    ]
    return SavedLayout(str(state.form), {p.name: _facts(p, step) for p, step in slots})


def _facts(p: Parameter, step: int) -> Facts:
    return Facts(p.shape, p.stride, str(p.dtype).removeprefix("torch."), step, p.whole, p.first_row)


def read_layout(saved: SavedLayout, held: Container[str], state: HostState, folder: Path) -> Layout:
    """Match a manifest's layout with a state, or :class:`MegacompileError` that names what does not fit.

    ``held`` are the names of all saved tensors: of frozen parameters there may be low halves or none.
    """
    if saved.optimizer_state != str(state.form):
        if isinstance(state.form, TorchOptimizer) or "." in saved.optimizer_state:
            raise MegacompileError(
                f"{folder} was saved with the state of {saved.optimizer_state} and this program has that of "
                f"{state.form}: compile with the optimizer that was saved."
            )
        raise MegacompileError(
            f"{folder} was saved with optimizer_state={saved.optimizer_state!r} and this program has "
            f"{state.form!r}: compile with the one that was saved."
        )
    theirs = by_whole(saved.parameters)
    owners = {slot.parameter.name: (g, slot.parameter) for g in state.groups for slot in g.slots}
    mine = by_whole(layout_of(state).parameters)
    for whole in [*mine, *theirs]:
        if whole not in theirs or whole not in mine:
            where = "the model" if whole in mine else "the checkpoint"
            raise MegacompileError(
                f"{folder} is of another model: only {where} has the parameter {whole}."
                + " Older versions saved no state of what no batch had used." * (whole in mine)
            )
        _compare(whole, theirs[whole], mine[whole], folder)
    groups = [
        _saved_group(owners[next(iter(mine[w]))], name, f, f"{name}/low" in held)
        for w in theirs
        for name, f in theirs[w].items()
    ]
    tensors = {f"{n}/{a}": t for group in shapes_of(groups, state.form) for n, arrays in group.items()
               for a, t in arrays.items()}  # fmt: skip
    parts: dict[str, tuple[Part, ...]] = {}
    for whole, pieces in mine.items():
        for name, facts in pieces.items():
            parts[name] = _saved_parts(facts, theirs[whole])
            _check_blocks(owners[name], parts[name], theirs[whole], state.form, folder)
    steps = {name: next(iter(theirs[w].values())).step for w, pieces in mine.items() for name in pieces}
    return Layout(tensors, parts, steps)


Pieces = dict[str, Facts]


def by_whole(parameters: Mapping[str, Facts]) -> dict[str, Pieces]:
    """By the model's parameters, their pieces (or themselves) in the order of rows."""
    found: dict[str, Pieces] = defaultdict(dict)
    for name, facts in sorted(parameters.items(), key=lambda item: item[1].first_row):
        found[facts.whole or name][name] = facts
    return {name: found[name] for name in dict.fromkeys(f.whole or n for n, f in parameters.items())}


def _compare(whole: str, theirs: Pieces, mine: Pieces, folder: Path) -> None:
    together, ours = join_pieces(theirs), join_pieces(mine)
    assert together is not None and ours is not None  # of a manifest that was read, and of a model
    for fact in ("shape", "stride", "computes_in"):
        found, expected = getattr(together, fact), getattr(ours, fact)
        if found != expected:
            raise MegacompileError(
                f"{folder} does not fit at {whole}: {fact} is {found} in the checkpoint "
                f"and {expected} in the model."
            )


def join_pieces(pieces: Pieces) -> Facts | None:
    """The facts of the parameter that pieces make up; None where they leave rows out, overlap or differ."""
    first, *rest = pieces.values()
    if not first.whole:
        return None if rest or first.first_row else first
    rows = 0
    for facts in (first, *rest):
        alike = (facts.stride, facts.computes_in, facts.step, facts.shape[1:])
        if (
            not facts.shape
            or facts.first_row != rows
            or alike != (first.stride, first.computes_in, first.step, first.shape[1:])
        ):
            return None
        rows += facts.shape[0]
    return replace(first, shape=(rows, *first.shape[1:]))


def _saved_group(owner: tuple[GroupLayout, Parameter], name: str, facts: Facts, has_low: bool) -> GroupLayout:
    """A group of one saved parameter, alike one of ours in all but name, rows and, if frozen, low halves."""
    group, parameter = owner
    slot = Slot(replace(parameter, name=name, shape=facts.shape), 0)
    elements, exact = padded_elements(slot.parameter.numel), not group.trainable and not has_low
    return replace(group, slots=(slot,), elements=elements, ranks=1, exact=exact)


def _saved_parts(facts: Facts, saved: Pieces) -> tuple[Part, ...]:
    begin, end = _elements(facts)
    parts = []
    for name, theirs in saved.items():
        first, last = _elements(theirs)
        start, stop = max(begin, first), min(end, last)
        if start < stop or begin == end == first == last:
            parts.append(Part(name, start - first, start - begin, stop - start, stop == end == last))
    return tuple(parts)


def _elements(facts: Facts) -> tuple[int, int]:
    """A piece's range of its whole parameter's elements."""
    start = facts.first_row * prod(facts.shape[1:])
    return start, start + prod(facts.shape)


def _check_blocks(
    owner: tuple[GroupLayout, Parameter],
    parts: tuple[Part, ...],
    saved: Pieces,
    form: Form,
    folder: Path,
) -> None:
    """Codes can be taken apart between blocks only."""
    (group, parameter) = owner
    if isinstance(form, TorchOptimizer) or form not in CODINGS or not group.trainable:
        return
    coding = CODINGS[form]
    coded = is_coded(parameter.numel, form)
    for part in parts:
        between = part.ends or part.count % coding.block == 0  # then the next part begins with a block too
        if is_coded(prod(saved[part.saved].shape), form) != coded or (coded and not between):
            raise MegacompileError(
                f"{folder} holds {part.saved} where this program has {parameter.name}, and {form} moments "
                "cannot be taken apart there: compile with the hbm_budget of the program that saved them."
            )


def copied_range(array: str, part: Part, saved: int, ours: int, form: Form) -> tuple[slice, slice]:
    """Return the entries of a saved flat array, of that length, and their places in one of ours."""
    if shared_by_pieces(form, array):
        return slice(0, saved), slice(0, ours)
    coding = None if isinstance(form, TorchOptimizer) else CODINGS.get(form)
    start, stop = array_range(array, coding, part.start, part.start + part.count)
    to, _ = array_range(array, coding, part.to, part.to)
    length = min(saved - start, ours - to) if part.ends else stop - start
    return slice(start, start + length), slice(to, to + length)
