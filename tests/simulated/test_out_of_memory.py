"""Out of memory within a step that was planned: said, planned again within less, and the state as it was."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megacompile.api.pipeline import Compiler
from megacompile.errors import DeviceFullError
from megacompile.runtime.block_calls import Blocks
from megacompile.runtime.cuda import CudaDevice
from tests.simulated.numbers import runtime
from tests.support.cuda_programs import program
from tests.support.models import batch_for, build

STEPS = 3
CLIPPED = {"max_grad_norm": 0.5}  # updates wait for the end of the backward


def failing(real: Callable[..., Any], at: list[int], times: int) -> Callable[..., Any]:
    """A call in whose place the allocator is asked for more than it may give, from number ``at`` on."""
    made = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        if made[0] in range(at[0], at[0] + times):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        return real(*args, **kwargs)

    return call


def trained(device: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    made = program(build("gpt2-dropout"), device, "1GB", **CLIPPED, **options)
    losses = [
        float(made.train_step(batch_for("gpt2-dropout", i, size=4, length=64)).loss) for i in range(STEPS)
    ]
    state = made.state_dict()
    made.close()
    return losses, state


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Compiler, "_may_reside", lambda *_: ())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_training_goes_on_as_if_nothing_had_happened(
    streamed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Dropout draws the same numbers again, and a snapshot is there."""
    expected, state = trained("cuda")
    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "_tangent", failing(Blocks._tangent, [4], 1))
        with pytest.warns(UserWarning, match="planned again within 6.* less, and the step repeated"):
            losses, ours = trained("cuda")
    assert losses == expected
    assert all(torch.equal(ours[n], v) for n, v in state.items())
    (saved,) = tmp_path.glob("megacompile-memory-*.pickle")
    assert pickle.loads(saved.read_bytes())["segments"]


class Full(TorchDispatchMode):
    """Finds no room at operator ``at`` of those that make device tensors, counted from now on; 0 for none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.at = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = tree_flatten(out)[0]
        if not func.is_view and any(isinstance(x, torch.Tensor) and x.is_cuda for x in made):
            self.seen += 1
            if self.seen == self.at:
                torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        return out


@pytest.fixture
def full(streamed: None, monkeypatch: pytest.MonkeyPatch) -> Full:
    mode, computing = Full(), CudaDevice.computing

    @contextmanager
    def with_mode(self: CudaDevice) -> Iterator[None]:
        with computing(self), mode:
            yield

    monkeypatch.setattr(CudaDevice, "computing", with_mode)
    return mode


def disturbed(full: Full, at: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state of a step, and of two of which operator ``at`` finds no room."""
    torch.manual_seed(0)
    made = program(build("plain", depth=1), "cuda", "1GB", planner="double-buffer", **CLIPPED)
    losses = [float(made.train_step(batch_for("plain", 0)).loss)]
    full.seen, full.at = 0, at
    losses += [float(made.train_step(batch_for("plain", i)).loss) for i in (1, 2)]
    full.at = 0
    state = made.state_dict()
    made.close()
    return losses, state


def check_operators(full: Full, few: int | None = None) -> None:
    runtime.set(lag_us=0)
    expected, state = disturbed(full, 0)
    count = full.seen
    for at in range(1, count + 1, 1 if few is None else count // few):
        with pytest.warns(UserWarning, match="planned again"):
            losses, ours = disturbed(full, at)
        assert losses == expected, at
        assert all(torch.equal(ours[n], v) for n, v in state.items()), at


def test_at_some_operators_a_step_is_repeated_bitwise(full: Full) -> None:
    check_operators(full, few=8)


@pytest.mark.slow
def test_at_each_operator_a_step_is_repeated_bitwise(full: Full) -> None:
    check_operators(full)


def test_it_is_tried_once(streamed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time in one step is an error that names the file; the program goes on after it."""
    torch.manual_seed(0)
    made = program(build("plain"), "cuda", "1GB", **CLIPPED)
    first = float(made.train_step(batch_for("plain")).loss)
    before = made.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(CudaDevice, "load", failing(CudaDevice.load, [1], 9))
        with (
            pytest.warns(UserWarning, match="planned again"),
            pytest.raises(DeviceFullError, match=r"Tried to allocate .*megacompile-memory-"),
        ):
            made.train_step(batch_for("plain"))
    assert all(torch.equal(before[n], v) for n, v in made.state_dict().items())
    assert float(made.train_step(batch_for("plain")).loss) < first
    made.close()


def test_gradients_that_wait_are_kept(streamed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        made = program(build("plain"), "cuda", "1GB", **CLIPPED)
        for i in range(2):
            made.forward_backward(batch_for("plain", i))
        made.optimizer_step()
        state = made.state_dict()
        made.close()
        return state

    expected = gathered()
    with monkeypatch.context() as patch:
        patch.setattr(CudaDevice, "load", failing(CudaDevice.load, [3], 1))  # in the second
        with pytest.warns(UserWarning, match="planned again"):
            ours = gathered()
    assert all(torch.equal(ours[n], v) for n, v in expected.items())


def test_half_an_update_is_not_repeated(streamed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where updates follow each block's backward: the error says how to go on."""
    made = program(build("plain"), "cuda", "1GB")
    made.train_step(batch_for("plain"))
    made.synchronize()
    progress = made._session.runtime._held.progress  # type: ignore[union-attr]
    tangent = Blocks._tangent

    def full_after_an_update(self: Blocks, value: int, micro: int) -> torch.Tensor:
        made._session.runtime.device.streams.synchronize()  # type: ignore[union-attr]
        if any(step.begun for step in progress.steps.values()):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        return tangent(self, value, micro)

    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "_tangent", full_after_an_update)
        with pytest.raises(DeviceFullError):
            made.train_step(batch_for("plain"))
    with pytest.raises(RuntimeError, match=r"load a checkpoint with program\.load"):
        made.train_step(batch_for("plain"))
    made.close()
