"""Answer a few prompts at each evaluation of a trainer: shown, and kept in a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from megacompile.json_codec import from_plain, parse_json
from megacompile.own_files import replace_text
from megacompile.text_files import read_text


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the lines that :class:`Samples` wrote; :class:`MegacompileError` where one is damaged."""
    lines = []
    texts = read_text(path).split("\n")  # an answer may hold what ``splitlines`` takes for an end of a line
    for number, text in enumerate(filter(None, texts), 1):
        where = f"{path}, line {number},"
        line = from_plain(dict[str, Any], parse_json(text, where), where)
        for name, kind in (("step", int), ("prompt", str), ("answer", str)):
            from_plain(kind, line.get(name), f"{where} {name}")
        lines.append(line)
    return lines


class Samples(TrainerCallback):
    """Answers ``prompts`` by the most likely tokens, ``length`` at most, so no random number is drawn.

    Where the tokenizer has a chat template, a prompt is what the user says. ``path`` gets one line for each
    answer: step, prompt, answer; of a training that goes on from a checkpoint those up to there stay in it.
    """

    def __init__(self, trainer: Any, prompts: Sequence[str], length: int, path: Path) -> None:
        self._trainer, self._prompts, self.tokens, self._path = trainer, list(prompts), length, path
        self._lines: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kept = read_samples(self._path) if state.global_step and self._path.exists() else []
        self._lines = [line for line in kept if line["step"] <= state.global_step]

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        answers = self._answers()  # of all ranks, which compute each token together
        if not state.is_world_process_zero:
            return
        lines = [
            {"step": state.global_step, "prompt": prompt, "answer": answer}
            for prompt, answer in zip(self._prompts, answers, strict=True)
        ]
        self._lines = [line for line in self._lines if line["step"] != state.global_step] + lines
        replace_text(self._path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines))
        for line in lines:
            self._trainer._steps.progress.write(f"{line['prompt']} → {line['answer']}")

    def forward(self) -> None:
        """Ask for the last token that answers may get."""
        asked = self._asked()
        missing = (self.tokens - 1, 0)
        ids = nn.functional.pad(asked["input_ids"], missing, value=self._tokenizer.pad_token_id)
        mask = nn.functional.pad(asked["attention_mask"], missing)
        self._trainer.program.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)

    def _answers(self) -> list[str]:
        tokenizer, asked = self._tokenizer, self._asked()
        options = {"max_new_tokens": self.tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
        tokens = self._trainer.program.generate(**asked, **options)
        answers: list[str] = tokenizer.batch_decode(tokens[:, asked["input_ids"].shape[1] :], True)
        return answers

    @property
    def _tokenizer(self) -> Any:
        """The tokenizer, of a processor for images too."""
        processing = self._trainer.processing_class
        return getattr(processing, "tokenizer", processing)

    def _asked(self) -> dict[str, Tensor]:
        """The prompts as rows of tokens, padded on the left."""
        template, tokenizer = self._trainer.processing_class, self._tokenizer
        padded = {"padding": True, "padding_side": "left"}
        if template.chat_template is not None:
            said = [
                prompt if template is tokenizer else [{"type": "text", "text": prompt}]
                for prompt in self._prompts
            ]
            chats = [[{"role": "user", "content": content}] for content in said]
            texts = template.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
            given = tokenizer(texts, add_special_tokens=False, return_tensors="pt", **padded)
        else:
            given = tokenizer(self._prompts, return_tensors="pt", **padded)
        return {name: given[name] for name in ("input_ids", "attention_mask")}
