"""Trainers, and ``megacompile train``, on real files of images, beside plain transformers and TRL."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile.cli.chat_rows import as_messages
from megacompile.cli.main import main
from megacompile.errors import MegacompileError
from megacompile.integrations.image_buckets import BucketCollator, measure
from megacompile.integrations.transformers import Trainer
from tests.support import images
from tests.support.models import build
from tests.support.text import tokenizer

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # each trainer would say that it was made
transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
trl = pytest.importorskip("trl", reason="trl is missing: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is missing: pip install datasets")
ours = pytest.importorskip("megacompile.integrations.trl")
Maker = Callable[[], tuple[nn.Module, Any]]
CLOCK = ("runtime", "per_second")
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-6,  # else one sign of a gradient near zero moves a weight
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "max_length": 64,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
}


def filled(folder: Path, rows: Sequence[Mapping[str, Any]], make: Maker = images.gemma3) -> Path:
    """Put a model with its processor, six images, rows and the example file into a folder."""
    model, processor = make()
    model.save_pretrained(folder / "model")  # type: ignore[operator]
    processor.save_pretrained(folder / "model")
    images.files(folder / "data" / "images", 6)
    (folder / "data" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["new", str(folder / "config.yaml")]) == 0
    return folder


def sft(kind: Any, folder: Path, make: Maker, **given: Any) -> Any:
    """Of three rows to train on, the last of which is a batch of its own, and two for evaluation."""
    paths = images.files(folder / "images", 5)
    rows = {"messages": images.chats(5), "images": [[str(path)] for path in paths]}
    data = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image()))
    model, processor = make()
    return kind(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(folder / "out"), **SETTINGS | {"assistant_only_loss": True} | given
        ),
        train_dataset=data.select(range(3)),
        eval_dataset=data.select(range(3, 5)),
        processing_class=processor,
        **({"hbm_budget": "20MB"} if kind is ours.SFTTrainer else {}),
    )


def logs(of: Any) -> list[dict[str, float]]:
    return [
        {k: v for k, v in entry.items() if not any(c in k for c in CLOCK)} for entry in of.state.log_history
    ]


@pytest.mark.slow
@pytest.mark.parametrize("make", [images.gemma3, images.qwen3_vl])
def test_sft_on_images_logs_what_trl_does_saves_and_goes_on(make: Maker, tmp_path: Path) -> None:
    """With the assistant's turns alone, the last short batch, and evaluation; each folder has the processor,
    so that plain transformers reads it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = sft(ours.SFTTrainer, tmp_path / "mine", make)
    assert not [w for w in caught if "no effect" in str(w.message) and "ddp" in str(w.message)]
    theirs = sft(trl.SFTTrainer, tmp_path / "theirs", make)
    for one in (mine, theirs):
        one.train()
    assert len(logs(mine)) == len(logs(theirs)) > 3
    for found, wanted in zip(logs(mine), logs(theirs), strict=True):
        assert found == pytest.approx(wanted, rel=2e-6, abs=5e-6)
    values = mine.program.state_dict()
    for name, value in theirs.model.named_parameters():
        torch.testing.assert_close(values[name], value, rtol=0, atol=2e-5)
    mine.save_model(str(tmp_path / "model"))
    checkpoint = tmp_path / "mine" / "out" / "checkpoint-2"
    for folder in (tmp_path / "model", checkpoint):
        assert (
            transformers.AutoProcessor.from_pretrained(folder).chat_template
            == mine.processing_class.chat_template
        )
    plain = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(plain.state_dict(), values, rtol=0, atol=0)
    again = sft(ours.SFTTrainer, tmp_path / "mine", make, eval_strategy="no")
    again.train(resume_from_checkpoint=str(checkpoint))
    for name, value in again.program.state_dict().items():
        assert torch.equal(value, values[name]), name


@pytest.mark.parametrize("make", [images.gemma3, images.qwen3_vl])
def test_a_row_whose_image_max_length_cuts_is_named_before_training(make: Maker, tmp_path: Path) -> None:
    """Not in the middle of an epoch; a text that is cut after its images is none of these."""

    def rows(order: Sequence[str]) -> Any:
        image, text = {"type": "image"}, {"type": "text", "text": "a" * 70}
        parts = {"first": [image, text], "last": [text, image]}
        said = {"role": "assistant", "content": [{"type": "text", "text": "b"}]}
        chats = [[{"role": "user", "content": parts[where]}, said] for where in order]
        paths = images.files(tmp_path / "images", len(order))
        data = datasets.Dataset.from_dict({"messages": chats, "images": [[str(path)] for path in paths]})
        return data.cast_column("images", datasets.List(datasets.Image()))

    def made(train: Any, held_out: Any) -> Any:
        model, processor = make()
        settings = SETTINGS | {"max_length": 40}
        return ours.SFTTrainer(
            model=model,
            args=trl.SFTConfig(output_dir=str(tmp_path / "out"), **settings),
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=processor,
            hbm_budget="20MB",
        )

    good, bad = rows(["first"] * 3), rows(["first", "last", "last"])
    made(good, good)
    says = r"max_length=40 cuts off image tokens of {}\[1\] .*and 1 more: it has \d+ tokens, the last of an"
    with pytest.raises(MegacompileError, match=says.format("train_dataset")):
        made(bad, good)
    with pytest.raises(MegacompileError, match=says.format("eval_dataset")):
        made(good, bad)


SEVERAL = ((60, 40), (112, 56), (56, 56), (56, 112), (80, 40))  # of 4 to 8 image tokens


@pytest.mark.slow
def test_images_of_several_sizes_on_few_programs_log_what_trl_does(tmp_path: Path) -> None:
    """The collator that fills batches up to few shapes; another count of tokens is all that it changes."""
    trainers = []
    for kind in (ours.SFTTrainer, trl.SFTTrainer):
        trainer = sft(kind, tmp_path / kind.__module__, images.qwen3_vl, save_strategy="no", max_steps=4)
        paths = images.files(tmp_path / kind.__module__ / "images", 5, SEVERAL)
        rows = {"messages": images.chats(5), "images": [[str(path)] for path in paths]}
        data = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image()))
        trainer.train_dataset, trainer.eval_dataset = data.select(range(3)), data.select(range(3, 5))
        trainers.append(trainer)
    mine, theirs = trainers
    inner, config = mine.data_collator, mine.model.config
    sizes = [*measure(inner, mine.train_dataset), *measure(inner, mine.eval_dataset)]
    mine.data_collator = BucketCollator(inner, config, sizes, batch_size=2, programs=2)
    for trainer in trainers:
        trainer.train()
    assert len(mine.program._session.decided.programs) <= 4  # as many to evaluate
    assert len(logs(mine)) == len(logs(theirs)) > 4
    for found, wanted in zip(logs(mine), logs(theirs), strict=True):
        counts = {key: wanted[key] for key in found if "num_tokens" in key or key == "total_flos"}
        assert found | counts == pytest.approx(wanted, rel=2e-6, abs=5e-6)


def plain(kind: Any, folder: Path) -> Any:
    """The usual script: ``AutoModelForImageTextToText``, a processor, and a collator of one's own."""
    made, processor = images.gemma3()
    made.save_pretrained(folder / "model")  # type: ignore[operator]
    processor.save_pretrained(folder / "model")
    processor = transformers.AutoProcessor.from_pretrained(folder / "model")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model")
    paths = images.files(folder / "images", 4)
    rows = [{"image": str(path), "chat": chat} for path, chat in zip(paths, images.chats(4), strict=True)]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        chats = []
        for row in rows:
            (asked, said), image = row["chat"], {"type": "image", "path": row["image"]}
            parts = [{"type": "text", "text": turn["content"]} for turn in (asked, said)]
            chats.append([asked | {"content": [image, parts[0]]}, said | {"content": [parts[1]]}])
        padded = {"padding": "max_length", "max_length": 96}
        batch = processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=padded
        )
        ignored = (batch["attention_mask"] == 0) | (batch["input_ids"] == model.config.image_token_id)
        return {**batch, "labels": batch["input_ids"].masked_fill(ignored, -100)}

    return kind(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=2,
            max_steps=2,
            learning_rate=1e-2,
            adam_epsilon=1e-5,  # else a gradient near zero moves a weight by its rounding
            logging_steps=1,
            save_strategy="no",
            remove_unused_columns=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        data_collator=collate,
        train_dataset=rows,
        processing_class=processor,
        **({"hbm_budget": "20MB"} if kind is Trainer else {}),
    )


def test_the_usual_script_on_images_logs_what_transformers_does(tmp_path: Path) -> None:
    """Through a collator and a processor; what is saved has the processor."""
    mine, theirs = (plain(kind, tmp_path / kind.__module__) for kind in (Trainer, transformers.Trainer))
    for one in (mine, theirs):
        one.train()
    assert len(logs(mine)) == len(logs(theirs)) > 2
    for found, wanted in zip(logs(mine), logs(theirs), strict=True):
        assert found == pytest.approx(wanted, rel=2e-6, abs=5e-6)
    mine.save_model(str(tmp_path / "saved"))
    assert transformers.AutoProcessor.from_pretrained(tmp_path / "saved").image_seq_length == 4
    saved = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").state_dict()
    for name, value in theirs.model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=2e-5)


SHAREGPT = [
    {
        "conversations": [
            {"from": "human", "value": f"<image>\n{asked['content']}"},
            {"from": "gpt", "value": said["content"]},
        ],
        "image": f"images/{i}.{('png', 'jpg')[i % 2]}",
    }
    for i, (asked, said) in enumerate(images.chats(6))
]
FLAGS = [
    f"--{key}={value}"
    for key, value in {
        "data": "data/rows.jsonl",
        "test_split_size": 0.3,
        "max_length": 64,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 2,
        "eval_steps": 2,
        "save_steps": 2,
        "sample_tokens": 4,
        "hbm_budget": "20MB",
        "bf16": "false",
        "disable_tqdm": "true",
    }.items()
]


@pytest.mark.slow
def test_the_command_trains_on_rows_that_name_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example file as it is written, on ShareGPT's rows; look first; the model has its processor."""
    monkeypatch.chdir(filled(tmp_path, SHAREGPT))
    assert main(["train", "config.yaml", *FLAGS, "--dry_run=true"]) == 0, capsys.readouterr().err
    looked = capsys.readouterr().out
    assert "4 rows to train on" in looked and "FITS" in looked and not Path("out").exists()
    assert main(["train", "config.yaml", *FLAGS]) == 0
    assert transformers.AutoProcessor.from_pretrained("out/model").image_seq_length == 4
    trained = transformers.AutoModelForImageTextToText.from_pretrained("out/model").state_dict()
    before = images.gemma3()[0].state_dict()
    assert not torch.equal(trained["lm_head.weight"], before["lm_head.weight"])
    assert len(Path("out/samples.jsonl").read_text().splitlines()) == 1
    assert main(["export", "out", "exported", "--dtype=bfloat16"]) == 0
    assert transformers.AutoProcessor.from_pretrained("exported").image_seq_length == 4


def test_the_command_fills_batches_of_several_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says how many programs that makes, before any is planned."""
    monkeypatch.chdir(filled(tmp_path, SHAREGPT, images.qwen3_vl))
    images.files(Path("data/images"), 6, SEVERAL)
    with monkeypatch.context() as patch:
        patch.delattr("megacompile.integrations.transformers.Mixin.plan")
        with pytest.raises(AttributeError, match="plan"):
            main(["train", "config.yaml", *FLAGS, "--dry_run=true"])
    looked = capsys.readouterr().out
    assert "at most 2" in looked and "tokens are filler" in looked
    assert main(["train", "config.yaml", *FLAGS, "--per_device_eval_batch_size=3"]) == 2
    assert "give the same for both" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_plans_the_largest_batch_of_several_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(filled(tmp_path, SHAREGPT, images.qwen3_vl))
    images.files(Path("data/images"), 6, SEVERAL)
    assert main(["train", "config.yaml", *FLAGS, "--dry_run=true"]) == 0, capsys.readouterr().err
    looked = capsys.readouterr().out
    assert "training on the largest images" in looked and "FITS" in looked


def test_what_is_wrong_with_rows_of_images_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the number of the row, before a model is loaded; a model that reads no images, too."""
    monkeypatch.chdir(filled(tmp_path, SHAREGPT))
    build("llama").save_pretrained("text")  # type: ignore[operator]
    tokenizer().save_pretrained("text")
    Path("data/images/none.png").write_bytes(b"none")

    def refused(row: Mapping[str, Any], *flags: str) -> str:
        rows = [SHAREGPT[0] | {"image": "images/0.png"}, dict(row)]
        Path("data/rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert main(["train", "config.yaml", *FLAGS, *flags]) == 2
        return capsys.readouterr().err

    said = SHAREGPT[1]["conversations"]
    twice = [said[0] | {"value": "<image><image> both?"}, said[1]]
    assert "row 2 names the image away.png" in refused(SHAREGPT[1] | {"image": "away.png"})
    assert "row 2: data/images/none.png is no image" in refused(SHAREGPT[1] | {"image": "images/none.png"})
    assert "row 2 has 1 images, and 2 places" in refused(SHAREGPT[1] | {"conversations": twice})
    assert "row 2 has 0 images, and 1 places" in refused(SHAREGPT[1] | {"image": None})
    assert "text is a llama, which reads text alone" in refused(SHAREGPT[1], "--model_name_or_path=text")
    assert "method: dpo does not take" in refused(SHAREGPT[1], "--method=dpo")
    cut = refused(SHAREGPT[1], "--max_length=8", "--test_split_size=0.5")
    assert "_dataset[0] (" in cut and "images/" in cut and "set max_length to 13 or more" in cut


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "<image>\nfox"}, {"role": "assistant", "content": "yes"}]},
        {"messages": [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "yes"}]},
        {
            "prompt": [{"role": "user", "content": "fox"}],
            "completion": [{"role": "assistant", "content": "yes"}],
        },
        {"conversations": [{"from": "human", "value": "<image>fox"}, {"from": "gpt", "value": "yes"}]},
    ],
    ids=["marked", "first", "prompt", "ShareGPT"],
)
def test_rows_of_many_kinds_name_images_alike(row: Mapping[str, Any], tmp_path: Path) -> None:
    """Also where no image is in some."""
    images.files(tmp_path, 1)
    text = json.loads(json.dumps(row).replace("<image>\\n", "").replace("<image>", ""))
    rows = [{**row, "images": ["0.png"]}, {**text, "images": []}]
    data = as_messages(datasets.Dataset.from_list(rows), folder=tmp_path)
    assert data[0]["images"][0].size == images.SIZES[0] and data[1]["images"] == []
    collate = trl.trainer.sft_trainer.DataCollatorForVisionLanguageModeling(images.gemma3()[1])
    found = images.gemma3()[1].tokenizer.batch_decode(collate([data[0], data[1]])["input_ids"])
    image = "\n\n<boi><image><image><image><image><eoi>\n\n"
    said = [f"user:{image}foxassistant:yes</s>", "user:foxassistant:yes</s>"]
    assert [text.replace("<pad>", "").replace(" ", "") for text in found] == said


def test_parts_that_name_their_images(tmp_path: Path) -> None:
    images.files(tmp_path, 2)
    asked = [
        {"type": "image", "path": "1.jpg"},
        {"type": "text", "text": "and"},
        {"type": "image", "path": "0.png"},
    ]
    said = [{"type": "text", "text": "yes"}]
    row = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
    data = as_messages(datasets.Dataset.from_list([row]), folder=tmp_path)
    assert [image.size for image in data[0]["images"]] == [images.SIZES[1], images.SIZES[0]]
    assert [part["type"] for part in data[0]["messages"][0]["content"]] == ["image", "text", "image"]
    asked[0] = {"type": "image_url", "image_url": "1.jpg"}
    with pytest.raises(MegacompileError, match="row 1 has a part of the type 'image_url'"):
        as_messages(datasets.Dataset.from_list([row]), folder=tmp_path)
