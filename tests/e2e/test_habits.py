"""How people train: each habit through the public face, beside eager PyTorch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import megacompile
from tests.support.models import Plain, batch_for, build
from tests.support.reference import EagerTrainer, assert_equal


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    options = {"lr": 1e-2, "weight_decay": 0.1, **options}
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **options)


def compiled(model: nn.Module, budget: str = "1GB", **options: Any) -> megacompile.Program:
    options.setdefault("optimizer", adamw(model))
    return megacompile.compile(model, budget, compute_dtype=torch.float32, **options)


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[megacompile.Program, EagerTrainer]:
    """A program and an eager trainer over equal models."""
    model = make()
    eager = copy.deepcopy(model)
    return compiled(model, **options), EagerTrainer(eager, adamw(eager), **options)


def three_equal_steps(program: megacompile.Program, trainer: EagerTrainer, kind: str) -> None:
    """Losses and then weights, bit by bit."""
    for step in range(3):
        batch = batch_for(kind, step)
        assert float(program.train_step(batch).loss) == trainer.train_step([batch])
    assert_equal(program, trainer)


def gpt2() -> nn.Module:
    return build("gpt2")


def test_hyperparameters_changed_between_steps() -> None:
    """While updates of the step before are in flight, which took the values of their own step."""
    program, trainer = pair(gpt2, max_grad_norm=1.0)
    for step in range(4):
        batch = batch_for("gpt2", step)
        program.train_step(batch)
        trainer.train_step([batch])
        for optimizer in (program.optimizer, trainer.optimizer):
            for group in optimizer.param_groups:
                group.update(lr=1e-2 / (step + 2), betas=(0.8, 0.9 + step / 100), weight_decay=0.01 * step)
    assert_equal(program, trainer)
    program.close()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("decoupled", [False, True])
def test_how_weights_decay_is_what_the_param_group_says(kind: Any, decoupled: bool) -> None:
    model = Plain()
    eager = copy.deepcopy(model)
    plain, ours = (kind(m.parameters(), lr=1e-2, weight_decay=0.5, eps=1e-3) for m in (eager, model))
    program = compiled(model, optimizer=ours)
    for step in range(3):
        for optimizer in (plain, ours):
            optimizer.param_groups[0]["decoupled_weight_decay"] = decoupled
        program.train_step(batch_for("plain", step))
        plain.zero_grad()
        eager(**batch_for("plain", step)).backward()
        plain.step()
    state = program.state_dict()
    for name, value in eager.named_parameters():
        torch.testing.assert_close(state[name], value.detach(), rtol=0, atol=1e-5)
    program.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_token_weighted_accumulation_inside_and_by_hand() -> None:
    """Micro-batches of different token counts, weighted by tokens: as one large batch would train."""
    batches = [batch_for("gpt2", i, size=s) for i, s in enumerate((1, 3))]
    total = sum(b["labels"].numel() for b in batches)
    weights = [b["labels"].numel() / total for b in batches]
    make = functools.partial(build, "gpt2", layers=1)
    inside, trainer = pair(make, max_grad_norm=1.0)
    by_hand = compiled(make(), max_grad_norm=1.0)
    for _ in range(2):
        out = inside.train_step(batches, weights=weights)
        for batch, weight in zip(batches, weights, strict=True):
            by_hand.forward_backward(batch, weight=weight)
        by_hand.optimizer_step()
        loss = trainer.backward(batches, weights)
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.update()
        assert float(out.loss) == pytest.approx(float(loss), rel=1e-6)
    for program in (inside, by_hand):
        state = program.state_dict()
        for name, value in trainer.model.named_parameters():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5)
        program.close()


def test_num_items_in_batch_is_the_trainers_convention() -> None:
    """Losses are sums over tokens divided by the count of all micro-batches; counts may change."""
    program, trainer = pair(lambda: build("llama", layers=1))
    for step in range(3):
        micro = [batch_for("llama", 10 * step + i) for i in range(2)]
        for i, batch in enumerate(micro):
            batch["labels"][:, : 3 * i + step] = -100
        count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in micro)
        out = program.train_step([{**b, "num_items_in_batch": count} for b in micro])
        given = [{**b, "num_items_in_batch": torch.tensor(count)} for b in micro]
        loss = trainer.backward(given, [1.0, 1.0])
        trainer.update()
        assert float(out.loss) == pytest.approx(float(loss), rel=1e-6)
    assert len(program._session.compiler.frontend._fronts) == 1
    state = program.state_dict()
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5)
    with pytest.raises(megacompile.MegacompileError, match="some micro-batches only"):
        program.train_step([{**micro[0], "num_items_in_batch": 3}, micro[1]])
    program.close()


def test_a_count_that_the_loss_does_not_read_is_refused() -> None:
    class Ignores(Plain):
        def forward(self, x: Tensor, y: Tensor, **rest: Any) -> Tensor:
            return super().forward(x, y)

    program = compiled(Ignores())
    with pytest.raises(megacompile.CaptureError, match="does not read num_items_in_batch"):
        program.train_step([{**batch_for("plain"), "num_items_in_batch": 6}] * 2)
    with pytest.raises(megacompile.CaptureError, match="does not read num_items_in_batch"):
        program.forward_backward({**batch_for("plain"), "num_items_in_batch": 6})
    out = program.train_step([{**batch_for("plain"), "num_items_in_batch": 6}] * 2, weights=[0.25, 0.5])
    assert float(out.loss) == pytest.approx(0.75 * float(out.losses[0]), rel=1e-6)


def test_frozen_embedding_and_frozen_layers() -> None:
    def make() -> nn.Module:
        model = build("llama", layers=2)
        model.model.embed_tokens.weight.requires_grad_(False)
        model.model.layers[1].requires_grad_(False)
        return model

    program, trainer = pair(make, max_grad_norm=1.0)
    frozen = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    three_equal_steps(program, trainer, "llama")
    state = program.state_dict()
    assert all(torch.equal(state[n], v) for n, v in frozen.items())
    program.close()


class Adapter(nn.Module):
    """A low-rank adapter beside a frozen linear layer."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.a), self.b)


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = Plain(depth=2).requires_grad_(False)
    for block in model.blocks:
        for place in (1, 3):
            block[place] = Adapter(block[place])  # type: ignore[index,operator]
    return model


def test_adapters_alone_have_state() -> None:
    program, trainer = pair(adapted, max_grad_norm=1.0)
    three_equal_steps(program, trainer, "plain")
    model = trainer.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = program.memory.host_bytes["moments"]
    assert 8 * trained <= moments <= 8 * trained + 8 * 64 * len(list(model.parameters()))
    frozen_groups = [g for g in program._session.scheduled().compiled.assembly.groups if not g.trainable]
    pushed = {op.group for op in program._session.scheduled().planned.step.ops if op.kind == "push_grad"}
    assert frozen_groups and not pushed & {g.index for g in frozen_groups}
    program.close()


@pytest.mark.slow
def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        return peft.get_peft_model(build("llama", layers=2), config).train()

    program, trainer = pair(make, max_grad_norm=1.0)
    three_equal_steps(program, trainer, "llama")
    program.close()


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_adapters_of_a_tied_embedding() -> None:
    """PEFT ties them by parameters that are views of others, which is refused; both ways out train, with
    the dropout before adapters."""
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")

    def make(**given: Any) -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, fan_in_fan_out=True, **given)
        return peft.get_peft_model(build("gpt2", layers=1), config).train()

    both = {"target_modules": ["c_attn", "wte", "lm_head"]}
    whole = {"target_modules": ["c_attn"], "modules_to_save": ["wte"], "ensure_weight_tying": True}
    advice = (
        r"set ensure_weight_tying=False, with which .* or keep it and name the embedding in modules_to_save"
    )
    with pytest.raises(megacompile.MegacompileError, match=advice):
        compiled(make(**both, ensure_weight_tying=True))
    for given in (both, whole):
        program, trainer = pair(functools.partial(make, **given), max_grad_norm=1.0)
        three_equal_steps(program, trainer, "gpt2")
        program.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_train_and_eval_mode_are_different_programs() -> None:
    program, trainer = pair(lambda: build("gpt2-dropout", layers=1))
    for step, training in enumerate((True, False, True)):
        program.model.train(training)
        trainer.model.train(training)
        batch = batch_for("gpt2-dropout", step)
        assert float(program.train_step(batch).loss) == trainer.train_step([batch])
        evaluated = float(program.evaluate(batch))
        mode = trainer.model.training
        with torch.no_grad():
            assert evaluated == pytest.approx(float(trainer.model.eval()(**batch).loss), rel=1e-6)
        trainer.model.train(mode)
    assert_equal(program, trainer)
    program.close()


def test_weight_parametrizations_train_right() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Plain(width=8, depth=1)
        parametrizations.weight_norm(model.first)
        parametrizations.orthogonal(model.blocks[0][1], orthogonal_map="householder")
        return model

    program, trainer = pair(make)
    three_equal_steps(program, trainer, "plain")
    program.close()


def test_a_parametrization_that_changes_a_buffer_trains_as_eager_does() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Plain(depth=1)
        parametrizations.spectral_norm(model.first)
        return model

    program, trainer = pair(make)
    three_equal_steps(program, trainer, "plain")
    state = program.state_dict()
    program.close()
    buffers = dict(trainer.model.named_buffers())
    assert buffers and all(torch.equal(state[name], buffer) for name, buffer in buffers.items())


def test_hooks_on_gradients_are_refused_and_forward_hooks_run() -> None:
    model = Plain()
    model.blocks[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(megacompile.MegacompileError, match=r"blocks\.0 has a backward hook"):
        compiled(model)
    model = Plain()
    model.first.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(megacompile.MegacompileError, match=r"first\.weight has a gradient hook"):
        compiled(model)

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Plain()
        model.blocks[0].register_forward_hook(lambda module, args, out: out * 0.5)
        return model

    program, trainer = pair(make)
    batch = batch_for("plain")
    assert float(program.train_step(batch).loss) == trainer.train_step([batch])
    assert_equal(program, trainer)
    program.close()


class InnerHook(Plain):
    """Registers a hook on an activation, which a captured graph would drop."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        h.register_hook(lambda grad: grad * 0.0)
        return nn.functional.mse_loss(self.last(h), y)


def test_hook_on_an_activation_is_refused() -> None:
    with pytest.raises(megacompile.CaptureError, match="hook"):
        compiled(InnerHook(), example_batch=batch_for("plain"))


def test_optimizer_that_holds_a_part_of_the_parameters() -> None:
    """What the optimizer does not hold is not updated, as in eager PyTorch."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.blocks.parameters(), lr=1e-2, weight_decay=0.1)

    torch.manual_seed(0)
    model = Plain()
    eager = copy.deepcopy(model)
    program = compiled(model, optimizer=optimizer(model))
    trainer = EagerTrainer(eager, optimizer(eager))
    three_equal_steps(program, trainer, "plain")
    program.close()


@pytest.mark.slow_cases(r"dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "mixed"])
def test_models_handed_over_in_low_precision(dtype: Any) -> None:
    """Masters are FP32 whatever the model came in; fp32 compute equals eager on the widened values."""
    model = build("llama", layers=2)
    if dtype == "mixed":
        model.model.layers.to(torch.bfloat16)
    else:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    eager = copy.deepcopy(model)
    for parameter in eager.parameters():
        parameter.data = parameter.data.float()
    program, trainer = compiled(model), EagerTrainer(eager, adamw(eager))
    for step in range(2):
        batch = batch_for("llama", step)
        assert float(program.train_step(batch).loss) == trainer.train_step([batch])
    assert_equal(program, trainer)
    assert all(v.dtype == torch.float32 for v in program.state_dict().values())
    program.sync_to(model)
    kept = {p.dtype for p in model.parameters()}
    assert kept == ({torch.float32, torch.bfloat16} if dtype == "mixed" else {dtype})
    program.close()


class Rich(Plain):
    """Returns several fields, the loss among them."""

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0, name: str = "") -> dict[str, Any]:
        h = self.first(x)
        return {"hidden": h, "name": name, "loss": nn.functional.mse_loss(self.last(h), y) * scale}


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_outputs_with_several_fields_and_constants_in_the_batch() -> None:
    torch.manual_seed(0)
    model = Rich()
    eager = copy.deepcopy(model)
    program, trainer = compiled(model), EagerTrainer(eager, adamw(eager))
    for scale in (1.0, 0.5, 1.0):
        batch = {**batch_for("plain"), "scale": scale, "name": "any"}
        assert float(program.train_step(batch).loss) == trainer.train_step([batch])
    assert_equal(program, trainer)
    assert len(program._session.compiler.frontend._fronts) == 2  # one per value of the constant
    program.close()


class Checkpointed(Plain):
    reentrant = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=self.reentrant)
        return nn.functional.mse_loss(self.last(h), y)


def test_a_reentrant_checkpoint_is_refused() -> None:
    model = Checkpointed()
    model.reentrant = True
    with pytest.raises(megacompile.CaptureError, match="use_reentrant=False"):
        compiled(model, example_batch=batch_for("plain"))


def test_checkpointing_inside_the_model_changes_nothing() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Checkpointed()

    program, trainer = pair(make)
    batch = batch_for("plain")
    assert float(program.train_step(batch).loss) == trainer.train_step([batch])
    assert_equal(program, trainer)
    program.close()
    model = build("llama", layers=1)
    trainer = EagerTrainer(copy.deepcopy(model), adamw(model))
    trainer.optimizer = adamw(trainer.model)
    model.gradient_checkpointing_enable()
    program, batch = compiled(model), batch_for("llama")
    assert float(program.train_step(batch).loss) == trainer.train_step([batch])
    assert_equal(program, trainer)
    program.close()
