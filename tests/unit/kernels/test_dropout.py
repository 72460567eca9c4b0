"""The counter hash behind dropout: its contract, and that its bits look like coin tosses.

Statistical bounds are five standard errors of fixed seeds: deterministic, and far from chance.
"""

import math

import pytest
import torch

from megacompile.kernels import random_numbers
from megacompile.kernels.dropout import dropout_mask
from megacompile.kernels.random_numbers import GOLDEN, LOW, dropout_keys, random_words

RNG = torch.tensor([42, 7])
COUNT = 1 << 20


def plain_hash(seed: int, site: int, index: int) -> int:
    """The definition in the module's docstring, on Python integers."""
    low = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD & low
        x = (x ^ x >> 15) * 0x735A2D97 & low
        return x ^ x >> 15

    def key(h: int) -> int:
        for word in (seed & low, seed >> 32 & low, site & low, site >> 32 & low):
            h = mix((h ^ word) + 0x9E3779B9 & low)
        return h

    first, second = key(0x243F6A88), key(0x85A308D3)
    x = mix(index & low ^ first)
    return mix(x + second + (index >> 32) * 0x9E3779B9 & low)


@pytest.mark.parametrize("seed,site", [(0, 0), (-1, 5), (2**63 - 1, 2**40 + 3)])
def test_words_follow_the_definition(seed: int, site: int) -> None:
    words = random_words(torch.tensor([seed, site - 2]), 2, (3, 50)).flatten().tolist()
    assert words == [plain_hash(seed, site, i) for i in range(150)]


def test_elements_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The high half of the index enters the hash (checked on the chunk that starts at 2**32)."""
    first, second = dropout_keys(RNG, 0).tolist()
    start = 1 << 32
    x = torch.arange(start & LOW, (start & LOW) + 4).bitwise_xor_(first)
    scratch = torch.empty_like(x)
    random_numbers._mix_(x, scratch)
    x.add_(second).add_((start >> 32) * GOLDEN & LOW).bitwise_and_(LOW)
    assert random_numbers._mix_(x, scratch).tolist() == [plain_hash(42, 7, start + i) for i in range(4)]


def test_mask_depends_on_seed_site_and_index_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = dropout_mask(RNG, 3, (300, 700), 0.3)
    assert torch.equal(mask, dropout_mask(torch.tensor([42, 10]), 0, (210000,), 0.3).view(300, 700))
    assert torch.equal(mask[:100], dropout_mask(RNG, 3, (100, 700), 0.3))
    monkeypatch.setattr(random_numbers, "CHUNK", 1 << 10)
    assert torch.equal(mask, dropout_mask(RNG, 3, (300, 700), 0.3))
    threads = torch.get_num_threads()
    torch.set_num_threads(3 if threads == 1 else 1)
    assert torch.equal(mask, dropout_mask(RNG, 3, (300, 700), 0.3))
    torch.set_num_threads(threads)
    assert not torch.equal(mask, dropout_mask(RNG, 4, (300, 700), 0.3))
    assert not torch.equal(mask, dropout_mask(torch.tensor([43, 7]), 3, (300, 700), 0.3))


def test_edges() -> None:
    assert dropout_mask(RNG, 0, (9,), 0.0).all() and not dropout_mask(RNG, 0, (9,), 1.0).any()
    assert dropout_mask(RNG, 0, (0, 3), 0.5).shape == (0, 3)
    assert dropout_mask(RNG, 0, (), 0.5).shape == ()
    with pytest.raises(ValueError, match="probability"):
        dropout_mask(RNG, 0, (3,), 1.5)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_rate(p: float) -> None:
    for site in range(4):
        kept = dropout_mask(RNG, site, (COUNT,), p).double().mean().item()
        assert abs(kept - (1 - p)) < 5 * math.sqrt(p * (1 - p) / COUNT)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack((a.float(), b.float())))[0, 1].abs().item()


def test_neighbours_sites_and_seeds_are_uncorrelated() -> None:
    bound = 5 / math.sqrt(COUNT)
    base = dropout_mask(RNG, 0, (COUNT,), 0.5)
    for shift in (1, 2, 3, 64, 128, 1024, 4096, 65536):
        assert correlation(base[shift:], base[:-shift]) < 5 / math.sqrt(COUNT - shift)
    for bit in range(0, 63, 3):
        other_site = torch.tensor([42, 7 ^ 1 << bit])
        other_seed = torch.tensor([42 ^ 1 << bit, 7])
        assert correlation(base, dropout_mask(other_site, 0, (COUNT,), 0.5)) < bound
        assert correlation(base, dropout_mask(other_seed, 0, (COUNT,), 0.5)) < bound


def test_bits_and_bytes_are_uniform() -> None:
    words = random_words(RNG, 1, (COUNT,))
    for bit in range(32):
        assert abs((words >> bit & 1).double().mean().item() - 0.5) < 2.5 / math.sqrt(COUNT)
    for shift in range(0, 32, 8):
        counts = torch.bincount(words >> shift & 255, minlength=256).double()
        chi = ((counts - COUNT / 256).square() / (COUNT / 256)).sum().item()
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255)


def test_each_input_bit_flips_half_of_the_output_bits() -> None:
    """Avalanche over the element's index, for the eleven lowest and some higher bits."""
    words = random_words(RNG, 1, (1 << 20,))
    for bit in (*range(11), 15, 19):
        index = torch.arange(1 << 19)
        flipped = words[index] ^ words[index ^ 1 << bit]
        for out in range(32):
            rate = (flipped >> out & 1).double().mean().item()
            # Pairs are counted twice within the half, so at least 2**18 independent ones.
            assert abs(rate - 0.5) < 2.5 / math.sqrt(1 << 18)
