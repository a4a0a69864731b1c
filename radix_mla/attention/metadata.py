"""The ragged batch of a step, as host arrays.

tokens:  | seq 0: decode | seq 1: Sq_1 new | ... |      T = cu_q[-1]
rows of sequence i: [0, Sk_i) exist in the pool, [Sk_i, Sk_i + Sq_i) are written by this step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    from radix_mla.engine.step import Chunk


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The step's sequences, host arrays. num_new (Sq), num_context (Sk), is_decode: [B];
    cu_q int64 [B + 1]; positions and slots int64 [T]: where each new token stands and is stored.
    """

    num_new: np.ndarray
    num_context: np.ndarray
    is_decode: np.ndarray
    page_tables: tuple[np.ndarray, ...]
    cu_q: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    page_size: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], page_size: int) -> RaggedBatch:
        """O(tokens + pages), no Python work per token. Every chunk has at least one token."""
        num_new = np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int64)
        num_context = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        cu_q = cumulative(num_new)
        sequence = np.repeat(np.arange(len(chunks)), num_new)  # [T]
        positions = np.arange(cu_q[-1]) + (num_context - cu_q[:-1])[sequence]
        page_tables = tuple(chunk.page_table for chunk in chunks)
        first_page = cumulative(np.array([len(table) for table in page_tables], dtype=np.int64))
        page = np.concatenate(page_tables)[first_page[sequence] + positions // page_size]
        return cls(
            num_new=num_new,
            num_context=num_context,
            is_decode=np.array([chunk.is_decode for chunk in chunks], dtype=bool),
            page_tables=page_tables,
            cu_q=cu_q,
            positions=positions,
            slots=page.astype(np.int64) * page_size + positions % page_size,
            page_size=page_size,
        )


def cumulative(lengths: np.ndarray) -> np.ndarray:
    """int64 [B + 1]: 0 and the running sums of lengths [B]."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)))


class LatentWeights(NamedTuple):
    """kv_b_proj per head: w_uk [H, P, L], w_uv [H, V, L]."""

    w_uk: torch.Tensor
    w_uv: torch.Tensor
