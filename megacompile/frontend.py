"""The stages before the plan: capture -> fuse -> tile -> partition -> differentiate.

:class:`Frontend` runs them for one kind of batch at a time and keeps what does not change between kinds:
the form of each parameter and the layout of the weight groups.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.assemble.assembly import Assembly, GroupLayout, Parameter, assemble, cut_parameters
from megacompile.capture.batch import Batch
from megacompile.capture.captured import Captured
from megacompile.capture.coded_weights import stored_shape
from megacompile.capture.forms import parameter_forms
from megacompile.capture.graph import capture
from megacompile.capture.loss import LossFn
from megacompile.capture.outputs import OutputsFn
from megacompile.differentiate.policies import DifferentiatedTemplate, differentiate
from megacompile.differentiate.sequence import CHUNKS, length_of
from megacompile.differentiate.whole import why_whole
from megacompile.errors import CaptureError, MegacompileError
from megacompile.fuse.placement import fuse, read_switches
from megacompile.fuse.report import Fusions
from megacompile.host.foreign import Foreign
from megacompile.host.formats import Form
from megacompile.host.optimizer import param_group_of
from megacompile.partition.blocks import Partition, Template, partition
from megacompile.plan.lowest import values_bytes
from megacompile.plan.residency import with_state
from megacompile.plan.tiling import TilingCandidate, tiling_candidates
from megacompile.tile.cuts import families, tables
from megacompile.tile.rewrite import Cuts, Tiled, tile

_TRACING = threading.RLock()  # torch traces one model at a time, over state of the whole process


@dataclass(frozen=True)
class Front:
    """One kind of batch, through the stages before weights are cut."""

    captured: Captured
    fused: Captured
    fusions: Fusions

    @functools.cached_property
    def tables(self) -> Cuts:
        """Tables of which the host can gather rows."""
        return tables(self.fused)


@dataclass(frozen=True)
class Compiled(Front):
    """One kind of batch, through all stages that do not depend on the plan; ``chunk`` > 0: what acts on each
    position of a sequence alone runs over chunks of so many."""

    tiled: Tiled
    part: Partition
    templates: tuple[DifferentiatedTemplate, ...]
    assembly: Assembly
    chunk: int = 0


class Frontend:
    """Compiles kinds of batches of one model as far as no plan is needed; each is made once.

    ``form`` is the format of the optimizer state; ``gathers`` says that all weights are sure to be in RAM,
    where the host can look rows up; ``layouts`` are the weight groups, once a program has laid them out.
    ``ranks`` share all groups, in each of ``replicas``, which may change until then. ``processors`` are the
    multiprocessors of the GPU whose memory is planned, None: the CPU's is. ``capture`` and ``differentiate``
    are the stages of these names, or what remembers their results.
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
        processors: int | None = None,
        ranks: int = 1,
        replicas: int = 1,
        capture: Callable[..., Captured] = capture,
        differentiate: Callable[..., DifferentiatedTemplate] = differentiate,
    ) -> None:
        self.model, self.compute_dtype, self.loss_fn = model, compute_dtype, loss_fn
        self.parameters = _describe(model, optimizer, compute_dtype)
        self.layouts: tuple[GroupLayout, ...] = ()
        self._forms = {n: (p.dtype, p.stride) for n, p in self.parameters.items()}
        self._trained = {n for n, p in self.parameters.items() if p.trained}
        self._kernels = read_switches(kernels)
        self._form: Form = form
        self._gathers = gathers
        self._inductor, self._processors = inductor, processors
        self.ranks, self.replicas = ranks, replicas
        self._capture, self._differentiated_by = capture, differentiate
        self._seeing: list[OutputsFn | None] = []  # whose graphs depend on padding: later ones are not tried
        self._fronts: dict[tuple[Any, ...], Front] = {}
        self._parts: dict[tuple[Any, ...], tuple[Tiled, Partition]] = {}
        self._compiled: dict[tuple[Any, ...], Compiled] = {}
        self._differentiated: dict[tuple[str, str, int], DifferentiatedTemplate] = {}

    def captured(self, batch: Batch, *, evaluate: bool) -> Captured:
        """The graph of one kind of batch; the stages after it use the same."""
        return self._front(batch, evaluate).captured

    @property
    def rounded(self) -> list[str]:
        """The frozen parameters that compute in bf16, whatever they are in the model."""
        return [n for n, p in self.parameters.items() if not p.trained and p.dtype == torch.bfloat16]

    def take_exact(self, names: Collection[str]) -> bool:
        """Note which of :attr:`rounded` have values that bf16 holds as they are; whether that is new."""
        noted = {n: replace(p, exact=n in names) for n, p in self.parameters.items()}
        changed, self.parameters = noted != self.parameters, noted
        if changed:
            self._compiled.clear()
        return changed

    @property
    def graphs(self) -> list[Captured]:
        """The graphs that were captured so far."""
        return [front.captured for front in self._fronts.values()]

    def tables(self, batch: Batch, *, evaluate: bool) -> Cuts:
        """Tables of which the host may gather the rows that this batch looks up."""
        return self._front(batch, evaluate).tables if self._gathers else {}

    def tiling_candidates(self, batch: Batch, *, evaluate: bool) -> Iterator[Cuts]:
        """Ways of cutting the weights: nothing cut, then ever smaller pieces of what is not updated whole."""
        whole = self.tables(batch, evaluate=evaluate)
        found, form = families(self._front(batch, evaluate).fused, gather=bool(whole)), self._form
        if isinstance(form, Foreign):
            found = tuple(f for f in found if all(form.cuts(self.parameters[name]) for name in f.names))
        return tiling_candidates(found, whole)

    def tilings(self, batch: Batch, *, evaluate: bool, chunk: int = 0) -> Iterator[TilingCandidate[Compiled]]:
        """One kind of batch cut in each of these ways; each made when asked for."""
        for cuts in self.tiling_candidates(batch, evaluate=evaluate):
            _, part = self._part(batch, cuts, evaluate)
            build = functools.partial(self.build, batch, cuts, evaluate=evaluate, chunk=chunk)
            yield TilingCandidate(values_bytes(part), build)

    def chunks(self, batch: Batch, cuts: Cuts, *, evaluate: bool) -> Iterator[int]:
        """Positions of a chunk to try: 0, sequences whole, then ever fewer than there are, where any template
        has loops with weights cut in this way."""
        yield 0
        templates = self._part(batch, cuts, evaluate)[1].templates
        longest = max((length_of(t) or 0 for t in templates), default=0)
        for chunk in (c for c in CHUNKS if c < longest):
            found = self.build(batch, cuts, evaluate=evaluate, chunk=chunk)
            if not any(t.loops for t in found.templates):
                return
            yield chunk

    def why_whole(self, batch: Batch, cuts: Cuts, *, evaluate: bool) -> str | None:
        """Why a long sequence of this batch is not all in chunks, in one sentence; None where it is."""
        length = min(CHUNKS, default=sys.maxsize)
        if not any(n > length for leaf in batch.tensors for n in leaf.shape):
            return None
        found = self.build(batch, cuts, evaluate=evaluate, chunk=length)
        return why_whole(batch.tensors, found.part.templates, found.templates, length)

    def build(self, batch: Batch, cuts: Cuts, *, evaluate: bool, chunk: int = 0) -> Compiled:
        """One kind of batch with its weights cut in this way, and its sequence in chunks of so many.

        Raises :class:`CaptureError` where the model cannot run on the batch, or cannot be compiled.
        """
        key = (batch.key, tuple(cuts.items()), chunk, self.ranks)
        with _TRACING:
            if key not in self._compiled:
                front, (tiled, part) = self._front(batch, evaluate), self._part(batch, cuts, evaluate)
                self._compiled[key] = self._build(front, tiled, part, chunk)
            return self._compiled[key]

    def constants(self, captured: Captured) -> dict[str, Tensor]:
        """Buffers and constants that the graph reads, by the names its blocks use."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        named = {name: buffers[name] for name in captured.buffers.values()}
        return named | captured.constants

    def forget(self) -> None:
        """Forget what was captured; functions of templates stay, as they are functions of their graphs."""
        self._fronts.clear()
        self._parts.clear()
        self._compiled.clear()

    def _front(self, batch: Batch, evaluate: bool) -> Front:
        """The stages before anything is cut."""
        with _TRACING:
            if batch.key not in self._fronts:
                captured = self._capture(
                    self.model,
                    batch.args,
                    batch.kwargs,
                    forms=self._forms,
                    trained=self._trained,
                    loss_fn=self.loss_fn,
                    evaluate=evaluate,
                    outputs=batch.outputs,
                    padded_right=batch.padded_right and batch.outputs not in self._seeing,
                )
                if batch.padded_right and not captured.blind:
                    self._seeing.append(batch.outputs)
                self._fronts[batch.key] = Front(captured, *fuse(captured, self._kernels))
            return self._fronts[batch.key]

    def _part(self, batch: Batch, cuts: Cuts, evaluate: bool) -> tuple[Tiled, Partition]:
        """One kind of batch with its weights cut in this way, before it is differentiated."""
        key = (batch.key, tuple(cuts.items()))
        with _TRACING:
            if key not in self._parts:
                fused = self._front(batch, evaluate).fused
                with self._running():
                    tiled = tile(fused, cuts, gather=self._gathers)
                    self._parts[key] = tiled, partition(tiled.captured)
            return self._parts[key]

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """What an operator says about its arguments is an error of the model on this batch."""
        try:
            yield
        except MegacompileError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise CaptureError(f"{type(self.model).__name__} cannot run on this batch: {reason}") from None

    def _build(self, front: Front, tiled: Tiled, part: Partition, chunk: int) -> Compiled:
        with self._running():
            mode = front.fused.fake_mode
            templates = tuple(self._differentiate(t, mode, chunk) for t in part.templates)
        constants = sum(b.nbytes for b in self.constants(tiled.captured).values())
        parameters = cut_parameters(self.parameters, tiled.cuts)
        assembly = assemble(
            part,
            templates,
            parameters,
            constants,
            self.layouts,
            outside=front.captured.outside,
            ranks=self.ranks,
            replicas=self.replicas,
        )
        assembly = with_state(assembly, self._form)
        return Compiled(front.captured, front.fused, front.fusions, tiled, part, templates, assembly, chunk)

    def _differentiate(self, template: Template, mode: FakeTensorMode, chunk: int) -> DifferentiatedTemplate:
        """Templates of the same name and computation, in programs cut differently, are made once."""
        key = (template.digest, template.name, chunk)
        if key not in self._differentiated:
            self._differentiated[key] = self._differentiated_by(
                template, mode, self._inductor, self._processors, chunk
            )
        return replace(self._differentiated[key], index=template.index)


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
