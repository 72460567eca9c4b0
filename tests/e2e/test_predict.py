"""``program.predict``: what eager eval mode returns, under a budget, whatever its structure.

Or what a function ``outputs=`` makes of it, compiled with the model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import megacompile
from tests.support.models import Plain, Through, batch_for, build


def compiled(model: nn.Module, batch: Any = None, budget: str = "1GB", **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return megacompile.compile(
        model, budget, compute_dtype=torch.float32, optimizer=optimizer, example_batch=batch, **options
    )


def expected(model: nn.Module, batch: Any) -> Any:
    """What eager eval mode returns; a model of transformers makes no cache."""
    own = {} if not hasattr(model, "config") else {"use_cache": False}
    with torch.no_grad():
        found = model.eval()(**batch, **own)
    return pytree.tree_map_only(Tensor, Tensor.detach, found)


def assert_same(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    """Equal structures, equal constants, and tensors within the tolerance, on the host and detached."""
    (ours, spec), (theirs, other) = pytree.tree_flatten(found), pytree.tree_flatten(wanted)
    assert spec == other and type(found) is type(wanted)
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        if isinstance(b, Tensor):
            assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, False)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        else:
            assert a == b


def without(batch: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in names}


def trained(program: megacompile.Program) -> nn.Module:
    """An eager model of the values that a program has now."""
    model = copy.deepcopy(program.model)
    program.sync_to(model)
    return model


@pytest.mark.slow_cases(r"gpt2")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_transformers_output_with_labels_and_without_after_each_step(name: str) -> None:
    model, batch = build(name), batch_for(name)
    program = compiled(copy.deepcopy(model), batch)
    assert_same(program.predict(batch), expected(model, batch))
    for seed in range(2):
        program.train_step(batch_for(name, seed))
        now = trained(program)
        assert_same(program.predict(batch), expected(now, batch))
        assert_same(program.predict(without(batch, "labels")), expected(now, without(batch, "labels")))
    assert not torch.equal(program.predict(batch).logits, expected(model, batch).logits)
    program.close()


def test_predictions_change_nothing_that_trains() -> None:
    with_dropout, batch = build("gpt2-dropout", layers=1), batch_for("gpt2")
    losses = []
    for predicts in (False, True):
        program = compiled(copy.deepcopy(with_dropout), batch)
        losses.append([])
        for seed in range(3):
            losses[-1].append(float(program.train_step(batch_for("gpt2", seed)).loss))
            if predicts:
                assert torch.equal(program.predict(batch).logits, program.predict(batch).logits)
        program.forward_backward(batch)
        if predicts:
            program.predict(batch)
        program.optimizer_step()
        losses[-1].append(float(program.evaluate(batch)))
        program.close()
    assert losses[0] == losses[1]


def test_a_mask_that_pads_and_another_length() -> None:
    model = build("llama", layers=1)
    program = compiled(copy.deepcopy(model), batch_for("llama"))
    ids = batch_for("llama", length=21)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 17:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    assert_same(program.predict(batch), expected(model, batch))
    assert program.predict({"input_ids": ids}).logits.shape[1] == 21
    program.close()


def test_a_budget_below_the_weights_is_kept() -> None:
    model, batch = Plain(width=256, depth=6), batch_for("plain")
    weights = sum(p.nbytes for p in model.parameters())
    program = compiled(copy.deepcopy(model), batch, f"{weights // 2}B")
    assert_same(program.predict(batch), expected(model, batch))
    program.train_step(batch)
    assert_same(program.predict(batch), expected(trained(program), batch))
    memory = program.memory
    assert memory.device_peak_bytes <= memory.predicted_peak_bytes <= weights // 2
    program.close()


def test_logits_of_a_head_that_is_cut_into_pieces() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16384, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip
    batch = batch_for("llama", length=8)
    program = compiled(copy.deepcopy(model), batch, "5MB")
    assert program._session.decided.cuts, "the head was to be cut"
    assert_same(program.predict(batch), expected(model, batch), 1e-5)
    program.close()


def test_results_that_do_not_fit_are_named_in_the_error() -> None:
    def wide(h: Tensor) -> dict[str, Tensor]:
        outer = h[:, :, None] * h[:, None, :] * torch.ones(64, 1, 1, 1)
        return {"loss": h.square().mean(), "outer": outer}

    x = {"x": torch.randn(16, 64)}
    program = compiled(Through(nn.Linear(64, 64), wide), x, "1MB")
    with pytest.raises(megacompile.BudgetError, match=r"\['outer'\] of 16\.8 MB.*outputs="):
        program.predict(x)
    assert program.predict(x, outputs=lambda out, batch: out["loss"]).shape == ()
    program.close()


class Pair(NamedTuple):
    first: Any
    second: Any


class Returns(nn.Module):
    """An MLP whose forward returns what a function makes of its parts; the loss is under "loss"."""

    def __init__(self, make: Callable[[Returns, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("table", torch.arange(6.0).view(2, 3))
        self.make = make

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = x
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return h.square().mean() if y is not None else self.make(self, x, h)


STRUCTURES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a tensor": lambda m, x, h: h,
    "a dict with numbers and None": lambda m, x, h: {
        "h": h, "none": None, "count": 3, "rate": 0.5, "name": "h", "inner": [h.sum(), (h.argmax(-1), True)],
    },
    "a named tuple": lambda m, x, h: Pair(h, Pair(h * 2, None)),
    "constants": lambda m, x, h: (h, torch.tensor([1.0, 2.0]), torch.arange(4), torch.zeros(2, 2).bool(),
                                  torch.tensor(7)),
    "inputs, parameters and buffers": lambda m, x, h: (x, h, m.table, m.layers[0].weight, m.layers[1].bias),
    "views": lambda m, x, h: (h[:, :3], h.t(), h.view(-1), h.expand(2, *h.shape), x[1:], m.table[0], h[0, 0]),
    "views of what lies in another block": lambda m, x, h: (h.t(), torch.tanh(m.layers[0](x)).t(), x.t()),
    "one of several": lambda m, x, h: (h.chunk(2), h.unbind(0), tuple(h.max(-1)), h.sort(-1).values),
    "one tensor twice": lambda m, x, h: (h, h, [h]),
    "other dtypes": lambda m, x, h: (h > 0, h.int(), h.double(), h.to(torch.bfloat16), torch.complex(h, x)),
    "an empty tensor": lambda m, x, h: (h[:, :0], h),
    "nothing of the weights": lambda m, x, h: (x * 2, torch.ones(3)),
}  # fmt: skip
EACH = list(STRUCTURES.values())
STRUCTURES["all of these"] = lambda m, x, h: [make(m, x, h) for make in EACH]


@pytest.mark.slow_cases(r"(?!a tensor|a named tuple|all)")
@pytest.mark.parametrize("name", STRUCTURES)
def test_what_a_plain_module_returns_comes_back_as_it_is(name: str) -> None:
    model = Returns(STRUCTURES[name])
    x = torch.randn(4, 8)
    program = compiled(copy.deepcopy(model), {"x": x, "y": x})
    assert_same(program.predict({"x": x}), expected(model, {"x": x}))
    program.train_step({"x": x, "y": x})
    assert_same(program.predict({"x": x}), expected(trained(program), {"x": x}))
    program.close()


def test_hidden_states_and_attentions() -> None:
    model, batch = build("gpt2", layers=2), without(batch_for("gpt2"), "labels")
    model.config._attn_implementation = "eager"
    program = compiled(copy.deepcopy(model), batch_for("gpt2"))
    more = batch | {"output_hidden_states": True}
    assert_same(program.predict(more), expected(model, more))
    program.close()


def test_an_output_that_no_program_can_give_back_is_named() -> None:
    program = compiled(
        Returns(lambda m, x, h: {"h": h, "of": m}), {"x": torch.randn(4, 8), "y": torch.ones(1)}
    )
    with pytest.raises(megacompile.CaptureError, match=r"The output holds a Returns.*outputs="):
        program.predict({"x": torch.randn(4, 8)})
    with pytest.raises(megacompile.CaptureError, match="holds no tensor"):
        program.predict({"x": torch.randn(4, 8)}, outputs=lambda out, batch: {"n": 1})
    program.close()


def programs(program: megacompile.Program) -> int:
    return len(program._session.decided.programs)


def test_a_function_of_the_output_is_compiled_once_for_each_meaning() -> None:
    model, batch = Returns(lambda m, x, h: {"logits": h}), {"x": torch.randn(4, 8)}
    program = compiled(copy.deepcopy(model), batch | {"y": torch.ones(1)})
    logits = expected(model, batch)["logits"]

    def top(rank: int) -> Callable[[Any, Any], Tensor]:
        return lambda out, batch: out["logits"].topk(3).indices[..., rank]

    before = programs(program)
    for _ in range(3):  # a new function object each time
        assert torch.equal(program.predict(batch, outputs=top(0)), logits.argmax(-1))
    assert programs(program) == before + 1
    assert torch.equal(program.predict(batch, outputs=top(1)), logits.topk(3).indices[..., 1])
    assert programs(program) == before + 2
    assert_same(program.predict(batch, outputs=lambda out, batch: out["logits"].sum(-1)), logits.sum(-1))
    assert programs(program) == before + 3
    program.predict(batch)
    program.predict(batch)
    assert programs(program) == before + 4

    def scaled(out: Any, batch: Any, *, by: float) -> Tensor:
        return by * out["logits"].amax(-1)

    for by in (2.0, 3.0, 2.0):
        found = program.predict(batch, outputs=functools.partial(scaled, by=by))
        assert_same(found, by * logits.amax(-1))
    assert programs(program) == before + 6
    program.close()


def test_log_probabilities_of_the_batch_without_storing_logits() -> None:
    def log_probs(out: Any, batch: Any) -> dict[str, Tensor]:
        logp = out.logits[:, :-1].log_softmax(-1)
        chosen = logp.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
        return {"sum": (chosen * batch["weights"][:, 1:]).sum(-1), "entropy": -(logp.exp() * logp).sum(-1)}

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build("gpt2", layers=1)

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            return self.inner(input_ids=input_ids, labels=labels, use_cache=False)

    model = Head()
    batch = without(batch_for("gpt2"), "labels")
    more = batch | {"weights": torch.rand(batch["input_ids"].shape)}  # which the forward does not take
    program = compiled(copy.deepcopy(model), batch_for("gpt2"))
    with torch.no_grad():
        wanted = log_probs(model.eval()(**batch), more)
    assert_same(program.predict(more, outputs=log_probs), wanted, 1e-5)
    program.close()


def test_a_mask_of_ones_reaches_the_function() -> None:
    batch = without(batch_for("llama"), "labels")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    model = build("llama", layers=1)
    program = compiled(copy.deepcopy(model), batch_for("llama"))
    found = program.predict(batch, outputs=lambda out, batch: out.logits.mean(-1) * batch["attention_mask"])
    assert_same(found, expected(model, batch).logits.mean(-1))
    program.close()


def test_with_a_loss_function_the_forward_is_given_what_it_takes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    x, y = torch.randn(4, 8), torch.randint(3, (4,))
    program = compiled(copy.deepcopy(model), (x, y), loss_fn=nn.CrossEntropyLoss())
    for batch in ((x, y), (x,), x):
        assert_same(program.predict(batch), model.eval()(x).detach())
        assert torch.equal(
            program.predict(batch, outputs=lambda out, batch: out.argmax(-1)), model(x).argmax(-1)
        )
    program.close()


def test_before_the_first_step() -> None:
    model, batch = build("gpt2", layers=1), batch_for("gpt2")
    for first in (batch, without(batch, "labels")):
        program = compiled(copy.deepcopy(model).train())
        assert_same(program.predict(first), expected(model, first))  # which lays out the state
        assert_same(program.predict(without(batch, "labels")), expected(model, without(batch, "labels")))
        program.train_step(batch)
        program.close()


def test_generator_and_discriminator_as_their_plain_loop() -> None:
    """A forward of the generator comes first; its loss is computed by a copy of the discriminator."""
    torch.manual_seed(0)
    makes, judges = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, n)) for n in (4, 1))
    plain = copy.deepcopy((makes, judges))
    criterion, one, zero = nn.BCEWithLogitsLoss(), torch.ones(8, 1), torch.zeros(8, 1)
    programs = [
        megacompile.compile(
            model,
            "1MB",
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            compute_dtype=torch.float32,
            **options,
        )
        for model, options in ((makes, {}), (judges, {"loss_fn": criterion}))
    ]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in plain]
    for _ in range(3):
        real, noise = torch.randn(8, 4), torch.randn(8, 4)
        fake = programs[0].predict(noise)
        programs[1].train_step((torch.cat([real, fake]), torch.cat([one, zero])))
        judged = functools.partial(lambda judge, _, made: criterion(judge(made), one), copy.deepcopy(judges))
        loss = programs[0].train_step(noise, loss=judged).loss
        made = plain[0](noise)
        criterion(plain[1](torch.cat([real, made.detach()])), torch.cat([one, zero])).backward()
        optimizers[1].step()
        expected_loss = criterion(plain[1](made), one)
        optimizers[0].zero_grad()
        expected_loss.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-5, atol=1e-6)
    for program in programs:
        program.close()


def test_one_batch_and_what_the_function_raises() -> None:
    batch = batch_for("gpt2")
    program = compiled(build("gpt2", layers=1), batch)
    with pytest.raises(megacompile.MegacompileError, match="predict takes one batch, not a list of 2"):
        program.predict([batch, batch])
    with pytest.raises(megacompile.CaptureError, match=r"test_predict.py.*no attribute 'scores'"):
        program.predict(batch, outputs=lambda out, batch: out.scores)
    program.train_step(batch)
    program.close()
    with pytest.raises(megacompile.ProgramError, match="closed"):
        program.predict(batch)
