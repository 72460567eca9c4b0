import pytest
import torch
import torch.nn.functional as F
from harness import DTYPES, compare, gradcheck, randn, spread

from megacompile.kernels.embedding import embedding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary,width", [(11, 41), (500, 1123)])
def test_forward_and_backward(vocabulary, width, dtype):
    torch.manual_seed(1)
    ids = torch.randint(0, vocabulary, (3, 23))
    ids[0] = 5
    compare(
        lambda w: embedding(w, ids),
        lambda w: F.embedding(ids, w),
        (randn(vocabulary, width),),
        dtype,
    )


def test_many_repeats_are_summed_in_float32():
    """4096 times one row: bf16 additions one by one would stop at 256."""
    weight = torch.zeros(3, 8, dtype=torch.bfloat16, requires_grad=True)
    embedding(weight, torch.ones(4096, dtype=torch.int64)).backward(torch.ones(4096, 8, dtype=torch.bfloat16))
    assert torch.equal(weight.grad, torch.tensor([0.0, 4096.0, 0.0]).bfloat16()[:, None].expand(3, 8))


def test_padding_and_empty():
    weight = randn(5, 4)
    embedding(weight, torch.tensor([1, 2, 2]), padding=2).sum().backward()
    assert weight.grad.sum(1).tolist() == [0, 4, 0, 0, 0]
    weight.grad = None
    embedding(weight, torch.empty(0, dtype=torch.int64)).sum().backward()
    assert not weight.grad.any()


def test_gradcheck():
    ids = torch.tensor([[0, 3, 3], [1, 0, 3]])
    gradcheck(lambda w: embedding(w, ids), randn(5, 3))
    gradcheck(lambda w: spread(embedding(w, ids)).transpose(0, 2), randn(5, 3))
