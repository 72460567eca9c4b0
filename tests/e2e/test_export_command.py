"""``megacompile export``: a checkpoint as a folder of plain transformers, without the script that trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megacompile.cli.main import main
from tests.e2e.test_trainer import lora, trainer
from tests.support.models import build
from tests.support.text import tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
Trainer = pytest.importorskip("megacompile.integrations.transformers").Trainer

STEPS = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "eval_strategy": "no"}


def trained(folder: Path, name: str = "llama", **given: Any) -> dict[str, torch.Tensor]:
    """The values after one step, of which the folder has a checkpoint."""
    given = {"make": lambda: build(name, layers=1)} | given
    one = trainer(Trainer, folder, of_trainer={"processing_class": tokenizer()}, **STEPS | given)
    one.train()
    values: dict[str, torch.Tensor] = one.program.state_dict()
    return values


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trained(folder)
    return folder


@pytest.mark.slow_cases(r"gpt2")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_checkpoint_becomes_a_plain_model(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Of a run, of its checkpoint, of the program's part: masters bit for bit; tied weights too."""
    values = trained(tmp_path / "run", name, bf16=True)
    shutil.copytree(tmp_path / "run" / "checkpoint-1", tmp_path / "checkpoint-7")
    shutil.rmtree(tmp_path / "run")
    for number, source in enumerate(("", "checkpoint-7", "checkpoint-7/program")):
        folder = tmp_path / f"{number}"
        assert main(["export", str(tmp_path / source), str(folder), "--dtype", "float32"]) == 0
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.dtype == torch.float32
        assert all(torch.equal(value, values[key]) for key, value in loaded.state_dict().items())
    assert (
        transformers.AutoTokenizer.from_pretrained(folder)("fox")["input_ids"]
        == tokenizer()("fox")["input_ids"]
    )


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_dtype(dtype: str | None, run: Path, tmp_path: Path) -> None:
    """That of the model as it was given, unless another is asked for."""
    given = ["--dtype", dtype] if dtype else []
    assert main(["export", str(run), str(tmp_path / "model"), *given]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    masters = transformers.AutoModelForCausalLM.from_pretrained(run / "checkpoint-1").state_dict()
    assert loaded.dtype == (torch.bfloat16 if dtype else torch.float32)
    assert all(torch.equal(v, masters[n].to(loaded.dtype)) for n, v in loaded.state_dict().items())


@pytest.mark.slow
def test_adapters_are_merged_into_their_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    trained(tmp_path / "run", make=lora, max_steps=2)  # the first one's learning rate is 0
    build("llama", layers=2).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    asked = ["export", str(tmp_path / "run"), str(tmp_path / "model"), "--merge", str(tmp_path / "base")]
    assert main([*asked, "--dtype", "bfloat16"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "checkpoint-2").merge_and_unload()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    wanted = plain.state_dict()
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(v, wanted[n].bfloat16()) for n, v in loaded.state_dict().items())
    start = build("llama", layers=2).state_dict()
    assert not torch.equal(wanted["model.layers.0.self_attn.q_proj.weight"],
                           start["model.layers.0.self_attn.q_proj.weight"])  # fmt: skip


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def truncate(folder: Path) -> None:
    shard = folder / "program" / "state-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


def flip(folder: Path) -> None:
    shard = folder / "program" / "state-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda c: shutil.rmtree(c / "program"), "it has no program"),
        (lambda c: (c / "unfinished").touch(), "was not written to its end"),
        (lambda c: edit(c / "program" / "checkpoint.json", version=99), "version 99; this"),
        (truncate, "bytes long instead of"),
        (flip, "is damaged: the checksum of"),
        (lambda c: edit(c / "config.json", num_hidden_layers=0), "of another model: only the checkpoint has"),
        (lambda c: (c / "config.json").unlink(), "has no config.json"),
    ],
    ids=["foreign", "unfinished", "newer", "truncated", "damaged", "another model", "no config"],
)
def test_what_is_no_checkpoint_of_ours_is_refused_by_its_reason(
    harm: Any, says: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(run / "checkpoint-1", tmp_path / "checkpoint-1"))
    harm(folder)
    assert main(["export", str(folder), str(tmp_path / "model")]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_what_cannot_be_exported_says_what_to_do(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="peft is missing: pip install peft")
    trained(tmp_path / "lora", make=lora)
    (tmp_path / "empty").mkdir()
    for source, target, says in (
        (tmp_path / "lora", "model", "holds adapters: --merge adds them"),
        (tmp_path / "empty", "model", "is no checkpoint, and holds none that is whole"),
        (tmp_path / "nowhere", "model", "is no folder"),
        (run, "lora", "is not empty"),
    ):
        assert main(["export", str(source), str(tmp_path / target)]) == 2
        assert says in capsys.readouterr().err
    for source, says in (
        (tmp_path / "lora", "cannot be loaded from ''"),  # the test's model is of no folder
        (run, "holds no adapters to merge"),
    ):
        assert main(["export", str(source), str(tmp_path / "model"), "--merge"]) == 2
        assert says in capsys.readouterr().err
