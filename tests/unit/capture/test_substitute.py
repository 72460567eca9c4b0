"""Our operators stand for what a model itself computes: recurrent layers, attention with hidden rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import megacompile
from megacompile.capture.patches import our_operators
from megacompile.errors import CaptureError
from megacompile.kernels.sdpa import attention
from tests.support.zoo import causal, padded_batch

RNG = torch.tensor([3, 0])
CELLS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm, two layers, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "lstm, no bias, projected": (nn.LSTM, {"bias": False, "proj_size": 4}),
    "lstm, bias, projected, both ways": (nn.LSTM, {"proj_size": 4, "bidirectional": True, "num_layers": 2}),
    "gru, two layers, both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "gru, time first": (nn.GRU, {"batch_first": False}),
    "tanh": (nn.RNN, {"num_layers": 2}),
    "relu, no bias": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
}


@pytest.mark.parametrize("name", sorted(CELLS))
def test_recurrent_layers_equal_torchs(name: str) -> None:
    cell, options = CELLS[name]
    torch.manual_seed(0)
    module = cell(6, 8, **{"batch_first": True, **options}).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    results = []
    for ours in (False, True):
        module.zero_grad()
        with our_operators(module, RNG) if ours else torch.enable_grad():
            out, last = module(x)
        states = last if isinstance(last, tuple) else (last,)
        sum((s * s).sum() for s in (out, *states)).backward()
        results.append([out, *states, *(p.grad for p in module.parameters())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_packed_sequences_are_refused() -> None:
    module = nn.LSTM(6, 8)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 6), torch.tensor([5, 3]))
    with our_operators(module, RNG), pytest.raises(CaptureError, match="pack_padded_sequence"):
        module(packed)
    with our_operators(nn.GRU(6, 8), RNG), pytest.raises(CaptureError, match="pack_padded_sequence"):
        nn.GRU(6, 8)(packed)


def test_counts_of_values_are_torchs_and_none_is_left_out() -> None:
    """As transformers before 5.23 counts the tokens of each expert, to balance them."""
    values = torch.tensor([3, 0, 3, 1], dtype=torch.int32)
    with our_operators(nn.Identity(), RNG):
        ours = torch.bincount(values, minlength=5)
        longer = torch.bincount(values, weights=torch.ones(4))  # torch's own
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            torch.bincount(values, minlength=3)
    assert torch.equal(ours, torch.bincount(values, minlength=5))
    assert torch.equal(longer, torch.bincount(values, weights=torch.ones(4)))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None) -> Tensor:
    out, _ = attention(q, k, v, bias, sinks, None, 0.35, False, 0, 0.0, 0.0, 0, False)
    return out


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("hide", [torch.finfo(torch.float32).min, -1e9, -torch.inf])
def test_a_query_whose_keys_are_all_masked_gives_what_torch_gives(hide: float, with_sinks: bool) -> None:
    """Zeros and no gradient where keys are hidden by -inf; a mean of all where they are lowered alike."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    allowed[:2] = False
    bias = torch.zeros(1, 1, 5, 5).masked_fill(~allowed, hide)
    sinks = torch.zeros(2) if with_sinks else None
    out = attend(q, k, v, bias, sinks)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))

    rest = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    if with_sinks:
        scores = torch.cat([rest[0] @ rest[1].mT * 0.35 + bias, torch.zeros(1, 2, 5, 1)], -1)
        wanted = scores.softmax(-1)[..., :-1] @ rest[2]
    elif hide == -torch.inf:
        wanted = F.scaled_dot_product_attention(*rest, attn_mask=bias, scale=0.35)
    else:  # written out: for such a query torch's own gradient is too large by the number of keys
        wanted = (rest[0] @ rest[1].mT * 0.35 + bias).softmax(-1) @ rest[2]
    torch.testing.assert_close(out, wanted)
    assert bool(out[:, :, :2].any()) == (hide != -torch.inf and not with_sinks)
    for mine, theirs in zip(grads, torch.autograd.grad(wanted.square().sum(), rest), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_keys_hidden_by_a_boolean_mask_are_not_seen_at_all() -> None:
    torch.manual_seed(0)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    allowed[:2] = False
    found = []
    for ours in (False, True):
        q, k, v = (torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(s)) for s in range(3))
        q.requires_grad_()
        with our_operators(nn.Identity(), RNG) if ours else torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), q)))
    assert not found[1][0][:, :, :2].any()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("model_type", ["deepseek_v32", "inkling2_text", "gpt_oss", "granite_swa", "llama4"])
def test_attention_with_more_than_queries_keys_and_values(model_type: str) -> None:
    """Sparse indices, sinks per query or per head, chunks: as the model's own attention computes them."""
    torch.manual_seed(0)
    model = causal(model_type).eval()
    batch = padded_batch(0)
    model.set_attn_implementation("eager")
    wanted = model(**batch, use_cache=False).loss
    with our_operators(model, RNG):
        found = model(**batch, use_cache=False).loss
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("doge", {"keep_window_size": 8}),
        ("deepseek_v32", {}),
        ("gemma2", {}),
        ("falcon", {}),
        ("qwen3_next", {}),
    ],
)
def test_padding_on_the_left_sees_what_it_sees_in_the_attention_that_a_model_comes_with(
    model_type: str, changes: dict[str, Any]
) -> None:
    """The last row of padding predicts a token. A boolean mask hides all keys from it; Gemma 2 and Doge, with
    additive masks, lower all alike.
    """
    torch.manual_seed(0)
    model = causal(model_type, **changes).eval()
    batch, found = padded_batch(0, left=True), []
    for ours in (False, True):
        model.zero_grad()
        with our_operators(model, RNG) if ours else torch.enable_grad():
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32])
@pytest.mark.parametrize(
    ("lead", "mask"),
    [((3,), (5, 5)), ((3,), (3, 1, 5)), ((2, 3), (5, 5)), ((2, 3), (3, 5, 5)), ((2, 3), (2, 1, 5, 5)),
     ((4, 2, 3), (5, 5)), ((4, 2, 3), (2, 1, 5, 5)), ((4, 2, 3), (4, 1, 3, 1, 5))],
)  # fmt: skip
def test_attention_of_any_number_of_dimensions_is_torch_s(
    lead: tuple[int, ...], mask: tuple[int, ...], masked: torch.dtype | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*lead, 5, 8, generator=generator) for _ in range(3))
    given = torch.randn(mask, generator=generator) if masked else None
    if given is not None and masked == torch.bool:
        given = given > -1
        given[..., 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, given)
    with our_operators(nn.Identity(), RNG):
        found = F.scaled_dot_product_attention(q, k, v, given)
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SwitchTransformers", "LongT5"])
def test_models_that_make_their_own_mask_make_it_in_a_capture_too(name: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 32, "d_kv": 8, "num_heads": 4, "num_layers": 1}
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_decoder_layers=1, dropout_rate=0.0, decoder_start_token_id=0, num_experts=2
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    ids = torch.randint(1, 64, (2, 16))
    expected = float(model(input_ids=ids, labels=ids).loss)
    adamw = torch.optim.AdamW(model.parameters())
    program = megacompile.compile(model, "1GB", optimizer=adamw, compute_dtype=torch.float32)
    assert float(program.train_step({"input_ids": ids, "labels": ids}).loss) == pytest.approx(expected)
    program.close()
