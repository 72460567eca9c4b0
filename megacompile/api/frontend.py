"""The stages before the plan: capture -> fuse -> tile -> partition -> differentiate -> assemble.

:class:`Frontend` runs them for one kind of batch at a time, and keeps what each stage gave. Kinds share the
forms of parameters and the functions of templates.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks.chunk_roles import CHUNKS, length_of
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.partition import Partition, Template, partition
from megacompile.blocks.template_cache import differentiate_once, what_decides
from megacompile.blocks.weight_groups import Assembly, GroupLayout, Parameter, assemble, cut_parameters
from megacompile.blocks.whole_sequences import why_whole
from megacompile.capture.attempts import Attempts, capture, with_values
from megacompile.capture.batch import Batch, BatchKey
from megacompile.capture.loss_value import LossFn
from megacompile.capture.opaque_functions import examine_anew
from megacompile.capture.parameter_forms import parameter_forms
from megacompile.capture.quantized_weights import stored_shape
from megacompile.capture.trace import TRACING, How, Request
from megacompile.errors import CaptureError, MegacompileError
from megacompile.garbage_collection import without_garbage_collection
from megacompile.graph.captured import Captured, Prologue
from megacompile.graph.forward_outputs import OutputsFn
from megacompile.graph.fusion_report import Fusions
from megacompile.graph.fusion_rewriter import FOLDED_SUMS, fuse, read_switches
from megacompile.graph.node_storage import written_buffers
from megacompile.graph.tile_cuts import Cuts, families, tables
from megacompile.graph.tile_rewriter import Tiled, tile
from megacompile.kernels._triton import Gpu
from megacompile.planner.group_state import with_state
from megacompile.planner.lowest_bytes import values_bytes
from megacompile.planner.tiling import TilingCandidate, tiling_candidates
from megacompile.state.moment_formats import Form
from megacompile.state.optimizer import param_group_of
from megacompile.state.torch_optimizer import TorchOptimizer


@dataclass(frozen=True, eq=False)
class Front:
    """One kind of batch, through the stages before weights are cut."""

    captured: Captured
    fused: Captured
    fusions: Fusions

    @functools.cached_property
    def tables(self) -> Cuts:
        """Tables of which the host can gather rows."""
        return tables(self.fused)

    @functools.cached_property
    def changed_buffers(self) -> list[str]:
        """The buffers that the forward changes."""
        captured = self.captured
        return sorted(captured.buffers[node.name] for node in written_buffers(captured.graph))


@dataclass(frozen=True, eq=False)
class Compiled(Front):
    """One kind of batch, through all stages that do not depend on the plan; ``chunk`` > 0: what acts on each
    position of a sequence alone runs over chunks of so many."""

    tiled: Tiled
    part: Partition
    templates: tuple[DifferentiatedTemplate, ...]
    assembly: Assembly
    chunk: int = 0


@dataclass(frozen=True)
class StateLayout:
    """The weight groups of a model, none until a first program lays them out, and the ``ranks`` that share
    each of them, in each of ``replicas``. ``exact`` are the frozen weights whose values bf16 holds as they
    are; None: those that the model has in it."""

    groups: tuple[GroupLayout, ...] = ()
    ranks: int = 1
    replicas: int = 1
    exact: frozenset[str] | None = None


LAID_OUT_ANEW = StateLayout()


@dataclass(frozen=True)
class Division:
    """The parts that one kind of batch is compiled in: weights cut in this way, its sequence in chunks of so
    many positions, 0: whole, and the state in these groups."""

    cuts: Cuts = field(default_factory=dict)
    chunk: int = 0
    layout: StateLayout = LAID_OUT_ANEW


UNDIVIDED = Division()
_Cut = tuple[tuple[str, tuple[int, ...]], ...]  # weights and the rows between which they are cut


@dataclass(frozen=True, eq=False)
class _Made:
    """The later stages of one kind of batch: its ``parts`` by the way in which weights are cut, and what was
    ``compiled`` by that, the positions of a chunk and the layout of the state."""

    parts: dict[_Cut, tuple[Tiled, Partition]] = field(default_factory=dict)
    compiled: dict[tuple[_Cut, int, StateLayout], Compiled] = field(default_factory=dict)


class Frontend:
    """Compiles kinds of batches of one model as far as no plan is needed; each is made once.

    ``form`` is the format of the optimizer state; ``gathers``: all weights are sure to be in RAM, so the host
    can look rows up. ``distributed``: several ranks train. ``gpu`` is the one whose memory is planned, None:
    the CPU's is. ``capture`` and ``differentiate`` are the stages of these names, or what remembers their
    results.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: LossFn | None = None,
        kernels: Mapping[str, bool] | bool | None = None,
        form: Form = "fp32",
        gathers: bool = True,
        inductor: torch.device | None = None,
        gpu: Gpu | None = None,
        distributed: bool = False,
        capture: Callable[[Request, How], Attempts[How, Captured]] = capture,
        differentiate: Callable[..., DifferentiatedTemplate] = differentiate_once,
    ) -> None:
        self.model, self.compute_dtype, self.loss_fn = model, compute_dtype, loss_fn
        self.parameters = _describe(model, optimizer, compute_dtype)
        if isinstance(form, TorchOptimizer):
            described = self.parameters.items()
            self.parameters = {n: replace(p, undivided=p.trained and not form.cuts(p)) for n, p in described}
        self._forms = {n: (p.dtype, p.stride) for n, p in self.parameters.items()}
        self._trained = {n for n, p in self.parameters.items() if p.trained}
        self._kernels = read_switches(kernels)
        self._form: Form = form
        self._gathers = gathers
        self._inductor, self._gpu = inductor, gpu
        self._distributed = distributed
        self._capture, self._differentiated_by = capture, differentiate
        self._parts_for_real: Mapping[str, str] = {}  # frozen ones that cannot be traced, and why
        self._seeing: list[OutputsFn | None] = []  # whose graphs depend on padding: later ones are not tried
        self._fronts: dict[BatchKey, Front] = {}
        self._hosted: dict[BatchKey, list[tuple[Prologue, int]]] = {}  # with their graphs' numbers
        self._made: WeakKeyDictionary[Front, _Made] = WeakKeyDictionary()
        self._differentiated: dict[Hashable, DifferentiatedTemplate] = {}

    def captured(self, batch: Batch) -> Captured:
        """The graph of one kind of batch; the stages after it use the same."""
        return self._front(batch).captured

    @property
    def rounded(self) -> list[str]:
        """The frozen parameters that compute in bf16, whatever they are in the model."""
        return [n for n, p in self.parameters.items() if not p.trained and p.dtype == torch.bfloat16]

    def laid_out(self, layout: StateLayout) -> Mapping[str, Parameter]:
        """The parameters as the host keeps them in this layout."""
        if layout.exact is None:
            return self.parameters
        return {n: replace(p, exact=n in layout.exact) for n, p in self.parameters.items()}

    def graphs_of_others(self, length: int) -> list[Captured]:
        """The graphs that were captured so far of batches that have no dimension of this size."""
        shapes = {key: [of for of, *_ in key.leaves if isinstance(of, tuple)] for key in self._fronts}
        return [
            front.captured
            for key, front in self._fronts.items()
            if not any(length in shape for shape in shapes[key])
        ]

    def tables(self, batch: Batch) -> Cuts:
        """Tables of which the host may gather the rows that this batch looks up."""
        return self._front(batch).tables if self._gathers else {}

    def tiling_candidates(self, batch: Batch) -> Iterator[Cuts]:
        """Ways of cutting the weights: nothing cut, then ever smaller pieces of what is not updated whole."""
        whole = self.tables(batch)
        found = families(self._front(batch).fused, gather=bool(whole))
        divided = (f for f in found if not any(self.parameters[name].undivided for name in f.names))
        return tiling_candidates(tuple(divided), whole)

    def tilings(self, batch: Batch, division: Division = UNDIVIDED) -> Iterator[TilingCandidate[Compiled]]:
        """One kind of batch with its weights cut in each of these ways, and else divided in this one; each
        made when asked for."""
        for cuts in self.tiling_candidates(batch):
            _, part = self._part(batch, cuts)
            build = functools.partial(self.build, batch, replace(division, cuts=cuts))
            yield TilingCandidate(values_bytes(part), build)

    def chunks(self, batch: Batch, division: Division = UNDIVIDED) -> Iterator[int]:
        """Positions of a chunk to try: 0, sequences whole, then ever fewer than there are, where any template
        has loops with weights cut in this way."""
        yield 0
        templates = self._part(batch, division.cuts)[1].templates
        longest = max((length_of(t) or 0 for t in templates), default=0)
        for chunk in (c for c in CHUNKS if c < longest):
            found = self.build(batch, replace(division, chunk=chunk))
            if not any(t.loops for t in found.templates):
                return
            yield chunk

    def why_whole(self, batch: Batch, division: Division) -> str | None:
        """Say why a long sequence of this batch is not all in chunks, in one sentence; None where it is."""
        length = min(CHUNKS, default=sys.maxsize)
        if not any(n > length for leaf in batch.tensors for n in leaf.shape):
            return None
        found = self.build(batch, replace(division, chunk=length))
        return why_whole(batch.tensors, found.part.templates, found.templates, length)

    def build(self, batch: Batch, division: Division = UNDIVIDED) -> Compiled:
        """One kind of batch, divided in this way.

        Raises :class:`CaptureError` where the model cannot run on the batch, or cannot be compiled.
        """
        key, chunk, layout = tuple(division.cuts.items()), division.chunk, division.layout
        front = self._front(batch)
        known = self._made_of(front).compiled
        if (key, chunk, layout) not in known:
            with TRACING:
                compiled = self._build(front, *self._part(batch, division.cuts), chunk, layout)
            known[key, chunk, layout] = compiled
            known[key, chunk, replace(layout, groups=compiled.assembly.groups)] = compiled
        return known[key, chunk, layout]

    def constants(self, captured: Captured) -> dict[str, Tensor]:
        """Buffers and constants that the graph reads, by the names its blocks use."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        named = {name: buffers[name] for name in captured.buffers.values()}
        return named | captured.constants

    def forget(self) -> None:
        """Forget what was captured, and how; functions of templates stay, as they are functions of graphs."""
        self._fronts.clear()
        self._hosted.clear()
        self._parts_for_real = {}
        self._seeing.clear()
        examine_anew()

    def reads_values(self, batch: Batch) -> bool:
        """Return whether a forward on a batch with entries of these names has read values of it."""
        return any(key.structure == batch.key.structure for key in self._hosted)

    def with_host_values(self, batch: Batch, *, seed: int = 0) -> Batch:
        """The batch with what the host computes of it for its program, and with what the forward goes by in
        its key; the batch itself, where the forward reads no values. What the host draws at random comes from
        ``seed``."""
        if batch.key in self._fronts:  # each step asks, and must not wait for another model's capture
            return batch
        with TRACING:
            known = self._hosted.get(batch.key, [])
            for prologue, number in known:
                if (values := prologue(batch.leaves, seed)) is not None:
                    return _extended(batch, number, values)
            with without_garbage_collection():
                captured = self._captured(batch)
            extended = batch
            if captured.prologue is not None:
                if (values := captured.prologue(batch.leaves, seed)) is None:
                    raise CaptureError(
                        "What the forward reads of this batch differs when it is read again: a function of "
                        "the model depends on something else than its arguments."
                    )
                graphs = {n: self._fronts[batch.key._replace(read=n)].captured for _, n in known}
                number = next((n for n, of in graphs.items() if captured.computes_as(of)), len(graphs))
                extended = _extended(batch, number, values)
                self._hosted.setdefault(batch.key, []).append((captured.prologue, number))
            if extended.key not in self._fronts:
                self._fronts[extended.key] = Front(captured, *fuse(captured, self._kernels))
            return extended

    def _front(self, batch: Batch) -> Front:
        """The stages before anything is cut."""
        front = self._fronts[self.with_host_values(batch).key]
        if self._distributed:
            _refuse_changes(front)
        return front

    def _captured(self, batch: Batch) -> Captured:
        """Capture one kind of batch in the way that earlier ones of the model have shown, if in any."""
        request = Request(
            self.model,
            batch.args,
            batch.kwargs,
            forms=self._forms,
            trained=self._trained,
            loss_fn=self.loss_fn,
            evaluate=batch.evaluates,
            outputs=batch.outputs,
            padded_right=batch.padded_right and batch.outputs not in self._seeing,
            hides_nothing=batch.hides_nothing,
        )
        how = How(parts=self._parts_for_real)
        attempts = self._capture(request, with_values(how) if self.reads_values(batch) else how)
        self._parts_for_real, captured = attempts.how.parts, attempts.get()
        if batch.padded_right and not (captured.blind or attempts.how.reads_values):
            self._seeing.append(batch.outputs)
        return captured

    def _part(self, batch: Batch, cuts: Cuts) -> tuple[Tiled, Partition]:
        """One kind of batch with its weights cut in this way, before it is differentiated."""
        key, front = tuple(cuts.items()), self._front(batch)
        known = self._made_of(front).parts
        if key not in known:
            with TRACING, self._running():
                tiled = tile(front.fused, cuts, gather=self._gathers)
                known[key] = tiled, partition(tiled.captured)
        return known[key]

    def _made_of(self, front: Front) -> _Made:
        return self._made.setdefault(front, _Made())

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Turn what an operator says about its arguments into an error of the model on this batch."""
        try:
            yield
        except MegacompileError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise CaptureError(f"{type(self.model).__name__} cannot run on this batch: {reason}") from None

    def _build(
        self, front: Front, tiled: Tiled, part: Partition, chunk: int, layout: StateLayout
    ) -> Compiled:
        with self._running():
            mode = front.fused.fake_mode
            templates = tuple(self._differentiate(t, mode, chunk) for t in part.templates)
        constants = sum(b.nbytes for b in self.constants(tiled.captured).values())
        outside = front.captured.outside
        assembly = self.assembled(part, templates, tiled.cuts, constants, layout, outside=outside)
        return Compiled(front.captured, front.fused, front.fusions, tiled, part, templates, assembly, chunk)

    def assembled(
        self,
        part: Partition,
        templates: tuple[DifferentiatedTemplate, ...],
        cuts: Cuts,
        constants: int,
        layout: StateLayout,
        *,
        outside: bool = False,
    ) -> Assembly:
        """The blocks of a partition with the model's state, laid out in this way; ``constants`` are the bytes
        that all blocks read beside it, ``outside`` says that a loss outside starts the backward."""
        parameters = cut_parameters(self.laid_out(layout), cuts)
        assembly = assemble(
            part,
            templates,
            parameters,
            constants,
            layout.groups,
            outside=outside,
            ranks=layout.ranks,
            replicas=layout.replicas,
        )
        return with_state(assembly, self._form)

    def _differentiate(self, template: Template, mode: FakeTensorMode, chunk: int) -> DifferentiatedTemplate:
        """Templates of the same name and computation, in programs cut differently, are made once."""
        key = what_decides(template, self._gpu, chunk)
        if key not in self._differentiated:
            self._differentiated[key] = self._differentiated_by(
                template, mode, self._inductor, self._gpu, chunk, fold=self._kernels[FOLDED_SUMS]
            )
        return replace(self._differentiated[key], index=template.index)


def _refuse_changes(front: Front) -> None:
    """Refuse a forward that changes buffers, which each of several ranks would change by itself."""
    if names := front.changed_buffers:
        raise CaptureError(
            f"The forward changes the buffer {names[0]}, and each of several ranks would change it by its "
            "own batch: train on one rank, put that module into eval mode, or replace it (BatchNorm by "
            "GroupNorm)."
        )


def _extended(batch: Batch, number: int, values: list[Tensor]) -> Batch:
    return replace(batch, leaves=[*batch.leaves, *values], key=batch.key._replace(read=number))


def _describe(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, compute_dtype: torch.dtype
) -> Mapping[str, Parameter]:
    owners = param_group_of(optimizer) if optimizer is not None else {}
    forms = parameter_forms(model, compute_dtype)
    described: dict[str, Parameter] = {}
    for name, p in model.named_parameters():
        dtype, strides = forms[name]
        owner = owners.get(id(p), -1)
        # what no optimizer holds is not updated, so it needs no gradient
        trained = p.requires_grad and (optimizer is None or owner >= 0)
        exact = not trained and dtype == p.dtype == torch.bfloat16
        described[name] = Parameter(
            name, stored_shape(p), strides, dtype, owner, trained=trained, exact=exact
        )
    return described
