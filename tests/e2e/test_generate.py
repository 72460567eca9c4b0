"""``program.generate``: the tokens of transformers' ``generate`` on the same weights, streamed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from tests.e2e.test_predict import compiled, trained
from tests.support.models import Plain, batch_for, build

NEW = {"max_new_tokens": 10, "pad_token_id": 0}


def prompts(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(5))


def left_padded() -> dict[str, Tensor]:
    """A prompt of four tokens and one of seven."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    return {"input_ids": prompts().masked_fill(mask == 0, 0), "attention_mask": mask}


def assert_same_tokens(program: megacompile.Program, model: nn.Module, **options: Any) -> Tensor:
    """The tokens of a plain model and of the program, from one seed, are equal; these are they."""
    found = []
    for generate in (program.generate, model.eval().generate):
        torch.manual_seed(11)
        found.append(generate(**options | NEW))  # type: ignore[operator]
    assert torch.equal(*found)
    return found[0]


def programs(program: megacompile.Program) -> int:
    return len(program._session.decided.programs)


@pytest.fixture
def no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """No budget has room for the model alone, so that programs answer for it."""

    def refuse(session: Any) -> None:
        raise megacompile.BudgetError("no room")

    monkeypatch.setattr("megacompile.api.program.Rollout", refuse)


@pytest.mark.slow_cases(r"gpt2")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.usefixtures("no_rollout")
def test_tokens_are_those_of_transformers_before_and_after_steps(name: str) -> None:
    model = build(name, layers=1)
    program = compiled(copy.deepcopy(model), batch_for(name))
    sampled = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    before = assert_same_tokens(program, model, input_ids=prompts())
    others = programs(program)
    assert_same_tokens(program, model, input_ids=prompts(), **sampled)
    for seed in range(2):
        program.train_step(batch_for(name, seed))
    now = trained(program)
    after = assert_same_tokens(program, now, input_ids=prompts())
    assert not torch.equal(before, after)
    assert_same_tokens(program, now, **left_padded())
    assert_same_tokens(program, now, **left_padded(), **sampled)
    assert programs(program) == others  # one served all lengths
    program.train_step(batch_for(name))
    program.close()


def test_under_a_budget_smaller_than_the_weights() -> None:
    model, batch = build("llama", layers=2), batch_for("llama", size=1, length=8)
    weights = sum(p.nbytes for p in model.parameters())
    program = compiled(copy.deepcopy(model), batch, f"{weights * 0.9 / 1e6:.3f}MB")
    assert_same_tokens(program, model, input_ids=prompts(rows=1))
    program.train_step(batch)
    assert_same_tokens(program, trained(program), input_ids=prompts(rows=1))
    assert program.memory.device_peak_bytes <= program.memory.budget_bytes < weights
    program.close()


@pytest.mark.slow
def test_beams_stopping_and_the_model_s_own_generation_config() -> None:
    model = build("llama", layers=1)
    model.generation_config.update(do_sample=True, top_k=5, eos_token_id=list(range(3, 40)))  # type: ignore[operator, union-attr]
    program = compiled(copy.deepcopy(model), batch_for("llama"))
    stopped = assert_same_tokens(program, model, input_ids=prompts())
    assert stopped.shape[1] < 17 or bool((stopped[:, 7:] == 0).any())
    assert_same_tokens(program, model, **left_padded(), do_sample=False, num_beams=3, num_return_sequences=2)
    given = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False, "eos_token_id": None}
    ours = program.generate(prompts(), **NEW | given)
    plain = model.eval().generate(prompts(), **NEW | given)  # type: ignore[operator]
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-5, atol=1e-6)
    program.close()


@pytest.mark.usefixtures("no_rollout")
def test_logits_of_one_position_where_the_forward_gives_all() -> None:
    from transformers import LlamaForCausalLM

    class GivesAll(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **given: Any) -> Any:
            assert "logits_to_keep" not in given
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **given)

    torch.manual_seed(0)
    model = GivesAll(build("llama", layers=1).config)
    program = compiled(copy.deepcopy(model), batch_for("llama"))
    assert_same_tokens(program, model, **left_padded())
    program.close()


def test_adapters() -> None:
    from tests.e2e.test_trainer import lora

    program = compiled(lora(), batch_for("llama"))
    before = program.generate(prompts(), **NEW)
    for seed in range(3):
        program.train_step(batch_for("llama", seed))
    ours = program.generate(**left_padded(), **NEW), program.generate(prompts(), **NEW)
    model: Any = program.release().eval()
    assert torch.equal(ours[0], model.generate(**left_padded(), **NEW))
    assert torch.equal(ours[1], model.generate(input_ids=prompts(), **NEW))
    assert not torch.equal(ours[1], before)


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning")
def test_what_only_a_rollout_can_do(request: pytest.FixtureRequest) -> None:
    """Virtual tokens, and an encoder with its decoder; without one, they are refused by name."""
    from transformers import T5Config, T5ForConditionalGeneration

    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    shape = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 128,
             "decoder_start_token_id": 0}  # fmt: skip
    models = (
        peft.get_peft_model(build("llama", layers=1), config),
        T5ForConditionalGeneration(T5Config(**shape)),
    )
    programs = [compiled(model) for model in models]
    ours = [program.generate(prompts(), **NEW | {"max_new_tokens": 3}) for program in programs]
    request.getfixturevalue("no_rollout")
    for program, what in zip(programs, ("virtual tokens", "encoder with its decoder"), strict=True):
        with pytest.raises(megacompile.MegacompileError, match=f"Without a rollout, .* knows no {what} of"):
            program.generate(prompts(), **NEW)
    for tokens, program in zip(ours, programs, strict=True):
        plain: Any = program.release().eval()
        assert torch.equal(tokens, plain.generate(input_ids=prompts(), **NEW | {"max_new_tokens": 3}))


@pytest.mark.slow
def test_while_a_trainer_trains_and_after(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from megacompile.integrations.transformers import Trainer
    from tests.e2e.test_trainer import trainer

    samples: list[tuple[Tensor, Tensor]] = []

    class Samples(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            plain: Any = trained(ours.program).eval()
            samples.append((ours.program.generate(prompts(), **NEW), plain.generate(prompts(), **NEW)))

    ours = trainer(Trainer, tmp_path, max_steps=2, callbacks=[Samples()])
    ours.train()
    assert len(samples) == 2
    for streamed, plain in samples:
        assert torch.equal(streamed, plain)
    last = ours.program.generate(prompts(), **NEW)
    assert torch.equal(last, ours.release().eval().generate(prompts(), **NEW))


def test_what_cannot_generate_is_refused_by_name() -> None:
    program = compiled(Plain())
    with pytest.raises(
        megacompile.MegacompileError, match="Plain is no model of transformers that generates"
    ):
        program.generate(prompts())
    program.close()


@pytest.mark.parametrize("given", [{"output_hidden_states": True}, {"inputs_embeds": torch.ones(2, 7, 32)}])
@pytest.mark.usefixtures("no_rollout")
def test_what_needs_more_than_logits_is_refused_by_name(given: dict[str, Any]) -> None:
    program = compiled(build("llama", layers=1), batch_for("llama"))
    with pytest.raises(megacompile.MegacompileError, match=f"takes no {next(iter(given))}"):
        program.generate(prompts(), **NEW | given)
    program.close()


@pytest.mark.parametrize("ids", [prompts()[0], [[5, 6]]])
def test_prompts_that_are_no_rows_of_tokens_are_refused(ids: Any) -> None:
    program = compiled(build("llama", layers=1))
    with pytest.raises(megacompile.MegacompileError, match="a tensor of rows of tokens"):
        program.generate(ids, **NEW)
    program.close()


def test_a_loaded_folder_s_generation_config(tmp_path: Path) -> None:
    model: Any = build("llama", layers=1)
    model.generation_config.update(do_sample=True, top_k=3, eos_token_id=[2, 90])
    model.save_pretrained(tmp_path / "in")
    given: dict[str, Any] = {"optimizer": torch.optim.AdamW, "compute_dtype": torch.float32}
    program = megacompile.from_pretrained(tmp_path / "in", "1GB", example_batch=batch_for("llama"), **given)
    assert_same_tokens(program, model, input_ids=prompts())
    program.export(tmp_path / "out")
    program.close()
    again = type(model).from_pretrained(tmp_path / "out").generation_config
    assert (again.do_sample, again.top_k, again.eos_token_id) == (True, 3, [2, 90])
    (tmp_path / "in" / "generation_config.json").write_text("{")
    with pytest.raises(
        megacompile.MegacompileError, match=r"generation_config\.json is no generation config"
    ):
        megacompile.from_pretrained(tmp_path / "in", "1GB")


@pytest.mark.usefixtures("no_rollout")
def test_a_first_call_needs_no_labels_and_a_model_whose_values_are_kept_says_so() -> None:
    program = compiled(build("llama", layers=1))
    assert program.generate(prompts(), **NEW).shape == (2, 17)
    with pytest.raises(megacompile.ProgramError, match=r"evaluate, predict or generate"):
        program.model.generate(prompts(), **NEW)  # type: ignore[operator]
    assert program.generate(prompts(), **NEW).shape == (2, 17)
    program.close()
