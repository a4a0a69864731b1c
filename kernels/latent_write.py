"""Scatter of new KV rows into a paged pool."""

from __future__ import annotations

import torch


def latent_write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """pool[slots[i]] = rows[i], in place, rounded to the pool's dtype.

    pool [S, W] one layer's rows; slots int64 [N], no slot twice; rows [N, W] of any float dtype and
    row stride.
    """
    assert slots.dtype == torch.int64, "slots are int64"
    assert rows.shape == (slots.shape[0], pool.shape[1]), f"rows are {tuple(rows.shape)}"
    pool.index_copy_(0, slots, rows.to(pool.dtype))
