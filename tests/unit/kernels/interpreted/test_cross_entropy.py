import pytest
import torch
import torch.nn.functional as F
from harness import DTYPES, compare, gradcheck, randn

from megacompile.kernels.cross_entropy_tiles import LossTerms, accumulate, finish, gradient_, new_state
from megacompile.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_with_gradients,
    tile_width,
)

TERMS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 5.0},
    "all": {"label_smoothing": 0.1, "softcap": 5.0, "ignore_index": 3},
}


def eager(logits, labels, ignore_index=-100, label_smoothing=0.0, softcap=0.0):
    z = logits.float() if logits.dtype != torch.float64 else logits
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return F.cross_entropy(
        z, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )


class Whole(torch.autograd.Function):
    """The loss of logits that are one tile, of which the backward overwrites a copy."""

    @staticmethod
    def forward(ctx, logits, labels, terms):
        state = new_state(logits, logits.shape[0])
        accumulate(state, logits, labels, 0, terms)
        loss, stats = finish(state, labels, terms)
        ctx.save_for_backward(logits, labels, stats)
        ctx.terms = terms
        return loss

    @staticmethod
    def backward(ctx, grad):
        logits, labels, stats = ctx.saved_tensors
        out = logits.clone(memory_format=torch.contiguous_format)
        gradient_(out, labels, stats, grad.contiguous(), 0, ctx.terms)
        return out, None, None


def cross_entropy(logits, labels, **terms):
    return Whole.apply(logits, labels, LossTerms(logits.shape[1], **terms))


def some_labels(rows, vocabulary, ignore_index=-100):
    labels = torch.randint(0, vocabulary, (rows,))
    labels[::7] = ignore_index
    labels[-1:] = vocabulary - 1
    return labels


@pytest.mark.slow_cases(r"shape[02]-\S*dtype|shape1-dtype[12]-(plain|softcap|smoothing)")
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 9001), (37, 123), (19, 41)])
def test_logits(shape, dtype, terms):
    torch.manual_seed(1)
    labels = some_labels(*shape, TERMS[terms].get("ignore_index", -100))
    compare(
        lambda x: cross_entropy(x, labels, **TERMS[terms]),
        lambda x: eager(x, labels, **TERMS[terms]),
        (randn(*shape, scale=4.0),),
        dtype,
    )


def test_no_logits():
    labels = some_labels(9, 41)
    empty = randn(0, 41)
    cross_entropy(empty, labels[:0]).sum().backward()
    assert empty.grad.shape == (0, 41)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_extreme(dtype):
    """Logits of 60000, equal rows, tokens that are ruled out by -inf (whole blocks of them)."""
    x = torch.randn(6, 5000)
    x[0] *= 20000
    x[1] = -60000.0
    x[2] = 0.0
    x[3, 5:] = float("-inf")
    x[4, :4200] = float("-inf")
    labels = torch.tensor([int(x[0].argmax()), 7, 4999, 4, 4300, -100])
    compare(
        lambda x: cross_entropy(x, labels),
        lambda x: eager(x, labels),
        (x.clamp(-65000, 65000).where(x.isfinite(), x).requires_grad_(),),
        dtype,
    )


def test_unknown_label_is_not_silent():
    loss = cross_entropy(torch.randn(3, 5), torch.tensor([5, -1, 2]))
    assert loss.isnan().tolist() == [True, True, False]


@pytest.mark.slow_cases(r"(plain|softcap|smoothing)")
@pytest.mark.parametrize("terms", TERMS)
def test_logits_gradcheck(terms):
    labels = torch.tensor([0, 3, -100, 4])
    if terms == "all":
        labels[2] = 2
    gradcheck(lambda x: cross_entropy(x, labels, **TERMS[terms]), randn(4, 5))


@pytest.mark.slow_cases(r"(dtype\d-plain|dtype0-all-F|dtype[12]-all-T)")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("terms", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype, terms, bias):
    """Three tiles, the last one ragged."""
    torch.manual_seed(1)
    tokens, width, vocabulary = 23, 41, 577
    labels = some_labels(tokens, vocabulary, TERMS[terms].get("ignore_index", -100))
    inputs = [randn(tokens, width), randn(vocabulary, width, scale=0.3)]
    inputs += [randn(vocabulary)] if bias else []
    compare(
        lambda h, w, b=None: linear_cross_entropy(h, w, labels, b, workspace=1, **TERMS[terms]),
        lambda h, w, b=None: eager(F.linear(h, w, b), labels, **TERMS[terms]),
        inputs,
        dtype,
    )


def test_linear_does_not_depend_on_the_tile_in_value():
    torch.manual_seed(1)
    hidden, weight, labels = randn(17, 8), randn(1024, 8), some_labels(17, 1024)
    whole = linear_cross_entropy(hidden, weight, labels)
    for workspace in (1, 17 * 4 * 512):
        part = linear_cross_entropy(hidden, weight, labels, workspace=workspace)
        torch.testing.assert_close(part, whole, rtol=1e-6, atol=1e-6)


class WithGradients(torch.autograd.Function):
    """A weighted sum of losses whose gradients are made with it."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, counts, terms):
        loss, *made = linear_cross_entropy_with_gradients(
            hidden, weight, labels, counts, bias, **terms, workspace=1
        )
        ctx.save_for_backward(*made)
        return (loss @ counts).reshape(1)

    @staticmethod
    def backward(ctx, grad):
        dhidden, dweight, dbias = ctx.saved_tensors
        return grad * dhidden, grad * dweight, grad * dbias if len(dbias) else None, None, None, None


@pytest.mark.slow_cases(r"(dtype\d-plain|dtype0-all-F|dtype[12]-all-T)")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("terms", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_with_gradients(dtype, terms, bias):
    """Two pieces of tokens, the last one ragged, of losses that count for more or less."""
    torch.manual_seed(1)
    tokens, width, vocabulary = 277, 41, 67
    labels, counts = (
        some_labels(tokens, vocabulary, TERMS[terms].get("ignore_index", -100)),
        torch.rand(tokens),
    )
    inputs = [randn(tokens, width), randn(vocabulary, width, scale=0.3)]
    inputs += [randn(vocabulary)] if bias else []
    compare(
        lambda h, w, b=None: WithGradients.apply(h, w, b, labels, counts, TERMS[terms]),
        lambda h, w, b=None: eager(F.linear(h, w, b), labels, **TERMS[terms]).mul(counts).sum().reshape(1),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("tokens", [0, 9])
def test_gradients_are_those_of_the_backward(tokens):
    """Of one piece, bit for bit: the same products."""
    hidden, weight, labels = randn(tokens, 8), randn(41, 8), some_labels(tokens, 41)
    loss = linear_cross_entropy(hidden, weight, labels)
    counts = torch.rand(tokens)
    expected = torch.autograd.grad(loss @ counts, (hidden, weight))
    found, *made, dbias = linear_cross_entropy_with_gradients(hidden, weight, labels, counts)
    assert torch.equal(found, loss) and not len(dbias)
    assert all(map(torch.equal, made, expected))


def test_linear_gradcheck():
    labels = torch.tensor([0, 599, -100])
    function = lambda h, w, b: linear_cross_entropy(h, w, labels, b, softcap=3.0, workspace=1)  # noqa: E731
    inputs = randn(3, 2), randn(600, 2), randn(600)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(function, doubles, fast_mode=True)


def test_tile_width():
    assert tile_width(4096, 128256, 2, 64 << 20) == 8192
    assert tile_width(4096, 128256, 2, (64 << 20) - 1) == 7936
    assert tile_width(4096, 128256, 2, 1) == 256
    assert tile_width(4096, 100, 2, 1) == 100
    assert tile_width(0, 100, 2, 1 << 20) == 100
