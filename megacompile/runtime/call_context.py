"""The context of a call of a program: other threads, the modes of torch that its caller is in, Ctrl-C.

A program computes the same wherever it is called from.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from megacompile.errors import CaptureError, ProgramError
from megacompile.runtime.device_failures import naming_failures

P = ParamSpec("P")
R = TypeVar("R")


def alone(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Run a program's method while no other runs in any thread, and outside of torch's modes.

    A :class:`CaptureError`, whose message names the line of the user's code, shows the caller's frames alone.
    """

    @functools.wraps(method)
    def call(program: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with exclusive(program._session, method.__name__), program._session.values.in_call():
                return method(program, *args, **kwargs)
        except CaptureError as error:
            raise error.with_traceback(None) from error.__cause__

    return call


@contextlib.contextmanager
def exclusive(session: Any, name: str) -> Iterator[None]:
    """Within the context, which is named ``name``, no other call of a session's program runs."""
    session.same_process()  # before the lock, which a fork may have copied as it was held
    if session.outside is not None and session.outside.running:  # maybe in a thread that the step awaits
        raise ProgramError(
            f"{name} was called while a step computes loss=: call it before or after the step."
        )
    world, device = session.world, session.settings.device
    with session.lock, world.call(name), plain_torch(), naming_failures(device):
        yield


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Gradients are traced, and tensors are made on the host, whatever mode the caller is in."""
    with contextlib.ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            modes.enter_context(torch.enable_grad())
        if torch.is_anomaly_enabled():
            modes.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        yield


def refuse_autocast() -> None:
    """A graph captured in autocast would be run out of it, or the other way round."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            raise ProgramError(
                "The program was called inside of torch.autocast: call it outside, and choose "
                "compute_dtype= in megacompile.compile instead."
            )


@contextlib.contextmanager
def whole_step() -> Iterator[None]:
    """Delay Ctrl-C to the end of a step, so that no update stays half done; a second one stops at once."""
    usual, pressed = signal.default_int_handler, threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return

    def later(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, usual)
        pressed.set()
        print("megacompile: this step ends first; Ctrl-C once more stops it at once.", file=sys.stderr)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if pressed.is_set():
            raise KeyboardInterrupt
