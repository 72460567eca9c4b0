"""Padding on the right: masks are left out where, and only where, neither loss nor gradients depend on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacompile
from megacompile.capture.batch import read_batch
from megacompile.graph.right_padding import is_padded_right
from tests.support.graphs import attention_calls, forward, graph_of, paths_on_cuda, run
from tests.support.zoo import causal, padded_batch


@pytest.mark.slow_cases(r"(?!llama|gemma2)")
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma2", "gpt2", "phi3", "cohere"])
def test_padding_at_the_right_needs_no_mask(model_type: str) -> None:
    """A dense bias leaves the fast path of a GPU; padding at the left still has it."""
    model = causal(model_type).train()
    right = graph_of(model, padded_batch(0), padded_right=True)
    assert right.blind and all(call["causal"] and call["bias"] is None for call in attention_calls(right))
    assert "kwargs_attention_mask" not in right.inputs
    if model_type != "llama":
        return
    left = graph_of(model, padded_batch(0, left=True))
    assert not left.blind and not any(call["causal"] for call in attention_calls(left))
    assert (paths_on_cuda(right), paths_on_cuda(left)) == ({"library"}, {"efficient"})


@pytest.mark.slow_cases(r"(?!opt)")
@pytest.mark.parametrize("model_type", ["opt", "qwen3_moe", "mamba"])
def test_a_mask_that_more_than_attention_reads_stays(model_type: str) -> None:
    """Positions are counted by the mask, a router's loss counts tokens, a recurrence stops at it."""
    changes = {"output_router_logits": True} if model_type == "qwen3_moe" else {}
    captured = graph_of(causal(model_type, **changes).train(), padded_batch(0), padded_right=True)
    assert not captured.blind and "kwargs_attention_mask" in captured.inputs


@pytest.mark.slow_cases(r"(?!llama)")
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral", "gpt2"])
def test_losses_and_gradients_are_bitwise_those_with_the_mask(model_type: str) -> None:
    torch.manual_seed(0)
    model, batch = causal(model_type).train(), padded_batch(0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    masked, blind = graph_of(model, batch), graph_of(model, batch, padded_right=True)
    assert all(call["bias"] is not None for call in attention_calls(masked)) and blind.blind
    for with_mask, without in zip(run(masked, model, batch), run(blind, model, batch), strict=True):
        assert torch.equal(with_mask, without)


class Aimed(nn.Module):
    """A model that is given numbers beside tokens, and steps of two where there is a mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, pixel_values: Tensor) -> Any:
        positions = None if attention_mask is None else 2 * (attention_mask.cumsum(-1) - 1)
        embeds = self.model.get_input_embeddings()(input_ids) + pixel_values  # type: ignore[operator]
        options = {"attention_mask": attention_mask, "position_ids": positions}
        return self.model(inputs_embeds=embeds, labels=input_ids, **options)


Aimed.__module__ = "transformers.models.aimed"  # of a library whose masks of ones are none


def test_a_mask_of_ones_beside_images_is_left_out_of_attention_alone() -> None:
    """Positions may be made of it, as in PI0."""
    torch.manual_seed(0)
    model = Aimed(causal("llama").train())
    ids = torch.randint(1, 60, (2, 8))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 8, 1)}
    batch = read_batch(given, model)
    assert batch.hides_nothing and not read_batch(given | {"attention_mask": ids > 30}, model).hides_nothing
    captured = graph_of(model, batch.kwargs, hides_nothing=True)
    assert all(call["causal"] and call["bias"] is None for call in attention_calls(captured))
    (loss,) = forward(captured, model, batch.kwargs)
    torch.testing.assert_close(loss, model(**given).loss)


class Model(nn.Module):
    """One causal layer that reads no mask, with what a test adds to it."""

    def __init__(self, mix: Callable[[Any, Tensor], Tensor], loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 64)
        self.mix, self.loss = mix, loss

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(input_ids)
        return self.loss(self.head(h + self.mix(self.qkv, h)), labels)


def attends(qkv: Any, h: Tensor, causal: bool = True) -> Tensor:
    q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in qkv(h).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, 64), labels[:, 1:].reshape(-1))


SOUND: dict[str, tuple[Any, Any]] = {
    "causal": (attends, shifted),
    "own positions": (attends, lambda x, y: F.cross_entropy(x.view(-1, 64), y.view(-1))),
    "a mean of weights": (lambda w, h: attends(w, h) * w.weight.mean(), shifted),
    "smoothed": (attends, lambda x, y: F.cross_entropy(x.view(-1, 64), y.view(-1), label_smoothing=0.1)),
    "a loss per token": (
        attends,
        lambda x, y: F.cross_entropy(x.view(-1, 64), y.view(-1), reduction="none").square().mean(),
    ),
    "filled where labels are ignored": (
        attends,
        lambda x, y: x[:, :-1].logsumexp(-1).masked_fill(~(y[:, 1:] != -100), 0).sum(),
    ),
    "positions in halves": (lambda w, h: torch.cat([attends(w, h)[:, :9], h[:, 9:]], 1), shifted),
    "a norm per token": (lambda w, h: F.layer_norm(attends(w, h), (16,)), shifted),
}
UNSOUND: dict[str, tuple[Any, Any]] = {
    "all keys": (lambda w, h: attends(w, h, causal=False), shifted),
    "a mean of positions": (lambda w, h: h.mean(1, keepdim=True) + attends(w, h), shifted),
    "a mean of rows": (lambda w, h: h.mean(0, keepdim=True) + attends(w, h), shifted),
    "a mean of all": (lambda w, h: h * h.mean() + attends(w, h), shifted),
    "flipped": (lambda w, h: attends(w, h.flip(1)), shifted),
    "rolled": (lambda w, h: attends(w, h).roll(-2, 1), shifted),
    "rows attend to rows": (lambda w, h: attends(w, h.transpose(0, 1)).transpose(0, 1), shifted),
    "rows behind each other": (lambda w, h: attends(w, h.view(1, -1, 16)).view(h.shape), shifted),
    "positions are columns": (lambda w, h: attends(w, h.mT.reshape(h.shape)), shifted),
    "positions in threes": (
        lambda w, h: attends(w, h.view(2, 8, 3, 16).mean(2).repeat_interleave(3, 1)),
        shifted,
    ),
    "halves that are swapped": (lambda w, h: attends(w, torch.cat([h[:, 12:], h[:, :12]], 1)), shifted),
    "filled where labels count": (
        attends,
        lambda x, y: x[:, :-1].logsumexp(-1).masked_fill(y[:, 1:] != -100, 0).sum(),
    ),
    "filled by earlier labels": (
        attends,
        lambda x, y: x[:, 1:].logsumexp(-1).masked_fill(y[:, :-1] == -100, 0).sum(),
    ),
    "a later position": (lambda w, h: h[:, 1:].sum() * attends(w, h), shifted),
    "a product over positions": (lambda w, h: attends(w, (h.mT @ torch.ones(24, 24)).mT), shifted),
    "earlier labels": (
        attends,
        lambda x, y: F.cross_entropy(x[:, 1:].reshape(-1, 64), y[:, :-1].reshape(-1)),
    ),
    "labels moved to the right": (
        attends,
        lambda x, y: F.cross_entropy(x.view(-1, 64), F.pad(y, (1, -1), value=-100).view(-1)),
    ),
    "labels of padding": (attends, lambda x, y: F.cross_entropy(x.view(-1, 64), y.clamp(0).view(-1))),
    "another class ignored": (
        attends,
        lambda x, y: F.cross_entropy(x.view(-1, 64), y.clamp(0).view(-1), ignore_index=5),
    ),
    "a penalty on all logits": (attends, lambda x, y: shifted(x, y) + x.logsumexp(-1).square().mean()),
    "other rows' labels": (
        attends,
        lambda x, y: F.cross_entropy(x.transpose(0, 1).reshape(-1, 64), y.reshape(-1)),
    ),
}


@pytest.mark.parametrize("name", [*SOUND, *UNSOUND])
def test_the_proof_holds_exactly_where_nothing_at_padding_counts(name: str) -> None:
    """Beside the verdict, what it says: the loss with other tokens at the padding."""
    torch.manual_seed(0)
    model, batch = Model(*(SOUND | UNSOUND)[name]), {n: x.flip(0) for n, x in padded_batch(0).items()}
    batch["input_ids"] %= 64
    batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["labels"] % 64)
    captured = graph_of(model, batch, padded_right=True)
    assert captured.blind == (name in SOUND)
    ids = torch.where(batch["attention_mask"] == 0, batch["input_ids"] + 7, batch["input_ids"]) % 64
    changed = not torch.equal(model(**batch), model(**(batch | {"input_ids": ids})))
    assert changed == (name in UNSOUND)


def test_attention_over_labels_alone_refutes_the_proof() -> None:
    """Nothing is known of what is behind their end."""

    class Decoder(Model):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
            shifted_right = F.pad(labels.clamp(0), (1, -1))
            h = self.embed(shifted_right)
            return self.loss(self.head(self.embed(input_ids) + self.mix(self.qkv, h)), labels)

    batch = padded_batch(0)
    batch = {name: torch.where(x == -100, x, x % 64) for name, x in batch.items()}
    assert not graph_of(Decoder(attends, shifted), batch, padded_right=True).blind


@pytest.mark.slow_cases(r"(2\]|4[02])")
@pytest.mark.parametrize("more", [2, 40, 41, 42])
def test_what_trl_reads_of_a_program_needs_no_mask(more: int) -> None:
    """Log-probabilities and metrics, and gradients from any of a loss outside of the program, bit for bit;
    also where one position is left over beside parts of several."""
    trl = pytest.importorskip("megacompile.integrations.trl")
    torch.manual_seed(0)
    model = causal("llama").train()
    batch = {name: torch.cat([x, x[:, -1:].expand(-1, more)], 1) for name, x in padded_batch(0).items()}
    outputs, found = trl.TokenOutputs(("entropy", "is_top1", "mean_logits", "log_sum_sq_probs")), []
    for padded_right in (False, True):
        captured = graph_of(model, batch, padded_right=padded_right, outputs=outputs)
        assert captured.blind == padded_right
        results = forward(captured, model, batch)
        (scored,) = (x for x in results if x.requires_grad)
        cotangent = torch.randn(scored.shape, generator=torch.Generator().manual_seed(1))
        found.append([*results, *torch.autograd.grad(scored, list(model.parameters()), cotangent)])
    assert all(map(torch.equal, *found))
    assert not graph_of(model, batch, padded_right=True, outputs=lambda out, _: out.logits).blind


def test_what_counts_as_padding_at_the_right() -> None:
    batch = padded_batch(0)
    assert is_padded_right(batch) and is_padded_right(batch | {"attention_mask": batch["labels"] != -100})
    assert not is_padded_right(padded_batch(0, left=True))
    assert not is_padded_right(batch | {"labels": batch["input_ids"]}), "a label at padding"
    assert not is_padded_right(batch | {"attention_mask": batch["attention_mask"][:, None, None]})
    assert not is_padded_right(batch | {"token_type_ids": batch["input_ids"]})
    assert not is_padded_right({"input_ids": batch["input_ids"], "labels": batch["labels"]})


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_one_step_of_rows_padded_at_either_end_is_one_program() -> None:
    """Losses are those of eager PyTorch whatever the order in which kinds of padding come."""
    torch.manual_seed(0)
    model = causal("llama").train()
    eager = copy.deepcopy(model)
    program = megacompile.compile(
        model, "1GB", optimizer=torch.optim.AdamW(model.parameters(), lr=0.0), compute_dtype=torch.float32
    )
    right, left = padded_batch(0), padded_batch(0, left=True)
    for step in ([right], [left], [right, left], [right, right]):
        wanted = sum(eager(**batch, use_cache=False).loss.item() for batch in step) / len(step)
        assert float(program.train_step(step).loss) == pytest.approx(wanted, rel=1e-6)
    assert len(program._session.decided.programs) == 4  # of one and of two micro-batches
    program.close()
