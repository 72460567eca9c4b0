"""Every operator on every kind of input: shapes, layouts, values. One table of operators, one of kinds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import test_clamped_glu
import test_cross_entropy
import test_gated_delta_rule
import test_glu
import test_layer_norm
import test_mamba2_chunk_scan
import test_qk_norm_rope
import test_rms_norm
import test_rope
import torch
import torch.nn.functional as F
from harness import compare, randn, shared, strided
from test_attention import Flash
from test_attention import eager as written_out
from torch import Tensor

from megacompile.kernels.adamw import Constants, adamw_, adamw_reference
from megacompile.kernels.add_rms_norm import add_rms_norm
from megacompile.kernels.clamped_glu import clamped_glu
from megacompile.kernels.dropout import dropout, dropout_reference
from megacompile.kernels.gated_delta import gated_delta_rule
from megacompile.kernels.glu import glu
from megacompile.kernels.layer_norm import layer_norm
from megacompile.kernels.linear_cross_entropy import linear_cross_entropy
from megacompile.kernels.mamba2 import mamba2_chunk_scan
from megacompile.kernels.qk_norm_rope import qk_norm_rope
from megacompile.kernels.rms_norm import rms_norm
from megacompile.kernels.rope import rope

RNG = torch.tensor([5, 6])
ROWS, COLUMNS = 7, 41


@dataclass(frozen=True)
class Kind:
    """Sizes, and what is done to the first operand."""

    rows: int = ROWS
    columns: int = COLUMNS
    scale: float = 1.0
    strided: bool = False
    shared: bool = False


KINDS = {
    "one row": Kind(rows=1, columns=4096),
    "odd": Kind(rows=199, columns=123),
    "empty": Kind(rows=0),
    "strided": Kind(strided=True),
    "shared": Kind(shared=True),
    "large": Kind(scale=3e4),
    "zeros": Kind(scale=0.0),
    "denormal": Kind(scale=1e-40),
}


@dataclass(frozen=True)
class Case:
    """A differentiable operator, its eager form, and inputs for a first operand of [rows, columns]."""

    ours: Callable[..., Any]
    eager: Callable[..., Any]
    more: Callable[[int, int], tuple[Tensor, ...]] = lambda rows, columns: ()
    narrow: bool = False
    """Whether the operator is for heads, 256 columns at most."""


def plain_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return test_rms_norm.eager(total, weight, 0.0, True), total


def labels(rows: int, classes: int) -> Tensor:
    return torch.arange(rows) * 7 % classes


def table(rows: int, columns: int) -> tuple[Tensor, ...]:
    cos, sin = test_rope.tables(rows, columns // 2 * 2)
    return cos[0, 0], sin[0, 0]


def heads(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda v, q, k: call(*(x[None, None] for x in (v, q, k)))[0, 0]


def one_head(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, cos, sin: call(*(t[None, None] if t is not w else t for t in (x, w, cos, sin)))[0, 0]


def one_rule(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of tokens' values, queries and keys, gates and strengths."""
    return lambda v, q, k, gates: call(
        *(x[None, :, None] for x in (q, k, v)), *(x[None] for x in gates.split(1, 1))
    )[0, :, 0]


def one_scan(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of one head's tokens, its time steps, what they write by and are read by, its decay and skip."""
    return lambda x, dt, B, C, A, D: call(
        x[None, :, None], dt[None], A, *(t[None, :, None] for t in (B, C)), D
    )[0, :, 0]


CASES = {
    "rms_norm": Case(rms_norm, lambda x, w: test_rms_norm.eager(x, w, 0, True), lambda r, c: (randn(c),)),
    "add_rms_norm": Case(add_rms_norm, plain_add_norm, lambda r, c: (randn(r, c), randn(c))),
    "layer_norm": Case(layer_norm, test_layer_norm.eager, lambda r, c: (randn(c), randn(c))),
    "glu": Case(glu, lambda g, u: test_glu.EAGER["silu"](g) * u, lambda r, c: (randn(r, c),)),
    "clamped_glu": Case(
        lambda x: clamped_glu(torch.cat((x, x), -1)),
        lambda x: test_clamped_glu.eager(torch.cat((x, x), -1)),
    ),
    "clamped_glu itself": Case(
        lambda x: clamped_glu(x[:, : x.shape[1] // 2 * 2]),
        lambda x: test_clamped_glu.eager(x[:, : x.shape[1] // 2 * 2]),
    ),
    "rope": Case(rope, test_rope.eager, table),
    "qk_norm_rope": Case(
        one_head(qk_norm_rope), one_head(test_qk_norm_rope.eager), lambda r, c: (randn(c), *table(r, c))
    ),
    "gated_delta_rule": Case(
        one_rule(gated_delta_rule),
        one_rule(test_gated_delta_rule.eager),
        lambda r, c: (randn(r, 24), randn(r, 24), torch.tensor([-0.1, 0.5]).repeat(r, 1).requires_grad_()),
        narrow=True,
    ),
    "mamba2_chunk_scan": Case(
        one_scan(mamba2_chunk_scan),
        one_scan(test_mamba2_chunk_scan.eager),
        lambda r, c: (
            *(torch.rand(r, 1).requires_grad_(), randn(r, 24), randn(r, 24)),
            *(torch.tensor([x]).requires_grad_() for x in (-0.2, 0.7)),
        ),
        narrow=True,
    ),
    "linear_cross_entropy": Case(
        lambda h, w: linear_cross_entropy(h, w, labels(len(h), len(w))),
        lambda h, w: test_cross_entropy.eager(F.linear(h, w), labels(len(h), len(w))),
        lambda r, c: (randn(300, c, scale=c**-0.5),),
    ),
    "attention": Case(
        heads(lambda v, q, k: Flash.apply(q, k, v, None, {"scale": 0.2})),
        heads(lambda v, q, k: written_out(q, k, v, None, 0.2)),
        lambda r, c: (randn(r, c), randn(r, c)),
        narrow=True,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_differentiable(name: str, kind: str) -> None:
    torch.manual_seed(1)
    case, how = CASES[name], KINDS[kind]
    rows, columns = how.rows, min(how.columns, COLUMNS) if case.narrow else how.columns
    first = randn(rows, columns, scale=how.scale)
    inputs = [first, *case.more(rows, columns)]
    outs = case.eager(*inputs)
    outs = (outs,) if isinstance(outs, Tensor) else outs
    grads = [torch.randn(o.shape) * max(1.0, how.scale) for o in outs]
    if how.scale < 1.0:
        grads = [torch.cat((g[:1] * how.scale, g[1:])) if g.dim() else g for g in grads]
    if how.strided:
        inputs, grads = [strided(x) for x in inputs], [strided(x) for x in grads]
    if how.shared:
        inputs, grads = [shared(x) for x in inputs], [shared(x) for x in grads]
    # Keys that are all alike: the gradient of a score is exactly zero, a difference of terms around one.
    floor = 1.0 if name == "attention" and (rows == 1 or how.shared) else 0.0
    compare(case.ours, case.eager, inputs, torch.float32, grads=grads, floor=floor)


def _state(x: Tensor) -> list[Tensor]:
    return [x.float().clone(), torch.zeros(x.numel()), torch.zeros(x.numel())]


def _adamw(x: Tensor) -> list[Tensor]:
    weight, *moments = _state(x)
    adamw_(weight, None, *moments, x, 1e-2, 0.9, 0.999, 1e-8, 0.1, 3, None)
    return [weight, *moments]


def _adamw_reference(x: Tensor) -> list[Tensor]:
    weight, first, second = _state(x)
    adamw_reference((weight, None, first, second), x, Constants.of(1e-2, 0.9, 0.999, 1e-8, 0.1, 3), None)
    return [weight, first, second]


FLAT: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "dropout": (
        lambda x: dropout(x, RNG, 1, 0.3),
        lambda x: dropout_reference(x, RNG, 1, 0.3),
    ),
    "adamw_": (_adamw, _adamw_reference),
}


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"strided", "shared", "one row"}))
@pytest.mark.parametrize("name", FLAT)
def test_flat(name: str, kind: str) -> None:
    """Those without a derivative are what their references are, to the last places of a float32."""
    torch.manual_seed(1)
    how = KINDS[kind]
    x = torch.randn(how.rows * how.columns) * how.scale
    results = [run(x.clone()) for run in FLAT[name]]
    ours, plain = ([r] if isinstance(r, Tensor) else list(r) for r in results)
    for one, other in zip(ours, plain, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        size = other.double().abs().nan_to_num(0.0, 0.0, 0.0).max().item() if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7 * size, equal_nan=True)
