"""Gather of KV rows from a paged pool into a dense buffer. S slots, N rows, W row width.

FP8 rows are uint8: the latent as e4m3, a fp32 scale for each 128 values of it, the rope as bf16
(L 512, R 64: 512 + 16 + 128 = 656 bytes).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16  # rows a program: 18 KB of bf16 rows in flight


def kv_gather(pool: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[i] = pool[slots[i]], converted to out's dtype; returns out.

    pool [S, W], out [N, W], each of any row stride; slots int64 [N], repeats allowed; N may be 0.
    """
    num_rows, width = slots.shape[0], pool.shape[1]
    assert slots.dtype == torch.int64, "slots are int64: a large pool overflows int32 addresses"
    assert out.shape == (num_rows, width), f"out is {tuple(out.shape)}"
    assert pool.stride(1) == out.stride(1) == slots.stride(0) == 1, "rows have unit stride"
    if num_rows == 0:
        return out
    block = column_block(width)
    _gather[(triton.cdiv(num_rows, _ROWS),)](
        pool,
        slots,
        out,
        num_rows,
        pool.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=block,
        ROWS=_ROWS,
        num_warps=4,
    )
    return out


FP8_GROUP = 128


def fp8_row_bytes(latent: int, rope: int) -> int:
    return latent + latent // FP8_GROUP * 4 + rope * 2


def fp8_views(
    pool: torch.Tensor, latent: int, rope: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pool uint8 [S, bytes] as e4m3 latents, fp32 scales and bf16 ropes, each from its own first
    column on; rows keep their distance (row bytes, or a quarter or half as many elements).
    """
    num_bytes = fp8_row_bytes(latent, rope)
    assert latent % FP8_GROUP == 0, f"L {latent} is not a multiple of {FP8_GROUP}"
    assert pool.shape[1] == num_bytes, f"rows of {pool.shape[1]} bytes, expected {num_bytes}"
    assert pool.is_contiguous(), "FP8 rows lie end to end"
    scales = pool.view(torch.float32)[:, latent // 4 :]
    ropes = pool.view(torch.bfloat16)[:, (num_bytes - 2 * rope) // 2 :]
    return pool.view(torch.float8_e4m3fn), scales, ropes


def kv_gather_fp8(pool: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`kv_gather` of FP8 rows, dequantised: pool uint8 [S, 656], out [N, L + R], R = 64."""
    num_rows, width = out.shape
    latent = width - 64
    assert slots.dtype == torch.int64, "slots are int64"
    assert slots.shape == (num_rows,), f"{tuple(slots.shape)} slots for {num_rows} rows"
    assert out.stride(1) == slots.stride(0) == 1, "rows have unit stride"
    views = fp8_views(pool, latent, 64)
    if num_rows:
        _gather_fp8[(triton.cdiv(num_rows, _ROWS), latent // FP8_GROUP + 1)](
            *views,
            slots,
            out,
            num_rows,
            out.stride(0),
            LATENT=latent,
            ROPE=64,
            ROW_BYTES=pool.shape[1],
            GROUP=FP8_GROUP,
            ROWS=_ROWS,
            num_warps=4,
        )
    return out


@triton.jit
def _gather_fp8(
    latents,
    scales,
    ropes,
    slots,
    out,
    num_rows,
    out_stride,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One group of some rows, the last one: their rope part."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    slot = tl.load(slots + row, mask=there, other=0)
    target = out + row.to(tl.int64)[:, None] * out_stride
    group = tl.program_id(1)
    if group < LATENT // GROUP:
        col = group * GROUP + tl.arange(0, GROUP)
        values = tl.load(
            latents + slot[:, None] * ROW_BYTES + col[None, :], mask=there[:, None], other=0.0
        )
        scale = tl.load(scales + slot * (ROW_BYTES // 4) + group, mask=there, other=0.0)
        wide = values.to(tl.float32) * scale[:, None]
        tl.store(target + col[None, :], wide.to(out.dtype.element_ty), mask=there[:, None])
    else:
        rope = tl.arange(0, ROPE)
        turned = tl.load(
            ropes + slot[:, None] * (ROW_BYTES // 2) + rope[None, :], mask=there[:, None], other=0.0
        )
        tl.store(
            target + LATENT + rope[None, :], turned.to(out.dtype.element_ty), mask=there[:, None]
        )


def column_block(width: int) -> int:
    """Columns a load: what divides the width without a rest, if that is wide enough (576: 64)."""
    exact = min(width & -width, 512)
    return exact if exact >= 64 else triton.next_power_of_2(min(width, 512))


@triton.jit
def _gather(
    pool,
    slots,
    out,
    num_rows,
    pool_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    slot = tl.load(slots + row, mask=there, other=0)
    source = pool + slot[:, None] * pool_stride
    target = out + row.to(tl.int64)[:, None] * out_stride
    for first in tl.static_range(0, WIDTH, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = there[:, None] & (col < WIDTH)[None, :]
        values = tl.load(source + col[None, :], mask=mask)
        tl.store(target + col[None, :], values.to(out.dtype.element_ty), mask=mask)
