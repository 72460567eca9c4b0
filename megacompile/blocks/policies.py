"""Differentiate: each template becomes forward, recompute and backward functions per checkpoint policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks.block_functions import BlockFunction, block_function, fused
from megacompile.blocks.chunk_loops import fitting_chunk, length_of, two_lengths
from megacompile.blocks.codegen import identifier
from megacompile.blocks.costs import ATTENTION, is_heavy
from megacompile.blocks.joint_graph import (
    Joint,
    Ref,
    extract,
    is_attention,
    joint_of,
    keeps_all,
    saved_set,
    without_statistics,
)
from megacompile.blocks.partition import Template
from megacompile.capture.changed_buffers import SNAPSHOT
from megacompile.graph.captured import WRITE, storage_nbytes, view_base
from megacompile.kernels._triton import Gpu

# ------------------------------------------------------------------------------------------------------------
# The numerical check of loops: a template's functions over chunks beside the whole ones, on random numbers.
#
# Both are made of one joint graph at a short length. Forward, recompute and backward of each checkpoint
# policy run on equal inputs; a backward is given what the whole forward saved.


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Of a result's scale, by the lowest precision among the template's inputs."""
IGNORED = -100  # labels, every fifth
_SMALL = 1e-2
"""Of a function's largest result. Smaller ones may be sums of terms that cancel; their rounding does not."""
_CPU = torch.device("cpu")


def disagreement(
    template: Template, whole: DifferentiatedTemplate, looped: DifferentiatedTemplate
) -> str | None:
    """Name the function whose loops do not compute what the whole one does; None where all do."""
    inputs = _random_inputs(template)
    floats = [e.dtype for e in template.examples if e.is_floating_point()]
    allowed = max((TOLERANCE[d] for d in floats), default=0.0)
    for name, policy in whole.policies.items():
        known: dict[Ref, Tensor] = {("in", i): x for i, x in enumerate(inputs)}
        pairs = [
            (policy.forward, looped.policies[name].forward),
            (policy.recompute, looped.policies[name].recompute),
            (policy.backward, looped.policies[name].backward),
        ]
        for function, other in pairs:
            if function is None or other is None:
                continue
            if function is policy.backward:
                known |= _random_gradients(function, known)
            results, others = _run(function, known), _run(other, known)
            least = _SMALL * max((_largest(x) for x in results), default=0.0)
            for ref, a, b in zip(function.outputs, results, others, strict=True):
                if why := _differ(a, b, allowed, least):
                    return f"{function.name}: {ref[0]} {ref[1]} {why}"
            if function is not policy.backward:
                known |= dict(zip(function.outputs, results, strict=True))
    return None


def _run(function: BlockFunction, known: dict[Ref, Tensor]) -> list[Tensor]:
    """The function on copies of what it is given to keep, which it may write over."""
    donated = ("saved", "grad")
    given = [known[r].clone() if r[0] in donated else known[r] for r in function.inputs]
    with function.products():
        return function.load(_CPU)(given)


def _largest(x: Tensor) -> float:
    """Return the largest of the elements that are finite: those of a mask may not be."""
    finite = x[x.isfinite()] if x.is_floating_point() else x.new_empty(0)
    return float(finite.abs().amax()) if finite.numel() else 0.0


def _differ(a: Tensor, b: Tensor, allowed: float, least: float) -> str | None:
    """Describe how two results differ, in parts of their scale: of the largest element, or of ``least``."""
    if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
        return f"is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
    if not a.is_floating_point():
        return None if torch.equal(a, b) else "differs"
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    scale = max(_largest(a), least) or 1.0
    apart = (a.to(wide) - b.to(wide)).abs().masked_fill(a == b, 0.0)
    distance = float(apart.amax()) / scale if a.numel() else 0.0
    return None if distance <= allowed else f"is off by {distance:.1e} of scale, allowed are {allowed:.0e}"


def _random_inputs(template: Template) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = any(n.target is torch.ops.aten.nll_loss_forward.default for n in template.graph.nodes)
    given = [n for n in template.graph.nodes if n.op == "placeholder"]
    made = [_random(e, k, labels, generator) for e, k in zip(template.examples, template.kinds, strict=True)]
    for node, value in zip(given, made, strict=True):
        if value.dtype == torch.int32 and any("attention" in str(user.target) for user in node.users):
            value[0], value[1] = 0, value.shape[-1]  # the keys that a packed token sees: all
    return made


def _random(example: Tensor, kind: str, labels: bool, generator: torch.Generator) -> Tensor:
    """Weights of a size that keeps activations near 1; small labels and ids."""
    made = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype)
    if not (example.is_floating_point() or example.is_complex()):
        made.random_(0, 2, generator=generator)
        if made.dim():
            made[..., :1] = 1  # of a mask: a position that sees no key would give no number
        if labels and kind == "value":
            made.flatten()[::5] = IGNORED
        return made
    made.normal_(generator=generator)
    if kind == "weight":
        made.mul_(example.shape[-1] ** -0.5 if example.dim() > 1 else 0.1).add_(float(example.dim() == 1))
    return made


def _random_gradients(function: BlockFunction, known: dict[Ref, Tensor]) -> dict[Ref, Tensor]:
    generator = torch.Generator().manual_seed(1)
    wanted = [ref for ref in function.inputs if ref[0] == "grad"]
    return {("grad", k): torch.empty_like(known["out", k]).normal_(generator=generator) for _, k in wanted}


# ------------------------------------------------------------------------------------------------------------
# Differentiate: each template becomes forward, recompute and backward functions per checkpoint policy.
#
# In: a :class:`~megacompile.blocks.partition.Template`. Out: :class:`DifferentiatedTemplate`. The joint graph
# of forward and backward is traced once with the gradient rules that eager PyTorch uses; a checkpoint policy
# is a choice of the forward tensors that are kept for the backward (the saved set). Invariant: every function
# is functional, but for memory that it owns.


PolicyName = Literal["all", "some", "attention", "none", "least"]
CHECKPOINT_POLICIES: tuple[PolicyName, ...] = ("all", "some", "attention", "none", "least")
"""Keep every tensor that the backward reads; keep the results of products and attention and derive
the rest again; keep those of attention alone; keep nothing and recompute the first set, or the second, before
the backward."""
_SHORT, _SHORT_CHUNK = (24, 26), 7  # lengths at which loops are checked, and their chunks there
NO_PRODUCT = "no product acts on positions alone"
"""Why a block of little work has no loops."""
_LARGE_SHARE = 8  # attention is kept alone where it is at least one of so many FLOPs of a forward


@dataclass(frozen=True)
class PolicyFunctions:
    """A saved set: what forward keeps, and the functions that belong to it.

    ``recompute`` is None where forward itself keeps the saved set. ``saved`` holds the bytes of each
    saved tensor.
    """

    name: PolicyName
    forward: BlockFunction
    recompute: BlockFunction | None
    backward: BlockFunction | None
    saved: tuple[int, ...]

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved)


@dataclass(frozen=True)
class DifferentiatedTemplate:
    """A template's functions by checkpoint policy; ``forward`` alone serves evaluation.

    ``loops``: positions of its sequence and those of a chunk, where functions run chunk by chunk;
    ``not_looped``: why none does, where that was asked for.
    """

    index: int
    name: str
    forward: BlockFunction
    policies: dict[PolicyName, PolicyFunctions]
    loops: tuple[int, int] | None = None
    not_looped: str | None = None

    def functions(self) -> Iterable[BlockFunction]:
        """Each function once."""
        every = [f for o in self.policies.values() for f in (o.forward, o.recompute, o.backward)]
        return {f.name: f for f in [*every, self.forward] if f is not None}.values()

    def with_functions(self, functions: dict[str, BlockFunction]) -> DifferentiatedTemplate:
        """The same with other functions of the same names."""

        def other(function: BlockFunction | None) -> BlockFunction | None:
            return function and functions[function.name]

        policies = {
            name: replace(policy, forward=functions[policy.forward.name], recompute=other(policy.recompute),
                          backward=other(policy.backward))
            for name, policy in self.policies.items()
        }  # fmt: skip
        return replace(self, forward=functions[self.forward.name], policies=policies)


def differentiate(
    template: Template,
    mode: FakeTensorMode,
    inductor: torch.device | None = None,
    gpu: Gpu | None = None,
    chunk: int = 0,
    *,
    check: bool = True,
) -> DifferentiatedTemplate:
    """Trace a template's forward and backward jointly and cut it at several saved sets.

    ``inductor`` names the device for which Inductor compiles the functions; None leaves them plain.
    ``gpu`` is the one whose memory is planned, None: the CPU's is.
    ``chunk`` > 0: what acts on each position of a sequence alone runs over chunks of so many positions, if it
    computes the same on random numbers, which ``check`` makes sure of.
    """
    length = length_of(template)
    if chunk and length is not None and length > chunk and not template.writes:
        return _in_chunks(template, mode, gpu, (length, chunk), check)
    if inductor is None:
        return _cut(template, mode, gpu)
    cutter = _Cutter(template, joint_of(template, mode), mode, gpu)
    return cutter.with_inductor(cutter.run(), inductor)


_CUT: WeakKeyDictionary[Template, dict[Any, DifferentiatedTemplate]] = WeakKeyDictionary()


def _cut(
    template: Template, mode: FakeTensorMode, gpu: Gpu | None, loops: tuple[int, int] | None = None
) -> DifferentiatedTemplate:
    """A template's functions, made once while it lives: chunks of two lengths may come to the same."""
    made, key = _CUT.setdefault(template, {}), (gpu, loops)
    if key not in made:
        joint = joint_of(template, mode)
        made[key] = _Cutter(template, joint, mode, gpu, loops=loops, lean=bool(loops)).run()
    return made[key]


def _in_chunks(
    template: Template, mode: FakeTensorMode, gpu: Gpu | None, loops: tuple[int, int], check: bool
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
    return replace(_cut(template, mode, gpu), not_looped=reason)


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
        # by function: results, given, and whether it writes into buffers
        self._parts: dict[str, tuple[list[fx.Node], dict[fx.Node, Ref], bool]] = {}

    def run(self) -> DifferentiatedTemplate:
        prefix = identifier(self.template.name)
        forward = self._function(f"{prefix}_forward", _numbered("out", self.joint.outs), ())
        if self.lean:
            return self._lean(prefix, forward)
        policies: dict[PolicyName, PolicyFunctions] = {}
        if any(grad is not None for grad in self.joint.grads):
            everything = saved_set(self.joint, keeps_all)
            something = saved_set(self.joint, is_heavy)
            policies["all"] = self._with_saved("all", prefix, everything, forward)
            if sum(_bytes(something)) < sum(_bytes(everything)):
                policies["some"] = self._with_saved("some", prefix, something, forward)
            if forward.attention_flops[0] * _LARGE_SHARE >= forward.flops > 0:
                attention = saved_set(self.joint, is_attention)
                policies["attention"] = self._with_saved("attention", prefix, attention, forward)
            policies["none"] = self._recomputed("none", prefix, everything, policies["all"], forward)
            if "some" in policies:
                lean = self._recomputed("least", prefix, something, policies["some"], forward)
                policies["least"] = lean
        else:
            policies = {
                name: PolicyFunctions(name, forward, None, None, ())
                for name in CHECKPOINT_POLICIES
                if name != "attention"
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

    def with_inductor(self, plain: DifferentiatedTemplate, device: torch.device) -> DifferentiatedTemplate:
        """Functions compiled by Inductor where they can be; all that run the forward, or none of them, since
        what is recomputed should be what was computed first; none that writes into a buffer."""
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
        return PolicyFunctions(name, forward, None, backward, _bytes(saved))

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
        self._parts[name] = [n for _, n in results], given, part == "forward"
        graph, inputs = self._graph(name)
        owned = self._owned(graph, saved)
        share = self.template.share
        return block_function(name, graph, inputs, results, owned, self.mode, share, self.gpu, self.loops)

    def _graph(self, name: str) -> tuple[fx.Graph, list[Ref]]:
        """A function's graph, made anew, and what its arguments are."""
        results, given, writes = self._parts[name]
        written = self.joint.written if writes else ()
        graph, inputs = extract(self.joint.graph, [*results, *itertools.chain(*written)], given)
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


def _bytes(nodes: Iterable[fx.Node]) -> tuple[int, ...]:
    return tuple(storage_nbytes(node.meta["val"]) for node in nodes)


def _numbered(kind: Literal["out", "saved"], nodes: Sequence[fx.Node]) -> list[tuple[Ref, fx.Node]]:
    return [((kind, k), node) for k, node in enumerate(nodes)]


# ------------------------------------------------------------------------------------------------------------
# What of long sequences stays whole, where a step does not fit: one sentence for the error that says so.
#
# In: a batch's tensors, and its templates as they were differentiated for chunks of a sequence.


_BIAS, _DROPOUT = 3, 10  # places among attention's arguments


def why_whole(
    batch: Iterable[Tensor],
    templates: Sequence[Template],
    made: Sequence[DifferentiatedTemplate],
    length: int,
) -> str | None:
    """Say why sequences of more positions than ``length`` are not all in chunks, and what helps; None where
    they are, or are no longer than that."""
    counted = [x.shape for x in batch if x.dim() > 1 and not x.is_floating_point()]  # tokens, labels
    if any(shape[0] > 1 and shape[1] > length for shape in counted):
        return "Blocks stay whole: a batch of several sequences; give micro-batches of one."
    calls = [n for t in templates for n in t.graph.nodes if n.target is ATTENTION]
    if any(_has_mask(call, length) for call in calls):
        return (
            "Attention's mask of tokens × tokens stays whole: give sequences without padding at their left, "
            "or documents by position_ids."
        )
    if any(_drops(call, length) for call in calls):
        return "Attention stays whole, with its tokens × tokens: dropout acts in it; set that to 0."
    reasons = ((t.name, t.not_looped) for t in made if t.not_looped not in (None, NO_PRODUCT))
    return next((f"The block {name} stays whole: {reason}." for name, reason in reasons), None)


def _has_mask(call: fx.Node, length: int) -> bool:
    """Return whether attention is given something for each of more than ``length`` queries and each key."""
    bias = call.args[_BIAS]
    return isinstance(bias, fx.Node) and bias.meta["val"].shape[-2:-1] > (length,)


def _drops(call: fx.Node, length: int) -> bool:
    """Return whether attention of more than ``length`` queries has a dropout."""
    queries, probability = call.args[0], call.args[_DROPOUT]
    assert isinstance(queries, fx.Node) and isinstance(probability, float)
    return probability > 0 and queries.meta["val"].shape[2] > length
