"""The head's cost over the number of tokens, counted."""

from __future__ import annotations

from benchmarks.head_traffic import HEAD, apart, counted, operands
from megacompile.graph.lm_head_patterns import workspace_bytes


def test_sums_of_a_long_batch_cost_in_proportion_to_its_tokens() -> None:
    tokens = 65536
    once, twice = (counted(n, workspace_bytes(*operands(n)), HEAD.add_product_) for n in (tokens, 2 * tokens))
    assert twice.flops == 2 * once.flops and twice.nbytes == 2 * once.nbytes and twice.sums == once.sums


def test_a_tile_of_fixed_size_would_cost_the_square_of_it() -> None:
    tokens = 16384
    eighth = operands(1)[1].nbytes // 8
    once, twice = (counted(n, eighth, apart) for n in (tokens, 2 * tokens))
    assert twice.flops == 2 * once.flops and twice.nbytes >= 3.9 * once.nbytes


def test_the_sum_is_read_and_written_once_per_tile_within_the_product() -> None:
    tokens = 4096
    count = counted(tokens, workspace_bytes(*operands(tokens)), HEAD.add_product_)
    hidden = operands(tokens)[0]
    assert count.nbytes == 2 * count.sums * 2 * hidden.nbytes  # float32, twice as large
