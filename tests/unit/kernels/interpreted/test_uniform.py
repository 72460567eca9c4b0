import pytest
import torch

from megacompile.kernels.uniform import BITS, uniform, uniform_reference


@pytest.mark.slow_cases(r"-42")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("seed,base", [(0, 0), (-42, 7), (2**62 + 5, 2**40)])
def test_triton_and_torch_draw_the_same_numbers(seed, base, dtype):
    rng = torch.tensor([seed, base])
    drawn = uniform(rng, (7, 411), dtype, 3)
    assert torch.equal(drawn, uniform_reference(rng, (7, 411), dtype, 3))
    assert drawn.dtype == dtype and drawn.min() >= 0 and drawn.max() < 1
    assert not torch.equal(drawn, uniform(rng, (7, 411), dtype, 3 + 2**32))


def test_shapes_without_elements_and_without_dimensions():
    rng = torch.tensor([1, 2])
    assert uniform(rng, (0, 3), torch.float32, 0).shape == (0, 3)
    assert uniform(rng, (), torch.float32, 0) == uniform(rng, (5,), torch.float32, 0)[0]
