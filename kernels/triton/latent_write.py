"""Norm, rope and scatter of new KV rows in one launch.

T tokens, H heads, L latent, R rope width, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def norm_rope_write_(
    kv: torch.Tensor,
    q_pe: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """In place: kv's latent RMS-normed, its k_pe and q_pe rotated, pool[slots] = the kv rows.

    kv [T, L + R] of any row stride, afterwards the rows as stored (rounded to the pool's dtype);
    q_pe [T, H, R] strided; norm_weight [L]; cos, sin fp32 [T, R/2] of interleaved pairs (as
    kernels/rope.py); pool [S, L + R] contiguous rows; slots int64 [T], repeats only among rows
    that nobody reads. fp32 or bf16; arithmetic is fp32.
    """
    num_tokens, width = kv.shape
    heads, rope = q_pe.shape[1:]
    latent = norm_weight.shape[0]
    assert width == latent + rope == pool.shape[1], f"rows are {width} wide"
    assert q_pe.shape[0] == slots.shape[0] == num_tokens, "one q_pe and one slot a token"
    assert cos.shape == sin.shape == (num_tokens, rope // 2), f"cos is {tuple(cos.shape)}"
    assert cos.dtype == sin.dtype == torch.float32, "cos and sin are fp32"
    assert slots.dtype == torch.int64, "slots are int64"
    assert kv.stride(1) == q_pe.stride(2) == pool.stride(1) == 1, "rows have unit stride"
    assert cos.stride(1) == sin.stride(1) == slots.stride(0) == norm_weight.stride(0) == 1
    if num_tokens == 0:
        return
    _norm_rope_write[(num_tokens,)](
        kv,
        q_pe,
        norm_weight,
        cos,
        sin,
        pool,
        slots,
        eps,
        kv.stride(0),
        q_pe.stride(0),
        q_pe.stride(1),
        cos.stride(0),
        sin.stride(0),
        pool.stride(0),
        HEADS=heads,
        HEAD_BLOCK=triton.next_power_of_2(min(heads, 32)),
        LATENT=latent,
        LATENT_BLOCK=triton.next_power_of_2(latent),
        ROPE=rope,
        PAIRS=triton.next_power_of_2(rope // 2),
        num_warps=1 if heads <= 32 else 4,  # one warp sums without a barrier
    )


@triton.jit
def _norm_rope_write(
    kv,
    q_pe,
    norm_weight,
    cos,
    sin,
    pool,
    slots,
    eps,
    kv_stride,
    q_stride_t,
    q_stride_h,
    cos_stride,
    sin_stride,
    pool_stride,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    stored = pool + tl.load(slots + token) * pool_stride
    row = kv + token * kv_stride
    col = tl.arange(0, LATENT_BLOCK)
    inside = col < LATENT
    latent = tl.load(row + col, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + col, mask=inside, other=0.0).to(tl.float32)

    pair = tl.arange(0, PAIRS)
    turns = pair < ROPE // 2
    cosine = tl.load(cos + token * cos_stride + pair, mask=turns, other=0.0)
    sine = tl.load(sin + token * sin_stride + pair, mask=turns, other=0.0)

    scale = tl.rsqrt(tl.sum(latent * latent, axis=0) / LATENT + eps)
    normed = (latent * scale * weight).to(kv.dtype.element_ty).to(pool.dtype.element_ty)
    tl.store(stored + col, normed, mask=inside)
    tl.store(row + col, normed.to(kv.dtype.element_ty), mask=inside)

    lane = tl.arange(0, 2 * PAIRS)
    in_rope = lane < ROPE
    even, odd = tl.split(
        tl.reshape(tl.load(row + LATENT + lane, mask=in_rope, other=0.0).to(tl.float32), (PAIRS, 2))
    )
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    k_pe = tl.reshape(turned, (2 * PAIRS,)).to(kv.dtype.element_ty).to(pool.dtype.element_ty)
    tl.store(stored + LATENT + lane, k_pe, mask=in_rope)
    tl.store(row + LATENT + lane, k_pe.to(kv.dtype.element_ty), mask=in_rope)

    for first in tl.static_range(0, HEADS, HEAD_BLOCK):
        head = first + tl.arange(0, HEAD_BLOCK)
        there = q_pe + token * q_stride_t + head[:, None] * q_stride_h + lane[None, :]
        mask = (head[:, None] < HEADS) & in_rope[None, :]
        q = tl.load(there, mask=mask, other=0.0).to(tl.float32)  # [HEAD_BLOCK, 2 · PAIRS]
        even, odd = tl.split(tl.reshape(q, (HEAD_BLOCK, PAIRS, 2)))
        turned = tl.join(
            even * cosine[None, :] - odd * sine[None, :],
            even * sine[None, :] + odd * cosine[None, :],
        )
        turned = tl.reshape(turned, (HEAD_BLOCK, 2 * PAIRS))
        tl.store(there, turned.to(q_pe.dtype.element_ty), mask=mask)
