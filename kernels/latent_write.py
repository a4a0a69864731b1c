"""New KV rows: their norm and rotation, and the scatter into a paged pool.

T tokens, H heads, L latent, R rope dims, S slots.
"""

from __future__ import annotations

import torch

from kernels.rmsnorm import rms_norm
from kernels.rope import rotate_


def latent_write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """pool[slots[i]] = rows[i], in place, rounded to the pool's dtype.

    pool [S, W] one layer's rows; slots int64 [N], no slot twice; rows [N, W] of any float dtype and
    row stride.
    """
    assert slots.dtype == torch.int64, "slots are int64"
    assert rows.shape == (slots.shape[0], pool.shape[1]), f"rows are {tuple(rows.shape)}"
    pool.index_copy_(0, slots, rows.to(pool.dtype))


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
    """Turns a projection's output into KV rows and stores them; one kernel on a GPU.

    kv [T, L + R], rows of any stride: the latent is RMS-normed by norm_weight [L], k_pe rotated.
    q_pe [T, H, R], strided: rotated. cos, sin fp32 [T, R/2], interleaved pairs as in
    `kernels/rope.py`. pool [S, L + R], slots int64 [T]: pool[slots] = kv, rounded to the pool's
    dtype. All in place; afterwards kv holds the rows as they are stored.
    """
    if kv.is_cuda:
        from kernels.triton import latent_write as gpu  # Triton only where there is a GPU

        gpu.norm_rope_write_(kv, q_pe, norm_weight, eps, cos, sin, pool, slots)
        return
    latent = norm_weight.shape[0]
    kv[:, :latent] = rms_norm(kv[:, :latent], norm_weight, eps)
    turn = torch.complex(cos, sin)  # [T, R/2]
    rotate_(kv[:, latent:], turn)
    rotate_(q_pe, turn[:, None])
    latent_write(pool, slots, kv)
    if pool.dtype != kv.dtype:
        kv.copy_(kv.to(pool.dtype))
