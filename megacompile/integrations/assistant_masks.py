"""Mask which tokens of a chat the assistant says, by where its words lie in the text.

transformers asks for the token at the first and at the last character of a turn. Some tokenizers spread
that character over several tokens, or give it none (GPT-NeoX's offsets leave out spaces). Then it leaves
out the rest of the turn or all later turns, or takes in the user's. Here every token is asked where it
lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from megacompile.errors import MegacompileError

_SHOWN = 80  # characters of a chat that is refused


class AssistantMasks:
    """A fast tokenizer, for TRL's preparation of data, with exact masks of what the assistant says."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer.decode(*args, **kwargs)

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        return_assistant_tokens_mask: bool = False,
        chat_template: str | None = None,
        tools: Any = None,
        **given: Any,
    ) -> Any:
        """As the tokenizer's, for one chat. Raises MegacompileError for a chat without the assistant."""
        tokenizer = self._tokenizer
        encoded = tokenizer.apply_chat_template(
            conversation, chat_template=chat_template, tools=tools, **given
        )
        if not return_assistant_tokens_mask:
            return encoded
        settings = {k: v for k, v in given.items() if k not in ("tokenize", "return_dict")}
        (text,), (spans,) = render_jinja_template(
            conversations=[conversation],
            tools=tools,
            chat_template=tokenizer.get_chat_template(chat_template, tools),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map | settings,
        )
        encoded["assistant_masks"] = mask = _within(encoded.encodings[0].offsets, spans)
        if not any(mask):
            shown = text[:_SHOWN] + "…" * (len(text) > _SHOWN)
            raise MegacompileError(
                f"The assistant says nothing in the chat {shown!r}, so there is nothing to learn from it: "
                "remove it, or set assistant_only_loss to false."
            )
        return encoded


def _within(offsets: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token with a character in a span; one that has none stands for those since the last."""
    mask, reached = [], 0
    for start, end in offsets:
        first = start if start < end else min(reached, start)
        mask.append(int(any(first < stop and begin < end for begin, stop in spans)))
        reached = max(reached, end)
    return mask
