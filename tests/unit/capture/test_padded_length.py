"""To what length batches are padded: few lengths, never shorter, within a model's reach."""

from __future__ import annotations

from megacompile.capture.padded_length import (
    PaddingCosts,
    bucket_length,
    growing_length,
    quarter_length,
    worth_one_length,
)

LENGTHS = range(1, 5000)


def test_four_lengths_serve_each_doubling() -> None:
    assert [bucket_length(n) for n in (1, 8, 9, 33, 65, 1025)] == [8, 8, 16, 40, 80, 1280]
    assert all(n <= bucket_length(n) < max(1.25 * n, n + 8) for n in LENGTHS)
    assert len({bucket_length(n) for n in range(1024, 2048)}) <= 4 + 1


def test_a_limit_holds_for_what_is_within_it() -> None:
    assert [bucket_length(n, longest=1100) for n in (1025, 1100, 1101)] == [1100, 1100, 1101]
    assert [growing_length(n, 5000, 1100) for n in (10, 500, 600, 1100)] == [256, 1024, 1100, 1100]
    assert growing_length(1101, 5000, 1100) == bucket_length(2202), "few programs beyond it, too"


def test_a_growing_sequence_needs_few_lengths_and_none_past_its_last() -> None:
    length, lengths = 1, []
    for n in range(1, 4001):
        if n > length or not lengths:
            length = growing_length(n, 4000, None)
            lengths.append(length)
    assert lengths == [256, 640, 1536, 3584, 4096]
    assert growing_length(5, 12, None) == 16


def test_four_lengths_serve_data_whose_longest_row_is_known() -> None:
    assert {quarter_length(n, 1000) for n in range(1, 1001)} == {256, 512, 768, 1000}
    assert all(n <= quarter_length(n, 4999) for n in LENGTHS)


def test_padding_never_costs_more_than_compiling() -> None:
    costs = PaddingCosts()
    assert [costs.pay("a", 1.0, 2.5) for _ in range(4)] == [True, True, False, False]
    assert costs.pay("b", 2.5, 2.5) and not costs.pay("b", 0.1, 2.5)


def test_one_long_micro_batch_keeps_a_length_of_its_own() -> None:
    assert worth_one_length([8, 8, 16]) and not worth_one_length([5, 6, 7, 8, 5, 64])
