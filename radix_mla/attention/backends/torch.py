"""Attention with torch's own kernels: the CPU path, and the reference on any device.

Multi-head: ATen's CPU flash attention. It wants one width for q, k and v (V is padded), aligns
`is_causal` to the first query (so a prefix needs a mask) and dies with the process on 0 keys (so
it never sees them). Elsewhere: matmul and softmax in blocks of queries.
Absorbed: matmul over the rows where they lie; scattered pages are gathered first. Sequences with
the same leading pages read these once.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kernels.merge_lse import merge_lse_
from radix_mla.attention.backend import Caps, MHAWork, MQAWork, Partial, Setting
from radix_mla.attention.backends.row_pieces import Piece, row_pieces
from radix_mla.attention.backends.torch_absorbed import attend_padded, attend_pieces
from radix_mla.attention.shared_prefix import shared_in
from radix_mla.cache.kv_pool import slots_of

CAPS = Caps(
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({"fp32", "bf16"}),
    kv_dtypes=frozenset({"fp32", "bf16"}),
    page_sizes=None,
    prefill=True,
    absorbed=True,
    pad_heads=True,
)
_QUERY_BLOCK = 256
_SHORT = 256  # rows; below, one padded batch beats the calls of one sequence after the other
_GATHER_QUERIES = 4  # from these on one GEMM over gathered rows beats several over runs in place
_MAX_SCORES = 1 << 22  # elements of a block of scores: 16 MB in fp32
_EMPTY = float("-inf")


def unavailable(setting: Setting) -> str | None:
    """Why this backend cannot be used here, beyond its `Caps`; None: it can."""
    return None


def make(setting: Setting) -> TorchBackend:
    return TorchBackend(setting.device)


class TorchBackend:
    """`flash` None: where it exists, which is on CPU."""

    name = "torch"
    caps = CAPS

    def __init__(self, device: str, *, flash: bool | None = None) -> None:
        self.device = device
        self._flash = device == "cpu" if flash is None else flash
        self._tails: list[list[Piece]] = []  # of each sequence: its rows outside shared passes
        self._shared: list[tuple[torch.Tensor, list[Piece]]] = []  # tokens int64, their rows
        self._padded: tuple[torch.Tensor, torch.Tensor] | None = None  # all decode, all short
        self._planned: MQAWork | None = None

    def plan(self, mha: list[MHAWork], mqa: MQAWork | None) -> None:
        self.plan_mqa(mqa)

    def plan_mha(self, works: list[MHAWork]) -> None:
        """Host lengths are all that `run_mha` needs."""

    def plan_mqa(self, mqa: MQAWork | None) -> None:
        self._planned, self._tails, self._shared, self._padded = mqa, [], [], None
        if mqa is None:
            return
        size = mqa.page_size
        num_q = np.diff(mqa.cu_q)
        short = (num_q == 1) & (mqa.kv_lens <= _SHORT)
        if len(num_q) > 1 and short.all() and not mqa.with_lse:
            self._padded = self._pad(mqa)
            return
        shared = shared_in(mqa)
        for table, length, first, queries in zip(
            mqa.page_tables, mqa.kv_lens.tolist(), shared.tails, num_q.tolist(), strict=True
        ):
            pages, num_rows = table[first:], length - first * size
            gather = queries >= _GATHER_QUERIES
            self._tails.append(row_pieces(pages, num_rows, size, self.device, gather=gather))
        for members, first, last in shared.passes:
            pages = mqa.page_tables[members[0]][first:last]
            pieces = row_pieces(pages, len(pages) * size, size, self.device)
            tokens = np.concatenate([np.arange(mqa.cu_q[i], mqa.cu_q[i + 1]) for i in members])
            self._shared.append((torch.from_numpy(tokens).to(self.device), pieces))

    def _pad(self, mqa: MQAWork) -> tuple[torch.Tensor, torch.Tensor]:
        """slots int64 [B · n] and mask fp32 [B, 1, n] for `attend_padded`, n the longest length."""
        longest = int(mqa.kv_lens.max())
        seen = np.arange(longest) < mqa.kv_lens[:, None]  # [B, n]
        slots = np.stack(
            [
                np.resize(slots_of(table, 0, length, mqa.page_size), longest)  # repeats to the end
                for table, length in zip(mqa.page_tables, mqa.kv_lens.tolist(), strict=True)
            ]
        )
        mask = np.where(seen, np.float32(0), np.float32(_EMPTY))[:, None]
        to = self.device
        return torch.from_numpy(slots.reshape(-1)).to(to), torch.from_numpy(mask).to(to)

    def run_mha(
        self, work: MHAWork, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Partial:
        q = F.pad(q, (0, k.shape[-1] - q.shape[-1])) if k.shape[-1] > q.shape[-1] else q
        spans = zip(work.cu_q[:-1], work.cu_q[1:], work.cu_k[:-1], work.cu_k[1:], strict=True)
        parts = [
            self._attend(q[q0:q1], k[:, k0:k1], v[:, k0:k1], scale, causal=work.causal)
            for q0, q1, k0, k1 in np.array(list(spans)).tolist()
        ]
        if len(parts) == 1:
            return parts[0]
        return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
    ) -> Partial:
        """One sequence: q [Sq, H, D], k [H, n, D], v [H, n, D']."""
        num_q, num_k = q.shape[0], k.shape[1]
        if num_k == 0:
            out = q.new_zeros(num_q, q.shape[1], v.shape[-1])
            return Partial(out, torch.full(q.shape[:2], _EMPTY, device=q.device))
        if self._flash and (not causal or num_q == num_k or num_q == 1):
            return _flash(q, k, v, scale, causal=causal and num_q > 1)
        step = max(1, min(_QUERY_BLOCK, _MAX_SCORES // num_k))
        blocks = [
            self._attend_block(q, k, v, scale, first, min(first + step, num_q), causal=causal)
            for first in range(0, num_q, step)
        ]
        return Partial(torch.cat([b.out for b in blocks]), torch.cat([b.lse for b in blocks]))

    def _attend_block(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        first: int,
        last: int,
        *,
        causal: bool,
    ) -> Partial:
        """Queries [first, last) of a sequence, with the keys that any of them sees."""
        seen = k.shape[1] - q.shape[0] + last if causal else k.shape[1]
        k, v, q = k[:, :seen], v[:, :seen], q[first:last]
        mask = _end_mask(last - first, seen, q) if causal else None
        if self._flash:
            return _flash(q, k, v, scale, causal=False, mask=mask)
        return _dense(q, k, v, scale, mask)

    def run_mqa(
        self,
        work: MQAWork,
        q: torch.Tensor,
        pool: torch.Tensor,
        scratch: torch.Tensor,
        latent: int,
        scale: float,
    ) -> Partial:
        assert work is self._planned, "run_mqa with work that was not planned for this step"
        heads = q.shape[1]
        out = torch.empty(q.shape[0], heads, latent, dtype=q.dtype, device=q.device)
        with_lse = work.with_lse or bool(self._shared)
        lse = torch.empty(q.shape[:2], device=q.device)
        if self._padded is not None:
            slots, mask = self._padded
            attend_padded(q, pool, slots, mask, scratch, scale, out)
            return Partial(out, lse)
        if len(self._tails) == 1 and not with_lse:
            attend_pieces(q, pool, self._tails[0], scratch, scale, out)
            return Partial(out, lse)
        cu_q = work.cu_q.tolist()
        for i, pieces in enumerate(self._tails):
            rows = slice(cu_q[i], cu_q[i + 1])
            part = out[rows], lse[rows] if with_lse else None
            attend_pieces(q[rows], pool, pieces, scratch, scale, *part)
        for tokens, pieces in self._shared:
            q_shared = q[tokens]
            o_shared = torch.empty(len(q_shared), heads, latent, dtype=q.dtype, device=q.device)
            lse_shared = torch.empty(q_shared.shape[:2], device=q.device)
            attend_pieces(
                q_shared, pool, pieces, scratch, scale, o_shared, lse_shared, causal=False
            )
            merge_lse_(o_shared, lse_shared, out[tokens], lse[tokens])
            out[tokens], lse[tokens] = o_shared, lse_shared
        return Partial(out, lse)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    mask: torch.Tensor | None = None,
) -> Partial:
    """q [Sq, H, D], k and v [H, n, D], n > 0; causal only for Sq == n; mask additive [Sq, n]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        0.0,
        causal,
        attn_mask=None if mask is None else mask[None, None],
        scale=scale,
    )  # [1, H, Sq, D], [1, H, Sq]
    return Partial(out[0].transpose(0, 1), lse[0].transpose(0, 1))


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> Partial:
    """As `_flash` without `causal`, by matmul; softmax in fp32."""
    scores = torch.matmul(q.transpose(0, 1), k.transpose(1, 2)).float() * scale  # [H, Sq, n]
    if mask is not None:
        scores += mask
    lse = torch.logsumexp(scores, dim=-1)  # [H, Sq]
    weights = torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype)
    return Partial(torch.matmul(weights, v).transpose(0, 1), lse.transpose(0, 1))


def _end_mask(num_q: int, num_k: int, like: torch.Tensor) -> torch.Tensor:
    """Additive [num_q, num_k]: query i sees keys [0, num_k - num_q + i]."""
    mask = like.new_full((num_q, num_q), _EMPTY).triu_(1)
    return F.pad(mask, (num_k - num_q, 0))
