"""Equal layers, of which one is traced, give the graph that all of them give, each traced by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megacompile.capture import repeated_layers
from megacompile.capture.loss_value import LossFn
from megacompile.capture.parameter_forms import parameter_forms
from megacompile.graph.captured import Captured, module_stack
from tests.support.graphs import capture

_DEPTH = 4


def _lines(captured: Captured) -> Any:
    """What a graph computes, node by node, with the forms of values and the modules around them."""
    return [
        (
            node.format_node(),
            [
                (x.shape, x.stride(), x.storage_offset(), x.dtype, x.untyped_storage().nbytes())
                for x in torch.utils._pytree.tree_leaves(node.meta.get("val"))
                if isinstance(x, Tensor)
            ],
            list(module_stack(node)),
        )
        for node in captured.graph.nodes
    ], [captured.parameters, captured.buffers, captured.inputs, list(captured.constants), captured.trainable]


def _both(make: Callable[[], nn.Module], inputs: dict[str, Any], **options: Any) -> tuple[Any, Any, int]:
    """The graphs of a model whose layers may repeat, and of one whose layers do not; how many did."""
    marked: list[int] = []
    returned = repeated_layers._returned

    def noted(first: Any, out: Any, around: list[Tensor]) -> Any:
        marked.append(first.number)
        return returned(first, out, around)

    def graph() -> Any:
        model = make().train()
        return _lines(capture(model, (), inputs, forms=parameter_forms(model, torch.float32), **options))

    with mock.patch.object(repeated_layers, "_returned", noted):
        repeated = graph()
    with mock.patch.object(repeated_layers, "_FEWEST", 1000):
        each = graph()
    return repeated, each, len(marked) - len(set(marked))


@pytest.mark.slow_cases(r"True")
@pytest.mark.parametrize("evaluate", [False, True])
def test_layers_of_a_model_are_traced_once(evaluate: bool) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=6, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )  # fmt: skip
    ids = torch.arange(16).reshape(2, 8)
    repeated, each, spared = _both(
        lambda: Gemma3ForCausalLM(config), {"input_ids": ids, "labels": ids}, evaluate=evaluate
    )
    assert repeated == each
    assert spared == 4  # of three of each kind


class _Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x).tanh()


class _Stack(nn.Module):
    """Layers one after the other, of which some may be one."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _stack(kind: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: _Stack([kind(i) for i in range(_DEPTH)])


_X = torch.ones(2, 4)


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    return outputs


_LOSS: LossFn = _loss


class _ByIndex(_Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (self.layer_idx + 1)


class _Counts(_Layer):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        _Counts.calls += 1
        return super().forward(-x if _Counts.calls % _DEPTH == 3 else x)


class _Keeps(_Layer):
    """Leaves what it returns in a list, too, and reads what the others left."""

    kept: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Any:
        before = _Keeps.kept if self.layer_idx else ()
        out = super().forward(x)
        _Keeps.kept = (*before, out)
        return sum(_Keeps.kept) if self.layer_idx == _DEPTH - 1 else out


class _Writes(_Layer):
    def forward(self, x: Tensor) -> Any:
        out = x.clone()
        out[:, 0] = 1.0
        return super().forward(out)


class _Fills(_Layer):
    """Fills a tensor of its own, as experts do, by indices."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x[self.fill(torch.zeros(2, dtype=torch.int64), x[:, 0].argsort())])

    def fill(self, places: Tensor, order: Tensor) -> Tensor:
        places[order] = torch.arange(2)
        return places


class _FillsByIndex(_Fills):
    def fill(self, places: Tensor, order: Tensor) -> Tensor:
        places[order] = self.layer_idx % 2
        return places


class _FillsSeen(_Fills):
    def fill(self, places: Tensor, order: Tensor) -> Tensor:
        seen = places.view(1, 2)
        places[order] = torch.arange(2)
        return seen[0]


class _FillsInput(_Layer):
    def forward(self, x: Tensor) -> Any:
        if self.layer_idx:  # the first gets the batch's
            x[x[:, 0].argsort()] = 0.5
        return super().forward(x)


class _Draws(_Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x + torch.rand(2, 4))


class _DropsOut(_Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class _Without(_Layer):
    """Has a part without gradients, a constant of its own, and makes a view that nobody reads."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.own = torch.full((4,), float(index))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            scale = x.abs().mean() + self.own
        x[:, :1].t()
        return super().forward(x * scale)


@pytest.mark.parametrize("kind", [_Layer, _Draws, _Fills])
def test_layers_of_a_user_s_own_are_traced_once(kind: Callable[[int], nn.Module]) -> None:
    repeated, each, spared = _both(_stack(kind), {"x": _X}, loss_fn=_LOSS)
    assert repeated == each
    assert spared == _DEPTH - 2  # the first gets an input without a gradient


@pytest.mark.parametrize(
    "kind", [_ByIndex, _Counts, _Keeps, _Writes, _FillsByIndex, _FillsSeen, _FillsInput, _DropsOut, _Without]
)
def test_layers_that_only_look_equal_are_traced_each(kind: Callable[[int], nn.Module]) -> None:
    repeated, each, _ = _both(_stack(kind), {"x": _X}, loss_fn=_LOSS)
    assert repeated == each


def test_a_hook_on_one_layer_is_that_layer_s_alone() -> None:
    def make() -> nn.Module:
        stack = _stack(_Layer)()
        inner: Any = stack.get_submodule("layers.3.linear")
        inner.register_forward_hook(lambda _, args, out: out * 2)
        return stack

    repeated, each, _ = _both(make, {"x": _X}, loss_fn=_LOSS)
    assert repeated == each


def test_one_layer_in_several_places_repeats_itself() -> None:
    def make() -> nn.Module:
        shared, other = _Layer(0), _Layer(1)
        other.linear.weight = shared.linear.weight
        return _Stack([shared, other, shared, shared])

    repeated, each, _ = _both(make, {"x": _X}, loss_fn=_LOSS)
    assert repeated == each


def test_layers_without_gradients_keep_their_barrier() -> None:
    class Frozen(_Stack):
        def __init__(self) -> None:
            super().__init__([_Layer(i) for i in range(_DEPTH)])
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for layer in self.layers:
                    x = layer(x)
            return self.head(x).sum()

    repeated, each, spared = _both(Frozen, {"x": _X}, loss_fn=_LOSS)
    assert repeated == each
    assert spared == _DEPTH - 1


@pytest.mark.parametrize("which", [0, 3])
def test_what_a_hook_keeps_of_a_layer_is_that_layer_s_own(which: int) -> None:
    """Also where it goes into the results as it is, and no other operator reads it."""
    kept: list[Tensor] = []

    class Kept(_Stack):
        def __init__(self) -> None:
            super().__init__([_Layer(i) for i in range(_DEPTH)])
            for layer in self.layers:
                layer.linear.register_forward_hook(lambda _, args, out: kept.append(out))

        def forward(self, x: Tensor) -> Any:
            kept.clear()
            super().forward(x)
            return kept[which]

    repeated, each, _ = _both(Kept, {"x": _X}, evaluate=True, outputs=lambda out, batch: out)
    assert repeated == each
