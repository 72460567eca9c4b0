# mypy: allow-untyped-defs, allow-incomplete-defs
"""The kernels of ``qk_norm_rope.py``: a tile is BLOCK_H heads of one token.

A head's columns are a and b, the two halves that are rotated, of HALF columns each, and c, those that pass,
where there are any, of PASS. ``x_batch``, ``x_token``, ``x_head`` are x's strides; columns have stride one.
"""

from megacompile.kernels._triton import tl, triton
from megacompile.kernels.rope import load_halves, rotate


@triton.jit
def qk_norm_rope_forward_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr, rstd_ptr,
    x_batch, x_token, x_head, y_batch, y_token, y_head, rstd_batch, rstd_token, rstd_head,
    cos_batch, cos_token, sin_batch, sin_token,
    tokens, heads, rotary, width, eps, offset,
    ACC: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """y and rstd of one tile."""
    at = tl.program_id(0).to(tl.int64)
    batch, token = at // tokens, at % tokens
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
    x_row = x_ptr + batch * x_batch + token * x_token + head * x_head
    y_row = y_ptr + batch * y_batch + token * y_token + head * y_head
    cos_row = cos_ptr + batch * cos_batch + token * cos_token
    sin_row = sin_ptr + batch * sin_batch + token * sin_token
    out: tl.constexpr = y_ptr.dtype.element_ty
    half = rotary // 2
    col = tl.arange(0, HALF)[None, :]
    known = col < half
    inside = (head < heads) & known
    a, b = load_halves(x_row, half, col, inside, ACC)
    squares = tl.sum(a * a + b * b, axis=1)[:, None]
    if PASS > 0:
        rest = rotary + tl.arange(0, PASS)[None, :]
        beyond = (head < heads) & (rest < width)
        c = tl.load(x_row + rest, mask=beyond, other=0.0).to(ACC)
        squares += tl.sum(c * c, axis=1)[:, None]
    rstd = 1.0 / tl.sqrt(squares / width + eps)
    tl.store(rstd_ptr + batch * rstd_batch + token * rstd_token + head * rstd_head, rstd, mask=head < heads)
    weight_a, weight_b = load_halves(weight_ptr, half, col, known, ACC)
    a *= rstd * (weight_a + offset)
    b *= rstd * (weight_b + offset)
    cos_a, cos_b = load_halves(cos_row, half, col, known, ACC)
    sin_a, sin_b = load_halves(sin_row, half, col, known, ACC)
    a, b = rotate(a, b, cos_a, sin_a, cos_b, sin_b, False)
    tl.store(y_row + col, a.to(out), mask=inside)
    tl.store(y_row + half + col, b.to(out), mask=inside)
    if PASS > 0:
        c *= rstd * (tl.load(weight_ptr + rest, mask=rest < width, other=0.0).to(ACC) + offset)
        tl.store(y_row + rest, c.to(out), mask=beyond)


@triton.jit
def qk_norm_rope_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, rstd_ptr, dx_ptr, dw_ptr,
    grad_batch, grad_token, grad_head, x_batch, x_token, x_head, dx_batch, dx_token, dx_head,
    rstd_batch, rstd_token, rstd_head, cos_batch, cos_token, sin_batch, sin_token,
    rows, tokens, heads, rotary, width, offset,
    ACC: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """dx, and each program's share of dw; ``rows`` are those of cos and sin, all tokens of the batch.

    Persistent: a program walks over tiles, keeps its share of dw in registers and writes it once.
    """
    half = rotary // 2
    col = tl.arange(0, HALF)[None, :]
    known = col < half
    weight_a, weight_b = load_halves(weight_ptr, half, col, known, ACC)
    weight_a, weight_b = weight_a + offset, weight_b + offset
    dw_a = tl.zeros((BLOCK_H, HALF), dtype=ACC)
    dw_b = tl.zeros((BLOCK_H, HALF), dtype=ACC)
    if PASS > 0:
        rest = rotary + tl.arange(0, PASS)[None, :]
        weight_c = tl.load(weight_ptr + rest, mask=rest < width, other=0.0).to(ACC) + offset
        dw_c = tl.zeros((BLOCK_H, PASS), dtype=ACC)
    out: tl.constexpr = dx_ptr.dtype.element_ty
    blocks = tl.cdiv(heads, BLOCK_H)
    for tile in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        at = (tile // blocks).to(tl.int64)
        batch, token = at // tokens, at % tokens
        head = (tile % blocks * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
        grad_row = grad_ptr + batch * grad_batch + token * grad_token + head * grad_head
        x_row = x_ptr + batch * x_batch + token * x_token + head * x_head
        dx_row = dx_ptr + batch * dx_batch + token * dx_token + head * dx_head
        rstd_row = rstd_ptr + batch * rstd_batch + token * rstd_token + head * rstd_head
        cos_row = cos_ptr + batch * cos_batch + token * cos_token
        sin_row = sin_ptr + batch * sin_batch + token * sin_token
        inside = (head < heads) & known
        rstd = tl.load(rstd_row, mask=head < heads, other=0.0)
        a, b = load_halves(grad_row, half, col, inside, ACC)
        normal_a, normal_b = load_halves(x_row, half, col, inside, ACC)
        normal_a, normal_b = normal_a * rstd, normal_b * rstd
        cos_a, cos_b = load_halves(cos_row, half, col, known, ACC)
        sin_a, sin_b = load_halves(sin_row, half, col, known, ACC)
        a, b = rotate(a, b, cos_a, sin_a, cos_b, sin_b, True)
        dw_a += a * normal_a
        dw_b += b * normal_b
        a *= weight_a
        b *= weight_b
        along = tl.sum(a * normal_a + b * normal_b, axis=1)[:, None]
        if PASS > 0:
            beyond = (head < heads) & (rest < width)
            c = tl.load(grad_row + rest, mask=beyond, other=0.0).to(ACC)
            normal_c = tl.load(x_row + rest, mask=beyond, other=0.0).to(ACC) * rstd
            dw_c += c * normal_c
            c *= weight_c
            along += tl.sum(c * normal_c, axis=1)[:, None]
            tl.store(dx_row + rest, ((c - normal_c * (along / width)) * rstd).to(out), mask=beyond)
        mean = along / width
        tl.store(dx_row + col, ((a - normal_a * mean) * rstd).to(out), mask=inside)
        tl.store(dx_row + half + col, ((b - normal_b * mean) * rstd).to(out), mask=inside)
    share = dw_ptr + tl.program_id(0) * width + col
    tl.store(share, tl.sum(dw_a, axis=0)[None, :], mask=known)
    tl.store(share + half, tl.sum(dw_b, axis=0)[None, :], mask=known)
    if PASS > 0:
        at_rest = dw_ptr + tl.program_id(0) * width + rest
        tl.store(at_rest, tl.sum(dw_c, axis=0)[None, :], mask=rest < width)
