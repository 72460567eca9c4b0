"""Loops over chunks of one sequence, beside whole functions, for any set-up of the zoo that reads tokens."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.api.frontend import Compiled, Frontend
from megacompile.blocks.chunk_loops import means_as_sums
from megacompile.blocks.chunk_roles import WHOLE, length_of, role, two_lengths
from megacompile.blocks.joint_graph import Joint
from megacompile.blocks.loop_check import disagreement
from megacompile.blocks.partition import Template
from megacompile.blocks.policies import _Cutter
from megacompile.blocks.whole_sequences import NO_PRODUCT
from megacompile.capture.batch import read_batch
from megacompile.graph.node_storage import is_view
from tests.support.zoo import Batch, Case, cases, tokens

LENGTHS, SHORT = (57, 61), (24, 26)
"""No other sizes of these models, whose weights have 96 columns and whose learned positions end at 64."""
CHUNKS = (19, 25, max(LENGTHS))  # one is a divisor of the first length, none of the second
_READ = {"input_ids", "labels", "attention_mask", "position_ids"}


class UnknownModel(Exception):
    """The installed transformers makes no such model of this size."""


@dataclass(frozen=True)
class Looped:
    """Of one template: what mixes positions, why it has no loops (None: it has), how those differ."""

    name: str
    mixes: tuple[str, ...] = ()
    whole: str | None = None
    wrong: str | None = None


@functools.cache
def names() -> tuple[str, ...]:
    """Set-ups whose batches are tokens."""
    return tuple(n for n, case in cases().items() if {"input_ids", "labels"} <= set(case.batch(0)) <= _READ)


def looped(name: str, lengths: tuple[int, ...] = LENGTHS, chunks: tuple[int, ...] = CHUNKS) -> list[Looped]:
    """What comes of the templates of one set-up that have a sequence: at the first length where it is not
    right, else at any."""
    found: dict[str, Looped] = {}
    for length in lengths:
        compiled = _compiled(cases()[name], length)
        for template in (t for t in compiled.part.templates if length_of(t) == length):
            known = found.get(template.name)
            if known is None or not (known.whole or known.wrong):
                found[template.name] = _looped(template, compiled.fused.fake_mode, length, chunks)
    return list(found.values())


def _compiled(case: Case, length: int) -> Compiled:
    try:
        model = case.build()
    except Exception as error:
        raise UnknownModel(f"transformers does not make it: {error}") from error
    batch = read_batch(_batch_of(case, length), model)
    return Frontend(model, torch.float32).build(batch)


def _batch_of(case: Case, length: int) -> Batch:
    """One sequence: padded or packed where the set-up is."""
    ids, given = tokens(0, size=1, length=length), case.batch(0)
    batch = {"input_ids": ids, "labels": ids.clone() if given["labels"].dim() > 1 else given["labels"][:1]}
    if "position_ids" in given:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (30, length - 30)])[None]
    if "attention_mask" in given:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, slice(0, 9) if "left" in case.name else slice(48, length)] = 0
    return batch


def _looped(template: Template, mode: Any, length: int, chunks: tuple[int, ...]) -> Looped:
    pairs, reason = two_lengths(template, mode, SHORT)
    if reason is not None:
        return Looped(template.name, whole=reason)
    joint = pairs[0][1]
    mixes = mixing(joint)
    whole = _Cutter(template, joint, mode, None, lean=True).run()
    for chunk in (min(c, length) for c in chunks):
        found = _Cutter(template, joint, mode, None, loops=(length, chunk), lean=True).run()
        if not any(f.looped for f in found.functions()):
            return Looped(template.name, mixes, whole=NO_PRODUCT)
        if wrong := disagreement(template, whole, found):
            return Looped(template.name, mixes, wrong=f"chunks of {chunk} of {length}: {wrong}")
    return Looped(template.name, mixes)


def mixing(joint: Joint) -> tuple[str, ...]:
    """The operators in which numbers of several positions first meet, by their names without ``_backward``.

    What they give runs on all positions at once too, with whatever reads that."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    means_as_sums(graph)
    met: list[fx.Node] = []
    behind: set[fx.Node] = set()  # what is made of such results and not one value for each position again
    for node in graph.nodes:
        if node.op == "call_function" and role(node) == "mixing":
            after = not behind.isdisjoint(node.all_input_nodes)
            first = not after and not is_view(node) and any(map(_of_positions, node.all_input_nodes))
            first &= node.target not in (operator.getitem, torch.ops.aten.new_zeros.default)
            if first and node.meta["along"] is not None:
                met.append(node)
            if (first or after) and not _of_positions(node):
                behind.add(node)
    return tuple(sorted({_named(n) for n in met}))


def _of_positions(node: fx.Node) -> bool:
    """Whether a node has numbers, and one of them or more for each position."""
    value, along = node.meta["val"], node.meta["along"]
    return isinstance(value, Tensor) and type(along) is int and along != WHOLE and value.is_floating_point()


def _named(node: fx.Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload), node
    return node.target._opname.strip("_").removesuffix("_backward")
