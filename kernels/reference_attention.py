"""Plain torch oracles of the attention and KV ops: one formula each, no blocks, no tricks.

Computed in the inputs' dtype (give fp32 or fp64). T new tokens, B sequences, S pool slots, H heads,
W row width (L + R), L latent, V value width. LSE: natural log, -inf for a query without keys, whose
output is 0.
"""

from __future__ import annotations

import torch


def mha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    *,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-head attention of ragged sequences.

    q [Tq, H, Dk], k [Tk, H, Dk], v [Tk, H, V]; cu_seqlens_* [B + 1] host ints. Causal is aligned to
    the end: the last query of a sequence sees all its keys. Returns (o [Tq, H, V], lse [Tq, H]).
    """
    outs, lses = [], []
    for i in range(len(cu_seqlens_q) - 1):
        q_i = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
        k_i = k[cu_seqlens_k[i] : cu_seqlens_k[i + 1]]
        v_i = v[cu_seqlens_k[i] : cu_seqlens_k[i + 1]]
        scores = torch.einsum("qhd,khd->qhk", q_i, k_i) * scale
        out, lse = _softmax_attend(scores, torch.einsum("khv->hkv", v_i), causal=causal)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def mqa_paged(
    q: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    seqlens: list[int],
    cu_seqlens_q: list[int],
    *,
    page_size: int,
    latent: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed attention: all heads attend to the same rows, whose first `latent` values are v.

    q [T, H, W], pool [S, W]; page_table int [B, max_pages]; seqlens [B] counts context and new
    rows; a sequence's queries are its last tokens (causal). Returns (o [T, H, latent], lse [T, H]).
    """
    outs, lses = [], []
    for i, length in enumerate(seqlens):
        slots = [
            int(page_table[i, r // page_size]) * page_size + r % page_size for r in range(length)
        ]
        rows = pool[slots].to(q.dtype)  # [length, W]
        scores = torch.einsum("qhw,kw->qhk", q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]], rows) * scale
        value = rows[:, :latent].expand(q.shape[1], length, latent)
        out, lse = _softmax_attend(scores, value, causal=True)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _softmax_attend(
    scores: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [Sq, H, Sk], v [H, Sk, V] → (o [Sq, H, V], lse [Sq, H])."""
    num_q, _, num_k = scores.shape
    if causal:
        hidden = torch.ones(num_q, num_k, dtype=torch.bool, device=scores.device)
        hidden = hidden.triu(num_k - num_q + 1)
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    return torch.einsum("qhk,hkv->qhv", weights, v), lse


def merge_lse(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged (o, lse), new tensors; shapes as in kernels.merge_lse.merge_lse_."""
    return combine_lse(torch.stack((o_a, o_b)), torch.stack((lse_a, lse_b)))


def combine_lse(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """o [K, N, H, V], lse [K, N, H] → (o [N, H, V], lse [N, H])."""
    total = torch.logsumexp(lse, dim=0)
    share = torch.where(lse == float("-inf"), 0.0, torch.exp(lse - total)).unsqueeze(-1)
    return torch.where(share == 0.0, 0.0, o * share).sum(dim=0), total


def kv_gather(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[N, W]: row i is pool[slots[i]]."""
    return torch.stack([pool[int(slot)] for slot in slots]) if len(slots) else pool[:0]


def latent_write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A copy of pool with rows written at slots."""
    pool = pool.clone()
    for slot, row in zip(slots.tolist(), rows, strict=True):
        pool[slot] = row.to(pool.dtype)
    return pool


def page_copy(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """A copy of pool with the rows at src written at dst, one after the other."""
    pool = pool.clone()
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        pool[target] = pool[source]
    return pool
