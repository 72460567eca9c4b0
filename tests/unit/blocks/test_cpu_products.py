"""bf16 products of a CPU that has none: each kind against float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from megacompile.blocks import cpu_products
from megacompile.blocks.cpu_products import Float32Products, float32_products, has_bf16_products
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.kernels.linear_cross_entropy import linear_cross_entropy

aten = torch.ops.aten
FLASH, FLASH_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@pytest.fixture
def no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "has_bf16_products", lambda: False)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def cases() -> dict[str, Case]:
    """Calls by the name of their kind; sums of more than one element, in layouts as backwards have them."""
    torch.manual_seed(0)
    ends, factors = torch.tensor([3, 3, 9, 16], dtype=torch.int32), {"beta": 0.5, "alpha": 2}
    q, k, v = (draw(2, 16, 4, 8).transpose(1, 2) for _ in range(3))
    out, lse = FLASH(q, k, v, 0.0, True)
    convolution = [1, 1], [0, 0], [1, 1], False, [0, 0], 2
    x, kernel = draw(2, 4, 9, 9), draw(6, 2, 3, 3)
    return {
        "mm": (aten.mm, (draw(33, 17).t(), draw(9, 33).t()), {}),
        "mm.out": (aten.mm, (draw(17, 33), draw(33, 9)), {"out": draw(17, 9)}),
        "addmm": (aten.addmm, (draw(9), draw(17, 33), draw(33, 9)), factors),
        "addmm_": (aten.addmm_, (draw(17, 9), draw(17, 33), draw(33, 9)), {}),
        "bmm": (aten.bmm, (draw(5, 7, 8), draw(5, 8, 9)), {}),
        "baddbmm": (aten.baddbmm, (draw(1, 9), draw(5, 7, 8), draw(5, 8, 9)), factors),
        "matmul": (torch.matmul, (draw(2, 3, 4, 5), draw(2, 3, 5, 4)), {}),
        "grouped rows": (aten._grouped_mm, (draw(16, 24), draw(4, 24, 32), ends), {}),
        "grouped sums": (aten._grouped_mm, (draw(24, 16), draw(16, 32), ends), {}),
        "grouped columns": (aten._grouped_mm, (draw(4, 24, 8), draw(8, 16), ends), {}),
        "batched groups": (aten._grouped_mm, (draw(4, 16, 24), draw(4, 24, 32)), {}),
        "attention": (FLASH, (q, k, v, 0.0, True), {}),
        "masked attention": (FLASH, (q, k, v), {"attn_mask": draw(2, 4, 16, 16), "scale": 0.3}),
        "attention's backward": (FLASH_BACKWARD, (out, q, k, v, out, lse, 0.0, True), {}),
        "convolution": (aten.convolution, (x, kernel, draw(6), *convolution), {}),
        "its backward": (
            aten.convolution_backward,
            (draw(2, 6, 7, 7), x, kernel, [6], *convolution, [True, True, True]),
            {},
        ),
    }


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return all tensors of nested tuples changed, the rest as it is."""
    if isinstance(value, tuple):
        return tuple(changed(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def wide(value: Any) -> Any:
    """Copies of tensors, those in bf16 as float32."""
    return changed(value, lambda t: t.float() if t.dtype == torch.bfloat16 else t.clone())


@pytest.mark.parametrize("piece", [cpu_products._PIECE, 40], ids=["whole", "in pieces"])
@pytest.mark.parametrize("kind", cases())
def test_products_are_rounded_once(
    kind: str, piece: int, monkeypatch: pytest.MonkeyPatch, no_products: None
) -> None:
    monkeypatch.setattr(cpu_products, "_PIECE", piece)
    func, args, options = cases()[kind]
    expected = func(*wide(args), **{name: wide(value) for name, value in options.items()})
    plain = func(*changed(args, Tensor.clone), **options)
    with float32_products():
        found = func(*args, **options)
    for a, b, c in zip(
        *((x if isinstance(x, tuple) else (x,)) for x in (found, expected, plain)), strict=True
    ):
        assert (a is None) == (b is None) == (c is None)
        if a is not None:
            assert (a.dtype, a.stride()) == (c.dtype, c.stride())
            # sums in pieces may be taken in another order, which the one rounding shows or hides
            torch.testing.assert_close(a, b.to(a.dtype), rtol=0 if piece > 40 else 2**-7, atol=1e-6)


def test_operators_with_bodies_in_python_are_seen_through(
    monkeypatch: pytest.MonkeyPatch, no_products: None
) -> None:
    hidden, weight, labels = draw(16, 32), draw(48, 32), torch.randint(0, 48, (16,))
    products, real = list[torch.Size](), cpu_products._product

    def product(a: Tensor, *args: Any) -> Tensor:
        products.append(a.shape)
        return real(a, *args)

    monkeypatch.setattr(cpu_products, "_product", product)
    hidden.requires_grad_()
    with float32_products():
        linear_cross_entropy(hidden, weight, labels).sum().backward()
    assert products == [(16, 32), (16, 32), (48, 16)]  # the logits twice, the weight's gradient


def test_copies_are_scratch_to_the_meter(no_products: None) -> None:
    """What a step is planned to hold is what it holds on a CPU with such products."""
    a, b = draw(64, 32), draw(32, 48)
    peaks = []
    for context in (nullcontext(), float32_products()):
        with context, StorageMeter() as meter:
            kept = torch.mm(a, b)
        peaks.append((meter.peak, meter.live))
        del kept
    assert peaks[0] == peaks[1] == (64 * 48 * 2,) * 2


def test_nothing_is_entered_where_the_cpu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = isinstance(float32_products(), Float32Products)
    assert entered == (not has_bf16_products())
    monkeypatch.setattr(cpu_products, "has_bf16_products", lambda: True)
    assert not isinstance(float32_products(), Float32Products)


def test_other_dtypes_are_left_alone(no_products: None) -> None:
    a, b = torch.randn(5, 6), torch.randn(6, 7)
    with float32_products():
        assert torch.equal(a @ b, torch.mm(a, b))
        assert torch.equal(a.double() @ b.double(), torch.mm(a.double(), b.double()))
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(a.bfloat16(), b)
