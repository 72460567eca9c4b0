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
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megacompile.api.device_weights import FULL, DeviceWeights, split_blocks, weight_bytes
from megacompile.api.rollout_forecast import Completions, forecast
from megacompile.api.session import Session
from megacompile.errors import BudgetError, ProgramError
from megacompile.units import format_bytes

_LOG = logging.getLogger("megacompile.compiler")  # trainers show what it tells
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
        blocks, outside = split_blocks(self.model)
        names = {id(parameter): name for name, parameter in self._names.items()}
        kept = _Weights({n: p for n, p in self._names.items() if id(p) in outside}, self)
        streamed = [
            _Weights({names[id(p)]: p for p in block.parameters() if id(p) not in outside}, self)
            for block in blocks
        ]
        least = weight_bytes(self.model, self._sizes).least
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
        machine, asked = session.measured_machine, Completions(rows, prompt, max(1, new))
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
        self.device.streams.synchronize()
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
