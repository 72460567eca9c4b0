"""Every operator on the torch path: schema, fake, autograd, tracing; backward against autograd.

One table, ``OPERATORS``: a differentiable call per operator, with inputs small enough for
gradcheck. The Triton path of the same operators is tested in ``interpreted/``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from megacompile.kernels.adamw import split_reference

ops = torch.ops.megacompile
LABELS = torch.tensor([0, 4, -100])


@dataclass(frozen=True)
class Case:
    """An operator, its differentiable arguments' shapes, and the call."""

    call: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    arguments: Callable[..., tuple[object, ...]]
    op: str


def case(op: str, *shapes: tuple[int, ...], rest: tuple[object, ...] = ()) -> Case:
    def arguments(*inputs: Tensor) -> tuple[object, ...]:
        return (*inputs, *rest)

    return Case(lambda *x: getattr(ops, op)(*arguments(*x)), shapes, arguments, op)


def recurrent(kind: str, gates: int, *, reverse: bool) -> Case:
    """A layer without cells and projection."""

    def arguments(*inputs: Tensor) -> tuple[object, ...]:
        given, hidden, *weights = inputs
        return given, hidden, None, *weights, None, kind, reverse

    shapes = (4, 3, gates * 2), (3, 2), (gates * 2, 2), (gates * 2,)
    return Case(lambda *x: ops.recurrent_layer(*arguments(*x)), shapes, arguments, "recurrent_layer")


def _rope(rotary: int, interleaved: bool) -> tuple[object, ...]:
    cos, sin = torch.randn(2, 1, 1, 3, rotary, generator=torch.Generator().manual_seed(0))
    return cos.double(), sin.double(), interleaved


OPERATORS = {
    "rms_norm": case("rms_norm", (3, 5), (5,), rest=(1e-6, 0.0, True)),
    "rms_norm gemma": case("rms_norm", (2, 3, 5), (5,), rest=(1e-6, 1.0, False)),
    "rms_norm bare": case("rms_norm", (3, 5), rest=(None, 1e-6, 0.0, True)),
    "add_rms_norm": case("add_rms_norm", (3, 5), (3, 5), (5,), rest=(1e-6, 0.0, True)),
    "layer_norm": case("layer_norm", (3, 5), (5,), (5,), rest=(1e-5,)),
    "layer_norm bare": case("layer_norm", (3, 5), rest=(None, None, 1e-5)),
    "glu silu": case("glu", (3, 5), (3, 5), rest=("silu",)),
    "glu gelu_tanh": case("glu", (3, 5), (3, 5), rest=("gelu_tanh",)),
    "glu gelu_erf": case("glu", (3, 5), (3, 5), rest=("gelu_erf",)),
    "clamped_glu": case("clamped_glu", (3, 10), rest=(1.0, 1.702, True)),
    "clamped_glu halves": case("clamped_glu", (3, 10), rest=(1.0, 1.702, False)),
    "rope": case("rope", (1, 2, 3, 6), rest=_rope(6, False)),
    "rope partial interleaved": case("rope", (1, 2, 3, 6), rest=_rope(4, True)),
    "qk_norm_rope": case("qk_norm_rope", (1, 2, 3, 6), (6,), rest=(*_rope(6, False)[:2], 1e-6, 0.0)),
    "qk_norm_rope partial": case("qk_norm_rope", (1, 2, 3, 6), (6,), rest=(*_rope(4, False)[:2], 1e-6, 1.0)),
    "gated_delta_rule": case(
        "gated_delta_rule", (1, 3, 1, 2), (1, 3, 1, 2), (1, 3, 2, 3), (1, 3, 2), (1, 3, 2), rest=(True,)
    ),
    "mamba2_chunk_scan": case(
        "mamba2_chunk_scan", (1, 3, 4, 3), (1, 3, 4), (4,), (1, 3, 2, 2), (1, 3, 2, 2), (4,)
    ),
    "recurrent_layer lstm": case(
        "recurrent_layer", (4, 3, 20), (3, 2), (3, 5), (20, 2), (20,), (2, 5), rest=("lstm", True)
    ),
    "recurrent_layer gru": recurrent("gru", 3, reverse=False),
    "recurrent_layer tanh": recurrent("tanh", 1, reverse=True),
    "linear_cross_entropy": case(
        "linear_cross_entropy", (3, 2), (300, 2), (300,), rest=(LABELS, -100, 0.1, 5.0, 1)
    ),
}


def inputs(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def floats(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return tuple(x for x in outputs if x.requires_grad)


@pytest.mark.parametrize("name", OPERATORS)
def test_backward_is_the_derivative(name: str) -> None:
    test = OPERATORS[name]
    leaves = inputs(test.shapes, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: floats(test.call(*x)), leaves, fast_mode=True)


@pytest.mark.slow_cases(
    r"(\w+_norm (gemma|bare)|glu gelu|clamped_glu halves|(qk_norm_)?rope partial|recurrent_layer [gt])"
)
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    test = OPERATORS[name]
    arguments = test.arguments(*inputs(test.shapes, torch.float64))
    torch.library.opcheck(getattr(ops, test.op).default, arguments)


@pytest.mark.parametrize("name", OPERATORS)
def test_trace_is_functional(name: str) -> None:
    """The joint graph holds the operator and its backward, nothing of their insides."""
    test = OPERATORS[name]

    def joint(*leaves: Tensor) -> tuple[Tensor, ...]:
        outputs = floats(test.call(*leaves))
        return torch.autograd.grad([x.sum() for x in outputs], leaves)

    graph = make_fx(joint, tracing_mode="fake", _allow_non_fake_inputs=True)(
        *inputs(test.shapes, torch.float64)
    ).graph
    ours = {str(node.target) for node in graph.nodes if "megacompile" in str(node.target)}
    assert ours == {f"megacompile.{test.op}.default", f"megacompile.{test.op}_backward.default"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_fake_agrees_in_low_precision(name: str, dtype: torch.dtype) -> None:
    test = OPERATORS[name]
    leaves = [x.detach() for x in inputs(test.shapes, dtype)]
    torch.library.opcheck(
        getattr(ops, test.op).default, test.arguments(*leaves), test_utils="test_faketensor"
    )


def _streaming() -> dict[str, tuple[object, ...]]:
    """Operators without a derivative: most of them write where their arguments lie."""
    x = torch.randn(300)
    high, low = split_reference(x)
    moments = torch.zeros(300), torch.zeros(300)
    rest = (x * 0.1, 1e-3, 0.9, 0.999, 1e-8, 0.1, 1)
    cos, sin = torch.randn(2, 1, 1, 3, 4)
    return {
        "adamw_": (x.clone(), None, *moments, *rest, None),
        "adamw_ split": (high, low, *moments, *rest, torch.ones(1)),
        "rope_": (torch.randn(1, 2, 3, 6), cos, sin),
        "glu_backward_": (torch.randn(3, 5), torch.randn(3, 5), torch.randn(3, 5), "silu"),
        "clamped_glu_backward_": (torch.randn(3, 5), torch.randn(3, 10), 7.0, 1.702, True),
        "linear_cross_entropy_with_gradients": (
            torch.rand(3),
            torch.randn(3, 2),
            torch.randn(30, 2),
            torch.randn(30),
            LABELS,
            -100,
            0.1,
            5.0,
            1,
        ),
        "head_tile": (torch.randn(4, 3), torch.randn(7, 3), None, torch.tensor([0, 8, -2, 6]), 0.0, 64),
        "head_tile softcap": (
            torch.randn(2, 3),
            torch.randn(5, 3),
            torch.randn(5),
            torch.tensor([1, 9]),
            4.0,
            64,
        ),
        "take_rows": (torch.randn(5, 2), torch.tensor([1]), torch.tensor([3])),
        "put_rows": (torch.randn(5, 2), torch.tensor([1]), torch.tensor([3])),
    }


@pytest.mark.parametrize("name", _streaming())
def test_opcheck_of_streaming_operators(name: str) -> None:
    operator = getattr(ops, name.split()[0]).default
    torch.library.opcheck(operator, _streaming()[name])


def test_references_are_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows computed one by one give what one pass over all of them gives, forward and backward."""
    found = []
    for least in (1 << 20, 1):
        monkeypatch.setattr("megacompile.kernels.row_chunks.LEAST", least)
        for name in ("rms_norm", "add_rms_norm", "layer_norm", "glu silu", "rope", "linear_cross_entropy"):
            leaves = inputs(OPERATORS[name].shapes, torch.float64)
            out = floats(OPERATORS[name].call(*leaves))
            found.append([*out, *torch.autograd.grad([x.sum() for x in out], leaves)])
    for whole, parts in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_every_operator_is_tested_here() -> None:
    tested = {case.op for case in OPERATORS.values()} | {n.split()[0] for n in _streaming()}
    elsewhere = {"attention", "decode_4bit", "decode_8bit", "dropout", "uniform"}  # of megacompile/capture
    elsewhere |= {"average_statistics", "buffer_snapshot"}  # of buffers, which have no gradient
    elsewhere |= {"own_gradient", "repeated_layer"}  # marks that no program has
    elsewhere |= {"opaque"}  # of functions that run as they are
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("megacompile::")
    }
    forward = {name for name in registered if not name.endswith("_backward")}
    assert forward - elsewhere == tested
