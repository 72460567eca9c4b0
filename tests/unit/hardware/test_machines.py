"""Machines and models by name: figures against hand calculations, files against every kind of fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from megacompile.cli.models import Model, load_model
from megacompile.cli.presets import PRESETS
from megacompile.errors import MegacompileError
from megacompile.hardware.catalog import (
    PROFILE_VERSION,
    PROFILES,
    MachineProfile,
    load_machine,
    override,
    parse_profile,
    profile_json,
)
from megacompile.hardware.machine import Machine, this_cpu

MACHINE = Machine("bench", 1e14, 1e12, 2e10, 2e10, 1e11, 1e-5, 1e-5)


def test_rates_are_peaks_times_the_efficiencies_that_their_sources_state() -> None:
    card = load_machine("rtx-4090")
    assert card.machine.flops == pytest.approx(165.2e12 * 0.8)
    assert card.peak("bf16") == pytest.approx(165.2e12)
    assert card.machine.memory_bandwidth == pytest.approx(1008e9 * 0.9)
    assert card.machine.h2d_bandwidth == pytest.approx(16 * 16e9 * 128 / 130 / 8 * 0.8, rel=1e-3)
    assert card.machine.host_bandwidth == pytest.approx(5600e6 * 8 * 2 * 0.75)
    assert card.rates("fp32").flops == pytest.approx(82.6e12 * 0.8)


@pytest.mark.parametrize("name", PROFILES)
def test_every_built_in_machine_is_whole_and_names_its_sources(name: str) -> None:
    profile = PROFILES[name]
    assert profile.device_bytes and 24e9 <= profile.device_bytes <= 200e9
    assert profile.machine.flops < profile.peak("bf16")
    assert profile.rates("fp32").flops < profile.rates("bf16").flops
    for figure in ("device memory", "bf16 rate", "fp32 rate", "device bandwidth"):
        assert "NVIDIA" in profile.sources[figure]
    assert {"link", "host bandwidth"} <= set(profile.sources)
    assert parse_profile(profile_json(profile)) == profile


def test_a_machine_file_is_read_back_exactly_and_may_hold_rates_alone(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(profile_json(MachineProfile(MACHINE, "mine", device_bytes=16 * 10**9)))
    assert load_machine(str(path)).machine == MACHINE
    fields = json.loads(profile_json(MachineProfile(MACHINE)))
    assert parse_profile(json.dumps({k: fields[k] for k in ("version", "machine")})).machine == MACHINE
    later = {
        "adam_bandwidth",
        "adam_beside_h2d",
        "adam_beside_d2h",
        "adam_threads",
    }  # than the first profiles
    older = {k: v for k, v in fields["machine"].items() if k not in later}
    known = parse_profile(json.dumps(fields | {"machine": older})).machine
    assert known == MACHINE and known.update_bandwidth == MACHINE.host_bandwidth


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"machine": {"flops": 0}}, "flops"),
        ({"machine": {"flops": 1e308}}, "flops"),
        ({"machine": {"memory_bandwidth": 1e-300}}, "memory_bandwidth"),
        ({"machine": {"flops": float("nan")}}, "NaN"),
        ({"machine": {"flops": float("inf")}}, "Infinity"),
        ({"machine": {"flops": "1e15"}}, "flops"),
        ({"machine": {"flops": True}}, "flops"),
        ({"machine": {"flops": None}}, "flops"),
        ({"machine": {"name": 'a"\nimport os'}}, "name"),
        ({"machine": {"host_bandwith": 1e11}}, "host_bandwidth"),
        ({"device_bytes": 1.5}, "device_bytes"),
        ({"device_bytes": -1}, "device_bytes"),
        ({"sources": ["a"]}, "sources"),
        ({"title": 3}, "title"),
        ({"version": 99}, "version"),
        ({"machine": 3}, "machine"),
    ],
)
def test_a_fault_in_a_machine_file_is_named(change: dict[str, object], named: str) -> None:
    fields = json.loads(profile_json(MachineProfile(MACHINE)))
    for key, value in change.items():
        fields[key] = fields[key] | value if isinstance(value, dict) else value
    with pytest.raises(MegacompileError, match=named):
        parse_profile(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"version": 1}', "[" * 100_000])
def test_what_is_no_machine_file_is_refused(text: str) -> None:
    with pytest.raises(MegacompileError):
        parse_profile(text)


def test_a_missing_rate_is_named() -> None:
    with pytest.raises(MegacompileError, match="lacks flops"):
        parse_profile(f'{{"version": {PROFILE_VERSION}, "machine": {{"name": "x"}}}}')


@pytest.mark.parametrize(
    ("given", "meant"), [("H100 PCIe", "h100-pcie"), ("rtx_4090", "rtx-4090"), ("4090", "rtx-4090")]
)
def test_names_are_forgiving(given: str, meant: str) -> None:
    assert load_machine(given).name == meant


@pytest.mark.parametrize(
    ("given", "near"), [("h10-pcie", "h100-pcie"), ("h100", "h100-sxm"), ("rtx4090", "4090")]
)
def test_near_machines_are_suggested(given: str, near: str) -> None:
    with pytest.raises(MegacompileError, match=near):
        load_machine(given)


def test_overrides_replace_rates_and_say_so() -> None:
    mine = override(load_machine("a6000"), host_bandwidth=300e9, link_bandwidth=12e9, price=0.5)
    assert (mine.machine.host_bandwidth, mine.machine.h2d_bandwidth) == (300e9, 12e9)
    assert mine.machine.d2h_bandwidth == 12e9
    assert mine.price_per_hour == 0.5
    assert "as given" in mine.sources["host bandwidth"] and "as given" in mine.sources["link"]
    updates = replace(mine.machine, adam_bandwidth=1e9, adam_beside_h2d=2.0, adam_beside_d2h=2.0)
    assert override(replace(mine, machine=updates), host_bandwidth=300e9).machine == mine.machine


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    model = load_model(name)
    assert model.parameters == pytest.approx(PRESETS[name].billions * 1e9, rel=0.01)
    # published active counts differ in whether they hold the embedding
    tables = 2 * model.text_config.vocab_size * model.text_config.hidden_size
    active = PRESETS[name].active * 1e9
    assert model.active_parameters - tables <= active * 1.01
    assert model.active_parameters >= active * 0.99
    assert next(model.module.parameters()).is_meta


def test_model_flops_are_six_per_matmul_parameter_and_attention_once() -> None:
    seq, layers, hidden = 4096, 32, 4096
    per_layer = hidden * (2 * 4096 + 2 * 1024) + 3 * hidden * 14336  # q, o, k, v; gate, up, down
    norms = hidden * (2 * layers + 1)
    attention = layers * 2 * 2 * (seq * (seq + 1) / 2) * hidden
    expected = 6 * (layers * per_layer + norms + 128256 * hidden) * seq + 3 * attention
    assert load_model("llama-3.1-8b").step_flops(1, seq) == pytest.approx(expected)


def test_windows_and_tied_tables_count_once() -> None:
    model = load_model("gemma3-1b")
    assert model.matmul_parameters == model.parameters  # tied: the table is the head
    full, local = 4, 22  # every sixth layer sees everything
    pairs = full * 4096 * 4097 / 2 + local * (512 * 513 / 2 + (4096 - 512) * 512)
    assert model.attention_flops(4096) == pytest.approx(2 * pairs * 4 * (256 + 256))


def test_layers_of_unlike_heads_count_their_own() -> None:
    model = load_model("gemma4-31b")
    full, local = 10 * 4096 * 4097 / 2 * 512, 50 * (1024 * 1025 / 2 + (4096 - 1024) * 1024) * 256
    assert model.attention_flops(4096) == pytest.approx(2 * 32 * 2 * (full + local))


def test_layers_that_do_not_attend_count_no_attention(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 64, "pad_token_id": 0}
    mamba2 = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "time_step_limit": [0.0, float("inf")]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    bamba = heads | {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]}
    found = []
    for kind, more in (("mamba2", mamba2), ("bamba", bamba)):
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(small | more | {"model_type": kind}))
        found.append(load_model(str(path)).attention_flops(10))
        AutoConfig.for_model(kind, **small, **more).save_pretrained(tmp_path)  # which has its own infinity
        found.append(load_model(str(tmp_path / "config.json")).attention_flops(10))
    assert found == [0, 0] + 2 * [2 * 55 * 2 * (16 + 16)]


def test_experts_count_as_far_as_tokens_reach_them() -> None:
    model = load_model("mixtral-8x7b")
    experts = 32 * 8 * 3 * 4096 * 14336
    assert model.active_parameters == model.parameters - experts * 6 // 8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": "llama", "hidden_size": NaN}', "NaN"),
        ('{"hidden_size": 64}', "model_type"),
        ('{"model_type": "lama"}', "did you mean"),
        ('{"model_type": "vit"}', "causal"),
        ("{", "JSON"),
        ("[]", "model_type"),
        ('{"model_type": "llama", "hidden_size": "large"}', "llama"),
    ],
)
def test_a_config_that_is_no_causal_model_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(MegacompileError, match=reason):
        load_model(str(path))


def test_near_models_are_suggested_and_missing_files_named(tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match=r"qwen2\.5-7b"):
        load_model("qwen2.5-7")
    with pytest.raises(MegacompileError, match="cannot be read"):
        load_model(str(tmp_path / "config.json"))


def test_a_config_folder_works(tmp_path: Path) -> None:
    fields = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = load_model(str(tmp_path))
    assert isinstance(model, Model) and model.parameters > 0


@pytest.mark.slow
def test_measuring_a_cpu_leaves_the_draws_of_the_user_alone() -> None:
    this_cpu.cache_clear()
    before = torch.get_rng_state()
    this_cpu(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
