"""Padding to few lengths: only where the model is known not to see it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile

pytestmark = pytest.mark.filterwarnings("ignore:Compiling another program")  # as lengths ask for it

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "pad_token_id": 0,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def fnet() -> nn.Module:
    from transformers import FNetConfig, FNetForMaskedLM

    return FNetForMaskedLM(FNetConfig(**_SMALL))


def convbert() -> nn.Module:
    from transformers import ConvBertConfig, ConvBertForMaskedLM

    return ConvBertForMaskedLM(ConvBertConfig(**_SMALL, num_attention_heads=4, embedding_size=16))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SMALL, num_attention_heads=2))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SMALL, num_attention_heads=2)).train()


def lfm2() -> nn.Module:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    config = Lfm2Config(**_SMALL | layers, num_attention_heads=2, num_key_value_heads=1)
    return Lfm2ForCausalLM(config).train()


@pytest.mark.slow
@pytest.mark.parametrize(("make", "lengths"), [(fnet, 3), (convbert, 3), (bert, 2), (llama, 2), (lfm2, 2)])
def test_padded_only_where_the_model_does_not_see_it(make: Any, lengths: int) -> None:
    torch.manual_seed(0)
    model = make().train()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    program = megacompile.compile(
        model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, planner="full-recompute"
    )
    for length in (16, 19, 20):
        ids = torch.randint(5, 64, (2, length))
        loss = float(program.train_step({"input_ids": ids, "labels": ids}).loss)
        assert loss == pytest.approx(eager(input_ids=ids, labels=ids).loss.item(), rel=1e-6)
    assert len(program._session.decided.programs) == lengths


def causal(family: str) -> nn.Module:
    """Of heads as wide, a vocabulary and a width as large as the lengths that batches are padded to."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, num_heads=4,
        n_groups=2, state_size=24,
    )  # fmt: skip
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.train()


@pytest.mark.slow_cases(r"(Llama|Mamba2)")
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mamba2"])
def test_a_length_that_is_the_size_of_another_dimension_is_padded_to(family: str) -> None:
    torch.manual_seed(0)
    model = causal(family)
    eager = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, eager))
    program = megacompile.compile(
        model, "1GB", optimizer=ours, compute_dtype=torch.float32, planner="full-recompute"
    )
    for length in (9, 11, 13, 10, 15, 12, 20, 23):
        ids = torch.randint(5, 64, (2, length))
        loss = eager(input_ids=ids, labels=ids).loss
        assert float(program.train_step({"input_ids": ids, "labels": ids}).loss) == pytest.approx(
            loss.item(), rel=1e-6
        )
        theirs.zero_grad()
        loss.backward()
        theirs.step()
    assert len(program._session.decided.programs) == 3  # of 9, 16 and 24
    state = program.state_dict()
    for name, value in eager.named_parameters():
        torch.testing.assert_close(state[name], value.detach(), rtol=0, atol=2e-5)
    program.close()


def test_masks_of_the_user_s_own_do_not_vouch_for_a_model() -> None:
    """A program for a masked batch is no sign that more padding would be hidden from a convolution."""
    torch.manual_seed(0)
    batches = []
    for length in (16, 13):
        ids = torch.randint(5, 64, (2, length))
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        batches.append({"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask})
    train_varied(Own(convolves_what_a_layer_makes_of_zeros), batches, rel=1e-7)


def test_no_batch_is_padded_past_the_positions_of_a_model() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=21, **dropouts)
    ids = [torch.randint(5, 64, (2, length)) for length in (16, 19)]
    train_varied(GPT2LMHeadModel(config).train(), [{"input_ids": i, "labels": i} for i in ids])


def test_packed_rows_are_not_padded() -> None:
    """transformers looks for packed sequences only where there is no mask, and padding needs one."""
    torch.manual_seed(0)
    model = llama()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)
    for length in (16, 19):
        ids = torch.randint(5, 64, (1, length))
        positions = torch.cat([torch.arange(7), torch.arange(length - 7)])[None]
        batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
        wanted = eager(**batch, use_cache=False).loss.item()
        assert float(program.train_step(batch).loss) == pytest.approx(wanted, rel=1e-6)
        del batch["position_ids"]
        assert eager(**batch, use_cache=False).loss.item() != pytest.approx(wanted, rel=1e-4)
    program.close()


def llama_with(loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """A Llama whose forward adds a loss of the test's own."""
    from transformers import LlamaForCausalLM

    class Llama(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Any = None) -> dict[str, Tensor]:
            out = super().forward(input_ids=input_ids, labels=labels, attention_mask=attention_mask)
            return {"loss": out.loss + loss(out.logits, labels)}

    return Llama(llama().config).train()


def train_varied(model: nn.Module, batches: list[dict[str, Any]], rel: float = 1e-6) -> None:
    """Losses of batches of several lengths, beside eager ones."""
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)
    for batch in batches:
        expected = eager(**batch)
        expected = expected if isinstance(expected, Tensor) else expected["loss"]
        assert float(program.train_step(batch).loss) == pytest.approx(expected.item(), rel=rel)
    program.close()


@pytest.mark.slow_cases(r"<lambda>[12]")
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: (logits.view(-1, logits.shape[-1]).logsumexp(-1) ** 2).mean(),
        lambda logits, labels: (logits[:, :-1].logsumexp(-1) ** 2).mean(),
        lambda logits, labels: logits[:, :-1].gather(-1, labels[:, 1:, None]).sum() / labels.shape[1],
    ],
)
def test_losses_of_the_user_s_own_do_not_see_padding(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    ids = [torch.randint(5, 64, (2, length)) for length in (16, 19)]
    train_varied(llama_with(loss), [{"input_ids": i, "labels": i} for i in ids])


@pytest.mark.slow_cases(r"<lambda>[0-2]")
@pytest.mark.parametrize(
    "more",
    [
        lambda ids: {"shift_labels": ids.roll(-1, 1)},
        lambda ids: {
            "position_ids": torch.arange(ids.shape[1])[None],
            "attention_mask": torch.ones_like(ids),
        },
        lambda ids: {"logits_to_keep": ids.shape[1]},
        lambda ids: {"attention_mask": torch.ones(2, 1, *ids.shape[1:] * 2, dtype=torch.bool).tril()},
    ],
)
def test_entries_of_the_batch_that_padding_does_not_know(more: Callable[[Tensor], dict[str, Any]]) -> None:
    torch.manual_seed(0)
    ids = [torch.randint(5, 64, (2, length)) for length in (16, 19)]
    train_varied(llama(), [{"input_ids": i, "labels": i, **more(i)} for i in ids])


class Own(nn.Module):
    """A causal model in the manner of transformers whose positions a function of the test's own mixes."""

    __module__ = "transformers.a_test"

    def __init__(self, mix: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(64, 24), nn.Linear(24, 24), nn.Linear(24, 64)
        self.mix = mix

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.embed(input_ids)
        if attention_mask is not None:
            h = h * attention_mask[..., None]
        logits = self.head(h + self.mix(self.cell, h))
        return nn.functional.cross_entropy(logits.view(-1, 64), labels.view(-1), ignore_index=-100)


def backwards(cell: Any, h: Tensor) -> Tensor:
    state, states = torch.zeros_like(h[:, 0]), []
    for t in reversed(range(h.shape[1])):
        state = torch.tanh(cell(h[:, t]) + state + 0.1)
        states.append(state)
    return torch.stack(states[::-1], 1)


def steps(cell: Any, h: Tensor) -> Tensor:
    state, states = torch.zeros_like(h[:, 0]), []
    for at in h.unbind(1):
        state = torch.tanh(cell(at) + state + 0.1)
        states.append(state)
    return torch.stack(states, 1) + states[-1][:, None]


def attends(cell: Any, h: Tensor) -> Tensor:
    return torch.softmax(cell(h) @ h.transpose(1, 2), -1) @ h


def by_fours(cell: Any, h: Tensor) -> Tensor:
    missing = -h.shape[1] % 4
    fours = nn.functional.pad(cell(h), (0, 0, 0, missing)).unflatten(1, (-1, 4))
    return fours.mean(2, keepdim=True).expand_as(fours).flatten(1, 2)[:, : h.shape[1]]


def convolves(cell: Any, h: Tensor, padding: int = 2, first: int = 0) -> Tensor:
    """Along positions, each over itself and the two before, where ``first`` + 2 is the ``padding``."""
    weight = cell.weight[:, :3, None].transpose(1, 2)
    return nn.functional.conv1d(h.transpose(1, 2), weight, padding=padding, groups=24)[
        ..., first : first + h.shape[1]
    ].transpose(1, 2)


def convolves_what_a_layer_makes_of_zeros(cell: Any, h: Tensor) -> Tensor:
    return convolves(cell, cell(h), first=1)


@pytest.mark.slow_cases(r"(backwards|steps|mix[45]|by_fours|<lambda>-False[1-9])")
@pytest.mark.parametrize(
    ("mix", "padded"),
    [
        (backwards, False),
        (steps, False),
        (attends, False),
        (by_fours, False),
        (functools.partial(convolves, padding=1), False),
        (functools.partial(convolves, first=1), False),
        (convolves, True),
        (lambda cell, h: cell(h).mean(1, keepdim=True), False),
        (lambda cell, h: cell(h).mean(), False),
        (lambda cell, h: cell(h) + h[:, -1:], False),
        (lambda cell, h: nn.functional.pad(cell(h)[:, 1:], (0, 0, 0, 1)), False),
        (lambda cell, h: cell(h).exp().cumsum(1), False),
        (lambda cell, h: cell(h), True),
        (lambda cell, h: nn.functional.layer_norm(cell(h), (24,)), True),
        (lambda cell, h: cell(h) + h[:, :1], True),
    ],
)
def test_models_that_mix_positions_themselves_are_not_padded(mix: Any, padded: bool) -> None:
    torch.manual_seed(0)
    model = Own(mix)
    eager = copy.deepcopy(model)
    program = megacompile.compile(
        model,
        "1GB",
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.0),
        compute_dtype=torch.float32,
        planner="full-recompute",
    )
    for length in (8, 11, 13):
        ids = torch.randint(5, 64, (2, length))
        loss = float(program.train_step({"input_ids": ids, "labels": ids}).loss)
        assert loss == pytest.approx(eager(ids, ids).item(), rel=1e-6)
    assert len(program._session.decided.programs) == (2 if padded else 3)
    program.close()
