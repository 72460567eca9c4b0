"""Our operators take tensors of any layout: permuted, strided, expanded, overlapping, of no elements.

Each tensor is a view into memory that is NaN everywhere else. What comes out of an operator is what comes
out of it for contiguous clones, or of torch's public function; its results lie as its fake says; and what
stood in the memory of arguments that are not written still stands there.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import megacompile
from megacompile.capture import replacements
from megacompile.errors import CaptureError
from megacompile.kernels import document_bounds, query_chunks, torch_sdpa
from tests.unit.kernels.test_operators import OPERATORS, _streaming, case

OURS = torch.ops.megacompile
RNG = torch.tensor([3, 0])
CASES = OPERATORS | {"dropout": case("dropout", (3, 5), rest=(RNG, 1, 0.5))}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}


class Laid(NamedTuple):
    """A tensor, and the memory that it is a view into as it was."""

    view: Tensor
    memory: Tensor

    @property
    def whole(self) -> Tensor:
        """All of its memory as it is now."""
        return self.view.as_strided(self.memory.shape, (1,), 0)

    def stands(self) -> bool:
        return bool(((self.whole == self.memory) | (self.memory != self.memory)).all())


def lay(draw: Any, x: Tensor, *, dense: bool = False) -> Laid:
    """Values like those of ``x`` in a layout that is drawn; ``dense``: contiguous, somewhere in memory."""
    order = list(range(x.dim())) if dense else draw(st.permutations(range(x.dim())))
    strides, step = [0] * x.dim(), 1
    for dim in reversed(order):
        gap = 1 if dense else draw(st.sampled_from((0, 1, 1, 1, 2)))  # shared, side by side, or apart
        strides[dim], step = gap * step, max(step, gap * step * x.shape[dim])
    if not dense and x.dim() > 1 and strides[-1] == 1 and draw(st.integers(0, 3)) == 0:
        strides[-2] = 1  # windows that overlap
    offset = draw(st.integers(0, 9))
    reach = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) if x.numel() else 0
    whole = torch.full((offset + reach + 11,), torch.nan if x.is_floating_point() else -(1 << 30)).to(x.dtype)
    view = whole.as_strided(x.shape, strides, offset)
    places = torch.arange(len(whole)).as_strided(x.shape, strides, offset).flatten()
    whole[places] = x.detach().flatten()  # of those that share a place any
    return Laid(view, whole.clone())


def leaf(x: Tensor, trained: bool) -> Tensor:
    return x.detach().requires_grad_(trained and x.is_floating_point())


def tensors(value: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


def spread(draw: Any, arguments: Sequence[Any], written: Sequence[int] = ()) -> tuple[list[Any], list[Laid]]:
    """Arguments with each tensor laid out, those that are written densely."""
    laid = [lay(draw, x, dense=i in written) if isinstance(x, Tensor) else x for i, x in enumerate(arguments)]
    read = [x for i, x in enumerate(laid) if isinstance(x, Laid) and i not in written]
    return [x.view if isinstance(x, Laid) else x for x in laid], read


def agree(found: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        scale = theirs.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if theirs.numel() else 0.0
        limit = CLOSE[dtype] * max(scale, 1.0)
        torch.testing.assert_close(
            mine.double(), theirs.double(), rtol=0.0, atol=limit, equal_nan=True, check_device=False
        )


def places(x: Tensor) -> tuple[Any, ...]:
    """Shape, dtype and the strides that matter."""
    apart = x.numel() and [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
    return tuple(x.shape), x.dtype, apart


def run(
    call: Callable[..., Any], arguments: Sequence[Any], trained: int, grads: Sequence[Tensor]
) -> list[Tensor]:
    """Results, and gradients of the first ``trained`` arguments."""
    given = [
        x.detach().requires_grad_(i < trained) if isinstance(x, Tensor) else x
        for i, x in enumerate(arguments)
    ]
    found = tensors(call(*given))
    out = [x for x in found if x.requires_grad]
    leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    return [x.detach() for x in found] + list(torch.autograd.grad(out, leaves, grads) if grads else ())


def dense(arguments: Sequence[Any]) -> list[Any]:
    return [x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x for x in arguments]


def lies_as_its_fake(
    call: Callable[..., Any],
    arguments: Sequence[Any],
    trained: int,
    grads: Sequence[Tensor],
    found: list[Tensor],
) -> None:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        promised = run(call, fakes, trained, [mode.from_tensor(g) for g in grads])
    assert [places(x) for x in found] == [places(x) for x in promised]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6)
@given(data=st.data())
def test_kernels(name: str, data: st.DataObject) -> None:
    """Forward and backward; gradients that come in are laid out too. Some have no tokens."""
    test, dtype = CASES[name], data.draw(st.sampled_from(DTYPES))
    call, trained = getattr(OURS, test.op), len(test.shapes)
    torch.manual_seed(0)
    plain = list(test.arguments(*(torch.randn(shape) for shape in test.shapes)))
    plain = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in plain]
    if data.draw(st.integers(0, 4)) == 0:
        plain = [
            x[tuple(slice(n * (n != 3)) for n in x.shape)] if isinstance(x, Tensor) else x for x in plain
        ]
    laid, read = spread(data.draw, plain)
    results = run(lambda *x: [y for y in tensors(call(*x)) if y.requires_grad], laid, trained, ())
    grads = [lay(data.draw, torch.randn_like(x)) for x in results]
    found = run(call, laid, trained, given := [g.view for g in grads])
    agree(found, run(call, dense(laid), trained, dense(given)), dtype)
    lies_as_its_fake(call, laid, trained, given, found)
    assert all(x.stands() for x in (*read, *grads))


def in_place() -> dict[str, tuple[int, ...]]:
    """Operators without a derivative, and which arguments they write to."""
    found = {}
    for name in _streaming():
        schema = getattr(OURS, name.split()[0]).default._schema
        found[name] = tuple(
            i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        )
    return found


@pytest.mark.parametrize("name", _streaming())
@settings(max_examples=6)
@given(data=st.data())
def test_kernels_of_emitted_code(name: str, data: st.DataObject) -> None:
    torch.manual_seed(0)
    operator, written, plain = getattr(OURS, name.split()[0]), in_place()[name], _streaming()[name]
    laid, read = spread(data.draw, plain, written)
    clones = dense(laid)
    found, wanted = operator(*laid), operator(*clones)
    agree(tensors(found), tensors(wanted), torch.float32)
    agree(
        [laid[i] for i in written if laid[i] is not None],
        [clones[i] for i in written if clones[i] is not None],
        torch.float32,
    )
    if not written:
        lies_as_its_fake(operator, laid, 0, (), tensors(found))
    assert all(x.stands() for x in read)


class Call(NamedTuple):
    """A call of torch's scaled_dot_product_attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    grouped: bool
    trained_mask: bool


@st.composite
def calls(draw: Any) -> Call:
    """What torch takes: dimensions that are broadcast, heads in groups, masks of each shape, no elements."""
    dtype, size = draw(st.sampled_from(DTYPES)), st.sampled_from
    grouped = draw(st.booleans())
    heads = draw(size((1, 2, 4)))
    lead = [draw(size((2, 3, 1, 0))) for _ in range(draw(size((1, 1, 1, 0, 2))))]
    queries, keys = draw(size((5, 1, 33, 0))), draw(size((7, 5, 1, 40, 0)))
    width = draw(size((8, 16, 1, 0)))
    wide = draw(size((width, width, 3)))
    whole_only = 0 in (*lead, queries, keys, width)  # torch's results of no elements have the queries' shape

    def tensor(of_heads: int, *last: int) -> Tensor:
        shape = [n if whole_only else draw(size((n, n, 1))) for n in lead] + [of_heads]
        while not grouped and not whole_only and shape and draw(st.integers(0, 5)) == 0:
            shape = shape[1:]
        return torch.randn(*shape, *last).to(dtype)

    few = [n for n in (1, 2, 4) if heads % n == 0] if grouped else [heads, heads, heads if whole_only else 1]
    q = tensor(heads if grouped else draw(size(few)), queries, width)
    k, v = tensor(draw(size(few)), keys, width), tensor(draw(size(few)), keys, wide)
    whole = torch.broadcast_shapes(*(x.shape[: -3 if grouped else -2] for x in (q, k)))
    whole = (*whole, heads) if grouped else whole
    kind = draw(size(("none", "bool", "float", "trained")))
    mask = None
    if kind != "none":
        shape = [draw(size((n, 1))) for n in (*whole, queries, keys)][draw(st.integers(0, len(whole))) :]
        mask = torch.randn(shape).to(dtype)
        if kind == "bool":
            mask = mask > -0.5
            mask[..., :1] = True
    return Call(q, k, v, mask, kind == "none" and draw(st.booleans()), grouped, kind == "trained")


@settings(max_examples=100)
@given(data=st.data(), call=calls())
def test_attention_is_torchs(data: st.DataObject, call: Call) -> None:
    dtype, options = call.q.dtype, {"is_causal": call.causal, "enable_gqa": call.grouped}
    given = [x for x in (call.q, call.k, call.v, call.mask) if x is not None]
    laid = [lay(data.draw, x) for x in given]
    grad: Laid | None = None
    results = []
    for ours in (False, True):
        leaves = [x.view.detach() if ours else x.view.detach().clone().double() for x in laid]
        if call.mask is not None and call.mask.dtype == torch.bool:
            leaves[3] = laid[3].view
        trained = [x.requires_grad_() for x in leaves[: 4 if call.trained_mask else 3]]
        if ours:
            with replacements.numbered(RNG):
                out = replacements.attention(None, *leaves, **options)
        else:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                out = F.scaled_dot_product_attention(*leaves, **options)
            grad = lay(data.draw, torch.randn(out.shape, dtype=dtype))
        given = grad.view if ours else grad.view.double()
        results.append([out.detach(), *torch.autograd.grad(out, trained, given, materialize_grads=True)])
    assert [x.shape for x in results[0]] == [x.shape for x in results[1]]
    agree(*results, dtype)
    assert all(x.stands() for x in (*laid, grad))


@settings(max_examples=30)
@given(data=st.data())
def test_attention_operators(data: st.DataObject) -> None:
    """Forward and backward alone, whole and in chunks; what is saved between them is laid out too."""
    draw, size = data.draw, st.sampled_from
    dtype = draw(size(DTYPES))
    batch, heads, groups, length = draw(size((2, 1))), 4, draw(size((2, 4, 1))), draw(size((40, 9, 1)))
    width = draw(size((16, 3)))
    q = torch.randn(batch, heads, length, width).to(dtype)
    k = torch.randn(batch, groups, length, width).to(dtype)
    v = torch.randn(batch, groups, length, draw(size((width, width, 5)))).to(dtype)
    flags = st.booleans()
    bias = torch.randn([draw(size((n, 1))) for n in (batch, heads, length, length)]).to(dtype)
    packed = draw(size((False, False, True)))
    ends = torch.tensor([0, length // 3, length])
    bounds = document_bounds(ends, length).expand(2, batch, length) if packed else None
    has_bias = not packed and draw(flags)
    sinks = torch.randn(heads).to(dtype) if draw(flags) else None
    constants = 0.3, draw(flags), draw(size((0, 5))), draw(size((0.0, 3.0))), draw(size((0.0, 0.0, 0.5))), 1
    constants = *constants, has_bias and draw(flags), bounds
    laid, read = spread(draw, (q, k, v, bias if has_bias else None, sinks, RNG))
    chunked = draw(flags)
    with pytest.MonkeyPatch.context() as patch:
        if chunked:
            patch.setattr(query_chunks, "LEAST_QUERIES", 8)
            patch.setattr(query_chunks, "MOST_BYTES", 1)
        found = OURS.attention(*laid, *constants)
        agree(found, OURS.attention(*dense(laid), *constants), dtype)
        lies_as_its_fake(OURS.attention, (*laid, *constants), 0, (), list(found))
        back, more = spread(draw, (torch.randn_like(found[0]), *found))
        given = back[0], *laid, *back[1:], *constants
        grads = OURS.attention_backward(*given)
        agree(grads, OURS.attention_backward(*dense(given)), dtype)
        lies_as_its_fake(OURS.attention_backward, given, 0, (), list(grads))
    assert all(x.stands() for x in (*read, *more))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_windows_that_overlap(dtype: torch.dtype) -> None:
    """Products of torch's take no rows that begin before the last one ends."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 103).to(dtype).unfold(2, 64, 1) for _ in range(4))
    given, constants = (q, k, v, None, None, None), (0.1, False, 0, 0.0, 0.0, 0, False)
    results = []
    for arguments in (given, dense(given)):
        found = OURS.attention(*arguments, *constants)
        results.append([*found, *OURS.attention_backward(grad, *arguments, *found, *constants)])
    agree(*results, dtype)


@settings(max_examples=25)
@given(data=st.data())
def test_rows_for_kernels_of_a_gpu(data: st.DataObject) -> None:
    """They load 16 bytes at once, from rows whose elements lie side by side."""
    dtype = data.draw(st.sampled_from(DTYPES[1:]))
    laid = lay(data.draw, torch.randn(2, 3, 5, 8).to(dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sdpa, "on_gpu", lambda x: True)
        (rows,) = torch_sdpa._readable_rows(laid.view)
        (again,) = torch_sdpa._readable_rows(rows)
    apart = (rows.storage_offset(), *rows.stride()[:3])
    assert rows.stride(3) == 1 and all(n * rows.element_size() % 16 == 0 for n in apart)
    assert again is rows and torch.equal(rows, laid.view)
    assert all(
        mine == 0 for mine, theirs in zip(rows.stride()[:2], laid.view.stride(), strict=False) if not theirs
    )


@pytest.mark.parametrize(
    ("q", "k", "v", "mask", "grouped"),
    [
        ((2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8), None, True),  # heads that do not divide
        ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 6, 8), None, False),  # keys without values
        ((2, 4, 5, 8), (2, 4, 5, 6), (2, 4, 5, 8), None, False),  # keys of another width
        ((1, 4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8), (2, 1, 5, 5), False),  # masks for more rows
        ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8), (5, 6), False),  # and for more keys
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], mask: tuple[int, ...] | None, grouped: bool
) -> None:
    """Of real tensors and of those of a capture."""
    for mode in (FakeTensorMode(), contextlib.nullcontext()):
        with mode, replacements.numbered(RNG), pytest.raises(CaptureError, match="do not fit together"):
            given = [None if shape is None else torch.zeros(shape) for shape in (q, k, v, mask)]
            replacements.attention(None, *given, enable_gqa=grouped)


class Mixed(nn.Module):
    """Keys that stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (
            F.scaled_dot_product_attention(self.queries(x), x.float(), x.float()).square().mean() + y.mean()
        )


def test_attention_on_two_dtypes_is_refused() -> None:
    model = Mixed()
    adamw = torch.optim.AdamW(model.parameters())
    program = megacompile.compile(model, "64MB", optimizer=adamw, compute_dtype=torch.bfloat16, device="cpu")
    x = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    with pytest.raises(CaptureError, match=r"multiplies torch\.bfloat16 by torch\.float32"):
        program.train_step({"x": x, "y": x})
    program.close()


class OverChannels(nn.Module):
    """Tokens mixed by attention over channels, whose last dimension is not adjacent in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 64, 3, 2, 8).permute(2, 0, 3, 4, 1).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return F.mse_loss(self.out(mixed.permute(0, 3, 1, 2).reshape(2, 64, 16)), y)


class Resampler(nn.Module):
    """Queries that are learnt, of one row; then a memory that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Parameter(torch.randn(1, 2, n, 8)) for n in (4, 5, 5))
        self.read, self.out = nn.Linear(16, 32), nn.Linear(8, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        k, v = self.read(x).view(2, 64, 2, 2, 8).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(self.queries, k, v)
        found = found + F.scaled_dot_product_attention(found, self.keys, self.values)
        return F.mse_loss(self.out(found).mean((1, 2)), y.mean(1))


@pytest.mark.parametrize("module", [OverChannels, Resampler])
def test_programs_train_as_eager_does(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = module()
    eager = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager))
    batch = {"x": torch.randn(2, 64, 16), "y": torch.randn(2, 64, 16)}
    program = megacompile.compile(model, "64MB", optimizer=ours, compute_dtype=torch.float32, device="cpu")
    for _ in range(3):
        loss = eager(**batch)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        assert float(program.train_step(batch).loss) == pytest.approx(loss.item(), rel=1e-5)
    program.close()
