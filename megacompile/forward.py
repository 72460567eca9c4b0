"""Forwards without training: the loss of a batch in eval mode, what the model returns for it, samples.

In: a batch. Out: tensors on the host. All run by programs of the forward alone, over the same state and
under the same budget as training.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megacompile.assemble.plan import Mode
from megacompile.capture.batch import Batch
from megacompile.capture.outputs import OutputsFn, all_outputs
from megacompile.errors import CaptureError, MegacompileError, ProgramError
from megacompile.generate import generate
from megacompile.inspection import Inspection
from megacompile.runtime.calls import alone
from megacompile.together import agreed_batches


class _PlannedError(Exception):
    """A forward was planned, and is not to run."""


class Forward(Inspection):
    """The part of :class:`~megacompile.program.Program` that computes and trains nothing."""

    _only_plans = False

    @contextlib.contextmanager
    def planning_alone(self) -> Iterator[None]:
        """Plan the first forward within the context, where the block ends; the budget may be refused."""
        self._only_plans = True
        try:
            yield
        except _PlannedError:
            pass
        finally:
            self._only_plans = False

    @alone
    def evaluate(self, batch: Any) -> Tensor:
        """The loss of a batch in eval mode, under the same budget; no gradient, no update. Of several ranks
        each gets that of its own batch."""
        loss: Tensor = self._forward("evaluate", batch, None)
        return loss

    @alone
    def predict(self, batch: Any, *, outputs: OutputsFn | None = None) -> Any:
        """What the forward returns for a batch in eval mode, on the host, under the same budget as training.

        A tensor, a tuple, a dict or a transformers output comes back as the model returns it, but for a cache
        of keys and values, which is left out. The batch needs no labels. It is padded to one of few lengths
        where all outputs are numbers or [rows, positions, ...], of which padding is cut off again. Of
        several ranks each gets the outputs of its own batch.

        ``outputs(output, batch)`` is compiled with the model, and what it returns comes in the place of the
        output: of ``lambda out, batch: out.logits.argmax(-1)`` no logits reach the host. It may read entries
        of the batch that the forward does not take, and an attribute ``inputs`` of it names entries that the
        forward is not given. Another function, or the same one over other values, is another program.
        """
        return self._forward("predict", batch, outputs or all_outputs)

    @alone
    def generate(self, /, input_ids: Tensor, **options: Any) -> Any:
        """Samples between steps: what ``model.generate(input_ids, **options)`` of transformers returns.

        The model is in eval mode, the result on the host, and the budget that of training.

        ``options`` are those of transformers: ``max_new_tokens``, ``do_sample``, ``temperature``,
        ``num_beams``, ``stopping_criteria``, an ``attention_mask`` of prompts padded on the left. Random
        numbers come from torch's generator, so a seed gives the same tokens as there.

        Each token takes a forward over the whole row, as no keys and values are kept: where weights are
        streamed, their transfer takes as long for one token as for a few hundred. So several rows cost little
        more than one. Rows are padded to few lengths, so that few programs are compiled. Several ranks
        call it together, with the same prompts, and the same seed where they sample.
        """
        return generate(self._session.model, self.predict, input_ids, **options)

    @alone
    def prepare(
        self,
        batch: Any,
        *,
        outputs: OutputsFn | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        """Compile the training program for an example batch and take over the model's storage; for a list of
        micro-batches of several kinds, the program of each.

        ``outputs``: the program of a ``loss`` that is computed outside; see :meth:`Program.train_step`.
        ``checkpoint``: the folder that :meth:`Program.load` will be given next, of which ranks on several
        machines, where they are as many, take the mesh.
        """
        session = self._session
        session.resumes = None if checkpoint is None else Path(checkpoint)

        with session.world.together():
            micro, _, _ = agreed_batches(session, batch, "train", lambda micro: [1.0] * len(micro), outputs)
            kinds = {of.key: of for of in reversed(micro)}
            mode = session.training(micro) if len(kinds) == 1 else Mode("accumulate")  # one after the other
            for of in reversed(kinds.values()):
                session.schedule(of, mode)

    def _forward(self, name: str, batch: Any, outputs: OutputsFn | None) -> Any:
        self._ready()
        session = self._session

        def weigh(micro: list[Batch]) -> list[float]:
            if len(micro) > 1:
                raise MegacompileError(
                    f"{name} takes one batch, not a list of {len(micro)}: call it for each."
                )
            return [1.0]

        with session.world.together():
            micro, weights, _ = agreed_batches(session, batch, "evaluate", weigh, outputs)
            if session.runtime is None:
                self._allocate(batch, outputs)
            if self._only_plans:
                session.schedule(micro[0], Mode("evaluate"))
            else:
                results = session.run(micro, Mode("evaluate"), weights)
        if self._only_plans:
            raise _PlannedError
        session.await_losses()
        compiled = session.compiler.compile(micro[0], evaluate=True)
        found = [micro[0].own(results.outputs[v, 0]) for v in compiled.part.results]
        return compiled.captured.structure.around(found)

    def _allocate(self, batch: Any, outputs: OutputsFn | None) -> None:
        """Lay out the state, which is allocated for training."""
        try:
            self.prepare(batch)
        except CaptureError as error:
            if outputs is None:
                raise
            raise ProgramError(
                "Nothing is compiled yet, and no training program can be compiled for the batch that predict "
                "was given: call program.prepare(batch) with one that gives a loss first, or compile with "
                f"example_batch. ({error})"
            ) from error

    def _ready(self) -> None:
        session = self._session
        session.same_process()
        if session.saving is not None and session.world.size == 1:  # several hear of it at one point
            session.saving.raise_failure()
        if session.inconsistent:
            raise ProgramError(session.inconsistent)
        raises = (
            session.settings.on_nonfinite == "raise" or session.world.size > 1
        )  # at one step on all ranks
        if raises and session.settings.on_nonfinite != "skip" and session.unreported:
            session.await_norm()  # no step runs after a faulty one, whatever the timing
        session.report_skipped()
        if session.values.lent:
            session.synchronize()
            session.values.take_back()
