"""Generate samples of a causal language model without a cache, where there is no room for a rollout.

In: a model whose values a program keeps, the program's ``predict``, options of transformers' ``generate``.
Out: what that returns. All sampling is transformers' code; the model's call alone is answered by a program
of the forward, which gives the logits of one position. With a cache, in a rollout, the model's own code
generates: :mod:`megacompile.api.generate_with_cache`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megacompile.capture.padded_length import growing_length, reach
from megacompile.capture.padding import pad_batch
from megacompile.errors import (
    MegacompileError,
)

_REFUSED = ("inputs_embeds", "past_key_values", "output_attentions", "output_hidden_states")
_Model: Any = object  # the class of the model that generates comes next


@dataclass(frozen=True)
class _NextLogits:
    """The logits of each row at the position that ``logits_to_keep`` holds, which the forward may take."""

    inputs: tuple[str, ...]

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
        logits: Tensor = outputs.logits
        return logits[:, batch["logits_to_keep"]] if self.inputs else logits


class _Streamed(_Model):
    """Comes before a model's class: a call runs the program's forward, everything else is the model's own."""

    device = torch.device("cpu")
    predict: Callable[..., Tensor]
    padded = 0  # the length of the program that ran last
    longest = 0

    def _prepare_generated_length(self, **given: Any) -> Any:
        config = super()._prepare_generated_length(**given)
        self.longest = config.max_length
        return config

    def __call__(self, input_ids: Tensor | None = None, **inputs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        given = {name: value for name, value in inputs.items() if value is not None}
        for name in _REFUSED:
            if given.get(name, False) is not False:
                raise MegacompileError(
                    f"Without a rollout, program.generate takes no {name}, as it keeps no keys and values "
                    "and reads logits only: give it input_ids, and call program.predict for other outputs."
                )
        assert input_ids is not None
        length = input_ids.shape[1]
        if length > self.padded:
            self.padded = growing_length(length, self.longest, reach(self))
        mask = {"attention_mask": torch.ones_like(input_ids)}  # always there: one program with it and without
        batch = pad_batch({"input_ids": input_ids} | mask | given, self.padded)
        batch["logits_to_keep"] = torch.tensor([length - 1])
        takes = "logits_to_keep" in inspect.signature(self.forward).parameters
        outputs = _NextLogits(() if takes else ("logits_to_keep",))
        return CausalLMOutput(logits=self.predict(batch, outputs=outputs))


def generate(model: Any, predict: Callable[..., Tensor], input_ids: Tensor, **options: Any) -> Any:
    """Return what ``model.generate`` of transformers returns, on the host; ``predict`` runs the forwards."""
    source = _language_model(model)
    kind = type(type(source).__name__, (_Streamed, type(source)), {})
    streamed: Any = object.__new__(kind)  # the model's attributes, as they are, and another call
    vars(streamed).update(vars(source), predict=predict)
    options |= {"input_ids": input_ids, "use_cache": False}
    return streamed.generate(**pytree.tree_map_only(Tensor, Tensor.cpu, options))


def refuse_no_generator(model: Any, input_ids: Any) -> None:
    """Refuse a model that is no generating one of transformers, and prompts other than rows of tokens."""
    source = model.get_base_model() if hasattr(model, "get_base_model") else model
    if (
        not (hasattr(source, "can_generate") and source.can_generate())
        or source.main_input_name != "input_ids"
    ):
        raise MegacompileError(
            f"{type(source).__name__} is no model of transformers that generates from tokens, which "
            "program.generate needs: call program.predict and choose from what it returns."
        )
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        raise MegacompileError(
            "program.generate takes input_ids as a tensor of rows of tokens: give **tokenizer(texts, "
            'return_tensors="pt", padding=True, padding_side="left"), or tokens[None] for one row.'
        )


def _language_model(model: Any) -> Any:
    """The model of transformers that generates; of adapters the one that they are on. Refuses what a program
    of the forward cannot answer for."""
    source = model.get_base_model() if hasattr(model, "get_base_model") else model
    virtual = source is not model and model.active_peft_config.is_prompt_learning
    if virtual or source.config.is_encoder_decoder:
        what = "virtual tokens" if virtual else "encoder with its decoder"
        raise MegacompileError(
            f"Without a rollout, program.generate knows no {what} of {type(source).__name__}: give it one "
            "process and a budget with room for a rollout, or call program.release() first."
        )
    return source
