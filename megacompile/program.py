"""The program: what :func:`megacompile.compile` returns and what a training loop talks to.

It keeps the promises about faults: state is never half updated without saying so, nothing is silent, and
whoever asks for the state first gets every update that is under way. Programs are compiled and run by its
:class:`~megacompile.session.Session`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn

from megacompile.assemble.plan import Mode
from megacompile.capture.batch import Batch, micro_weights
from megacompile.capture.outputs import OutputsFn, all_outputs
from megacompile.errors import DeviceLostError, MegacompileError, ProgramError
from megacompile.outside import LossOfOutputs
from megacompile.persistence import Persistence
from megacompile.runtime.calls import alone
from megacompile.runtime.results import StepOutput
from megacompile.runtime.step_io import StepResults
from megacompile.runtime.values import Lending
from megacompile.session import Session
from megacompile.together import agreed_batches, described_optimizer
from megacompile.world.control import World


class Program(Persistence):
    """A model compiled for training under a memory budget; made by :func:`megacompile.compile`.

    Of several ranks each has one, and calls its methods together with the others.

    ``model`` and ``optimizer`` are those that were given, the model without torch's wrappers; a learning-rate
    scheduler takes ``optimizer``. Used as ``with program:``, it is closed at the end.
    """

    def __init__(self, session: Session) -> None:
        self.model = session.model
        self.optimizer = session.optimizer
        self._session = session
        self._closed = False

    @property
    def world(self) -> World:
        """The ranks that train the model together; a process alone is one of one."""
        return self._session.world

    # ---- training --------------------------------------------------------------------------------

    @alone
    def train_step(
        self,
        batch: Any,
        *,
        weights: Sequence[float] | None = None,
        loss: LossOfOutputs | None = None,
        outputs: OutputsFn | None = None,
    ) -> StepOutput:
        """One optimizer step on a batch (a dict, a tuple, a tensor, or a list of tensors), or on a list of
        micro-batches.

        A list trains on the mean of the micro-batches' losses (their sum where the batches carry
        ``num_items_in_batch``), or on the sum weighted by ``weights``. Returns at once when the last
        block's backward is done; updates go on in the background. Of several ranks each brings as many
        micro-batches, and trains on those of all: ``out.losses`` are all ranks', ``out.loss`` is one number.

        ``loss(i, output)`` is computed outside of the program, by any code, from what the forward returns for
        micro-batch i: tensors on the host, whose gradients by this scalar the backward starts from. It is
        called once for each, between forward and backward. ``outputs(output, batch)`` is compiled with the
        model, as for :meth:`predict`, and what it returns comes in the place of the output.
        """
        self._ready()
        session = self._session
        if session.runtime is not None and session.runtime.has_gradients:
            raise ProgramError(
                "Gradients of forward_backward are waiting: call optimizer_step() or drop_gradients() first."
            )

        def weigh(micro: list[Batch]) -> list[float]:
            if weights is None:
                session.intake.check_counts(micro)
            return micro_weights(micro, weights, ranks=session.world.size)

        given = _outputs_for(loss, outputs)
        with session.world.together():
            micro, own, everyone = agreed_batches(session, batch, "train", weigh, given)
            if len({m.key for m in micro}) > 1:
                return self._step_by_accumulation(micro, own, loss)
            try:
                results = session.run(micro, session.training(micro), own, loss=loss)
            except BaseException:
                session.drop_gradients()
                raise
        return StepOutput(self._session, results, everyone)

    @alone
    def forward_backward(
        self,
        batch: Any,
        *,
        weight: float | None = None,
        loss: LossOfOutputs | None = None,
        outputs: OutputsFn | None = None,
    ) -> StepOutput:
        """Add the gradient of ``weight`` (None: 1) times the batch's loss to those that wait on the host.

        Parameters have no ``.grad``: ``max_grad_norm`` clips, when :meth:`optimizer_step` applies them.
        ``loss`` and ``outputs`` are those of :meth:`train_step`.
        """
        self._ready()
        session = self._session

        def weigh(micro: list[Batch]) -> list[float]:
            if weight is None:
                session.intake.check_counts(micro)
            return [1.0 if weight is None else weight] * len(micro)

        with session.world.together():
            given = _outputs_for(loss, outputs)
            micro, own, everyone = agreed_batches(session, batch, "accumulate", weigh, given)
            return StepOutput(session, StepResults(self._accumulate(micro, own, loss)), everyone)

    @alone
    def optimizer_step(self) -> StepOutput:
        """Apply the gradients that :meth:`forward_backward` has gathered, clipped as compiled."""
        self._ready()
        with self.world.together():
            self.world.compare(self._described_update)
            return StepOutput(self._session, self._session.update(), ())

    @alone
    def drop_gradients(self) -> None:
        """Forget the gradients that :meth:`forward_backward` has gathered."""
        self._session.synchronize()
        self._session.drop_gradients()

    @alone
    def close(self) -> None:
        """Finish what is under way and end the worker threads; the state can still be read."""
        session = self._session
        lost: DeviceLostError | None = None
        try:
            if not self.world.ended:  # then the step was left that said so
                session.synchronize()
        except DeviceLostError as error:
            lost = error
        if session.runtime is not None:
            session.runtime.close()
        self.world.disconnect()
        self._closed = True
        session.inconsistent = (
            session.inconsistent or "The program was closed: compile the model again to train on."
        )
        session.finish_saving()
        if lost is not None:
            raise lost
        session.report_skipped()

    @alone
    def release(self) -> nn.Module:
        """Give the model its values back, free the program's own, moments too, and close it.

        Returns the model, an ordinary one again. Its values need host memory beside the state until that is
        freed.
        """
        self.close()
        with self.world.together():
            self._session.release()
        return self.model

    def lend(self, lending: Lending) -> None:
        """Let the model be used between calls of this program: each parameter that is touched gets its value,
        on the host, until the next call takes over what has become of it. One process alone does; to be
        called before the state is laid out."""
        values = self._session.values
        values.lending, values.give_up = lending, self._give_up

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # otherwise what went wrong first is what to tell
                raise

    def __getstate__(self) -> Any:
        raise ProgramError("A program cannot be pickled: save program.state_dict() instead.")

    # ---- inside ---------------------------------------------------------------------------------

    def _give_up(self) -> None:
        self.release()
        self._session.inconsistent = (
            "Another program has taken over the model of this one: use that one, or make another trainer."
        )

    def _described_update(self) -> dict[str, Any]:
        """What all ranks must have alike to update by what waits; refused where nothing does."""
        runtime = self._session.runtime
        if runtime is not None and runtime.lost_gradients:
            runtime.drop_gradients()
            raise ProgramError(
                "A forward_backward failed in the middle of its backward, and all gradients gathered since "
                "the last update were dropped with it: repeat those micro-batches."
            )
        if runtime is None or not runtime.has_gradients:
            raise ProgramError("No gradient is waiting: call forward_backward(batch) first.")
        self._session.check_model()
        return {"optimizer": described_optimizer(self._session)}

    def _accumulate(
        self, micro: list[Batch], weights: list[float], loss: LossOfOutputs | None
    ) -> list[Tensor]:
        losses: list[Tensor] = []
        for i, (one, weight) in enumerate(zip(micro, weights, strict=True)):
            results = self._session.run([one], Mode("accumulate"), [weight], loss=_numbered(loss, i))
            if self.world.size > 1:
                self._session.await_losses()  # then there are those of all ranks
            losses += results.losses
        return losses

    def _step_by_accumulation(
        self, micro: list[Batch], weights: list[float], loss: LossOfOutputs | None
    ) -> StepOutput:
        try:
            losses = self._accumulate(micro, weights, loss)
        except BaseException:
            self._session.drop_gradients()
            raise
        results = self._session.update()
        results.losses = losses
        return StepOutput(self._session, results, weights)


def _outputs_for(loss: LossOfOutputs | None, outputs: OutputsFn | None) -> OutputsFn | None:
    """What a program computes in the place of the loss, where that is computed outside."""
    if loss is not None:
        return outputs or all_outputs
    if outputs is not None:
        raise MegacompileError(
            "outputs= is given without loss=, which would be computed from them: give both."
        )
    return None


def _numbered(loss: LossOfOutputs | None, number: int) -> LossOfOutputs | None:
    """The loss for a run of this micro-batch alone."""
    return None if loss is None else lambda _, outputs: loss(number, outputs)
