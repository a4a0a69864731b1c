"""Gather of KV rows from a paged pool into a dense buffer."""

from __future__ import annotations

import torch


def kv_gather(pool: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[i] = pool[slots[i]], converted to out's dtype.

    pool [S, W] one layer's rows, contiguous; slots int64 [N], any order, repeats allowed;
    out [N, W] with unit stride in W, owned by the caller. Returns out. N may be 0.
    """
    assert slots.dtype == torch.int64, "slots are int64: a large pool overflows int32 addresses"
    assert out.shape == (slots.shape[0], pool.shape[1]), f"out is {tuple(out.shape)}"
    if pool.is_cuda:
        from kernels.triton import kv_gather as gpu  # Triton is imported where there is a GPU only

        gpu.kv_gather(pool, slots, out)
        return out
    if pool.dtype == out.dtype and out.is_contiguous():
        torch.index_select(pool, 0, slots, out=out)
    else:
        out.copy_(pool.index_select(0, slots))
    return out
