"""Predict a rollout: does it fit, where are the weights, how many tokens a second.

In: a model, the forms of its parameters as programs compute with them, a machine, a budget, rows and tokens
of prompts and completions. Out: a :class:`Forecast`. The model's own forward runs on fake tensors, for the
prompts and for a token in the middle of the completions: what its operators keep is memory, what they read,
write and multiply is time. ``program.rollout`` says it before the first token, and ``megacompile plan
--rollout`` before there is a machine.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megacompile.api.device_weights import WeightBytes, stored_bytes, weight_bytes
from megacompile.blocks.costs import flops_of
from megacompile.blocks.memory_meter import StorageMeter, tensors_of
from megacompile.capture.fake_copy import fake_copy
from megacompile.capture.parameter_forms import Form
from megacompile.hardware.catalog import LAUNCH_SECONDS
from megacompile.hardware.machine import Machine
from megacompile.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Completions:
    """The rows of a rollout, and the tokens of a prompt and of a completion."""

    rows: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Forecast:
    """A rollout as predicted, of ``at_once`` rows at a time, none where not one fits.

    ``need_bytes`` is what so many take of the device, and one row where none fits. ``load`` is the time to
    bring the weights that stay, ``prefill`` the time of all prompts, ``decode`` the time of all completions.
    """

    completions: Completions
    streams: bool
    at_once: int
    weights: WeightBytes
    cache_bytes: int  # of one row, at its end
    need_bytes: int
    load: float
    prefill: float
    decode: float

    @property
    def seconds(self) -> float:
        return self.load + self.prefill + self.decode

    @property
    def prefill_rate(self) -> float:
        """Tokens of prompts per second."""
        return self.completions.rows * self.completions.prompt / self.prefill

    @property
    def decode_rate(self) -> float:
        """Tokens of completions per second."""
        return self.completions.rows * self.completions.new / self.decode

    @property
    def weights_at(self) -> str:
        """Say where the weights are."""
        if self.streams:
            return f"{format_bytes(self.weights.streamed)} of weights come block by block for each token"
        return f"{format_bytes(self.weights.whole)} of weights stay on the device"

    def __str__(self) -> str:
        c = self.completions
        rows = f"{c.rows} rows" if self.at_once == c.rows else f"{c.rows} rows, {self.at_once} at a time"
        return (
            f"rollout of {rows}, {c.prompt} tokens and {c.new} new ones: {self.weights_at}, and "
            f"{format_bytes(self.cache_bytes)} of cache a row; predicted {self.prefill_rate:,.0f} tokens/s "
            f"of prompts, {self.decode_rate:,.0f} of completions, {format_seconds(self.seconds)} in all"
        )


def forecast(
    model: nn.Module, forms: Mapping[str, Form], machine: Machine, budget: int, completions: Completions
) -> Forecast:
    """Predict a rollout within ``budget`` bytes.

    As :class:`~megacompile.api.generate_with_cache.Rollout` has it, weights stay where they leave room for
    one row, and half as many rows come at once until they fit.

    Raises whatever the model's forward raises on fake tensors.
    """
    weights = weight_bytes(model, stored_bytes(model, forms))
    whole = _trial(model, forms, machine, completions)

    def need(rows: int, kept: int) -> int:
        """Bytes of so many rows, in proportion, beside weights of ``kept`` bytes."""
        return kept + whole.peak * rows // completions.rows

    def fitting(kept: int) -> int:
        """Rows at a time that fit, 0 where not one does."""
        rows = completions.rows
        while rows and need(rows, kept) > budget:
            rows //= 2
        return rows

    at_once, kept = fitting(weights.whole), weights.whole
    streams = not at_once
    if streams:
        at_once, kept = fitting(weights.least), weights.least
    waves, trial = -(-completions.rows // max(1, at_once)), whole
    if waves > 1:
        trial = _trial(
            model, forms, machine, Completions(max(1, at_once), completions.prompt, completions.new)
        )
    brings = weights.streamed / machine.h2d_bandwidth if streams else 0.0
    return Forecast(
        completions,
        streams,
        at_once,
        weights,
        whole.cache // completions.rows,
        need(max(1, at_once), kept),
        (weights.whole - streams * weights.streamed) / machine.h2d_bandwidth,
        waves * (trial.prefill + brings),
        waves * completions.new * (trial.token + brings),
    )


@dataclass(frozen=True)
class _Trial:
    """Bytes beside the weights at the highest point and of the cache at the end; seconds of all prompts, and
    of a token of all rows in the middle of the completions."""

    peak: int
    cache: int
    prefill: float
    token: float


class _Clock(TorchDispatchMode):
    """Adds up the seconds that operators take: to be called, or to multiply, or to read and write."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine, self.seconds = machine, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read, written = tensors_of((args, kwargs)), tensors_of(out)
        storages = {t.untyped_storage()._cdata for t in read}
        if func._schema.is_mutable or any(t.untyped_storage()._cdata not in storages for t in written):
            nbytes = sum(t.nbytes for t in (*read, *written))
            work = flops_of(func, args, kwargs, out) / self._machine.flops
            self.seconds += max(LAUNCH_SECONDS, work, nbytes / self._machine.memory_bandwidth)
        return out


def _trial(model: nn.Module, forms: Mapping[str, Form], machine: Machine, completions: Completions) -> _Trial:
    rows, prompt, half = completions.rows, completions.prompt, completions.new // 2
    fake, meter = FakeTensorMode(allow_non_fake_inputs=True), StorageMeter()
    with meter:
        copied: Any = fake_copy(model, forms, fake, ()).eval()
    weights = meter.live
    source = copied.get_base_model() if hasattr(copied, "get_base_model") else copied
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(source.forward).parameters else {}

    def run(length: int, past: int, cache: Any, *modes: Any) -> Any:
        with ExitStack() as stack, torch.no_grad():
            for mode in (fake, meter, *modes):
                stack.enter_context(mode)
            ids, mask = torch.zeros(rows, length).long(), torch.ones(rows, past + length).long()
            outputs = copied(
                input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **last
            )
            outputs.logits[:, -1].to(torch.float32, copy=True)  # of which ``generate`` samples
            return outputs.past_key_values

    prefill, token = _Clock(machine), _Clock(machine)
    cache = run(prompt, 0, None, prefill)
    first = meter.peak - weights
    if half:
        cache = run(half, prompt, cache)
    meter.peak = meter.live
    cache = run(1, prompt + half, cache, token)
    grows = (prompt + completions.new) / (prompt + half + 1)
    middle, kept = meter.peak - weights, meter.live - weights
    del cache
    return _Trial(round(max(first, middle * grows)), round(kept * grows), prefill.seconds, token.seconds)
