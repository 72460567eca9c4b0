"""Differentiate: each template becomes forward, recompute and backward functions per checkpoint policy.

In: a :class:`~megacompile.blocks.partition.Template`. Out: :class:`DifferentiatedTemplate`. The joint graph
of forward and backward is traced once with the gradient rules that eager PyTorch uses; a checkpoint policy
is a choice of the forward tensors that are kept for the backward (the saved set). Invariant: every function
is functional, but for memory that it owns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks.block_functions import BlockFunction, block_function, fused
from megacompile.blocks.chunk_roles import fitting_chunk, length_of, two_lengths
from megacompile.blocks.codegen import identifier
from megacompile.blocks.costs import is_heavy
from megacompile.blocks.differentiated_template import (
    CHECKPOINT_POLICIES,
    DifferentiatedTemplate,
    PolicyFunctions,
    PolicyName,
)
from megacompile.blocks.folded_sums import with_folded_sums
from megacompile.blocks.head_gradients import with_gradients_in_forward
from megacompile.blocks.joint_graph import Joint, Ref, extract, joint_in, joint_of, without_statistics
from megacompile.blocks.loop_check import disagreement
from megacompile.blocks.partition import Template
from megacompile.blocks.saved_sets import is_attention, keeps_all, keeps_narrow, saved_set
from megacompile.blocks.whole_sequences import NO_PRODUCT
from megacompile.capture.changed_buffers import SNAPSHOT
from megacompile.graph.node_storage import WRITE, storage_nbytes, view_base
from megacompile.kernels._triton import Gpu

_SHORT, _SHORT_CHUNK = (24, 26), 7  # lengths at which loops are checked, and their chunks there
_LARGE_SHARE = 8  # attention is kept alone where it is at least one of so many FLOPs of a forward


def differentiate(
    template: Template,
    mode: FakeTensorMode,
    inductor: torch.device | None = None,
    gpu: Gpu | None = None,
    chunk: int = 0,
    *,
    check: bool = True,
    fold: bool = False,
) -> DifferentiatedTemplate:
    """Trace a template's forward and backward jointly and cut it at several saved sets.

    ``inductor`` names the device for which Inductor compiles the functions; None leaves them plain.
    ``gpu`` is the one whose memory is planned, None: the CPU's is.
    ``chunk`` > 0: what acts on each position of a sequence alone runs over chunks of so many positions, if it
    computes the same on random numbers, which ``check`` makes sure of.
    ``fold``: fold sums into products, but where loops or Inductor place them in another way.
    """
    length = length_of(template)
    if chunk and length is not None and length > chunk and not template.writes:
        return _in_chunks(template, mode, gpu, (length, chunk), check, fold)
    if inductor is None:
        return _cut(template, mode, gpu, fold=fold)
    cutter = _Cutter(template, joint_of(template, mode), mode, gpu)
    return cutter.with_inductor(cutter.run(), inductor)


_CUT: WeakKeyDictionary[Template, dict[Any, DifferentiatedTemplate]] = WeakKeyDictionary()


def _cut(
    template: Template,
    mode: FakeTensorMode,
    gpu: Gpu | None,
    loops: tuple[int, int] | None = None,
    fold: bool = False,
) -> DifferentiatedTemplate:
    """A template's functions, made once while it lives: chunks of two lengths may come to the same."""
    made, key = _CUT.setdefault(template, {}), (gpu, loops, fold)
    if key not in made:
        joint = joint_of(template, mode)
        if fold:
            joint = joint_in(with_folded_sums(joint.graph, mode), template)
        made[key] = _Cutter(template, joint, mode, gpu, loops=loops, lean=bool(loops)).run()
    return made[key]


def _in_chunks(
    template: Template, mode: FakeTensorMode, gpu: Gpu | None, loops: tuple[int, int], check: bool, fold: bool
) -> DifferentiatedTemplate:
    """With loops over chunks, unless there are none or they compute something else."""
    pairs, reason = two_lengths(template, mode, _SHORT)
    if reason is None:
        (_, joint), (short, short_joint) = pairs
        loops = loops[0], fitting_chunk(joint, loops[1])
        try:
            found = _cut(template, mode, gpu, loops)
            if not any(f.looped for f in found.functions()):
                reason = NO_PRODUCT
            elif check:
                reason = _wrong(short, short_joint, mode)
        except RuntimeError as error:  # what an operator says about its arguments
            reason = f"its loops fail: {str(error).strip().splitlines()[0]}"
    if reason is None:
        return replace(found, loops=loops)
    return replace(_cut(template, mode, gpu, fold=fold), not_looped=reason)


def _wrong(short: Template, joint: Joint, mode: FakeTensorMode) -> str | None:
    """Describe what loops compute otherwise than whole functions at a short length; None where nothing."""
    make = partial(_Cutter, short, joint, mode, None, lean=True)
    whole, looped = make().run(), make(loops=(length_of(short) or 0, _SHORT_CHUNK)).run()
    return disagreement(short, whole, looped)


class _Cutter:
    """Cuts one joint graph at several saved sets."""

    def __init__(
        self,
        template: Template,
        joint: Joint,
        mode: FakeTensorMode,
        gpu: Gpu | None,
        *,
        loops: tuple[int, int] | None = None,
        lean: bool = False,
    ) -> None:
        self.template = template
        self.mode = mode
        self.gpu = gpu
        self.joint = joint
        self.loops = loops
        self.lean = lean
        # by function: its joint graph, results, given, and whether it writes into buffers
        self._parts: dict[str, tuple[Joint, list[fx.Node], dict[fx.Node, Ref], bool]] = {}

    def run(self) -> DifferentiatedTemplate:
        prefix = identifier(self.template.name)
        forward = self._function(f"{prefix}_forward", _numbered("out", self.joint.outs), ())
        if self.lean:
            return self._lean(prefix, forward)
        policies: dict[PolicyName, PolicyFunctions] = {}
        if any(grad is not None for grad in self.joint.grads):
            everything = saved_set(self.joint, keeps_all)
            something = saved_set(self.joint, is_heavy)
            policies["all"] = whole = self._with_saved("all", prefix, everything, forward)
            if sum(_saved_bytes(something)) < sum(_saved_bytes(everything)):
                policies["some"] = self._with_saved("some", prefix, something, forward)
                narrow = saved_set(self.joint, keeps_narrow(self.joint))
                if 0 < sum(_saved_bytes(narrow)) < sum(_saved_bytes(something)):
                    policies["narrow"] = self._with_saved("narrow", prefix, narrow, forward)
            if forward.attention_flops[0] * _LARGE_SHARE >= forward.flops > 0:
                attention = saved_set(self.joint, is_attention)
                policies["attention"] = self._with_saved("attention", prefix, attention, forward)
            policies["none"] = self._recomputed("none", prefix, everything, whole, forward)
            if "some" in policies:
                lean = self._recomputed("least", prefix, something, policies["some"], forward)
                policies["least"] = lean
            if (ahead := self._with_gradients_ahead(prefix, forward)) is not None:
                found = {"some": replace(whole, name="some")} | policies | {"all": ahead}
                policies = {name: found[name] for name in CHECKPOINT_POLICIES if name in found}
        else:
            policies = {
                name: PolicyFunctions(name, forward, None, None, ())
                for name in CHECKPOINT_POLICIES
                if name not in ("narrow", "attention")
            }
        return DifferentiatedTemplate(self.template.index, self.template.name, forward, policies)

    def _lean(self, prefix: str, forward: BlockFunction) -> DifferentiatedTemplate:
        """Policies of little memory alone: what is not kept is derived inside of the backward's own loops."""
        policies: dict[PolicyName, PolicyFunctions] = {}
        if any(grad is not None for grad in self.joint.grads):
            attention = saved_set(self.joint, is_attention)
            if any(map(is_attention, attention)):
                policies["attention"] = self._with_saved("attention", prefix, attention, forward)
            policies["none"] = self._with_saved("none", prefix, [], forward)
        else:
            policies["none"] = PolicyFunctions("none", forward, None, None, ())
        return DifferentiatedTemplate(self.template.index, self.template.name, forward, policies)

    def _with_gradients_ahead(self, prefix: str, plain: BlockFunction) -> PolicyFunctions | None:
        """Functions whose forward makes a head's gradients and keeps these, None where there is no such head:
        no product is formed twice, but a gradient of the head's weight is there before the backward."""
        graph = with_gradients_in_forward(self.joint.graph, len(self.template.examples), self.mode)
        if graph is None:
            return None
        ahead = _Cutter(self.template, joint_in(graph, self.template), self.mode, self.gpu)
        ahead._parts = self._parts
        return ahead._with_saved("all", f"{prefix}_ahead", saved_set(ahead.joint, keeps_all), plain)

    def with_inductor(self, plain: DifferentiatedTemplate, device: torch.device) -> DifferentiatedTemplate:
        """Compile functions by Inductor if possible: all that run the forward, or none of them, because a
        recompute should repeat the first computation; none that writes into a buffer."""
        if self.joint.written:
            return plain
        backwards = {o.backward.name for o in plain.policies.values() if o.backward is not None}
        found = {
            f.name: fused(f, self._graph(f.name)[0], self.mode, device, self.gpu) for f in plain.functions()
        }
        if not all(f.fused for name, f in found.items() if name not in backwards):
            found |= {f.name: f for f in plain.functions() if f.name not in backwards}
        return plain.with_functions(found)

    def _with_saved(
        self, name: PolicyName, prefix: str, saved: list[fx.Node], plain: BlockFunction
    ) -> PolicyFunctions:
        results = _numbered("out", self.joint.outs) + _numbered("saved", saved)
        forward = self._function(f"{prefix}_forward_save_{name}", results, ()) if saved else plain
        backward = self._backward(f"{prefix}_backward_from_{name}", saved)
        return PolicyFunctions(name, forward, None, backward, _saved_bytes(saved))

    def _recomputed(
        self,
        name: PolicyName,
        prefix: str,
        saved: list[fx.Node],
        full: PolicyFunctions,
        plain: BlockFunction,
    ) -> PolicyFunctions:
        if not saved:
            return PolicyFunctions(name, plain, None, full.backward, ())
        results = _numbered("saved", saved)
        recompute = self._function(f"{prefix}_recompute_{full.name}", results, (), part="recompute")
        return PolicyFunctions(name, plain, recompute, full.backward, full.saved)

    def _backward(self, name: str, saved: list[fx.Node]) -> BlockFunction:
        leaves = [i for i, e in enumerate(self.template.examples) if e.requires_grad]
        results: list[tuple[Ref, fx.Node]] = [
            (("grad", i), grad) for i, grad in zip(leaves, self.joint.grads, strict=True) if grad is not None
        ]
        return self._function(name, results, saved, part="backward")

    def _function(
        self,
        name: str,
        results: list[tuple[Ref, fx.Node]],
        saved: Sequence[fx.Node],
        *,
        part: Literal["forward", "recompute", "backward"] = "forward",
    ) -> BlockFunction:
        """The function that computes ``results`` from the inputs and, in a backward, from what is kept. What
        was read of a buffer before a forward changed it is kept for whoever computes that again."""
        given: dict[fx.Node, Ref] = {
            node: ref
            for node, ref in self.joint.refs.items()
            if part == "backward" or ref[0] != "out" or (part == "recompute" and node.target is SNAPSHOT)
        }
        if part == "backward":
            given.update({n: ("saved", j) for j, n in enumerate(saved)})
        self._parts[name] = self.joint, [n for _, n in results], given, part == "forward"
        graph, inputs = self._graph(name)
        owned = self._owned(graph, saved)
        share = self.template.share
        return block_function(name, graph, inputs, results, owned, self.mode, share, self.gpu, self.loops)

    def _graph(self, name: str) -> tuple[fx.Graph, list[Ref]]:
        """A function's graph, made anew, and what its arguments are."""
        joint, results, given, writes = self._parts[name]
        written = joint.written if writes else ()
        graph, inputs = extract(joint.graph, [*results, *itertools.chain(*written)], given)
        output = graph.output_node()
        nodes: Any = output.args[0]
        output.args = (nodes[: len(results)],)
        pairs = nodes[len(results) :]
        with graph.inserting_before(output):
            for buffer, new in zip(pairs[::2], pairs[1::2], strict=True):
                graph.call_function(WRITE, (buffer, new)).meta["val"] = buffer.meta["val"]
        return graph, without_statistics(graph, inputs)

    def _owned(self, graph: fx.Graph, saved: Sequence[fx.Node]) -> set[fx.Node]:
        """The saved tensors that a backward may overwrite: those that no output of the block shows."""
        shown = {view_base(n) for n in self.joint.outs}
        names = {n.name for n in saved if n not in shown}
        return {n for n in graph.nodes if n.op == "placeholder" and n.name in names}


def _saved_bytes(nodes: Iterable[fx.Node]) -> tuple[int, ...]:
    return tuple(storage_nbytes(node.meta["val"]) for node in nodes)


def _numbered(kind: Literal["out", "saved"], nodes: Sequence[fx.Node]) -> list[tuple[Ref, fx.Node]]:
    return [((kind, k), node) for k, node in enumerate(nodes)]
