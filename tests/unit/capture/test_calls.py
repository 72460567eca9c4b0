"""Calls that no graph can hold are refused by name, with the way out; others beside them train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import megacompile
from megacompile.capture import patches
from tests.support.reference import EagerTrainer, check_beside_eager

BATCH = {"x": torch.linspace(-1, 1, 32).view(4, 8)}
Forward = Callable[[Any, Tensor], Tensor]


class Given(nn.Module):
    """Layers and a forward of the test's own."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)
        self.recurrent = nn.LSTM(8, 4, batch_first=True)
        self.given = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.given(self, x).mean()


@pytest.fixture(autouse=True)
def checks_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch starts: torch.compile turns the checks of distributions off for the whole process."""
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)


def compiled(model: nn.Module) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)


@torch.library.custom_op("test_capture_calls::twice_", mutates_args=("x",))
def twice_(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("test_capture_calls::all_twice_", mutates_args=("x",))
def all_twice_(x: list[Tensor]) -> None:
    for each in x:
        each.mul_(2)


@torch.library.custom_op("test_capture_calls::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


LABELS, LENGTHS, COUNTS = torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])


@torch.library.custom_op("test_capture_calls::ctc", mutates_args=())
def ctc(x: Tensor, labels: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    return F.ctc_loss(x, labels, lengths, counts, reduction="none")


@torch.library.custom_op("test_capture_calls::ctc_backward", mutates_args=())
def ctc_backward(grad: Tensor, x: Tensor, labels: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    loss, alpha = torch.ops.aten._ctc_loss(x, labels, lengths, counts)
    return torch.ops.aten._ctc_loss_backward(grad, x, labels, lengths, counts, loss, alpha, 0)


ctc.register_fake(lambda x, *_: x.new_empty(x.shape[1]))
ctc_backward.register_fake(lambda grad, x, *_: torch.empty_like(x))
ctc.register_autograd(
    lambda ctx, grad: (ctc_backward(grad, *ctx.saved_tensors), None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def loss_of_labels(m: Any, x: Tensor) -> Tensor:
    """What the refusal of ctc_loss proposes; eager calls ctc_loss itself."""
    given = m.a(x)[:, None].log_softmax(-1), LABELS, LENGTHS, COUNTS
    return ctc(*given) if torch.compiler.is_compiling() else F.ctc_loss(*given, reduction="none")


def writes(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    twice_(x)
    return m.a(x)


def writes_into_a_list(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    all_twice_([x])
    return m.a(x)


def writes_what_is_trained(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    twice_(h)
    return h


def penalty(m: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(m.a(x).tanh().sum(), x, create_graph=True)
    return grad.square()


def backward(m: Any, x: Tensor) -> Tensor:
    loss = m.a(x).mean()
    loss.backward(retain_graph=True)
    return loss


def packed(m: Any, x: Tensor) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(m.a(x)[None], torch.tensor([3]), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(m.recurrent(rows)[0])[0]


def cond(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda h: 2 * h, lambda h: h * h, (m.a(x),))


def loop(m: Any, x: Tensor) -> Tensor:
    (grown,) = while_loop(lambda h: h.sum() < 10, lambda h: (h + 1,), (x.clone(),))
    return m.a(grown)


def scanned(m: Any, x: Tensor) -> Tensor:
    return scan(lambda c, t: ((c + t).clone(), (c * t).clone()), torch.zeros(8), m.a(x))[1]


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def flex(m: Any, x: Tensor) -> Tensor:
    q = m.a(x)[None, None]
    return flex_attention(q, q, q, block_mask=create_block_mask(causal, None, None, 4, 4, x.device))


def masked(m: Any, x: Tensor) -> Tensor:
    """What the refusal of flex attention proposes."""
    q, mask = m.a(x)[None, None], create_mask(causal, None, None, 4, 4, x.device)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def writes_in_vmap(m: Any, x: Tensor) -> Tensor:
    def row(values: Tensor) -> Tensor:
        out = torch.zeros_like(values)
        out[2] = values[1]
        return out + values

    return torch.vmap(row)(m.a(x).detach() + x) * m.a(x)


REFUSED: dict[str, tuple[Forward, str]] = {
    "an operator that writes into a list": (writes_into_a_list, r"calls test_cap.*mutates_args=\(\)"),
    "an operator that writes what is trained": (writes_what_is_trained, r"no autograd formula"),
    "an operator without a fake kernel": (
        lambda m, x: twice(x) * m.a(x),
        r"calls test_capture_calls::twice, which has no fake kernel.*register_fake\.$",
    ),
    "cond": (cond, r"calls torch's cond, .*torch\.where"),
    "while_loop": (loop, "calls torch's while_loop, .*loops in Python"),
    "scan": (scanned, "calls torch's scan, .*loops in Python"),
    "autograd.grad": (
        penalty,
        r"^The forward computes gradients itself, by torch\.autograd\.grad.*a formula",
    ),
    "backward": (backward, r"^The forward computes gradients itself, by .*backward\(\)"),
    "func.grad": (
        lambda m, x: torch.func.grad(lambda t: m.a(t).tanh().sum())(x).square(),
        r"^The forward computes gradients itself, by torch\.func\.grad",
    ),
    "func.jacrev": (
        lambda m, x: torch.func.jacrev(m.a)(x[0]),
        "^The forward computes gradients itself, by .*jacrev",
    ),
    "func.jacfwd": (
        lambda m, x: torch.func.jacfwd(m.a)(x[0]),
        "^The forward computes gradients itself, by .*jacfwd",
    ),
    "packed sequences": (packed, r"pack_padded_sequence.*mask the loss"),
    "running statistics of InstanceNorm": (
        lambda m, x: m.norm(m.a(x)[None]).square(),
        "^norm changes its running statistics: .*track_running_stats=False",
    ),
    "gaussian_nll_loss": (
        lambda m, x: F.gaussian_nll_loss(m.a(x), x, m.b(x).exp()),
        r"gaussian_nll_loss, which looks at the values of var: write it out",
    ),
    "flex attention": (
        flex,
        r"^The forward of Given calls flex attention at test_calls\.py:\d+ \(return flex.*attn_mask= what",
    ),
    "flex attention of frozen values": (
        lambda m, x: flex_attention(*[x[None, None]] * 3)[0, 0] * m.a(x),
        "^The model calls flex attention, .*attn_mask= what",
    ),
    "ctc_loss": (
        lambda m, x: F.ctc_loss(m.a(x).log_softmax(-1), torch.tensor([1, 2]), (4,), (2,)),
        r"ctc_loss, .*custom_op",
    ),
    "a draw of a distribution": (
        lambda m, x: distributions.Poisson(m.a(x).exp()).sample() * m.a(x),
        r"^The model calls aten\.poisson.*into the batch",
    ),
}


@pytest.mark.slow_cases(r"(scan|cond|while|flex \w+ of)")
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_refused_by_name(name: str) -> None:
    forward, words = REFUSED[name]
    model = Given(forward)
    with pytest.raises(megacompile.CaptureError, match=words):
        compiled(model).train_step(BATCH)


TRAINED: dict[str, Forward] = {
    "rfft": lambda m, x: torch.fft.rfft(m.a(x)).abs(),
    "irfft": lambda m, x: torch.fft.irfft(torch.complex(m.a(x), m.b(x))).square(),
    "rfft2": lambda m, x: torch.fft.rfft2(m.a(x)).abs(),
    "stft": lambda m, x: torch.stft(m.a(x), 8, 4, window=torch.hann_window(8), return_complex=True).abs(),
    "log_prob": lambda m, x: distributions.Normal(m.a(x), m.b(x).exp()).log_prob(x),
    "rsample": lambda m, x: distributions.Normal(m.a(x), m.b(x).exp()).rsample(),
    "kl_divergence": lambda m, x: distributions.kl_divergence(
        distributions.Normal(m.a(x), m.b(x).exp()), distributions.Normal(0.0, 1.0)
    ),
    "an operator around ctc_loss": loss_of_labels,
    "func.jvp": lambda m, x: torch.func.jvp(lambda t: m.a(t).tanh(), (x,), (x,))[1].square(),
    "the mask of flex attention": masked,
    "writes within vmap": writes_in_vmap,
    "an operator that writes": writes,
    "InstanceNorm's own statistics": lambda m, x: m.norm.eval()(m.a(x)[None]).square(),
}


@pytest.mark.slow_cases(r"(func\.jvp|rfft)")
@pytest.mark.parametrize("name", TRAINED)
def test_what_stands_beside_them_trains_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    model = Given(TRAINED[name])
    eager = copy.deepcopy(model)
    trainer = EagerTrainer(eager, torch.optim.AdamW(eager.parameters(), lr=1e-2, eps=1e-3))
    check_beside_eager(compiled(model), trainer, [BATCH] * 3, rel=1e-5)


def test_distributions_check_values_everywhere_else() -> None:
    def wrong() -> None:
        with pytest.raises(ValueError, match="scale"):
            distributions.Normal(0.0, -1.0)

    with patches.replaced(patches.REFUSED):
        distributions.Normal(0.0, -1.0)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(wrong).result()
    wrong()
