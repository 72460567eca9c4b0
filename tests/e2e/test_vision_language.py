"""Vision-language models whose images have sizes of their own, beside plain transformers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import megacompile
from tests.support.multimodal import fixed, sized
from tests.support.vision_language import Case, cases

pytestmark = pytest.mark.slow

SIZED = cases() | sized()


def _batches(case: Case, *, mixed: bool) -> list[dict[str, Tensor]]:
    """Three with images in other places, and of other sizes, ``mixed`` with text alone and padding."""
    one, other = case.sizes
    if not mixed:
        return [case.batch(one, seed, 0) for seed in range(3)]
    made = ((one, 0, 0), (other, 1, 0), (other, 2, 0), ([[], []], 3, 0), (one, 4, 2), ([one[0], []], 5, 0))
    return [case.batch(*each) for each in made]


def steps(model: nn.Module, batches: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Losses and norms of clipped steps in plain transformers."""
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-3), [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def _doubled(batches: Iterable[Any]) -> list[Any]:
    return [pytree.tree_map_only(Tensor, _wide, dict(batch)) for batch in batches]


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def trained(
    model: nn.Module, batches: Iterable[Any], budget: float | str, *, beside: Iterable[Any] | None = None
) -> int:
    """Train like plain transformers, whose results must come out; return the number of programs.

    ``beside``: the batches of plain transformers, where they are others. Where FP32 itself is far from FP64,
    as in Gemma 4, a norm or a weight may be off by a tenth of how far plain transformers is.
    """
    eager, batches = copy.deepcopy(model), list(batches)
    plain = batches if beside is None else list(beside)
    losses, norms = steps(eager, plain)
    wide = copy.deepcopy(model).double()
    exact = functools.cache(functools.partial(steps, wide, _doubled(plain)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = megacompile.compile(
        model, budget, optimizer=optimizer, max_grad_norm=0.5, compute_dtype=torch.float32, device="cpu"
    )
    for i, (batch, loss, norm) in enumerate(zip(batches, losses, norms, strict=True)):
        out = program.train_step(batch)
        assert float(out.loss) == pytest.approx(loss, rel=1e-6)
        if float(out.grad_norm) != pytest.approx(norm, rel=1e-5):
            assert float(out.grad_norm) == pytest.approx(norm, abs=0.1 * abs(exact()[1][i] - norm))
    state = program.state_dict()
    for name, value in eager.state_dict().items():
        near = 2e-5
        if not torch.allclose(state[name], value, rtol=0, atol=near):
            exact()
            near = max(near, 0.1 * float((wide.state_dict()[name] - value).abs().max()))
        torch.testing.assert_close(state[name], value, rtol=0, atol=near)
    programs = len(program._session.decided.programs)
    program.close()
    return programs


@pytest.mark.parametrize("name", list(SIZED))
def test_images_in_other_places_share_a_program(name: str) -> None:
    """At the least budget."""
    case = SIZED[name]
    torch.manual_seed(0)
    model, batches = case.build(), _batches(case, mixed=False)
    assert trained(model, batches, _least(model, batches[0])) == 1


@pytest.mark.parametrize("name", list(fixed()))
def test_values_of_a_batch_are_inputs_of_one_program(name: str) -> None:
    """Of images, video, sound and actions, at the least budget."""
    case = fixed()[name]
    torch.manual_seed(0)
    model, batches = case.build(), [case.batch(seed) for seed in range(3)]
    assert trained(model, batches, _least(model, batches[0])) == 1


def _least(model: nn.Module, batch: Any) -> str:
    with pytest.raises(megacompile.BudgetError) as error:
        megacompile.compile(model, "1KB", compute_dtype=torch.float32, max_grad_norm=0.5, example_batch=batch)
    return f"{error.value.least_bytes}B"


@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.parametrize("name", list(SIZED))
def test_each_combination_of_sizes_has_a_program(name: str) -> None:
    case = SIZED[name]
    torch.manual_seed(0)
    assert trained(case.build(), _batches(case, mixed=True), "200MB") <= 5
