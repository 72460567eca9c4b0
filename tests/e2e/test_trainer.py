"""The Trainer beside transformers' own: the same logs, the same weights, checkpoints that both can use."""

from __future__ import annotations

import dataclasses
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import megacompile
from megacompile.api.decisions import Decisions
from megacompile.api.pipeline import Compiler
from megacompile.blocks.cpu_products import float32_products
from megacompile.capture.batch import Batch
from megacompile.integrations import training_arguments
from megacompile.integrations.training_arguments import MegacompileConfig, compile_options
from megacompile.schedule.plan import Mode
from megacompile.state.several_optimizers import Several
from tests.support.models import build

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
Trainer = pytest.importorskip("megacompile.integrations.transformers").Trainer
fewer_rows = pytest.importorskip("megacompile.integrations.transformers").fewer_rows

_BY_UPSTREAM = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon
gradient_accumulation_steps label_smoothing_factor tf32 use_cache neftune_noise_alpha
logging_strategy logging_steps logging_first_step log_on_each_node include_num_input_tokens_seen
logging_nan_inf_filter
log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics save_strategy
save_steps save_only_model save_on_each_node save_total_limit push_to_hub
hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
restore_callback_states_from_checkpoint full_determinism data_seed accelerator_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
remove_unused_columns label_names train_sampling_strategy length_column_name skip_memory_metrics
do_train do_eval do_predict resume_from_checkpoint local_rank
"""
CLOCK = {"runtime", "samples_per_second", "steps_per_second", "model_preparation_time"}


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Token sequences of 12, some with labels that are ignored at the start."""
    ids = torch.randint(3, 60, (count, 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[: count // 4, :4] = -100
    return [{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)]


def trainer(kind: Any, folder: Path, make: Callable[[], nn.Module] | None = None, **given: Any) -> Any:
    """Upstream's trainer or ours over the same model, data and arguments."""
    for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "callbacks"):
        given.setdefault("of_trainer", {})[name] = given.pop(name, None)
    of_trainer = given.pop("of_trainer")
    if kind is Trainer:
        of_trainer = {"hbm_budget": "20MB"} | of_trainer
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": [],
        "use_cpu": True,
    }
    return kind(
        model=(make or (lambda: build("llama", layers=1)))(),
        args=transformers.TrainingArguments(**settings | given),
        train_dataset=rows(22, 1),
        eval_dataset=rows(8, 2),
        **of_trainer,
    )


def logs(of: Any) -> list[dict[str, float]]:
    """What was logged, but for what the clock says."""
    return [
        {k: v for k, v in entry.items() if not any(k.endswith(c) for c in CLOCK)}
        for entry in of.state.log_history
    ]


def assert_same_logs(ours: Any, plain: Any, tolerance: float = 1e-6) -> None:
    assert len(logs(ours)) == len(logs(plain)) > 0
    for mine, theirs in zip(logs(ours), logs(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance)


def mean_of_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, targets = outputs[0][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def lora(**given: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    torch.manual_seed(3)
    model: nn.Module = peft.get_peft_model(
        build("llama", layers=1),
        peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **given),
    )
    return model


def adapted(kind: str, **given: Any) -> nn.Module:
    """By another adapter of PEFT; LoKr draws whether it is dropped, also where it never is."""
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    torch.manual_seed(3)
    config = getattr(peft, f"{kind}Config")(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **given)
    model: nn.Module = peft.get_peft_model(build("llama", layers=1), config)
    return model


def prompts(kind: str, **given: Any) -> nn.Module:
    """A model that learns a prompt alone."""
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    torch.manual_seed(3)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4, **given)
    model: nn.Module = peft.get_peft_model(build("llama", layers=1), config)
    return model


def lora_on_experts() -> nn.Module:
    """GPT-OSS, whose experts PEFT parametrizes anew in each forward, with losses of its router."""
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = transformers.GptOssConfig(**sizes, **heads, **experts, pad_token_id=0)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model: nn.Module = peft.get_peft_model(
        transformers.GptOssForCausalLM(config),
        peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, task_type="CAUSAL_LM"),
    )
    return model


@pytest.mark.slow_cases(r"LoHa|(label|compute|no|LoRA|LoKr|experts)")
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="accumulation, clipping, cosine"),
        pytest.param({"label_smoothing_factor": 0.1, "max_steps": 3}, id="label smoothing"),
        pytest.param({"compute_loss_func": mean_of_tokens, "max_steps": 3}, id="compute_loss_func"),
        pytest.param(
            {"max_grad_norm": 0, "gradient_accumulation_steps": 2, "max_steps": 3}, id="no clipping"
        ),
        pytest.param({"make": lora, "max_steps": 3}, id="LoRA"),
        pytest.param({"make": lambda: adapted("LoKr"), "max_steps": 3}, id="LoKr"),
        pytest.param({"make": lambda: adapted("LoHa"), "max_steps": 3}, id="LoHa"),
        pytest.param({"make": lora_on_experts, "max_steps": 3}, id="experts' LoRA"),
    ],
)
def test_logs_what_plain_transformers_does(given: Mapping[str, Any], tmp_path: Path) -> None:
    """Loss, norm, learning rate, evaluation: each entry to 1e-6; weights as after plain training."""
    ours, plain = (trainer(kind, tmp_path, **given) for kind in (Trainer, transformers.Trainer))
    for one in (ours, plain):
        one.train()
    assert_same_logs(ours, plain)
    values = ours.program.state_dict()
    for name, value in plain.model.named_parameters():
        torch.testing.assert_close(values[name], value, rtol=0, atol=2e-5)


def test_resumes_bitwise_from_what_plain_transformers_loads(tmp_path: Path) -> None:
    whole = trainer(Trainer, tmp_path, save_strategy="steps", save_steps=3)
    whole.train()
    values = whole.program.state_dict()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    assert all(torch.equal(value, values[name]) for name, value in again.named_parameters())
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()  # as a writer that was killed leaves it
    resumed = trainer(Trainer, tmp_path, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert logs(resumed)[:-1] == logs(whole)[:-1]  # the last has the mean of the steps made here
    assert all(torch.equal(value, values[name]) for name, value in resumed.program.state_dict().items())
    again = trainer(Trainer, tmp_path, save_strategy="no", max_steps=3)
    again.train(resume_from_checkpoint=True)  # with no step left to make
    checkpoint = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3").state_dict()
    assert all(torch.equal(v, checkpoint[name]) for name, v in again.program.state_dict().items())


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "eval_strategy": "no"}
    plain, ours = (
        trainer(kind, tmp_path / kind.__module__, **settings) for kind in (transformers.Trainer, Trainer)
    )
    for one in (plain, ours):
        one.train()
    theirs, mine = (Path(one.args.output_dir) / "checkpoint-1" for one in (plain, ours))
    with pytest.raises(megacompile.MegacompileError, match="it has no program"):
        ours.train(resume_from_checkpoint=str(theirs))
    with pytest.raises(KeyError, match="param_groups"):  # rather than fresh moments, and no word of it
        plain.train(resume_from_checkpoint=str(mine))


@pytest.mark.slow_cases(r"\{'(trainable|bias)")
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"modules_to_save": ["norm", "lm_head"]},
        {"trainable_token_indices": [3, 5]},
        {"bias": "lora_only"},
    ],
    ids=str,
)
def test_adapters_are_saved_as_peft_saves_them(given: dict[str, Any], tmp_path: Path) -> None:
    """In a checkpoint and at the end: each file like plain transformers', and to be loaded by PEFT."""
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    settings = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 1}
    found = []
    for kind in (Trainer, transformers.Trainer):
        found.append(trainer(kind, tmp_path / kind.__module__, make=lambda: lora(**given), **settings))
        found[-1].train()
        found[-1].save_model()
    folders = [Path(one.args.output_dir) for one in found]
    for part in ("checkpoint-1", "."):
        mine, theirs = (load_file(folder / part / "adapter_model.safetensors") for folder in folders)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)
    loaded = peft.PeftModel.from_pretrained(build("llama", layers=1), folders[0]).state_dict()
    trained = found[0].program.state_dict(trained=True)
    assert trained and all(torch.equal(value, loaded[name]) for name, value in trained.items())


@pytest.mark.slow_cases(r"Prefix|PromptEncoder")
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("PromptTuningConfig", {}),
        ("PromptEncoderConfig", {"encoder_hidden_size": 8}),
        ("PrefixTuningConfig", {}),
        ("PrefixTuningConfig", {"prefix_projection": True, "encoder_hidden_size": 8}),
    ],
)
def test_prompts_are_learned_and_saved_as_by_peft(kind: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Each log to 1e-6; the file holds what the prompt's encoder computes, as PEFT's does."""
    found = []
    for of in (Trainer, transformers.Trainer):
        folder = tmp_path / of.__module__
        found.append(trainer(of, folder, make=lambda: prompts(kind, **given), max_steps=3))
        found[-1].train()
        found[-1].save_model()
    assert_same_logs(*found)
    mine, theirs = (load_file(Path(one.args.output_dir) / "adapter_model.safetensors") for one in found)
    assert mine.keys() == theirs.keys() == {"prompt_embeddings"}
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_the_best_checkpoint_comes_back(tmp_path: Path) -> None:
    settings = {
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "num_train_epochs": 3,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "learning_rate": 1e-3,
    }
    found = []
    for kind in (Trainer, transformers.Trainer):
        callbacks = [transformers.EarlyStoppingCallback(1)]
        one = trainer(kind, tmp_path / kind.__module__, callbacks=callbacks, **settings)
        one.train()
        found.append(one)
    assert_same_logs(*found)
    ours, plain = found
    assert Path(ours.state.best_model_checkpoint).name == Path(plain.state.best_model_checkpoint).name
    assert ours.evaluate()["eval_loss"] == pytest.approx(ours.state.best_metric, rel=1e-6)


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions[:, :-1] == predicted.label_ids[:, 1:]).mean())}


def most_likely(logits: Any, labels: Tensor) -> Tensor:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def test_metrics_and_predictions(tmp_path: Path) -> None:
    """Before training, when the state is laid out from a batch for evaluation; and the logits themselves."""
    settings = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": most_likely, "max_steps": 2}
    ours, plain = (trainer(kind, tmp_path, **settings) for kind in (Trainer, transformers.Trainer))
    assert ours.evaluate()["eval_accuracy"] == plain.evaluate()["eval_accuracy"]
    for one in (ours, plain):
        one.train()
        one.preprocess_logits_for_metrics = one.compute_metrics = None
    assert_same_logs(ours, plain)
    mine, theirs = (one.predict(rows(4, 3)) for one in (ours, plain))
    torch.testing.assert_close(torch.from_numpy(mine.predictions), torch.from_numpy(theirs.predictions))
    assert mine.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-6)


@pytest.mark.slow
def test_predictions_of_many_lengths_need_few_programs(tmp_path: Path) -> None:
    whole = rows(6, 3)
    cut = [{k: v[:n] for k, v in row.items()} for row, n in zip(whole, (12, 7, 9, 5, 11, 10), strict=True)]
    settings = {"preprocess_logits_for_metrics": most_likely, "per_device_eval_batch_size": 1}
    ours, plain = (trainer(kind, tmp_path, **settings) for kind in (Trainer, transformers.Trainer))
    mine, theirs = (one.predict(cut) for one in (ours, plain))
    assert mine.predictions.tolist() == theirs.predictions.tolist()
    assert mine.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-6)
    assert len(ours.program._session.decided.programs) <= 1 + 3


@pytest.fixture
def without_tf32() -> Iterator[list[Any]]:
    backends: Any = torch.backends
    flags = [backends, backends.cudnn.conv, backends.cudnn.rnn]
    before = [flag.fp32_precision for flag in flags]
    for flag in flags:
        flag.fp32_precision = "ieee"
    yield flags
    for flag, precision in zip(flags, before, strict=True):
        flag.fp32_precision = precision


def test_trains_without_tf32(tmp_path: Path, without_tf32: list[Any]) -> None:
    """As ``tf32=False`` sets it on a GPU; torch.export alone cannot read the flags then."""
    trainer(Trainer, tmp_path, max_steps=1, eval_strategy="no").train()
    assert [flag.fp32_precision for flag in without_tf32] == ["ieee"] * 3


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(rows(5, 4))  # the last batch for evaluation has one row of four


def test_a_stream_is_evaluated_as_by_plain_transformers(tmp_path: Path) -> None:
    ours, plain = (trainer(kind, tmp_path) for kind in (Trainer, transformers.Trainer))
    losses = [one.evaluate(Stream())["eval_loss"] for one in (ours, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    """Where plain transformers goes on with weights that are NaN, and leaves the loss out of its logs."""

    def poisoned() -> nn.Module:
        model = build("llama", layers=1)
        model.model.embed_tokens.weight.data[20] = float("nan")  # type: ignore[union-attr, operator, index]
        return model

    ours = trainer(Trainer, tmp_path, make=poisoned, eval_strategy="no")
    with pytest.raises(FloatingPointError, match="was nan"):
        ours.train()


@pytest.mark.slow
def test_the_batch_that_fits_is_found_in_few_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the least bytes of those that do not; one row that does not is refused with what it needs."""
    tried: list[int] = []  # each once, however often it is planned
    plan = Compiler.plan

    def noting(self: Compiler, decided: Decisions, batch: Batch, mode: Mode) -> Any:
        if tried[-1:] != [len(batch.tensors[0])]:
            tried.append(len(batch.tensors[0]))
        return plan(self, decided, batch, mode)

    monkeypatch.setattr(Compiler, "plan", noting)
    settings = {"per_device_train_batch_size": 16, "max_steps": 1, "gradient_accumulation_steps": 1}
    given = {"auto_find_batch_size": True, "eval_strategy": "no", **settings}
    ours = trainer(Trainer, tmp_path, of_trainer={"hbm_budget": "0.45MB"}, **given)
    ours.train()
    assert tried == [16, 15, 14] and ours._train_batch_size == 14
    with pytest.raises(megacompile.BudgetError, match="too small: training needs") as refused:
        trainer(Trainer, tmp_path, of_trainer={"hbm_budget": "50kB"}, **given).train()
    assert tried[3] == 16 and tried[-1] == 1 and len(tried) <= 7
    given["per_device_train_batch_size"] = 1
    trainer(Trainer, tmp_path, of_trainer={"hbm_budget": f"{refused.value.least_bytes}B"}, **given).train()


def test_the_next_batch_size_is_read_from_what_others_need() -> None:
    assert fewer_rows([(16, 500)], 400) == 12  # as if rows alone took bytes
    assert fewer_rows([(16, 500), (12, 420)], 400) == 11  # 180 bytes for none, 20 for each
    assert fewer_rows([(64, 500), (51, 500)], 400) == 40  # of rows that there are not
    assert fewer_rows([(3, 500)], 499) == 2
    assert fewer_rows([(3, 500)], 10) == 1
    assert fewer_rows([(16, 0)], 400) == 8  # no room on the host


def of_lengths(*lengths: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.arange(n) % 60, "labels": torch.arange(n) % 60} for n in lengths]


def test_a_budget_without_room_for_evaluation_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """The least that is named is that of the longest row; it suffices, and 1 % less does not."""
    held_out = [row for n in (8, 64, 8) for row in of_lengths(*[n] * 32)]

    def within(budget: str) -> Any:
        ours = trainer(
            Trainer, tmp_path, of_trainer={"hbm_budget": budget}, per_device_train_batch_size=1, max_steps=2,
            gradient_accumulation_steps=1, per_device_eval_batch_size=32,
        )  # fmt: skip
        ours.train_dataset, ours.eval_dataset = of_lengths(*[8] * 4), held_out
        return ours

    small = within("400kB")
    with pytest.raises(megacompile.BudgetError, match="too small: evaluation needs") as caught:
        small.train()
    least = caught.value.least_bytes
    assert least is not None and small.state.global_step == 0 and small.program.memory.host_bytes == {}
    assert str(caught.value).count(str(least)) == 1 and "the least that suffices for all" in str(caught.value)
    less = within(f"{least * 99 // 100}B")
    with pytest.raises(megacompile.BudgetError, match=f"evaluation needs {least} bytes"):
        less.train()
    assert less.state.global_step == 0
    enough = within(f"{least}B")
    enough.train()
    assert [entry for entry in logs(enough) if "eval_loss" in entry]


@pytest.mark.slow
def test_planning_an_evaluation_changes_no_step(tmp_path: Path) -> None:
    """With dropout, and rows in an order that is drawn for each epoch."""
    losses = []
    for strategy in ("no", "steps"):
        ours = trainer(
            Trainer, tmp_path, make=lambda: build("gpt2-dropout"), eval_strategy=strategy, eval_steps=100
        )
        ours.train()
        losses.append([entry["loss"] for entry in logs(ours) if "loss" in entry])
    assert losses[0] == losses[1]


def test_a_training_that_begins_with_an_evaluation_is_planned_in_train_mode(tmp_path: Path) -> None:
    """A model that was loaded is in eval mode until its first step."""
    ours = trainer(
        Trainer,
        tmp_path,
        make=lambda: build("gpt2-dropout", layers=1).eval(),
        eval_on_start=True,
        gradient_accumulation_steps=1,
        max_steps=2,
    )
    ours.train()
    assert len(ours.program._session.decided.programs) == 2  # one trains, one evaluates
    ours.program.close()


def test_a_released_model_is_plain_again(tmp_path: Path) -> None:
    ours = trainer(Trainer, tmp_path, max_steps=2, eval_strategy="no")
    ours.train()
    values = ours.program.state_dict()
    model = ours.release()
    assert all(torch.equal(value, values[name]) for name, value in model.named_parameters())
    ours.train()  # from these values, with moments of its own
    assert ours.state.global_step == 2


def test_each_argument_is_honoured_mapped_or_refused() -> None:
    kinds = [
        set(_BY_UPSTREAM.split()),
        training_arguments.MAPPED,
        training_arguments.NO_EFFECT,
        training_arguments.REFUSED,
    ]
    fields = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    known = set().union(*kinds)
    assert sum(map(len, kinds)) == len(known)
    assert fields <= known
    if transformers.__version__.startswith("5.23."):  # earlier versions lack some
        assert fields == known
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "trainer.md").read_text()
    assert [name for kind in kinds[1:] for name in kind if f"`{name}`" not in page] == []


def test_arguments_that_this_version_lacks_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in (training_arguments.NO_EFFECT, training_arguments.REFUSED):
        monkeypatch.setitem(table, "of_another_version", "which has it")
    given = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    assert training_arguments.settle(given, MegacompileConfig()).device == "cpu"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optim": "lomo"}, "optim='lomo'"),
        ({"optim_args": "a=1"}, "optim_args"),
        ({"debug": "underflow_overflow"}, "debug"),
        ({"fp16_full_eval": True}, "fp16_full_eval"),
        ({"liger_kernel_config": {"rope": True}}, "liger_kernel_config"),
        (
            {
                "load_best_model_at_end": True,
                "save_only_model": True,
                "save_strategy": "steps",
                "save_steps": 2,
            },
            "needs whole checkpoints",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(megacompile.MegacompileError, match=words):
        trainer(Trainer, tmp_path, **given)


class Penalized:
    """A subclass's own loss: the model's, and a penalty on confident logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
        loss = loss + 1e-2 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_a_subclass_runs_outside_of_the_program(tmp_path: Path) -> None:
    """Upstream's ``compute_loss`` in it as it is; with metrics, over several micro-batches."""
    found = []
    for kind in (Trainer, transformers.Trainer):
        given = {"hbm_budget": "20MB"} if kind is Trainer else {}
        own = type("Own", (Penalized, kind), {})
        settings = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": most_likely}
        one = trainer(own, tmp_path, max_steps=3, of_trainer=given, **settings)
        one.train()
        found.append(one)
    assert_same_logs(*found)


class OwnOptimizer:
    """A subclass's own optimizer, as plain transformers documents it: without upstream's."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None:
            groups = [
                {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ]
            self.optimizer: Any = torch.optim.AdamW(groups, lr=3e-3)
        return self.optimizer


def muon_beside_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest, as both are used."""
    named = dict(model.named_parameters())
    inner = [n for n, p in named.items() if p.dim() == 2 and "layers" in n]
    return [
        torch.optim.Muon([named[n] for n in inner], lr=1e-2),
        torch.optim.AdamW([p for n, p in named.items() if n not in inner], lr=1e-3),
    ]


class Both(Several):
    """One optimizer for upstream, whose accelerate gives it other dicts for its param groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = [group for member in self.optimizers for group in member.param_groups]
        for group, given in zip(own, self.param_groups, strict=True):
            group["lr"] = given["lr"]
        with float32_products():  # as a program's Muon does, on a CPU without bf16 ones
            super().step()


@pytest.mark.parametrize(("norm", "tolerance"), [(1e9, 1e-6), (1.0, 1e-4)], ids=["unclipped", "clipped"])
def test_a_list_of_optimizers_trains_as_its_members_do_upstream(
    norm: float, tolerance: float, tmp_path: Path
) -> None:
    """Over micro-batches, by a schedule. Upstream takes one optimizer: one that has each of them step. Two
    norms that are summed in another order clip by factors that differ in their last bit, and Muon's
    iteration, in bfloat16, makes a rounding of that in single elements: 1.5e-5 of a later norm on a Xeon with
    AMX, less on an EPYC."""
    both = []
    for kind in (Trainer, transformers.Trainer):
        model = build("llama", layers=1)
        optimizers: Any = muon_beside_adamw(model)
        given = {"optimizers": (optimizers if kind is Trainer else Both(optimizers), None)}
        settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": norm}
        make: Any = lambda model=model: model  # noqa: E731
        both.append(trainer(kind, tmp_path, make, of_trainer=given, **settings))
        both[-1].train()
    assert_same_logs(*both, tolerance)
    steps = [entry for entry in logs(both[0]) if "grad_norm" in entry]
    assert max(entry["grad_norm"] for entry in steps) > 1.0
    assert len({entry["learning_rate"] for entry in steps}) > 2


@pytest.mark.slow_cases(r"(?!adafactor|schedule)")
@pytest.mark.parametrize("name", ["sgd", "adafactor", "adagrad", "rmsprop", "schedule_free_adamw"])
def test_optimizers_are_named_as_upstream_names_them(name: str, tmp_path: Path) -> None:
    """What evaluates weights that are not those it trains switches between them."""
    given: dict[str, Any] = {"optim": name, "max_steps": 3}
    if name == "sgd":
        given["optim_args"] = "momentum=0.9"
    if name.startswith("schedule_free"):
        pytest.importorskip("schedulefree", reason="schedulefree is missing: pip install schedulefree")
        given |= {"lr_scheduler_type": "constant", "warmup_steps": 0}
    both = [trainer(kind, tmp_path, **given) for kind in (Trainer, transformers.Trainer)]
    for each in both:
        each.train()
    assert_same_logs(*both)


NAMES = [name.value for name in transformers.training_args.OptimizerNames]
WAYS_OUT = {  # what the refusal of a name says, by a part of it
    "lion": r"optimizers=\(lion_pytorch\.Lion\(",
    "rmsprop_bnb": "optim='rmsprop'",
    "ademamix": "optim='adamw_8bit'",
    "galore": "optim='adamw_8bit'",
    "apollo": "optim='adamw_8bit'",
    "lomo": "optim='adafactor'",
    "xla": "optim='adamw_torch'",
    "npu": "optim='adamw_torch'",
    "": r"give the optimizer's object, as optimizers=\(optimizer, None\)",
}


def test_each_name_of_an_optimizer_is_taken_or_refused_with_a_way_out(tmp_path: Path) -> None:
    taken = set()
    for name in NAMES:
        arguments = transformers.TrainingArguments(str(tmp_path), optim=name, use_cpu=True)
        words = next(words for part, words in WAYS_OUT.items() if part in name)
        try:
            training_arguments.settle(arguments, MegacompileConfig())
            taken.add(name)
        except megacompile.MegacompileError as error:
            assert f"optim={name!r}" in str(error) and re.search(words, str(error))
            assert str(error).count(". ") == 0
    assert {"sgd", "adafactor", "adagrad", "rmsprop", "adamw_torch", "adamw_torch_fused"} <= taken
    assert {name for name in NAMES if "schedule_free" in name} <= taken


class OwnScheduler:
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer,  # type: ignore[attr-defined]
            lambda step: 1.0 - step / 10,
        )
        return self.lr_scheduler


class OwnSteps:
    """Own steps around upstream's, which read the losses, and an own evaluation that calls the model."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        vars(self).setdefault("seen", []).append(float(loss))
        return 2 * loss

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs.loss + 1.0, outputs.logits, inputs["labels"]


@pytest.mark.slow_cases(r"OwnSteps")
@pytest.mark.parametrize(
    "hooks",
    [(OwnOptimizer,), (OwnScheduler,), (OwnSteps,), (OwnSteps, Penalized)],
    ids=lambda hooks: "+".join(hook.__name__ for hook in hooks),
)
def test_hooks_of_a_subclass_do_what_they_do_upstream(hooks: tuple[type, ...], tmp_path: Path) -> None:
    found = []
    for kind in (Trainer, transformers.Trainer):
        given = {"hbm_budget": "20MB"} if kind is Trainer else {}
        own = type("Own", (*hooks, kind), {})
        settings = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": most_likely}
        found.append(trainer(own, tmp_path, max_steps=3, of_trainer=given, **settings))
        found[-1].train()
    assert_same_logs(*found)
    mine, theirs = (vars(one).get("seen", []) for one in found)
    assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("Shira", {}, r"q_proj makes a sparse tensor .* LoRA"),
        ("LoKr", {"module_dropout": 0.1}, "both their dropouts to 0"),
    ],
)
def test_adapters_that_no_graph_can_hold_are_refused_by_name(
    kind: str, given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(megacompile.CaptureError, match=words):
        trainer(
            Trainer, tmp_path, make=lambda: adapted(kind, **given), max_steps=1, eval_strategy="no"
        ).train()


def test_a_training_step_without_upstreams_is_refused_by_name(tmp_path: Path) -> None:
    class Alone(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = model(**inputs).loss
            loss.backward()
            return loss.detach()

    with (
        pytest.warns(UserWarning, match="trains the model in plain PyTorch"),
        pytest.raises(megacompile.MegacompileError, match=r"Alone\.training_step .* compute_loss"),
    ):
        trainer(Alone, tmp_path, eval_strategy="no").train()


def test_a_loss_that_no_program_can_train_on_is_named(tmp_path: Path) -> None:
    class Twice(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss + model(**inputs).loss

    class Constant(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return torch.ones((), requires_grad=True)

    for kind, words in (
        (Twice, "calls the model again after the call that is trained on"),
        (Constant, "without calling the model"),
    ):
        with pytest.raises(megacompile.MegacompileError, match=words):
            trainer(kind, tmp_path, eval_strategy="no").train()


def test_no_thread_is_left_where_an_update_never_comes(tmp_path: Path) -> None:
    """The first micro-batch waits for the model's outputs; the second fails before it calls the model."""

    class Fails(Trainer):
        calls = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            if self.calls == 2:
                raise KeyError("mine")
            return model(**inputs).loss

    with pytest.raises(KeyError, match="mine"):
        trainer(Fails, tmp_path, eval_strategy="no", gradient_accumulation_steps=2).train()
    for thread in threading.enumerate():
        if thread.name == "megacompile loss":
            thread.join(60)
            assert not thread.is_alive()


def test_arguments_become_options_of_compile(tmp_path: Path) -> None:
    given = transformers.TrainingArguments(
        str(tmp_path),
        bf16=True,
        optim="adamw_torch_4bit",
        use_liger_kernel=True,
        seed=7,
        use_cpu=True,
        max_grad_norm=0,
    )
    options = compile_options(
        given, build("llama", layers=1), training_arguments.settle(given, MegacompileConfig(hbm_budget=1))
    )
    expected = {
        "compute_dtype": torch.bfloat16,
        "optimizer_state": "int4",
        "kernels": True,
        "seed": 7,
        "device": "cpu",
        "max_grad_norm": None,
        "inductor": False,
    }
    assert {name: options[name] for name in expected} == expected


def test_what_has_no_effect_is_said_once(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = trainer(Trainer, tmp_path, gradient_checkpointing=True, max_steps=1, eval_strategy="no")
        ours.train()
    said = [str(w.message) for w in caught if "no effect" in str(w.message)]
    assert len(said) == 1
    assert "gradient_checkpointing" in said[0]
    shutil.rmtree(tmp_path)
