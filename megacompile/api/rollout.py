"""A rollout: the model alone on the device, with its weights and a cache of keys and values, to generate.

In: a session between two steps, whose programs have given the device back. Out: a copy of the model, of the
same modules, whose weights are there as programs compute with them, or come block by block where they do not
fit. Its ``generate`` is the model's own; nothing else of the device's memory is in use, so the cache has all
that weights leave.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megacompile.api.session import Session
from megacompile.blocks.costs import flops_of
from megacompile.blocks.memory_meter import StorageMeter, tensors_of
from megacompile.capture.fingerprint import Form, copy_around, fake_copy, parameter_forms
from megacompile.capture.fingerprint import tensors_of as held_tensors
from megacompile.capture.quantized_weights import stored_shape
from megacompile.errors import BudgetError, BudgetExceededError, ProgramError
from megacompile.hardware.catalog import LAUNCH_SECONDS
from megacompile.hardware.machine import Machine
from megacompile.runtime.device import Device
from megacompile.units import format_bytes, format_seconds

_LOG = logging.getLogger("megacompile.compiler")  # trainers show what it tells
FULL = (BudgetExceededError, torch.OutOfMemoryError)  # the device's memory
_Model: Any = object  # the class of the model that generates comes next


class _Weights:
    """Some parameters of the copy, which share one piece of the device's memory while they are there."""

    def __init__(self, names: Mapping[str, nn.Parameter], rollout: Rollout) -> None:
        self._names, self._rollout = names, rollout
        self.nbytes = sum(map(rollout.nbytes_of, names))

    def load(self, *_: Any) -> None:
        """Bring them; a hook before a block's forward."""
        place = torch.empty(self.nbytes, dtype=torch.uint8, device=self._rollout.device.torch_device)
        for name, parameter in self._names.items():
            nbytes = self._rollout.nbytes_of(name)
            parameter.data = self._rollout.read(name, place[:nbytes])
            place = place[nbytes:]

    def drop(self, *_: Any) -> None:
        """Give their memory back; a hook after a block's forward."""
        for parameter in self._names.values():
            parameter.data = parameter.data.new_empty(0)


class DeviceWeights:
    """The parameters of a session's model as programs compute with them, on the device, of which until
    :meth:`end` nothing else is in use."""

    def __init__(self, session: Session) -> None:
        self._values, self._budget = session.values, session.compiler.room.budget_bytes
        self._forms = parameter_forms(session.model, session.compiler.frontend.compute_dtype)
        self._sizes = _stored_bytes(session.model, self._forms)
        self._shapes = {name: stored_shape(p) for name, p in session.model.named_parameters()}
        session.vacate()
        runtime = session.runtime
        self._closes = runtime is None
        self._passing = runtime is not None and runtime.state.passing
        self.device: Device = session.settings.open_device() if runtime is None else runtime.device

    @property
    def names(self) -> list[str]:
        """Return those of all parameters, in the model's order."""
        return list(self._sizes)

    def nbytes_of(self, name: str) -> int:
        """Return what a parameter takes of the device."""
        return self._sizes[name]

    def read(self, name: str, place: Tensor) -> Tensor:
        """A parameter as programs compute with it, in these bytes of the device."""
        dtype, strides = self._forms[name]
        value = place.view(dtype).as_strided(self._shapes[name], strides)
        for target, source in _unmetered(self._values.streamed_parts(name, value)):
            self.device.copy([target], [source])
            if self._passing:
                self.device.synchronize()  # the next part may come where this one is
        return value

    def fetch(self, name: str) -> Tensor:
        """A parameter as programs compute with it, which has its place until who takes it lets it go."""
        self.device.synchronize()  # who took the last one may still read where this one comes
        with self.room_for(f"the {format_bytes(self.nbytes_of(name))} of {name}"):
            nbytes = self.nbytes_of(name)
            return self.read(name, torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device))

    @contextlib.contextmanager
    def room_for(self, what: str) -> Iterator[None]:
        """Within, what is allocated is the device's; raises BudgetError where it has no room."""
        try:
            with self.device.whole():
                yield
        except FULL:
            raise BudgetError(
                f"hbm_budget leaves {format_bytes(self._budget)}, without room for {what} beside weights "
                "that were taken before and not let go yet: raise it."
            ) from None

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all, each under its name."""
        for name in self.names:
            yield name, self.fetch(name)

    def around(self, module: nn.Module, parameters: Mapping[int, nn.Parameter]) -> Any:
        """A copy of a module around other parameters, given by the ids of its own, with its buffers on the
        device."""
        tensors: dict[int, Any] = dict(parameters)
        with self.device.whole():
            for tensor in (*module.buffers(), *held_tensors(module)):
                if isinstance(tensor, Tensor):
                    tensors[id(tensor)] = tensor.detach().to(self.device.torch_device, copy=True)
        return copy_around(module, tensors)

    def end(self) -> None:
        """Give the device back."""
        self.device.synchronize()
        self.device.vacate()
        if self._closes:
            self.device.close()


class Rollout(DeviceWeights):
    """The model on the device until :meth:`end`, as ``model``: with all weights, or with those outside of its
    blocks, while those of each block come for its forward alone.

    Raises :class:`~megacompile.errors.BudgetError` where not even these fit.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._session = session
        self._streams, self._running, self._ended = False, False, False
        self._names: dict[str, nn.Parameter] = {}
        try:
            self.model = self._copy(session.model)
            self._place_weights()
        except BaseException:
            self.end()
            raise

    def _copy(self, model: nn.Module) -> Any:
        """The model's modules, in eval mode, around parameters that hold nothing yet."""
        device, parameters = self.device.torch_device, dict[int, nn.Parameter]()
        for name, parameter in model.named_parameters():
            nothing = torch.empty(0, dtype=self._forms[name][0], device=device)
            parameters[id(parameter)] = self._names[name] = nn.Parameter(nothing, requires_grad=False)
        copied = self.around(model, parameters)
        copied.__class__ = type(type(model).__name__, (_OnDevice, type(model)), {})
        copied._rollout = self
        return copied.eval()

    def _place_weights(self) -> None:
        """Bring all weights; where there is no room for them, have those of blocks come one by one."""
        everything = _Weights(self._names, self)
        if everything.nbytes <= self._budget:
            with contextlib.suppress(*FULL), self.device.whole():
                everything.load()
                return
        self._stream()

    def _stream(self) -> None:
        """Keep what is outside of blocks, and bring the weights of each block for its forward."""
        self._streams = True
        _Weights(self._names, self).drop()
        blocks, outside = _split_blocks(self.model)
        names = {id(parameter): name for name, parameter in self._names.items()}
        kept = _Weights({n: p for n, p in self._names.items() if id(p) in outside}, self)
        streamed = [
            _Weights({names[id(p)]: p for p in block.parameters() if id(p) not in outside}, self)
            for block in blocks
        ]
        least = _weight_bytes(self.model, self._sizes).least
        if least > self._budget:
            raise BudgetError(
                f"Generating takes {format_bytes(least)} of weights at a time, and the budget leaves "
                f"{format_bytes(self._budget)}: hbm_budget has to be at least {least} bytes, and more for a "
                "cache of keys and values.",
                least_bytes=least,
            )
        with self.device.whole():
            kept.load()
        for block, weights in zip(blocks, streamed, strict=True):
            block.register_forward_pre_hook(weights.load)
            block.register_forward_hook(weights.drop, always_call=True)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a method of the model returns: what it is given goes to the device, and its results to
        the host, but for a cache, which is left out."""
        if self._ended:
            raise ProgramError(
                "This model belonged to a rollout, which has ended: use it inside of its with block."
            )
        if self._running:
            return function(*args, **kwargs)
        self._running = True
        device = self.device.torch_device
        try:
            with self.device.products(), self.device.whole(), torch.no_grad():
                args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(device, copy=True), (args, kwargs))
                results = function(*args, **kwargs)
                del args, kwargs
        finally:
            self._running = False
        if "past_key_values" in (results if isinstance(results, dict) else ()):
            results = type(results)(**{k: v for k, v in results.items() if k != "past_key_values"})
        return pytree.tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), results)

    def generate(self, function: Callable[..., Any], name: str, options: dict[str, Any]) -> Any:
        """Return what the model's ``generate`` returns for the rows under ``name``: for all at once, or for
        one part after the other, where the device has no room for the cache of all."""
        rows = at_once = len(options[name])
        self._foretell(rows, options[name].shape[1], options)
        start, results = 0, list[Any]()
        while start < rows or not results:
            draws = self._random_state()
            part = slice(start, start + at_once)
            own = {
                name: value[part] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
                for name, value in options.items()
            }
            try:
                results.append(self.run(function, (), own))
                start += at_once
                continue
            except FULL:
                self._random_state(draws)
                if at_once == 1 and self._streams:
                    raise BudgetError(
                        f"hbm_budget leaves {format_bytes(self._budget)}, without room for the cache of one "
                        "row beside the weights of one block: give shorter prompts, ask for fewer tokens, or "
                        "raise it."
                    ) from None
            gc.collect()  # what failed may be in a cycle with its traceback
            if at_once == 1:
                self._stream()
            at_once = at_once // 2 or rows
        if len(results) == 1:
            return results[0]
        whole = results[0]
        if isinstance(whole, dict) and set(whole) == {"sequences"}:
            results = [result.sequences for result in results]
        if not all(isinstance(result, Tensor) for result in results):
            raise BudgetError(
                f"The budget has no room for the cache of {rows} rows, and results that are more than tokens "
                f"are not put together of parts: give {at_once} rows at a time."
            )
        longest = max(result.shape[1] for result in results)
        padded = functools.partial(nn.functional.pad, value=self._padding(options))
        tokens = torch.cat([padded(result, (0, longest - result.shape[1])) for result in results])
        return tokens if isinstance(whole, Tensor) else type(whole)(sequences=tokens)

    def _foretell(self, rows: int, prompt: int, options: Mapping[str, Any]) -> None:
        """Say once, before the first token, how fast they will come."""
        session = self._session
        if not _LOG.isEnabledFor(logging.INFO) or not session.is_new("how fast a rollout is"):
            return
        new = self._setting(options, "max_new_tokens") or self._setting(options, "max_length", 20) - prompt
        rows *= max(self._setting(options, name, 1) for name in ("num_return_sequences", "num_beams"))
        machine, asked = session.compiler.measured_machine, Completions(rows, prompt, max(1, new))
        try:
            _LOG.info("%s", forecast(session.model, self._forms, machine, self._budget, asked))
        except Exception as error:  # a forward may read values, which nothing has yet
            _LOG.info("how fast a rollout is cannot be predicted: %s", str(error).partition("\n")[0])

    def _setting(self, options: Mapping[str, Any], name: str, default: Any = None) -> Any:
        """A setting of ``generate``, as it is given or else as the model has it."""
        config = options.get("generation_config") or self.model.generation_config
        return next((v for v in (options.get(name), getattr(config, name, None)) if v is not None), default)

    def _padding(self, options: Mapping[str, Any]) -> int:
        """The token that ``generate`` puts after the end of a row."""
        token = self._setting(options, "pad_token_id", self._setting(options, "eos_token_id", 0))
        return int(token[0] if isinstance(token, list) else token)

    def _random_state(self, state: Sequence[Tensor] = ()) -> list[Tensor]:
        """The state of the generators that sampling draws from; set first where one is given."""
        kinds: list[Any] = [torch, torch.cuda] if self.device.torch_device.type == "cuda" else [torch]
        for kind, given in zip(kinds, state, strict=False):
            kind.set_rng_state(given)
        return [kind.get_rng_state() for kind in kinds]

    def end(self) -> None:
        """Give the device back; the copy of the model is of no use any more."""
        self._ended = True
        self.device.synchronize()
        _Weights(self._names, self).drop()
        super().end()


class _OnDevice(_Model):
    """Comes before a model's class: the model computes on the device, for callers on the host."""

    _rollout: Rollout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._rollout.run(super().__call__, args, kwargs)

    def generate(self, inputs: Any = None, **options: Any) -> Any:
        """As the model's own."""
        name = self.main_input_name
        if inputs is not None:
            options[name] = inputs
        if not isinstance(options.get(name), Tensor):
            return self._rollout.run(super().generate, (), options)
        return self._rollout.generate(super().generate, name, options)


def _unmetered(parts: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same; what is made on the host for it is not the device's, and counted by no meter."""
    while True:
        with _disable_current_modes():
            part = next(parts, None)
        if part is None:
            return
        yield part


# ------------------------------------------------------------------------------------------------------------
# Predict a rollout: does it fit, where are the weights, how many tokens a second.
#
# In: a model, the forms of its parameters as programs compute with them, a machine, a budget, rows and tokens
# of prompts and completions. Out: a :class:`Forecast`. The model's own forward runs on fake tensors, for the
# prompts and for a token in the middle of the completions: what its operators keep is memory, what they read,
# write and multiply is time. ``program.rollout`` says it before the first token, and ``megacompile plan
# --rollout`` before there is a machine.


ALIGNED = 256  # bytes, at a multiple of which each weight begins


@dataclass(frozen=True)
class Completions:
    """The rows of a rollout, and the tokens of a prompt and of a completion."""

    rows: int
    prompt: int
    new: int


@dataclass(frozen=True)
class WeightBytes:
    """The bytes of all weights; of those outside of blocks with the largest block's; of those that a forward
    brings where blocks are streamed."""

    whole: int
    least: int
    streamed: int


@dataclass(frozen=True)
class Forecast:
    """A rollout as predicted, of ``at_once`` rows at a time, none where not one fits.

    ``need_bytes`` is what so many take of the device, and one row where none fits. ``load`` is the time in
    which weights come that stay; ``prefill`` that of all prompts, ``decode`` that of all completions.
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
    """Predict a rollout within ``budget`` bytes. As :class:`~megacompile.api.rollout.Rollout` has it, weights
    stay where they leave room for one row, and half as many rows come at once until they fit.

    Raises whatever the model's forward raises on fake tensors.
    """
    weights = _weight_bytes(model, _stored_bytes(model, forms))
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


# ------------------------------------------------------------------------------------------------------------
# Weights: those that stay, and those of blocks.


def _stored_bytes(model: nn.Module, forms: Mapping[str, Form]) -> dict[str, int]:
    """Return what each parameter takes of the device."""
    shapes = {name: stored_shape(parameter) for name, parameter in model.named_parameters()}
    sizes = {name: prod(shape) * forms[name][0].itemsize for name, shape in shapes.items()}
    return {name: -(-nbytes // ALIGNED) * ALIGNED for name, nbytes in sizes.items()}


def _weight_bytes(model: nn.Module, sizes: Mapping[str, int]) -> WeightBytes:
    """Add up the bytes of parameters, of which ``sizes`` has each by its name."""
    blocks, outside = _split_blocks(model)
    of = {id(p): sizes[name] for name, p in model.named_parameters()}
    kept = sum(n for key, n in of.items() if key in outside)
    each = [sum(of[key] for key in {*map(id, block.parameters())} - outside) for block in blocks]
    return WeightBytes(sum(of.values()), kept + max(each, default=0), sum(each))


def _split_blocks(model: nn.Module) -> tuple[list[nn.Module], set[int]]:
    """Return the blocks of a model, which are in lists of modules, and the ids of parameters outside."""
    blocks: list[nn.Module] = []
    outside: set[int] = set()

    def walk(module: nn.Module) -> None:
        outside.update(map(id, module.parameters(recurse=False)))
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                blocks.extend(child)
            else:
                walk(child)

    walk(model)
    return blocks, outside


# ------------------------------------------------------------------------------------------------------------
# A trial: the model's forward on fake tensors, which have sizes and no values.


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
