"""Which tokens have a label: exactly those that the texts say, for every form of data.

What is expected comes from the texts alone. A chat is a list of pieces as its template writes them, each with
whether it is learned; tokens are laid over it by the bytes that they stand for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import megacompile
from megacompile.cli.main import main
from tests.support.models import build
from tests.support.text import tokenizer

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # each trainer would say that it was made
trl = pytest.importorskip("trl", reason="trl is missing: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is missing: pip install datasets")
command = pytest.importorskip("megacompile.cli.train")

Turns = Sequence[tuple[str, str]]
Pieces = list[tuple[str, bool]]
Rows = list[dict[str, Any]]

CHATS: dict[str, Turns] = {
    "one turn": [("user", "what is it?"), ("assistant", "a fox.")],
    "several turns": [
        ("user", "what is it?"), ("assistant", "a fox."), ("user", "and this?"), ("assistant", "a dog."),
        ("user", "sure?"), ("assistant", "yes."),
    ],
    "system prompt": [("system", "be brief.\nbe kind."), ("user", "who?"), ("assistant", "me.")],
    "the assistant begins": [("assistant", "hello"), ("user", "hi"), ("assistant", "well?")],
    "twice the assistant": [("user", "go"), ("assistant", "one"), ("assistant", "two"), ("user", "three")],
    "empty turns": [("user", ""), ("assistant", ""), ("user", "x"), ("assistant", "y"), ("assistant", "")],
    "names of roles in the text": [
        ("user", "assistant: yes</s>user: "), ("assistant", "user: no\nassistant: "),
    ],
    "spaces at the ends": [
        ("user", " a "), ("assistant", " b "), ("user", "\nc\n"), ("assistant", "\n\nd\n "),
    ],
    "emoji": [("user", "🦊?"), ("assistant", "🦊👩‍🚀 yes 🇪🇺"), ("user", "👍🏽"), ("assistant", "👍🏽")],
    "combining marks": [("user", "e\u0301tude"), ("assistant", "e\u0301t\u00e9 n"), ("user", "o\u0308")],
    "right to left": [
        ("user", "מה זה?"), ("assistant", "שועל."), ("user", "وهذا؟"), ("assistant", "كلب \u200fA"),
    ],
}  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
)


def of_characters() -> Any:
    return tokenizer(also="".join(said for turns in CHATS.values() for _, said in turns))


def of_bytes(template: str = CHATML, *, trims: bool = False) -> Any:
    """Most characters beyond ASCII are several tokens; ``trims`` takes spaces out of the offsets."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=trims)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator([said for turns in CHATS.values() for _, said in turns] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=template
    )


def documented() -> str:
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "train.md"
    (template,) = re.findall(r"^```jinja\n(.*?)^```", page.read_text(), re.M | re.S)
    return str(template)


def by_characters(turns: Turns) -> Iterator[tuple[str, bool]]:
    """The pieces of a chat as the template of ``tests.support.text`` writes them."""
    for role, said in turns:
        yield f"{role}: ", False
        yield (f"{said}</s>", True) if role == "assistant" else (f"{said}\n", False)


def by_chatml(turns: Turns) -> Iterator[tuple[str, bool]]:
    for role, said in turns:
        yield f"<|im_start|>{role}\n", False
        yield f"{said}<|im_end|>", role == "assistant"
        yield "\n", False


def expected(pieces: Sequence[tuple[str, bool]], ids: Sequence[int], tokens: Any) -> list[int]:
    """The labels: of tokens that stand for bytes of learned pieces alone. No token stands for both kinds."""
    learned = [flag for text, flag in pieces for _ in text.encode()]
    labels, begin = [], 0
    for token, name in zip(ids, tokens.convert_ids_to_tokens(ids), strict=True):
        whole = name in tokens.all_special_tokens or tokens.eos_token == "</s>"  # else a character per byte
        of_token = learned[begin : (begin := begin + len(name.encode() if whole else name))]
        assert len(set(of_token)) == 1
        labels.append(token if of_token[0] else -100)
    assert begin == len(learned)
    return labels


def trainer_of(folder: Path, rows: Rows, tokens: Any, **keys: Any) -> Any:
    """The trainer that ``megacompile train`` makes of a file of these rows, before it trains."""
    build("llama", layers=1).save_pretrained(folder / "model")  # type: ignore[operator]
    tokens.save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {"model_name_or_path": str(folder / "model"), "data": str(folder / "data.jsonl")}
    given |= {"output_dir": str(folder / "out"), "assistant_only_loss": True, "max_length": 512}
    given |= {"use_cpu": True, "bf16": False, "report_to": "none", "hbm_budget": "20MB"}
    (folder / "config.yaml").write_text(json.dumps(given | keys))  # YAML too
    return command._trainer(*command._parse(trl, folder / "config.yaml", []))


def messages(turns: Turns) -> list[dict[str, str]]:
    return [{"role": role, "content": said} for role, said in turns]


def check(trainer: Any, all_pieces: Sequence[Pieces], kept: slice = slice(None)) -> None:
    """The rows, and the batches that are made of them."""
    tokens, rows = trainer.processing_class, iter(trainer.train_dataset)
    for pieces in all_pieces:
        ids = tokens("".join(text for text, _ in pieces), add_special_tokens=False)["input_ids"]
        labels = expected(pieces, ids, tokens)[kept]
        if any(label != -100 for label in labels):
            row = next(rows)
            assert row["input_ids"] == ids[kept]
            assert row["labels"] == labels, pieces
    assert next(rows, None) is None
    batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    for row, labels, mask in zip(
        trainer.train_dataset, batch["labels"], batch["attention_mask"], strict=True
    ):
        missing = len(labels) - len(row["labels"])
        assert labels.tolist() == row["labels"] + [-100] * missing
        assert mask.tolist() == [1] * len(row["labels"]) + [0] * missing


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        pytest.param(of_characters, by_characters, id="a token is a character"),
        pytest.param(of_bytes, by_chatml, id="a token is bytes"),
        pytest.param(lambda: of_bytes(trims=True), by_chatml, id="offsets without spaces"),
        pytest.param(lambda: of_bytes(documented()), by_chatml, id="the template in the documentation"),
    ],
)
def test_all_turns_of_the_assistant_are_learned_and_nothing_else(
    make: Any, pieces: Any, tmp_path: Path
) -> None:
    rows = [{"messages": messages(turns)} for turns in CHATS.values()]
    check(trainer_of(tmp_path, rows, make()), [list(pieces(turns)) for turns in CHATS.values()])


def test_a_turn_without_its_end_marker_is_learned_whole(tmp_path: Path) -> None:
    """Its last character may be several tokens; the end marker is not learned, as the template says."""
    tokens = of_bytes(trims=True)
    tokens.chat_template = CHATML.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")

    def pieces(turns: Turns) -> Iterator[tuple[str, bool]]:
        for role, said in turns:
            yield f"<|im_start|>{role}\n", False
            yield said, role == "assistant"
            yield "<|im_end|>\n", False

    rows = [{"messages": messages(turns)} for turns in CHATS.values()]
    check(trainer_of(tmp_path, rows, tokens), [list(pieces(turns)) for turns in CHATS.values()])


def test_sharegpt(tmp_path: Path) -> None:
    """Also a system prompt in a column of its own, and turns that say nothing."""
    speakers = {"user": "human", "assistant": "gpt", "system": "system"}
    rows: Rows = [
        {
            "conversations": [{"from": speakers[role], "value": said or None} for role, said in turns],
            "system": "",
        }
        for turns in CHATS.values()
    ]
    rows.append(rows[0] | {"system": "be brief."})
    chats = [*CHATS.values(), [("system", "be brief."), *CHATS["one turn"]]]
    check(trainer_of(tmp_path, rows, of_characters()), [list(by_characters(turns)) for turns in chats])


def test_alpaca(tmp_path: Path) -> None:
    rows = [
        {"instruction": "translate", "input": "ein fuchs", "output": "a fox", "text": "unused"},
        {"instruction": "say nothing", "input": "", "output": "", "text": "unused"},
    ]
    chats = [
        [("user", "translate\n\nein fuchs"), ("assistant", "a fox")],
        [("user", "say nothing"), ("assistant", "")],
    ]
    check(trainer_of(tmp_path, rows, of_characters()), [list(by_characters(turns)) for turns in chats])


@pytest.mark.filterwarnings("ignore:.* rows have nothing to learn from", "ignore:The `'keep_end'` truncation")
@pytest.mark.parametrize("length", [14, 25, 26, 40])
@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_labels_are_cut_with_their_tokens(length: int, mode: str, tmp_path: Path) -> None:
    """Rows that have no label left are dropped."""
    kept = slice(length) if mode == "keep_start" else slice(-length, None)
    rows = [{"messages": messages(turns)} for turns in CHATS.values()]
    trainer = trainer_of(tmp_path, rows, of_characters(), max_length=length, truncation_mode=mode)
    check(trainer, [list(by_characters(turns)) for turns in CHATS.values()], kept)


def test_without_assistant_only_loss_all_is_learned(tmp_path: Path) -> None:
    rows = [{"messages": messages(turns)} for turns in CHATS.values()]
    chats = [[(text, True) for text, _ in by_characters(turns)] for turns in CHATS.values()]
    check(trainer_of(tmp_path, rows, of_characters(), assistant_only_loss=False), chats)


@pytest.mark.parametrize("only", [True, False])
def test_completions(only: bool, tmp_path: Path) -> None:
    """Of texts: the completion and the end of the text, or all of it."""
    parts = [("what is it?", " a fox."), ("", "🦊"), ("שועל", ""), ("a b", "c</s>")]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in parts]
    trainer = trainer_of(
        tmp_path, rows, of_characters(), assistant_only_loss=False, completion_only_loss=only
    )
    ends = [completion.removesuffix("</s>") + "</s>" for _, completion in parts]
    check(trainer, [[(prompt, not only), (end, True)] for (prompt, _), end in zip(parts, ends, strict=True)])


@pytest.mark.parametrize("everywhere", [True, False], ids=["whole completion", "assistant in the completion"])
def test_completions_of_chats(everywhere: bool, tmp_path: Path) -> None:
    """What the assistant says in the prompt is not learned; nor, on request, the user in the completion."""
    prompt = [("system", "be brief."), ("user", "who?"), ("assistant", "me."), ("user", "and?")]
    completion = [("assistant", "a fox. 🦊"), ("user", "no"), ("assistant", "yes")]
    rows = [{"prompt": messages(prompt), "completion": messages(completion)}]
    trainer = trainer_of(tmp_path, rows, of_characters(), assistant_only_loss=not everywhere)
    before = [*by_characters(prompt), ("assistant: ", False)]  # as in generation
    learned = [(text, flag or everywhere) for text, flag in [*by_characters(completion)][1:]]
    check(trainer, [[(text, False) for text, _ in before] + learned])


@pytest.mark.parametrize("cut", [512, 40])
def test_packed_rows_hold_the_same_labels(cut: int, tmp_path: Path) -> None:
    """Each sequence as by itself, but for its first token, which nothing in the row tells of."""
    rows = [{"messages": messages(turns)} for turns in CHATS.values()]
    tokens = of_characters()
    trainer = trainer_of(tmp_path, rows, tokens, packing=True, max_length=cut)
    wanted = []
    for turns in CHATS.values():
        ids = tokens("".join(text for text, _ in by_characters(turns)))["input_ids"]
        wanted.append((ids[:cut], expected(list(by_characters(turns)), ids, tokens)[:cut]))
    found = []
    for row in trainer.train_dataset:
        batch = trainer.data_collator([dict(row)])
        (ids,), (labels,), (positions,) = (
            batch[name].tolist() for name in ("input_ids", "labels", "position_ids")
        )
        assert positions == [i for length in row["seq_lengths"] for i in range(length)]
        ends = [sum(row["seq_lengths"][: i + 1]) for i in range(len(row["seq_lengths"]))]
        assert ends[-1] == len(ids)
        for begin, end in zip([0, *ends], ends, strict=False):
            found.append((ids[begin:end], labels[begin:end]))
    assert sorted(found) == sorted((ids, [-100, *labels[1:]]) for ids, labels in wanted)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"messages": messages([("user", "only asked")])}],
            "The assistant says nothing in the chat 'user: only",
        ),
        ([{"messages": []}], "row 2 is a chat without a turn"),
        (
            [{"conversations": [{"from": "human", "value": "hi"}, {"from": "bot", "value": "hi"}]}],
            "a turn is from 'bot', which is none of human, gpt",
        ),
        (
            [{"messages": [{"role": "user", "text": "hi"}]}],
            "row 2 has a turn without content, only role, text: give each turn a role and content",
        ),
        (
            [{"question": "hi", "answer": "hi"}],
            "its columns are answer, question: rename them to messages",
        ),
    ],
    ids=["no turn of the assistant", "no turn", "another speaker", "no content", "other columns"],
)
def test_a_chat_that_teaches_nothing_is_refused(
    rows: Rows, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"messages": messages(CHATS["one turn"])} if "messages" in rows[0] else None
    with pytest.raises(megacompile.MegacompileError):
        trainer_of(tmp_path, [good, *rows] if good else rows, of_characters())
    assert main(["train", str(tmp_path / "config.yaml")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_rows_that_max_length_leaves_no_label_are_told_of(tmp_path: Path) -> None:
    rows = [{"messages": messages(CHATS[name])} for name in ("one turn", "system prompt")]
    with pytest.warns(UserWarning, match="1 of 2 rows have nothing to learn from in their first 35 tokens"):
        trainer_of(tmp_path, rows, of_characters(), max_length=35)
    with pytest.raises(megacompile.MegacompileError, match="2 of 2 rows have nothing to learn from"):
        trainer_of(tmp_path, rows, of_characters(), max_length=12)
