"""From and to transformers' folders: values exact, ties kept, nothing twice in memory, errors by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import megacompile
from megacompile.api.pretrained import Shards, build_empty
from tests.support.models import batch_for, build
from tests.support.scripts import output_of
from tests.support.text import tokenizer
from tests.support.vision_language import cases

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def stored(name: str, folder: Path, **options: Any) -> nn.Module:
    model = build(name, seed=4)
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.slow_cases(r"qwen3")
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])  # the second ties its embedding to its head
def test_trains_as_the_loaded_model_does_and_comes_back(name: str, tmp_path: Path) -> None:
    model = stored(name, tmp_path / "in", max_shard_size="40KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    fp32 = {"compute_dtype": torch.float32}
    program = megacompile.from_pretrained(tmp_path / "in", "1GB", optimizer=adamw, **fp32)
    assert program.model.training
    assert all(torch.equal(v, program.state_dict()[n]) for n, v in model.named_parameters())
    twin = megacompile.compile(model, "1GB", optimizer=adamw(model.parameters()), **fp32)
    for step in range(2):
        batch = batch_for(name, step)
        assert float(program.train_step(batch).loss) == float(twin.train_step(batch).loss)
    trained = program.state_dict()
    assert all(torch.equal(v, trained[n]) for n, v in twin.state_dict().items())
    twin.close()
    for dtype in (torch.float32, torch.bfloat16):
        program.export(tmp_path / str(dtype), dtype)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(dtype))
        assert type(again) is type(model)
        for key, value in again.named_parameters():
            assert value.dtype == dtype
            assert torch.equal(value, trained[key].to(dtype)), key
    program.close()


def test_saving_as_transformers_does_compiles_nothing_again(tmp_path: Path) -> None:
    """Though it writes a dtype and an architecture into the live config; other changes are followed."""
    model = build("llama")
    before = dict(vars(model.config))
    program = megacompile.compile(
        model, "1GB", optimizer=adamw(model.parameters()), compute_dtype=torch.float32
    )
    program.train_step(batch_for("llama", 0))
    model.save_pretrained(tmp_path, state_dict=program.state_dict())
    assert vars(model.config) != before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.train_step(batch_for("llama", 1))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == program.state_dict().keys()
    model.config.rms_norm_eps = 1e-3
    session = program._session
    assert not session.decided.knows(session.padded(session.read(batch_for("llama", 2)))[0])
    program.close()


def test_a_head_that_a_user_tied_is_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a config that does not tie it transformers looks for it, and would make it up."""
    monkeypatch.setattr("megacompile.state.model_export.SHARD_BYTES", 5_000)  # one in which it comes alone
    model = build("llama")
    assert not model.config.tie_word_embeddings
    model.lm_head.weight = model.model.embed_tokens.weight
    with megacompile.compile(model, "1GB", optimizer=adamw(model.parameters())) as program:
        program.train_step(batch_for("llama"))
        program.export(tmp_path / "out", torch.float32)
        trained = program.state_dict()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(v, trained[n]) for n, v in again.named_parameters())


def test_several_shards_come_out_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacompile.state.model_export.SHARD_BYTES", 20_000)
    model = build("llama")
    program = megacompile.compile(model, "1GB", optimizer=adamw(model.parameters()))
    program.export(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state = program.state_dict()
    assert all(torch.equal(v, state[n].bfloat16()) for n, v in again.named_parameters())
    with pytest.raises(megacompile.MegacompileError, match="is not empty"):
        program.export(tmp_path / "out")
    with pytest.raises(megacompile.MegacompileError, match=r"torch.int8 cannot hold weights"):
        program.export(tmp_path / "other", torch.int8)


def test_an_export_beside_other_files_replaces_the_last_one(tmp_path: Path) -> None:
    """Into a trainer's output folder; in the dtypes that the parameters have."""
    model = build("gpt2").bfloat16()
    program = megacompile.compile(model, "1GB", optimizer=adamw(model.parameters()))
    program.train_step(batch_for("gpt2"))
    (tmp_path / "trainer_state.json").write_text("{}")
    for stale in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / stale).write_text("of an earlier export")
    program.export(tmp_path, None, beside=True)
    names = {"config.json", "generation_config.json", "model.safetensors", "trainer_state.json"}
    assert {file.name for file in tmp_path.iterdir()} == names
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    values = program.state_dict()
    assert plain.dtype == torch.bfloat16
    assert all(torch.equal(v, values[n].bfloat16()) for n, v in plain.named_parameters())
    program.close()


def test_the_tokenizer_and_the_processor_follow_the_model(tmp_path: Path) -> None:
    """Of the folder that a model was loaded from; files that lie at the new place stay as they are."""
    stored("gpt2", tmp_path / "source")
    tokenizer().save_pretrained(tmp_path / "source")
    for name in ("preprocessor_config.json", "optimizer.pt"):
        (tmp_path / "source" / name).write_text("{}")
    with megacompile.from_pretrained(tmp_path / "source", "1GB", optimizer=adamw) as program:
        program.export(tmp_path / "new")
        known = tmp_path / "known"
        known.mkdir()
        (known / "tokenizer.json").write_text("its own")
        program.export(known, beside=True)
    written = {file.name for file in (tmp_path / "new").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"} < written
    assert "optimizer.pt" not in written
    text = "a text"
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert again(text) == tokenizer()(text)
    assert (known / "tokenizer.json").read_text() == "its own"
    assert (known / "tokenizer_config.json").exists()


def test_a_plain_module_is_exported_without_config(tmp_path: Path) -> None:
    model = build("plain")
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    program = megacompile.compile(model, "1GB", optimizer=adamw(model.parameters()))
    program.export(tmp_path / "out", torch.float32)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert all(torch.equal(found[n], v) for n, v in values.items())


def test_a_base_models_names_are_found(tmp_path: Path) -> None:
    """As GPT-2 is published: without the prefix that its head's class gives the parameters."""
    model = stored("gpt2", tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    save_file({n.removeprefix("transformer."): v for n, v in values.items()}, tmp_path / "model.safetensors")
    program = megacompile.from_pretrained(tmp_path, "1GB", optimizer=adamw)
    assert all(torch.equal(v, program.state_dict()[n]) for n, v in model.named_parameters())


@pytest.mark.parametrize("name", ["Qwen2-VL", "Mistral 3", "LLaVA-NeXT", "SmolVLM"])
def test_vision_language_models_are_read_under_the_names_of_their_files(name: str, tmp_path: Path) -> None:
    """transformers writes the names of a checkpoint's own time, and renames them by regular expressions."""
    model: Any = cases()[name].build()
    model.save_pretrained(tmp_path)
    empty, shards = build_empty(tmp_path), Shards(tmp_path)
    shards.fit(empty)
    assert type(empty) is type(model)
    assert all(torch.equal(shards.read(n), v) for n, v in model.named_parameters())


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_experts_are_merged_as_transformers_merges_them(kind: str, tmp_path: Path) -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "num_experts_per_tok": 2}
    experts = experts if kind == "Qwen3Moe" else {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{kind}Config")(**shape, **heads, **experts)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(tmp_path / "in")
    assert any("experts.3." in name for name in load_file(tmp_path / "in" / "model.safetensors"))
    program = megacompile.from_pretrained(tmp_path / "in", "1GB", optimizer=adamw)
    assert all(torch.equal(v, program.state_dict()[n]) for n, v in model.named_parameters())
    program.export(tmp_path / "out", torch.float32)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    values = dict(model.named_parameters())
    assert all(torch.equal(v, values[n]) for n, v in again.named_parameters())


def rename(values: dict[str, torch.Tensor]) -> None:
    values["model.norm.other"] = values.pop("model.norm.weight")


def reshape(values: dict[str, torch.Tensor]) -> None:
    values["model.norm.weight"] = torch.ones(7)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (rename, "has no model.norm.weight, or under another name"),
        (reshape, r"has model.norm.weight in the shape \(7,\); the model has \(32,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Any, says: str, tmp_path: Path) -> None:
    stored("llama", tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    change(values)
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(megacompile.MegacompileError, match=says):
        megacompile.from_pretrained(tmp_path, "1GB", optimizer=adamw)


def test_folders_that_are_no_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(megacompile.MegacompileError, match=r"has no config.json"):
        megacompile.from_pretrained(tmp_path, "1GB")
    stored("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(megacompile.MegacompileError, match="is no whole safetensors file"):
        megacompile.from_pretrained(tmp_path, "1GB", optimizer=adamw)
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(megacompile.MegacompileError, match=r"has no model.safetensors and no"):
        megacompile.from_pretrained(tmp_path, "1GB", optimizer=adamw)
    index = {"weight_map": {"a": "../elsewhere"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(megacompile.MegacompileError, match=r"names .../elsewhere', which is no file"):
        megacompile.from_pretrained(tmp_path, "1GB", optimizer=adamw)
    for text, says in (("[" * 100_000, "nested too deeply"), ('{"weight_map": [3]}', "is malformed")):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(megacompile.MegacompileError, match=rf"index.json .*{says}"):
            megacompile.from_pretrained(tmp_path, "1GB", optimizer=adamw)
    (tmp_path / "config.json").write_text('{"architectures": ["os"], "model_type": "llama"}')
    with pytest.raises(megacompile.MegacompileError, match="which transformers does not have"):
        megacompile.from_pretrained(tmp_path, "1GB", optimizer=adamw)


def test_parameters_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(megacompile.MegacompileError, match=r"weight is on the meta device.*from_pretrained"):
        megacompile.compile(model, "1GB")


MEASURE = """
import sys, threading, time, torch, megacompile
from megacompile.state.host_arena import resident_bytes
from megacompile.state.model_values import ModelValues
take_over, seen = ModelValues.take_over, []
def watched(self, *arguments):
    done = threading.Event()
    def watch():
        while not done.is_set():
            seen.append(resident_bytes())
            time.sleep(0.0005)
    thread = threading.Thread(target=watch)
    seen.append(resident_bytes())
    thread.start()
    take_over(self, *arguments)
    done.set()
    thread.join()
ModelValues.take_over = watched
program = megacompile.from_pretrained(sys.argv[1], "80MB", optimizer=torch.optim.AdamW)
ids = torch.arange(8)[None]
program.prepare({"input_ids": ids, "labels": ids})
print(program.memory.host_bytes["masters"], max(seen) - seen[0])
"""


def test_peak_is_the_masters_and_one_shard(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 32_000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="17MB")
    largest = max(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert largest < 20 << 20
    masters, grown = map(int, output_of(MEASURE, tmp_path).split())
    assert masters >= 4 * sum(p.numel() for p in model.parameters())
    # and a chunk of FP32 values, second halves of huge pages, what the page cache holds: less than a shard
    assert grown <= masters + largest + 4 * 32_000 * 256 + (14 << 20)
