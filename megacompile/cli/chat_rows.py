"""Rows of chats as people have them, ShareGPT's and Alpaca's, as the messages that chat templates take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megacompile.cli.chat_images import has_images, named_images, placed_images, with_files
from megacompile.errors import MegacompileError

_SPEAKERS = {  # of ShareGPT's turns, as roles
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    **{role: role for role in ("user", "assistant", "system", "tool")},
}


_Reader = Callable[[Mapping[str, Any]], list[dict[str, Any]]]  # of a row, as turns
_OTHERS = ({"prompt"}, {"chosen"}, {"input_ids"})  # columns that TRL reads as they are


def as_messages(data: Any, text: str = "text", folder: Path = Path()) -> Any:
    """ShareGPT's conversations and Alpaca's instructions as chats; preferences and texts, which are in the
    column ``text``, as they are. Images that rows name are files, relative to ``folder``."""
    names = set(data.column_names or ())
    kinds: dict[tuple[str, ...], _Reader] = {
        ("conversations",): _from_sharegpt,
        ("instruction", "output"): _from_alpaca,
        ("messages",): lambda row: list(row["messages"]),
    }
    read = next((kind for columns, kind in kinds.items() if names.issuperset(columns)), None)
    if read is None and names and not any(map(names.issuperset, ({text}, *_OTHERS))):
        raise MegacompileError(
            f"data: its columns are {', '.join(sorted(names))}: rename them to messages, conversations, "
            f"instruction and output, prompt and completion, chosen and rejected, or {text}."
        )
    if has_images(data):
        return _with_images(data, read, folder)
    if read is None or "chosen" in names:
        return data

    def chat(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        return {"messages": _turns(read, row, index + 1)}

    others = [name for name in data.column_names if name not in ("tools", "chat_template_kwargs")]
    return data.map(chat, with_indices=True, remove_columns=others)


def _turns(read: _Reader, row: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """The turns of a row that is a chat."""
    try:
        turns = read(row)
        if not turns:
            raise MegacompileError(f"data: row {number} is a chat without a turn: remove it.")
        for turn in turns:
            _check_said(turn, number)
        return _system(row) + turns
    except (TypeError, AttributeError, KeyError) as error:
        raise MegacompileError(
            f"data: row {number} is no chat ({error}): its turns must be a list of objects of texts."
        ) from error


def _with_images(data: Any, read: _Reader | None, folder: Path) -> Any:
    """Chats, or prompts and completions that are chats, with their images."""
    from datasets import Dataset

    names = set(data.column_names)
    if "chosen" in names or (read is None and not isinstance(data, Dataset)):
        return data  # for TRL to read or refuse
    if read is None and not isinstance(data[0].get("prompt"), list):
        raise MegacompileError(
            "data: rows have images, and are no chats: give messages, conversations, or prompt and "
            "completion that are lists of turns."
        )

    def chat(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        turns = _turns(read or (lambda row: list(row["prompt"])), row, index + 1)
        messages, images = placed_images(turns, named_images(row), index + 1)
        if read is not None:
            return {"messages": messages, "images": images}
        completion, _ = placed_images(row["completion"], (), index + 1)
        return {"prompt": messages, "completion": completion, "images": images}

    made = data.map(chat, with_indices=True, remove_columns=data.column_names)
    files = isinstance(made, Dataset) and getattr(made.features["images"].feature, "dtype", "") == "string"
    return with_files(made, folder) if files else made


def _check_said(turn: Mapping[str, Any], row: int) -> None:
    """Chat templates fail, or print None, where a turn says nothing."""
    if turn.get("content") is None and not turn.get("tool_calls"):
        keys = ", ".join(name for name, value in turn.items() if value is not None)
        raise MegacompileError(
            f"data: row {row} has a turn without content, only {keys}: give each turn a role and content."
        )


def _system(row: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _from_sharegpt(row: Mapping[str, Any]) -> list[dict[str, str]]:
    turns = [
        (turn.get("from") or turn.get("role"), turn.get("value") or turn.get("content") or "")
        for turn in row["conversations"]
    ]
    for speaker, _ in turns:
        if speaker not in _SPEAKERS:
            known = ", ".join(_SPEAKERS)
            raise MegacompileError(f"data: a turn is from {speaker!r}, which is none of {known}: rename it.")
    return [{"role": _SPEAKERS[speaker], "content": said} for speaker, said in turns]


def _from_alpaca(row: Mapping[str, Any]) -> list[dict[str, str]]:
    asked = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"] or ""}]
