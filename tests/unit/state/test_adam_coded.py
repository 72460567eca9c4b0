"""Coded moments: the kernel's codes are the book's nearest, its values the book's, on both backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacompile.state import adam
from megacompile.state.adam import AdamHyper, adamw_step, join, split
from megacompile.state.code_books import BOOKS
from megacompile.state.coded_adam import Coded, coded_adamw_step, decode, encode
from megacompile.state.moment_formats import CODINGS, MomentCoding

HYPER = AdamHyper(lr=1e-3, weight_decay=0.1, step=3)
TIE = 1e-6  # of the midpoint: how near a value must be to it for the backends to disagree
# Moments that a step leaves as they were, bit for bit, and weights that it turns into -m.
FROZEN = AdamHyper(lr=1.0, beta1=1 - 1e-13, beta2=1 - 1e-13, eps=1.0, step=10**16)


@pytest.fixture(params=("c", "c without AVX-512", "torch"))
def any_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    name, _, narrow = request.param.partition(" ")
    with pytest.MonkeyPatch.context() as patch:
        if narrow:
            patch.setattr(adam, "TARGETS", ("-march=native -mno-avx512f -fopenmp",))
        try:
            adam.set_backend(name)  # type: ignore[arg-type]
        except RuntimeError as error:
            pytest.skip(str(error))
        yield request.param
    adam.set_backend("auto")


@pytest.fixture(params=("int8", "int4"))
def coding(request: pytest.FixtureRequest) -> MomentCoding:
    return CODINGS[request.param]


def empty(coding: MomentCoding, elements: int) -> Coded:
    codes = torch.zeros(coding.code_bytes(elements), dtype=torch.uint8)
    return Coded(codes, torch.zeros(coding.blocks(elements)))


def unpacked(moment: Coded, coding: MomentCoding) -> Tensor:
    if coding.bits == 8:
        return moment.codes.long()
    return torch.stack((moment.codes & 15, moment.codes >> 4), 1).flatten().long()


def coded_by_the_step(x: Tensor, coding: MomentCoding) -> tuple[Coded, Coded]:
    """Codes of x as a first and of x * x as a second moment: a step that forgets what was before."""
    first, second = empty(coding, x.numel()), empty(coding, x.numel())
    forget = AdamHyper(lr=0.0, beta1=0.0, beta2=0.0)
    coded_adamw_step(torch.zeros_like(x), first, second, x, forget, coding)
    return first, second


def telling_values(book: str, block: int) -> Tensor:
    """Blocks that begin with 1: every midpoint of a book, its neighbours, codes, and a sweep."""
    codes = torch.tensor(BOOKS[book], dtype=torch.float64)
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([(middles * (1 + k * 2.0**-24)).float() for k in (-40, -3, -2, -1, 0, 1, 2, 3, 40)])
    generator = torch.Generator().manual_seed(5)
    sweep = 10 ** (-9 * torch.rand(4096, generator=generator))
    values = torch.cat([near, codes.float(), sweep, -sweep, torch.zeros(3)])
    if min(BOOKS[book]) >= 0:
        values = values.abs()
    values = torch.cat([values, values.new_zeros(-values.numel() % (block - 1))]).view(-1, block - 1)
    return torch.cat([torch.ones(values.shape[0], 1), values], 1).flatten()


def assert_nearest(codes: Tensor, x: Tensor, book: str, scale: float | Tensor = 1.0) -> None:
    """No code of the book is nearer than the one chosen, but for ties."""
    table = torch.tensor(BOOKS[book], dtype=torch.float64)
    x = x.double() / scale
    middles = (table[1:] + table[:-1]) / 2
    nearest = torch.bucketize(x, middles)
    wrong = codes != nearest
    assert ((codes - nearest).abs() <= 1).all()
    between = middles[torch.minimum(codes, nearest)[wrong]]
    assert ((x[wrong] - between).abs() <= TIE * between.abs()).all()


def test_first_moments_take_the_nearest_code(any_backend: str, coding: MomentCoding) -> None:
    x = telling_values(coding.first_book, coding.block)
    first, _ = coded_by_the_step(x, coding)
    assert torch.equal(first.scales, torch.ones(x.numel() // coding.block))
    assert_nearest(unpacked(first, coding), x, coding.first_book)


def test_second_moments_take_the_nearest_code(any_backend: str, coding: MomentCoding) -> None:
    x = telling_values(coding.second_book, coding.block).sqrt()
    _, second = coded_by_the_step(x, coding)
    assert torch.equal(second.scales, torch.ones(x.numel() // coding.block))
    assert_nearest(unpacked(second, coding), x * x, coding.second_book)


def test_scales_of_many_magnitudes(any_backend: str, coding: MomentCoding) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, coding.block, generator=generator)
    x *= 10 ** torch.linspace(-15, 15, 64)[:, None]
    first, second = coded_by_the_step(x.flatten(), coding)
    for moment, values, book in (
        (first, x, coding.first_book),
        (second, x * x, coding.second_book),
    ):
        assert torch.equal(moment.scales, values.abs().amax(1))
        scales = moment.scales.double().repeat_interleave(coding.block)
        assert_nearest(unpacked(moment, coding), values.flatten(), book, scales)


def test_values_are_the_books_bit_for_bit(any_backend: str, coding: MomentCoding) -> None:
    """A step whose weight becomes minus the first moment, and one that divides 1 by the second's root."""
    count = len(BOOKS[coding.first_book])
    codes = torch.arange(count, dtype=torch.uint8).repeat(coding.block // count + 1)[: coding.block]
    codes = codes if coding.bits == 8 else codes[0::2] | codes[1::2] << 4
    for scale in (1.0, 0.3, 1e-20):
        full = Coded(codes.clone(), torch.tensor([scale]))
        table = torch.tensor(BOOKS[coding.first_book], dtype=torch.float64).float() * scale
        none = Coded(torch.zeros_like(codes), torch.zeros(1))
        weight = torch.zeros(coding.block)
        coded_adamw_step(weight, full, none, torch.zeros(coding.block), FROZEN, coding)
        assert torch.equal(-weight, table[unpacked(Coded(codes, full.scales), coding)])
        if scale < 1e-9:
            continue
        table = torch.tensor(BOOKS[coding.second_book], dtype=torch.float64).float() * scale
        top = torch.full_like(codes, 255)  # 1 in the first book
        weight = torch.zeros(coding.block)
        second = Coded(codes.clone(), torch.tensor([scale]))
        grad, hyper = torch.zeros(coding.block), replace(FROZEN, eps=1e-3)
        coded_adamw_step(weight, Coded(top, torch.ones(1)), second, grad, hyper, coding)
        values = table[unpacked(Coded(codes, full.scales), coding)]
        expected = torch.zeros(coding.block)
        adamw_step(expected, torch.ones(coding.block), values, grad, hyper)
        assert torch.equal(weight, expected)


def test_codes_of_an_unchanged_moment_do_not_move(any_backend: str, coding: MomentCoding) -> None:
    x = torch.randn(5 * coding.block, generator=torch.Generator().manual_seed(2))
    first, second = coded_by_the_step(x, coding)
    for _ in range(3):
        before = [t.clone() for m in (first, second) for t in (m.codes, m.scales)]
        weight = torch.zeros_like(x)
        coded_adamw_step(weight, first, second, torch.zeros_like(x), FROZEN, coding)
        after = [t for m in (first, second) for t in (m.codes, m.scales)]
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])


def random_state(n: int, coding: MomentCoding, seed: int) -> tuple[Tensor, Coded, Coded, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w, m, g, e = (torch.randn(n, generator=generator) for _ in range(4))
    first, second = empty(coding, n), empty(coding, n)
    encode(m * 0.1, first, coding, coding.first_book)
    encode(torch.rand(n, generator=generator) * 0.01, second, coding, coding.second_book)
    return w, first, second, g * 10**e


def take(
    state: tuple[Tensor, Coded, Coded, Tensor],
    coding: MomentCoding,
    *,
    halves: bool = False,
    threads: int = 1,
) -> list[Tensor]:
    w, first, second, grad = state
    weight = w.clone()
    first, second = (Coded(m.codes.clone(), m.scales.clone()) for m in (first, second))
    if halves:
        pair = torch.empty(w.numel(), dtype=torch.bfloat16), torch.empty(w.numel(), dtype=torch.int16)
        split(weight, *pair)
        coded_adamw_step(pair, first, second, grad, HYPER, coding, threads)
        join(*pair, weight)
    else:
        coded_adamw_step(weight, first, second, grad, HYPER, coding, threads)
    return [weight, first.codes, first.scales, second.codes, second.scales]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(1, 900).map(lambda k: 2 * k), seed=st.integers(0, 999), bf16=st.booleans())
def test_is_the_fp32_step_between_decoding_and_coding(
    any_backend: str, coding: MomentCoding, n: int, seed: int, bf16: bool
) -> None:
    w, first, second, grad = random_state(n, coding, seed)
    state = (w, first, second, grad.bfloat16() if bf16 else grad)
    weight, m = w.clone(), decode(first, coding, coding.first_book)
    v = decode(second, coding, coding.second_book)
    adamw_step(weight, m, v, state[3], HYPER)
    got = take(state, coding)
    assert torch.equal(got[0], weight)
    for codes, scales, exact, book in (
        (got[1], got[2], m, coding.first_book),
        (got[3], got[4], v, coding.second_book),
    ):
        assert torch.equal(scales, torch.stack([b.abs().max() for b in exact.split(coding.block)]))
        each = scales.double().repeat_interleave(coding.block)[:n]
        assert_nearest(unpacked(Coded(codes, scales), coding), exact, book, each)
    assert all(torch.equal(a, b) for a, b in zip(take(state, coding, halves=True), got, strict=True))


def test_threads_and_cuts_between_blocks_change_nothing(any_backend: str, coding: MomentCoding) -> None:
    n = 200_006
    state = random_state(n, coding, 0)
    expected = take(state, coding, halves=True)
    for threads in (2, 3):
        got = take(state, coding, halves=True, threads=threads)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    edges = [0, coding.block, 40 * coding.block, n]
    pieces = [
        take((state[0][a:b], state[1].part(a, b, coding), state[2].part(a, b, coding), state[3][a:b]), coding)
        for a, b in pairwise(edges)
    ]
    for parts, whole in zip(zip(*pieces, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_zero_tiny_and_nonfinite_blocks(any_backend: str, coding: MomentCoding) -> None:
    block = coding.block
    x = torch.randn(4 * block, generator=torch.Generator().manual_seed(0))
    x[:block] = 0
    x[block + 3] = float("nan")
    x[2 * block + 5] = -float("inf")
    first, second = coded_by_the_step(x, coding)
    assert first.scales[0] == second.scales[0] == 0
    assert first.scales[1:3].isinf().all() and second.scales[1:3].isinf().all()
    assert first.scales[3].isfinite() and second.scales[3].isfinite()
    values = decode(first, coding, coding.first_book).view(4, block)
    assert (values[0] == 0).all() and values[3].isfinite().all()
    assert not values[1:3].isfinite().all(1).any()


def test_bad_inputs_are_named(coding: MomentCoding) -> None:
    w, first, second, grad = random_state(512, coding, 0)
    with pytest.raises(ValueError, match="exp_avg has"):
        coded_adamw_step(w, Coded(first.codes[1:], first.scales), second, grad, HYPER, coding)
    with pytest.raises(ValueError, match="exp_avg_sq must be uint8"):
        coded_adamw_step(w, first, Coded(second.codes.char(), second.scales), grad, HYPER, coding)
    with pytest.raises(ValueError, match="grad has 511"):
        coded_adamw_step(w, first, second, grad[1:], HYPER, coding)
