"""A tokenizer whose tokens are characters, with a chat template that marks what the assistant says."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,!?:\n"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer(also: str = "", marks: Mapping[str, str] | None = None) -> Any:
    """Of ``CHARACTERS`` and those in ``also``; ``marks`` are special tokens by the name of an attribute."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: i
        for i, token in enumerate(["<pad>", "<s>", "</s>", *CHARACTERS, *sorted({*also} - {*CHARACTERS})])
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
        extra_special_tokens=marks,
    )


def sentences(count: int, seed: int = 0) -> list[str]:
    """Texts of 5 to 40 characters."""
    draw = random.Random(seed)
    return ["".join(draw.choices(CHARACTERS[:12], k=draw.randint(5, 40))) for _ in range(count)]
