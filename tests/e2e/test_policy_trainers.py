"""Reinforcement learning and reward models by TRL over a program, beside TRL's own: every logged number."""

from __future__ import annotations

import importlib
import json
import os
import string
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import megacompile
from megacompile.api.device_weights import DeviceWeights
from megacompile.api.merged_weights import MergedWeights
from tests.support import images
from tests.support.examples import load_example
from tests.support.models import build
from tests.support.text import sentences, tokenizer

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # each trainer would say that it was made
trl = pytest.importorskip("trl", reason="trl is missing: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is missing: pip install datasets")
ours = pytest.importorskip("megacompile.integrations.trl")

pytestmark = pytest.mark.filterwarnings("ignore:Compiling another program")
CLOCK = ("runtime", "per_second", "step_time")
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-6,  # else one sign of a gradient near zero moves a weight
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
}


def early_letters(completions: list[str], **_: Any) -> list[float]:
    """The share of letters before n: another number for almost each of the completions."""
    return [sum("a" <= letter < "n" for letter in text) / max(len(text), 1) for text in completions]


def adapters(**given: Any) -> Any:
    """LoRA that moves the model far within few steps."""
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    settings = {"r": 4, "lora_alpha": 64, "target_modules": ["o_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**settings | given)


def lora(model: Any = None, **given: Any) -> Any:
    settings = adapters(**given)
    model = build("llama", layers=1) if model is None else model
    torch.manual_seed(3)
    return importlib.import_module("peft").get_peft_model(model, settings)


def saved(folder: Path) -> Any:
    """A model that TRL can read once more, as its reference."""
    build("llama", layers=1).save_pretrained(folder / "start")
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)


class Written:
    """Completions that were written before: of 3 to 8 tokens, others at each call, some without an end;
    after the first call as long as ``later`` says."""

    def __init__(self, eos: int, later: int = 0) -> None:
        self._eos, self._random = eos, torch.Generator().manual_seed(0)
        self._later, self._calls = later, 0

    def __call__(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        lengths = torch.randint(3, 8, (len(prompt_ids),), generator=self._random)
        if self._later and self._calls:
            lengths.fill_(self._later - 1)
        self._calls += 1
        made = [torch.randint(5, 60, (int(n),), generator=self._random).tolist() for n in lengths]
        return [[*ids, self._eos] if i % 3 else ids for i, ids in enumerate(made)]


def policy(
    kind: Any,
    folder: Path,
    *,
    samples: bool = False,
    model: Any = None,
    peft_config: Any = None,
    budget: str = "20MB",
    later: int = 0,
    **given: Any,
) -> Any:
    config = trl.RLOOConfig if issubclass(kind, trl.RLOOTrainer) else trl.GRPOConfig
    settings = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0} | SETTINGS | given
    prompts = sentences(8, 1)
    if not samples:
        prompts = [text[:5] for text in prompts]  # of one length, which few programs are for
    data = datasets.Dataset.from_dict({"prompt": prompts})
    trainer = kind(
        build("llama", layers=1) if model is None else model,
        early_letters,
        config(output_dir=str(folder), **settings),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
        peft_config=peft_config,
        **({"hbm_budget": budget} if kind.__module__.startswith("megacompile") else {}),
    )
    if not samples:
        written = Written(tokenizer().eos_token_id, later)
        with_logprobs = not isinstance(trainer, trl.RLOOTrainer)
        trainer._generate_single_turn = lambda *a: (written(*a), None) if with_logprobs else written(*a)
    return trainer


def preferences(kind: Any, folder: Path, **given: Any) -> Any:
    texts = {name: sentences(8, i) for i, name in enumerate(("prompt", "chosen", "rejected"))}
    data = datasets.Dataset.from_dict(texts)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    return kind(
        transformers.LlamaForSequenceClassification(config),
        args=trl.RewardConfig(output_dir=str(folder), **SETTINGS | {"eval_strategy": "epoch"} | given),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
        **({"hbm_budget": "20MB"} if kind is ours.RewardTrainer else {}),
    )


def labelled(kind: Any, folder: Path, model: Any = None, **given: Any) -> Any:
    texts = {name: sentences(8, i) for i, name in enumerate(("prompt", "completion"))}
    data = datasets.Dataset.from_dict(texts | {"label": [i % 2 == 0 for i in range(8)]})
    before = {"precompute_ref_log_probs": True, "max_length": 64}
    return kind(
        build("llama", layers=1) if model is None else model,
        args=trl.KTOConfig(output_dir=str(folder), **SETTINGS | before | given),
        train_dataset=data,
        processing_class=tokenizer(),
        **({"hbm_budget": "20MB"} if kind is ours.KTOTrainer else {}),
    )


def logs(of: Any) -> list[dict[str, float]]:
    return [
        {k: v for k, v in entry.items() if not any(c in k for c in CLOCK)} for entry in of.state.log_history
    ]


def compare(mine: Any, plain: Any, tolerance: float = 2e-6) -> None:
    for trainer in (mine, plain):
        transformers.set_seed(0)
        trainer.train()
    same_logs(mine, plain, tolerance)


def same_logs(mine: Any, plain: Any, tolerance: float = 2e-6) -> None:
    assert len(logs(mine)) == len(logs(plain)) > 1
    assert any(entry.get("grad_norm", 0) > 0 for entry in logs(plain))
    for entry, other in zip(logs(mine), logs(plain), strict=True):
        assert entry == pytest.approx(other, abs=tolerance, rel=1e-5, nan_ok=True)


@pytest.mark.slow_cases(r"(?!old)")
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"eval_strategy": "steps", "eval_steps": 2}, id="dapo, evaluated"),
        pytest.param({"temperature": 0.7, "loss_type": "sapo"}, id="temperature"),
        pytest.param({"loss_type": "grpo", "num_iterations": 2, "max_steps": 4}, id="old log-probabilities"),
        pytest.param(
            {"gradient_accumulation_steps": 4, "steps_per_generation": 2}, id="generates within a step"
        ),
        pytest.param({"entropy_coef": 0.05, "top_entropy_quantile": 0.5}, id="entropy bonus"),
        pytest.param(
            {
                "use_adaptive_entropy": True,
                "entropy_target": 9.0,
                "entropy_coef": 0.05,
                "entropy_coef_delta": 0.05,
            },
            id="adaptive entropy bonus",
        ),
        pytest.param({"importance_sampling_level": "sequence", "loss_type": "dr_grpo"}, id="sequence level"),
        pytest.param({"mask_truncated_completions": True, "loss_type": "bnpo"}, id="truncated"),
        pytest.param({"loss_type": "cispo", "num_iterations": 2, "max_steps": 4}, id="cispo, iterations"),
        pytest.param({"loss_type": "vespo", "num_iterations": 2, "max_steps": 4}, id="vespo, iterations"),
        pytest.param({"loss_type": "luspo", "importance_sampling_level": "sequence"}, id="luspo"),
    ],
)
def test_grpo_logs_what_trl_does(given: Mapping[str, Any], tmp_path: Path) -> None:
    compare(*(policy(kind, tmp_path, **given) for kind in (ours.GRPOTrainer, trl.GRPOTrainer)))


@pytest.mark.slow
def test_grpo_under_the_least_budget_logs_what_trl_does(tmp_path: Path) -> None:
    """With old log-probabilities, an entropy bonus, and evaluation."""
    given = {
        "num_iterations": 2,
        "max_steps": 4,
        "entropy_coef": 0.05,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    with pytest.raises(megacompile.BudgetError) as refused:
        policy(ours.GRPOTrainer, tmp_path, budget="1000B", **given).train()
    mine = policy(ours.GRPOTrainer, tmp_path, budget=f"{refused.value.least_bytes}B", **given)
    compare(mine, policy(trl.GRPOTrainer, tmp_path, **given))
    least = mine.program.budget_bytes
    assert 0.9 * least < mine.program.memory.device_peak_bytes <= least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("GRPOTrainer", "training on completions of 60 tokens", id="GRPO"),
        pytest.param("RLOOTrainer", "log-probabilities of completions of 60 tokens", id="RLOO"),
    ],
)
def test_completions_as_long_as_they_may_get_are_planned_first(kind: str, more: str, tmp_path: Path) -> None:
    """The first ones are of 8 tokens at most, all later ones of 60; 16 of these are evaluated at a time."""
    given: dict[str, Any] = {
        "max_completion_length": 60,
        "later": 60,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 16,
    }
    trainer = policy(getattr(ours, kind), tmp_path, budget="100kB", **given)
    with pytest.raises(
        megacompile.BudgetError, match=r"(training|evaluation).* suffices for all of"
    ) as refused:
        trainer.train()
    assert more in str(refused.value) and "evaluation" in str(refused.value)
    assert trainer.state.global_step == 0
    least = refused.value.least_bytes
    trainer = policy(getattr(ours, kind), tmp_path, budget=f"{least}B", **given)
    trainer.train()
    assert trainer.state.global_step == 3
    assert 0.9 * least < trainer.program.memory.device_peak_bytes <= least


@pytest.mark.slow
def test_adapters_log_what_trl_does(tmp_path: Path) -> None:
    compare(*(policy(kind, tmp_path, model=lora()) for kind in (ours.GRPOTrainer, trl.GRPOTrainer)))


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["a copy", "adapters off", "adapters as they were"])
@pytest.mark.parametrize("kind", ["GRPOTrainer", "RLOOTrainer"])
def test_references_log_what_trl_does(kind: str, reference: str, tmp_path: Path) -> None:
    """With ``beta``: beside a frozen copy of the model; new adapters, or those that the model came with."""
    mine, plain = (
        policy(
            getattr(of, kind),
            tmp_path,
            model=saved(tmp_path) if reference == "a copy" else lora() if "were" in reference else None,
            peft_config=adapters() if reference == "adapters off" else None,
            beta=0.1,
            temperature=0.8,
        )
        for of in (ours, trl)
    )
    compare(mine, plain)
    assert any(abs(entry.get("kl", 0)) > 1e-4 for entry in logs(mine))


FOLLOWS = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.7}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GRPOTrainer", "RLOOTrainer", "KTOTrainer"])
def test_a_reference_that_follows_the_policy_logs_what_trl_does(kind: str, tmp_path: Path) -> None:
    """Mixed by TRL's shares, at TRL's steps; so is what it then is."""
    make: Any = labelled if kind == "KTOTrainer" else policy
    before = {"precompute_ref_log_probs": False} if kind == "KTOTrainer" else {}
    mine, plain = (
        make(getattr(of, kind), tmp_path, model=saved(tmp_path), **FOLLOWS | before) for of in (ours, trl)
    )
    compare(mine, plain, 2e-5 if kind == "KTOTrainer" else 2e-6)  # its kl is of sums of hundreds
    mine.release()
    start = saved(tmp_path)
    for (name, value), expected in zip(
        mine.ref_model.named_parameters(), plain.ref_model.parameters(), strict=True
    ):
        torch.testing.assert_close(value, expected, rtol=0, atol=2e-5)
        assert not torch.allclose(value, start.get_parameter(name), rtol=0, atol=1e-3)


SAMPLED = {"samples": True, "learning_rate": 3e-2}


@pytest.mark.slow_cases(r"beside")
@pytest.mark.parametrize("given", [{}, FOLLOWS], ids=["alone", "beside a reference that follows"])
def test_a_training_goes_on_as_if_undisturbed(given: Mapping[str, Any], tmp_path: Path) -> None:
    """Also its first completions are of the weights that were saved, and its reference is as it was, where
    TRL's would be as at the start."""
    saving = {"save_strategy": "steps", "save_steps": 2, **SAMPLED, **given}
    whole, resumed = (
        policy(ours.GRPOTrainer, tmp_path, model=saved(tmp_path) if given else None, **saving)
        for _ in range(2)
    )
    transformers.set_seed(0)
    whole.train()
    for _ in range(2):  # once more by the same trainer, which has other weights by then
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        # the last has the mean of the steps made here; how far rows are padded depends on earlier ones
        for entry, other in zip(logs(resumed)[:-1], logs(whole)[:-1], strict=True):
            assert entry == pytest.approx(other, rel=1e-6, abs=1e-8)


def test_a_checkpoint_without_its_reference_is_refused(tmp_path: Path) -> None:
    policy(ours.GRPOTrainer, tmp_path, save_strategy="steps", max_steps=1, save_steps=1).train()
    trainer = policy(ours.GRPOTrainer, tmp_path, model=saved(tmp_path), **FOLLOWS)
    with pytest.raises(megacompile.MegacompileError, match="checkpoint-1/reference holds no checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def test_what_cannot_follow_is_refused_by_name(tmp_path: Path) -> None:
    """Some by TRL itself."""
    for refused, given in (
        ("the reference model is not used", {"beta": 0.0}),
        ("sync_ref_model=True` while using a PEFT model", {"model": lora()}),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=refused):
            policy(ours.GRPOTrainer, tmp_path, **FOLLOWS | given)


def test_the_policy_and_its_reference_take_turns_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = policy(ours.GRPOTrainer, tmp_path, model=saved(tmp_path), beta=0.1)
    turns: list[tuple[int, int]] = []
    predict = megacompile.Program.predict

    def on_device(program: Any) -> int:
        runtime = program._session.runtime
        return 0 if runtime is None else runtime.device._slab.nbytes + len(runtime.resident.weights)

    def watched(program: Any, *args: Any, **kwargs: Any) -> Any:
        result = predict(program, *args, **kwargs)
        if program is not trainer.program:
            turns.append((on_device(program), on_device(trainer.program)))
        return result

    monkeypatch.setattr(megacompile.Program, "predict", watched)
    trainer.train()
    assert len(turns) > 2 and all(own > 0 and other == 0 for own, other in turns)
    reference = trainer.ref_model
    trainer.release()
    loaded = saved(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in reference.state_dict().items())


def test_rloo_logs_what_trl_does(tmp_path: Path) -> None:
    compare(*(policy(kind, tmp_path, temperature=0.8) for kind in (ours.RLOOTrainer, trl.RLOOTrainer)))


def test_reward_model_logs_what_trl_does(tmp_path: Path) -> None:
    given = {"train_sampling_strategy": "sequential"}  # the same lengths in each epoch
    compare(*(preferences(kind, tmp_path, **given) for kind in (ours.RewardTrainer, trl.RewardTrainer)))


@pytest.mark.slow
def test_kto_logs_what_trl_does(tmp_path: Path) -> None:
    mine, plain = (labelled(kind, tmp_path) for kind in (ours.KTOTrainer, trl.KTOTrainer))
    compare(mine, plain, 1e-5)  # its kl is of sums of hundreds


def test_completions_are_sampled_as_trl_does(tmp_path: Path) -> None:
    """By the model's own ``generate``, from values that the program lends it."""
    compare(*(policy(kind, tmp_path, **SAMPLED) for kind in (ours.GRPOTrainer, trl.GRPOTrainer)))


@pytest.mark.slow
def test_the_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a reward below 0.1 to one above 0.4."""
    monkeypatch.chdir(tmp_path)
    grpo = load_example("grpo")
    monkeypatch.setattr(grpo, "UPDATES", 10)
    grpo.main()
    rewards = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if "█" in line]
    assert rewards[0] < 0.1 and rewards[-1] > 0.4


@pytest.mark.slow
def test_trls_own_script_runs_with_one_import_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``trl/scripts/grpo.py`` as it is installed, from a command line; its logs are those of it as it is."""
    source = (Path(trl.__file__).parent / "scripts" / "grpo.py").read_text()
    names = "get_dataset, get_peft_config, get_quantization_config"
    before = f"    from trl import GRPOTrainer, {names}\n"
    after = f"    from megacompile.integrations.trl import GRPOTrainer\n    from trl import {names}\n"
    assert source.count(before) == 1
    saved(tmp_path)
    tokenizer().save_pretrained(tmp_path / "start")
    rows = "\n".join(json.dumps({"prompt": text}) for text in sentences(8, 1))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(rows)
    given = SETTINGS | {
        "model_name_or_path": tmp_path / "start",
        "dtype": "float32",
        "dataset_name": tmp_path / "data",
        "reward_funcs": f"{__name__}.early_letters",
        "num_generations": 4,
        "max_completion_length": 8,
        "beta": 0.1,
        "report_to": "none",
    }
    finished: list[Any] = []
    monkeypatch.setattr(transformers.Trainer, "save_model", lambda trainer, _: finished.append(trainer))
    for text, folder in ((source.replace(before, after), "mine"), (source, "plain")):
        module = types.ModuleType("script")
        monkeypatch.setitem(sys.modules, "script", module)  # where its dataclass looks
        script = vars(module)
        exec(compile(text, "grpo.py", "exec"), script)
        settings = given | {"output_dir": tmp_path / folder}
        arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        script["main"](*script["make_parser"]().parse_args_and_config(arguments))
    same_logs(*finished)


def looking(kind: Any, folder: Path, make: Callable[[], tuple[Any, Any]]) -> Any:
    """A policy that reads an image beside each prompt."""
    model, processor = make()
    paths = [str(path) for path in images.files(folder / "images", 4)]
    prompts = [[{"role": "user", "content": text[:8]}] for text in sentences(4, 1)]
    data = datasets.Dataset.from_dict({"prompt": prompts, "image": paths})
    return kind(
        model,
        early_letters_of_chats,
        trl.GRPOConfig(
            output_dir=str(folder),
            num_generations=4,
            max_completion_length=6,
            **SETTINGS | {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2},
        ),
        train_dataset=data.cast_column("image", datasets.Image()),
        eval_dataset=data.cast_column("image", datasets.Image()).select(range(1)),
        processing_class=processor,
        **({"hbm_budget": "20MB"} if kind is ours.GRPOTrainer else {}),
    )


def early_letters_of_chats(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    return early_letters(["".join(said.get("content") or "" for said in chat) for chat in completions])


@pytest.mark.slow
@pytest.mark.parametrize("make", [images.gemma3, images.qwen3_vl])
def test_policies_that_read_images_log_what_trl_does(make: Any, tmp_path: Path) -> None:
    """Completions are sampled; with evaluation."""
    compare(*(looking(kind, tmp_path, make) for kind in (ours.GRPOTrainer, trl.GRPOTrainer)))


def doubled(text: str) -> str:
    """Say a text twice.

    Args:
        text: What is said.
    """
    return text + text


def calling(kind: Any, folder: Path) -> Any:
    """A policy of which every second completion calls a tool: these are written, what follows is sampled."""
    characters = tokenizer(string.printable)
    characters.backend_tokenizer.decoder = tokenizers.decoders.Fuse()  # no spaces between characters
    characters.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    characters.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=4096,
    )  # fmt: skip
    trainer = kind(
        transformers.LlamaForCausalLM(config),
        early_letters_of_chats,
        trl.GRPOConfig(
            output_dir=str(folder),
            num_generations=4,
            max_completion_length=200,
            max_tool_calling_iterations=1,
            **SETTINGS | {"max_steps": 2},
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": "say"}]] * 4}),
        processing_class=characters,
        tools=[doubled],
        **({"hbm_budget": "100MB"} if kind is ours.GRPOTrainer else {}),
    )
    call = '<tool_call>\n{"name": "doubled", "arguments": {"text": "ab"}}\n</tool_call><|im_end|>'
    written = [characters(text)["input_ids"] for text in ("eel<|im_end|>", call)]
    generate, turns = trainer._generate_single_turn, list[int]()

    def turn(prompts: Any, images: Any, fields: Any, num_generations: int, **given: Any) -> Any:
        turns.append(num_generations)
        if num_generations == 1:  # after a call
            return generate(prompts, images, fields, num_generations, **given)
        return [[*written[i % 2]] for i in range(len(prompts))], None

    trainer._generate_single_turn, trainer.turns = turn, turns
    return trainer


@pytest.mark.slow
def test_a_policy_that_calls_tools_logs_what_trl_does(tmp_path: Path) -> None:
    """Also what it samples once a tool has answered."""
    mine, plain = (calling(kind, tmp_path) for kind in (ours.GRPOTrainer, trl.GRPOTrainer))
    compare(mine, plain)
    assert mine.turns == plain.turns == [4, 1] * 2
    assert all(entry["tools/call_frequency"] == 0.5 for entry in logs(mine) if "reward" in entry)


class Server:
    """Stands where TRL's client of a vLLM server does, which needs vLLM, and a GPU for its broadcast.

    It keeps what it is sent, and answers by :class:`Written`.
    """

    def __init__(self, **_: Any) -> None:
        self.sent: list[dict[str, torch.Tensor]] = []
        self._written = Written(tokenizer().eos_token_id)

    def init_communicator(self, device: Any) -> None: ...

    def get_server_info(self) -> Any:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: Any, named: Any) -> None:
        """Take one after the other, as they were announced."""
        self.sent.append({})
        for (name, dtype, shape), (sent, value) in zip(metadata, named, strict=True):
            assert (name, dtype, shape) == (sent, str(value.dtype).removeprefix("torch."), list(value.shape))
            self.sent[-1][name] = value.to("cpu", copy=True)
            del value

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        ids = self._written([prompt for prompt in prompts for _ in range(n)])
        logprobs = [[[-4.0 - 0.1 * i] for i in range(len(row))] for row in ids]
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": logprobs}


def served(kind: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Any:
    generation = importlib.import_module("trl.generation.vllm_generation")
    monkeypatch.setattr(generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(generation, "VLLMClient", Server)
    settings = {"use_vllm": True, "vllm_mode": "server", "samples": True}
    return policy(kind, folder, **settings | given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GRPOTrainer", "RLOOTrainer"])
def test_a_server_is_handed_the_weights_one_by_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs and all weights that come are those of plain TRL; the device never has more than two of them."""
    mine, plain = (served(getattr(of, kind), tmp_path, monkeypatch) for of in (ours, trl))
    peaks = watched_peaks(monkeypatch, DeviceWeights)
    compare(mine, plain)
    largest = max(p.numel() * 4 for p in plain.model.parameters())
    assert 0 < max(peaks) <= 2 * largest
    same_sent(mine, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="LoRA"),
        pytest.param({"use_rslora": True, "use_dora": True}, id="DoRA"),
        pytest.param(
            {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "bias": "all"}, id="bias"
        ),
        pytest.param({"modules_to_save": ["lm_head"], "target_modules": ["embed_tokens"]}, id="modules"),
    ],
)
def test_a_server_is_handed_weights_with_their_adapters(
    settings: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged one by one: as plain TRL, which merges all of them, sends and logs."""
    models = (lora(build("gpt2") if "bias" in settings else None, **settings) for _ in range(2))
    mine, plain = (
        served(kind, tmp_path, monkeypatch, model=model)
        for kind, model in zip((ours.GRPOTrainer, trl.GRPOTrainer), models, strict=True)
    )
    peaks = watched_peaks(monkeypatch, MergedWeights)
    compare(mine, plain)
    sizes = [p.numel() * 4 for p in plain.model.parameters()]
    assert 0 < max(peaks) <= 4 * max(sizes)
    same_sent(mine, plain)
    first, last = (plain.vllm_generation.vllm_client.sent[i] for i in (0, -1))
    changed = [name for name, value in last.items() if not torch.allclose(value, first[name], atol=1e-3)]
    assert len(changed) >= 2


def watched_peaks(monkeypatch: pytest.MonkeyPatch, kind: type[DeviceWeights]) -> list[int]:
    """The bytes that the device has at each weight that is handed over."""
    peaks = list[int]()
    each = kind.each

    def watched(weights: DeviceWeights) -> Any:
        for name, value in each(weights):
            device: Any = weights.device
            peaks.append(device._whole.peak)
            yield name, value
            del value

    monkeypatch.setattr(kind, "each", watched)
    return peaks


def same_sent(mine: Any, plain: Any) -> None:
    """Servers were sent the same weights at the same times."""
    servers = [trainer.vllm_generation.vllm_client for trainer in (mine, plain)]
    assert len(servers[0].sent) == len(servers[1].sent) > 2
    for sent, expected in zip(*(server.sent for server in servers), strict=True):
        assert list(sent) == list(expected)
        for name, value in sent.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_what_a_server_cannot_be_handed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, before anything is trained."""
    peft = importlib.import_module("peft")
    tied = build("llama", layers=1)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    for refused, model in (
        (
            "embed_tokens.base_layer.weight is the weight of another layer",
            lora(tied, target_modules=["embed_tokens"]),
        ),
        ("TrainableTokensWrapper at .*embed_tokens cannot be merged", lora(trainable_token_indices=[3])),
        ("PROMPT_TUNING learns what is put before", peft.get_peft_model(build("llama", layers=1), tuning)),
    ):
        with pytest.raises(megacompile.MegacompileError, match=refused):
            served(ours.GRPOTrainer, tmp_path, monkeypatch, model=model)
    with pytest.raises(megacompile.MegacompileError, match="vllm_mode=colocate yet: set it to server"):
        served(ours.GRPOTrainer, tmp_path, monkeypatch, vllm_mode="colocate")


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    refused = "GRPOTrainer does not support use_transformers_continuous_batching=True"
    with pytest.raises(megacompile.MegacompileError, match=refused):
        policy(ours.GRPOTrainer, tmp_path, use_transformers_continuous_batching=True)
