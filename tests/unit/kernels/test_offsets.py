"""No integer wraps where tensors pass 2**31 elements, in what Triton compiles of every kernel.

Each kernel is recorded on meta tensors of such sizes, in the layouts that it takes, and compiled to Triton's
IR. A kernel that no call launches so, and a tensor that none makes so large, fail, unless ``SMALL`` has it.
"""

import importlib
import importlib.util
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from benchmarks.gate_rules import TABLE_TRITON
from megacompile import kernels
from megacompile.bench.ceilings import CHIPS
from megacompile.kernels import gated_delta, mamba2
from megacompile.kernels._triton import Gpu, Launch, launch, recording, tl, triton
from megacompile.kernels.adamw import Constants, adamw_triton
from megacompile.kernels.attention import Rule
from megacompile.kernels.attention import backward_triton as attention_backward
from megacompile.kernels.attention import forward_triton as attention_forward
from megacompile.kernels.clamped_glu import clamped_glu_backward_triton, clamped_glu_triton
from megacompile.kernels.cross_entropy_tiles import LossTerms, accumulate_triton, gradient_triton, new_state
from megacompile.kernels.decode_4bit import decode_4bit_triton, stored_4bit_bytes
from megacompile.kernels.decode_8bit import decode_8bit_triton, stored_8bit_bytes
from megacompile.kernels.dropout import dropout_triton
from megacompile.kernels.gated_delta import RuleInputs
from megacompile.kernels.gated_delta import backward_triton as delta_backward
from megacompile.kernels.gated_delta import forward_triton as delta_forward
from megacompile.kernels.glu import glu_backward_triton, glu_triton
from megacompile.kernels.layer_norm import layer_norm_backward_triton, layer_norm_triton
from megacompile.kernels.mamba2 import ScanInputs
from megacompile.kernels.mamba2 import backward_triton as scan_backward
from megacompile.kernels.mamba2 import forward_triton as scan_forward
from megacompile.kernels.qk_norm_rope import qk_norm_rope_backward_triton, qk_norm_rope_triton
from megacompile.kernels.rms_norm import rms_norm_backward_triton, rms_norm_triton
from megacompile.kernels.rope import rope_triton
from megacompile.kernels.uniform import uniform_triton
from tests.support.integer_ranges import wrapping_integers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not triton.__version__.startswith(TABLE_TRITON),
    reason=f"reads the IR of triton {TABLE_TRITON}x, as the gate's tables are made with: pip install triton",
)

FAR = 1 << 31
ARCH = 90
BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def elementwise(count: int) -> None:
    state, high, low = (empty(count, dtype=dtype) for dtype in (torch.float32, BF16, torch.int16))
    constants = Constants.of(1e-4, 0.9, 0.999, 1e-8, 0.1, 3)
    adamw_triton((high, low, state, state), state, constants, empty(1))
    rng = empty(2, dtype=torch.int64)
    dropout_triton(high, rng, 3, 0.1)
    uniform_triton(rng, (count,), BF16, 3)
    decode_4bit_triton(empty(stored_4bit_bytes(count, 1), dtype=torch.uint8), (count,), 1, BF16)
    decode_8bit_triton(empty(stored_8bit_bytes(count, 1), dtype=torch.uint8), (count, 1), BF16)


def activations(rows: int, columns: int) -> None:
    """Of halves of a packed tensor, and of tensors side by side."""
    both = empty(rows, 2 * columns)
    y = empty(rows, columns)
    for gate, up in (both.chunk(2, dim=1), (y, y)):
        glu_triton(gate, up, "silu")
        glu_backward_triton(gate, gate, up, "silu", y, y)
    for interleaved in (True, False):
        clamped_glu_triton(both, 7.0, 1.702, interleaved)
        for grad in (both[:, :columns], y):
            clamped_glu_backward_triton(grad, both, 7.0, 1.702, interleaved, both)


def norms(rows: int, columns: int) -> None:
    x = empty(rows, 2 * columns)[:, :columns]
    weight = empty(columns)
    _, total, rstd = rms_norm_triton(x, x, weight, 1e-6, 0.0, True)
    rms_norm_backward_triton(x, total, x, weight, rstd, (0.0, True))
    _, mean, rstd = layer_norm_triton(x, weight, weight, 1e-5)
    layer_norm_backward_triton(x, x, weight, True, mean, rstd)


def losses(tokens: int, columns: int) -> None:
    logits, labels = empty(tokens, columns), empty(tokens, dtype=torch.int64)
    state, terms = new_state(logits, tokens), LossTerms(columns, -100, 0.1, 30.0)
    accumulate_triton(state, logits, labels, 0, terms)
    gradient_triton(logits, labels, state, state[0], 0, terms)


def rotations(x: Tensor) -> None:
    """Rotate whole heads, half of each, and with a table for each head; x is [B, H, S, D]."""
    whole = empty(len(x), 1, *x.shape[2:])
    half = whole[..., : x.shape[3] // 2]
    for cos, interleaved in ((half, True), (half, False), (whole.expand(*x.shape).contiguous(), False)):
        rope_triton(x, cos, cos, interleaved, False, torch.empty_like(x))
    _, rstd = qk_norm_rope_triton(x, whole[0, 0, 0], half, half, 1e-6, 0.0)
    qk_norm_rope_backward_triton(x, x, whole[0, 0, 0], half, half, rstd, 0.0)


def attentions(q: Tensor) -> None:
    """q: [B, H, S, D]; each head of keys is that of four queries."""
    k = q[:, ::4]
    bounds = empty(2, len(q), q.shape[2], dtype=torch.int32)
    rule = Rule(0.1, True, 1024, 50.0, empty(q.shape[1]), bounds)
    out, lse = attention_forward(q, k, k, rule)
    attention_backward(q, q, k, k, out, lse, rule)


def gated_delta_rule(v: Tensor) -> None:
    """v: [B, S, H, D]; each head of keys is that of four values."""
    k = v[:, :, ::4]
    given = RuleInputs(k, k, v, v[..., 0], v[..., 0], True)
    delta_backward(v, given, delta_forward(given)[1])


def mamba2_scan(x: Tensor, B: Tensor | None = None) -> None:
    """x: [B, S, H, D]; B: [B, S, G, N], else of every fourth head."""
    B = x[:, :, ::4] if B is None else B
    of_heads = empty(x.shape[2])
    given = ScanInputs(x, x[..., 0], of_heads, B, B, of_heads)
    scan_backward(x, given, scan_forward(given)[1])


LONG = empty(128, 520, 1 << 15, 128)  # [B, H, S, D]: heads far apart
ROWS = empty(128, 1 << 15, 520, 128).transpose(1, 2)  # tokens far apart
MANY = empty(5000, 8, 4096, 128)  # rows of the batch far apart
SHORT = empty(65535, 256, 64, 64)  # as many heads of rows as fit
PART = empty(1, 4096, 1 << 17, 128).transpose(1, 2)[:, :9000]  # tokens that a backward takes at once
CALLS: list[Callable[[], None]] = [
    *(partial(elementwise, n) for n in (FAR - 512, FAR + 512, 2 * FAR + 1024)),
    *(partial(activations, *shape) for shape in ((1 << 18, 16384), (1, FAR // 2 - 512), (1, FAR - 512))),
    *(partial(norms, 2 * FAR // n, n) for n in (128, 8192)),
    partial(losses, 1 << 16, 1 << 16),
    *(partial(call, x) for call in (rotations, attentions) for x in (LONG, ROWS, MANY)),
    *(
        partial(call, x.transpose(1, 2))
        for call in (gated_delta_rule, mamba2_scan)
        for x in (LONG, ROWS, SHORT, PART)
    ),
    partial(
        mamba2_scan, empty(1, 256, 65535, 128), empty(1, 256, 1, 256)
    ),  # the largest states that it takes
]
# The tensors that are never so large, and why.
SMALL = {
    r"\w+_norm_\w+ (weight|bias|dw|db)_ptr": "a number for each column, or as many as there are programs",
    r"(rms|layer)_norm_\w+ (mean|rstd)_ptr": "a number for each row",
    r"(accumulate|gradient)_kernel (labels|state|stats|grad)_ptr": "up to four numbers for each token",
    r"attention_\w+ (first|last)_ptr": "a number for each token, whatever the heads",
    r"\w+ (sinks|a|d)_ptr": "a number for each head",
    r"mamba2_\w+ (decays|carried|totals)_ptr": "a number for 1024 elements of a state, or for a head's chunk",
    r"\w+ (rng|scale|book)_ptr": "two numbers, one, sixteen",
}


@cache
def launches() -> list[Launch]:
    """Those of all calls, each once."""
    with recording(ARCH, chip_processors=CHIPS[ARCH].processors) as made:
        for call in CALLS:
            call()
    found = {}
    for each in made:
        numbers = [x for x in each.args if not isinstance(x, Tensor)]
        found[repr((each.kernel.__name__, each.grid, numbers, each.constants))] = each
    return list(found.values())


def test_no_integer_wraps() -> None:
    """If one does, make what multiplies a stride int64 in the line that is named."""
    assert not [found for each in launches() for found in wrapping_integers(each, ARCH)]


def test_every_kernel_has_large_tensors() -> None:
    """If one has not, add a call to ``CALLS``."""
    names = {
        name
        for module in pkgutil.iter_modules(kernels.__path__)
        for name, found in vars(importlib.import_module(f"megacompile.kernels.{module.name}")).items()
        if name.endswith("_kernel") and hasattr(found, "arg_names")
    }
    assert names == {each.kernel.__name__ for each in launches()}
    elements: dict[str, int] = defaultdict(int)
    for each in launches():
        for name, x in zip(each.kernel.arg_names, each.args, strict=False):
            if isinstance(x, Tensor):
                key = f"{each.kernel.__name__} {name}"
                reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
                elements[key] = max(elements[key], reach)
    small = {name for name, count in elements.items() if count <= FAR}
    assert small == {name for name in elements if any(re.fullmatch(pattern, name) for pattern in SMALL)}


def test_grids_fit() -> None:
    """CUDA's end at 65535 in their second and third dimension."""
    for each in launches():
        assert each.grid[0] < FAR and max(each.grid[1:], default=1) < 1 << 16, each.kernel.__name__


@pytest.mark.parametrize(("batch", "heads"), [(65535, 65535), (1 << 16, 1), (1, 1 << 16)])
def test_recurrences_leave_longer_grids_to_torch(batch: int, heads: int) -> None:
    """The number of a head of all the batch is int32."""
    one = empty(1, 1, 1, 128)
    many = one.expand(batch, 1, heads, 128)
    with recording(gpu=Gpu(132, ARCH)):
        assert gated_delta.runs_kernels(one, one, one) and not gated_delta.runs_kernels(many, many, many)
        assert mamba2.runs_kernels(one, one, one) and not mamba2.runs_kernels(many, many, many)


@triton.jit
def sample_kernel(x_ptr, stride, count, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    if KIND == "int64":
        tl.store(x_ptr + row.to(tl.int64) * stride, 1.0)
    elif KIND == "int32":
        tl.store(x_ptr + row * stride, 1.0)
    elif KIND == "too late":
        tl.store(x_ptr + (row * stride).to(tl.int64), 1.0)
    elif KIND == "mask":
        tl.store(x_ptr + row, 1.0, mask=row * stride < count)
    elif KIND == "branch":
        if row * stride < count:
            tl.store(x_ptr + row, 1.0)
    elif KIND == "stored":
        tl.store(x_ptr + row, row * stride)
    elif KIND == "bounded":
        tl.store(x_ptr + tl.minimum(row, 1) * stride + row % 4 // 2 * stride, 1.0)
    elif KIND == "loop":
        for n in range(row, count, 1 << 20):
            tl.store(x_ptr + n, 1.0)
    elif KIND == "carried":
        at = row
        for _ in range(4):
            tl.store(x_ptr + at, 1.0)
            at += stride


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        *((kind, [0, 0]) for kind in ("int64", "stored", "bounded")),
        *((kind, [1, 0]) for kind in ("int32", "too late", "mask", "branch", "loop")),
        ("carried", [1, 1]),
    ],
)
def test_a_wrapping_integer_is_found(kind: str, found: list[int]) -> None:
    """Just where it decides what is read, written or done; three rows reach 2**31, two do so in a loop."""
    with recording(ARCH) as made:
        for rows in (3, 2):
            counts = {"loop": FAR - 8 if rows == 3 else FAR // 2}
            launch(sample_kernel, (rows,), empty(FAR), 1 << 30, counts.get(kind, 100), KIND=kind)
    assert [len(wrapping_integers(each, ARCH)) for each in made] == found
