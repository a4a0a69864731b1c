"""Gather of KV rows from a paged pool into a dense buffer. S slots, N rows, W row width.

FP8 rows are uint8: the latent as e4m3, a fp32 scale for each 128 values of it, the rope as bf16
(L 512, R 64: 512 + 16 + 128 = 656 bytes).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 2048  # about so many a program of one warp: four rows of 576


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
    low = 1 << (width.bit_length() - 1)  # width = low + high: 512 + 64
    high = width - low
    rows = max(1, _ELEMENTS // low)
    _gather[(triton.cdiv(num_rows, rows),)](
        pool,
        slots,
        out,
        num_rows,
        pool.stride(0),
        out.stride(0),
        LOW=low,
        HIGH=high,
        HIGH_BLOCK=triton.next_power_of_2(high),
        ROWS=rows,
        num_warps=1,
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
        rows = max(1, _ELEMENTS // latent)
        _gather_fp8[(triton.cdiv(num_rows, rows),)](
            *views,
            slots,
            out,
            num_rows,
            out.stride(0),
            LATENT=latent,
            ROPE=64,
            ROW_BYTES=pool.shape[1],
            GROUP=FP8_GROUP,
            ROWS=rows,
            num_warps=1,
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
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < num_rows)[:, None]
    slot = tl.load(slots + row, mask=row < num_rows, other=0)[:, None]
    target = out + row.to(tl.int64)[:, None] * out_stride
    dtype: tl.constexpr = out.dtype.element_ty
    latent = tl.arange(0, LATENT)[None, :]
    rope = tl.arange(0, ROPE)[None, :]
    group = tl.arange(0, LATENT // GROUP)[None, :]
    values = tl.load(latents + slot * ROW_BYTES + latent, mask=there, other=0.0)
    scale = tl.load(scales + slot * (ROW_BYTES // 4) + group, mask=there, other=0.0)
    turned = tl.load(ropes + slot * (ROW_BYTES // 2) + rope, mask=there, other=0.0)
    groups = tl.reshape(values.to(tl.float32), (ROWS, LATENT // GROUP, GROUP))
    wide = tl.reshape(groups * scale[:, :, None], (ROWS, LATENT))
    tl.store(target + LATENT + rope, turned.to(dtype), mask=there)
    tl.store(target + latent, wide.to(dtype), mask=there)


@triton.jit
def _gather(
    pool,
    slots,
    out,
    num_rows,
    pool_stride,
    out_stride,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    HIGH_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < num_rows)[:, None]
    slot = tl.load(slots + row, mask=row < num_rows, other=0)
    source = pool + slot[:, None] * pool_stride
    target = out + row.to(tl.int64)[:, None] * out_stride
    dtype: tl.constexpr = out.dtype.element_ty
    low = tl.arange(0, LOW)[None, :]
    # All loads come before the first store, which they may not pass: its target may be a source.
    values = tl.load(source + low, mask=there)
    if HIGH > 0:
        high = tl.arange(0, HIGH_BLOCK)[None, :]
        rest = tl.load(source + LOW + high, mask=there & (high < HIGH))
        tl.store(target + LOW + high, rest.to(dtype), mask=there & (high < HIGH))
    tl.store(target + low, values.to(dtype), mask=there)
