"""List what the ahead-of-time gate compiles of each operator: calls of its launchers on meta tensors.

The gate records the launches that these calls make, so it compiles what will run and cannot drift from it.
Cases are named by what the speed of the kernels depends on: sizes, an activation, what attention masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.hopper_attention import hopper_attention_backward, hopper_attention_forward
from benchmarks.hopper_attention import supports as hopper_supports
from megacompile.kernels.adamw import Constants, adamw_triton
from megacompile.kernels.add_rms_norm import MAX_ADD_RMS_NORM_BACKWARD
from megacompile.kernels.attention import Rule
from megacompile.kernels.attention import backward_triton as attention_backward
from megacompile.kernels.attention import forward_triton as attention_forward
from megacompile.kernels.clamped_glu import clamped_glu_backward_triton, clamped_glu_triton
from megacompile.kernels.cross_entropy_tiles import LossTerms, accumulate_triton, gradient_triton, new_state
from megacompile.kernels.decode_4bit import decode_4bit_triton, stored_4bit_bytes
from megacompile.kernels.decode_8bit import decode_8bit_triton, stored_8bit_bytes
from megacompile.kernels.dropout import dropout_triton
from megacompile.kernels.gated_delta import RuleInputs
from megacompile.kernels.gated_delta import backward_triton as gated_delta_backward
from megacompile.kernels.gated_delta import forward_triton as gated_delta_forward
from megacompile.kernels.glu import ACTIVATIONS, glu_backward_triton, glu_triton
from megacompile.kernels.layer_norm import (
    MAX_LAYER_NORM_BACKWARD,
    layer_norm_backward_triton,
    layer_norm_triton,
)
from megacompile.kernels.mamba2 import ScanInputs
from megacompile.kernels.mamba2 import backward_triton as mamba2_backward
from megacompile.kernels.mamba2 import forward_triton as mamba2_forward
from megacompile.kernels.qk_norm_rope import qk_norm_rope_backward_triton, qk_norm_rope_triton
from megacompile.kernels.rms_norm import MAX_RMS_NORM_BACKWARD, rms_norm_backward_triton, rms_norm_triton
from megacompile.kernels.rope import rope_triton
from megacompile.kernels.uniform import uniform_triton

Case = tuple[str, Callable[[], object]]
_ROW_WIDTHS = tuple(1 << n for n in range(6, 16))  # one for each tile of whole rows, up to MAX_ROW
_TYPES = (("bf16", torch.bfloat16), ("fp32", torch.float32))


def _adamw() -> list[Case]:
    constants = Constants.of(1e-4, 0.9, 0.999, 1e-8, 0.1, 3)

    def case(split: bool) -> None:
        state = torch.empty(1 << 20, device="meta")
        high, low = state.bfloat16(), state.to(torch.int16)
        if split:
            adamw_triton((high, low, state, state), high, constants, state)
        else:
            adamw_triton((state, None, state, state), high, constants, state)

    return [("split bf16", partial(case, True)), ("fp32", partial(case, False))]


def _add_rms_norm() -> list[Case]:
    def case(width: int) -> None:
        x = torch.empty((8192, width), dtype=torch.bfloat16, device="meta")
        _, total, rstd = rms_norm_triton(x, x, x[0], 1e-6, 0.0, True)
        if width <= MAX_ADD_RMS_NORM_BACKWARD:
            rms_norm_backward_triton(x, x, total, x[0], rstd, (0.0, True))

    return [(f"{n} bf16", partial(case, n)) for n in _ROW_WIDTHS]


def _attention() -> list[Case]:
    def case(dims: tuple[int, int], rule: Rule, sinks: bool = False, packed: bool = False) -> None:
        q, k, v = (
            torch.empty((2, 4096, heads, dim), dtype=torch.bfloat16, device="meta").transpose(1, 2)
            for heads, dim in ((32, dims[0]), (8, dims[0]), (8, dims[1]))
        )
        logits = q[0, :, 0, 0].contiguous() if sinks else None
        bounds = torch.empty((2, 2, 4096), dtype=torch.int32, device="meta") if packed else None
        rule = replace(rule, sinks=logits, bounds=bounds)
        out, lse = attention_forward(q, k, v, rule)
        attention_backward(out, q, k, v, out, lse, rule)

    causal, window = Rule(0.1), Rule(0.1, window=1024)
    gemma, every = replace(causal, softcap=50.0), replace(window, softcap=50.0)
    return [
        *((f"{d} all bf16", partial(case, (d, d), every, True, True)) for d in (64, 128, 256)),
        ("64 two-sided bf16", partial(case, (64, 64), Rule(0.1, False, 512))),
        *((f"{d} causal bf16", partial(case, (d, d), causal)) for d in (64, 128, 256)),
        ("192/128 causal bf16", partial(case, (192, 128), causal)),
        ("128 window bf16", partial(case, (128, 128), window)),
        ("128 packed bf16", partial(case, (128, 128), causal, packed=True)),
        ("64 sinks bf16", partial(case, (64, 64), causal, sinks=True)),
        ("64 window sinks bf16", partial(case, (64, 64), window, sinks=True)),
        ("256 softcap bf16", partial(case, (256, 256), gemma)),
        ("256 window softcap bf16", partial(case, (256, 256), every)),
    ]


def _hopper_attention() -> list[Case]:
    """List the cases of the candidate for Hopper; other chips launch nothing."""

    def case(width: int, rule: Rule, sinks: bool = False, packed: bool = False) -> None:
        q, k, v = (
            torch.empty((2, 4096, heads, width), dtype=torch.bfloat16, device="meta").transpose(1, 2)
            for heads in (32, 8, 8)
        )
        logits = q[0, :, 0, 0].contiguous() if sinks else None
        bounds = torch.empty((2, 2, 4096), dtype=torch.int32, device="meta") if packed else None
        if hopper_supports(q, k, v):
            rule = replace(rule, sinks=logits, bounds=bounds)
            out, lse = hopper_attention_forward(q, k, v, rule)
            hopper_attention_backward(out, q, k, v, out, lse, rule)

    causal, window = Rule(0.1), Rule(0.1, window=1024)
    return [
        *((f"{d} causal bf16", partial(case, d, causal)) for d in (64, 96, 128)),
        ("128 full bf16", partial(case, 128, Rule(0.1, False))),
        ("128 window bf16", partial(case, 128, window)),
        ("128 packed bf16", partial(case, 128, causal, packed=True)),
        ("128 softcap bf16", partial(case, 128, replace(causal, softcap=50.0))),
        ("64 sinks bf16", partial(case, 64, causal, sinks=True)),
        ("128 all bf16", partial(case, 128, replace(window, softcap=50.0), True, True)),
    ]


def _clamped_glu() -> list[Case]:
    def case(dtype: torch.dtype, interleaved: bool) -> None:
        both = torch.empty((4096, 2 * 2880), dtype=dtype, device="meta")
        y = clamped_glu_triton(both, 7.0, 1.702, interleaved)
        clamped_glu_backward_triton(y, both, 7.0, 1.702, interleaved, both)

    return [
        ("interleaved bf16", partial(case, torch.bfloat16, True)),
        ("halves bf16", partial(case, torch.bfloat16, False)),
        ("interleaved fp32", partial(case, torch.float32, True)),
    ]


def _decode_4bit() -> list[Case]:
    def case(dtype: torch.dtype) -> None:
        stored = torch.empty(stored_4bit_bytes(4096 * 4096, 64), dtype=torch.uint8, device="meta")
        decode_4bit_triton(stored, (4096, 4096), 64, dtype)

    return [(name, partial(case, dtype)) for name, dtype in _TYPES]


def _decode_8bit() -> list[Case]:
    def case(dtype: torch.dtype) -> None:
        stored = torch.empty(stored_8bit_bytes(4096, 4096), dtype=torch.uint8, device="meta")
        decode_8bit_triton(stored, (4096, 4096), dtype)

    return [(name, partial(case, dtype)) for name, dtype in _TYPES]


def _dropout() -> list[Case]:
    def case(dtype: torch.dtype) -> None:
        rng = torch.empty(2, dtype=torch.int64, device="meta")
        dropout_triton(torch.empty((4096, 4096), dtype=dtype, device="meta"), rng, 3, 0.1)

    return [(name, partial(case, dtype)) for name, dtype in _TYPES]


def _gated_delta() -> list[Case]:
    def case(groups: int, heads: int, width: int, inner: int) -> None:
        q = torch.empty((2, 4096, groups, width), dtype=torch.bfloat16, device="meta")
        v = torch.empty((2, 4096, heads, inner), dtype=torch.bfloat16, device="meta")
        beta = v[..., 0].contiguous()
        given = RuleInputs(q, q, v, beta.float(), beta, True)
        out, states = gated_delta_forward(given)
        gated_delta_backward(out, given, states)

    return [
        ("128/128 bf16", partial(case, 16, 32, 128, 128)),
        ("96/192 bf16", partial(case, 30, 30, 96, 192)),
    ]


def _glu() -> list[Case]:
    def case(activation: str, dtype: torch.dtype, packed: bool) -> None:
        both = torch.empty((4096, 2 * 14336), dtype=dtype, device="meta")
        gate, up = both.chunk(2, dim=-1)
        if not packed:
            gate, up = torch.empty_like(gate), torch.empty_like(up)
        y = glu_triton(gate, up, activation)
        glu_backward_triton(y, gate, up, activation, torch.empty_like(y), torch.empty_like(y))

    cases = [(f"{a} bf16", partial(case, a, torch.bfloat16, False)) for a in ACTIVATIONS]
    cases.append(("silu bf16 packed", partial(case, "silu", torch.bfloat16, True)))
    return [*cases, ("silu fp32", partial(case, "silu", torch.float32, False))]


def _layer_norm() -> list[Case]:
    def case(width: int) -> None:
        x = torch.empty((8192, width), dtype=torch.bfloat16, device="meta")
        _, mean, rstd = layer_norm_triton(x, x[0], x[0], 1e-5)
        if width <= MAX_LAYER_NORM_BACKWARD:
            layer_norm_backward_triton(x, x, x[0], True, mean, rstd)

    return [(f"{n} bf16", partial(case, n)) for n in (768, *_ROW_WIDTHS)]


def _linear_cross_entropy() -> list[Case]:
    def case(columns: int, dtype: torch.dtype, terms: LossTerms) -> None:
        logits = torch.empty((4096, columns), dtype=dtype, device="meta")
        labels = torch.empty(4096, dtype=torch.int64, device="meta")
        state = new_state(logits, 4096)
        accumulate_triton(state, logits, labels, 0, terms)
        gradient_triton(logits, labels, state, state[0], 0, terms)

    whole, every = LossTerms(128256), LossTerms(128256, -100, 0.1, 30.0)
    return [
        ("128256 bf16", partial(case, 128256, torch.bfloat16, whole)),
        ("128256 bf16 all terms", partial(case, 128256, torch.bfloat16, every)),
        ("8192 bf16", partial(case, 8192, torch.bfloat16, whole)),
        ("8192 fp32", partial(case, 8192, torch.float32, whole)),
    ]


def _mamba2() -> list[Case]:
    def case(heads: int, width: int, groups: int, inner: int) -> None:
        x = torch.empty((1, 4096, heads, width), dtype=torch.bfloat16, device="meta")
        B = torch.empty((1, 4096, groups, inner), dtype=torch.bfloat16, device="meta")
        of_heads = x[0, 0, :, 0].contiguous()
        given = ScanInputs(x, x[..., 0].contiguous(), of_heads.float(), B, B, of_heads)
        out, states = mamba2_forward(given)
        mamba2_backward(out, given, states)

    return [
        ("128/64 bf16", partial(case, 128, 64, 8, 128)),
        ("256/128 bf16", partial(case, 32, 128, 2, 256)),
    ]


def _qk_norm_rope() -> list[Case]:
    def case(heads: int, width: int, rotary: int, dtype: torch.dtype) -> None:
        x = torch.empty((2, 4096, heads, width), dtype=dtype, device="meta").transpose(1, 2)
        table = torch.empty((1, 1, 4096, rotary), dtype=dtype, device="meta")
        given = x, x[0, 0, 0], table, table
        y, rstd = qk_norm_rope_triton(*given, 1e-6, 0.0)
        qk_norm_rope_backward_triton(y, *given, rstd, 0.0)

    shapes = ((32, 128), (8, 128), (16, 64), (8, 256))
    return [
        *((f"{h}x{w} bf16", partial(case, h, w, w, torch.bfloat16)) for h, w in shapes),
        ("16x256 partial bf16", partial(case, 16, 256, 64, torch.bfloat16)),
        ("32x128 fp32", partial(case, 32, 128, 128, torch.float32)),
    ]


def _rms_norm() -> list[Case]:
    def case(width: int, dtype: torch.dtype) -> None:
        x = torch.empty((8192, width), dtype=dtype, device="meta")
        weight = x[0]
        _, _, rstd = rms_norm_triton(x, None, weight, 1e-6, 0.0, True)
        if width <= MAX_RMS_NORM_BACKWARD:
            rms_norm_backward_triton(x, None, x, weight, rstd, (0.0, True))

    cases = [(f"{n} bf16", partial(case, n, torch.bfloat16)) for n in _ROW_WIDTHS]
    return [*cases, ("4096 fp32", partial(case, 4096, torch.float32))]


def _rope() -> list[Case]:
    def case(heads: int, width: int, rotary: int, interleaved: bool) -> None:
        x = torch.empty((2, 4096, heads, width), dtype=torch.bfloat16, device="meta")
        cos = torch.empty((1, 1, 4096, rotary), dtype=torch.bfloat16, device="meta")
        x = x.transpose(1, 2)
        for transposed in (False, True):
            rope_triton(x, cos, cos, interleaved, transposed, torch.empty_like(x))
        rope_triton(x, cos, cos, interleaved, False, x)

    return [
        ("32x128 bf16", partial(case, 32, 128, 128, False)),
        ("8x64 bf16", partial(case, 8, 64, 64, False)),
        ("32x128 partial bf16", partial(case, 32, 128, 32, False)),
        ("32x128 interleaved bf16", partial(case, 32, 128, 128, True)),
    ]


def _uniform() -> list[Case]:
    def case(dtype: torch.dtype) -> None:
        uniform_triton(torch.empty(2, dtype=torch.int64, device="meta"), (4096, 4096), dtype, 3)

    return [(name, partial(case, dtype)) for name, dtype in _TYPES]


CASES: dict[str, list[Case]] = {
    "adamw_": _adamw(),
    "add_rms_norm": _add_rms_norm(),
    "attention": _attention(),
    "clamped_glu": _clamped_glu(),
    "decode_4bit": _decode_4bit(),
    "decode_8bit": _decode_8bit(),
    "dropout": _dropout(),
    "gated_delta_rule": _gated_delta(),
    "glu": _glu(),
    "hopper_attention": _hopper_attention(),
    "layer_norm": _layer_norm(),
    "linear_cross_entropy": _linear_cross_entropy(),
    "mamba2_chunk_scan": _mamba2(),
    "qk_norm_rope": _qk_norm_rope(),
    "rms_norm": _rms_norm(),
    "rope": _rope(),
    "uniform": _uniform(),
}
"""By the operator's name: named calls of its launchers."""
