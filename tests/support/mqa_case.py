"""Random absorbed-attention problems over a poisoned pool, for the Triton kernel and its bench."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.reference_attention import mqa_paged
from kernels.triton.mqa_plan import SharedPass

SCALE = 0.09


@dataclass(frozen=True)
class MQACase:
    q: torch.Tensor  # [T, H, L + R]
    pool: torch.Tensor  # [S, L + R], NaN where no sequence reads
    page_table: torch.Tensor  # int32 [B, pages]
    cu_q: np.ndarray
    kv_lens: np.ndarray
    shared: list[SharedPass]
    page_size: int
    latent: int
    said: torch.Tensor | None = None  # fp32 [S, L + R]: what an FP8 pool says

    def in_fp8(self) -> MQACase:
        stored, said = quantise(self.pool, self.latent)
        return replace(self, pool=stored, said=said)

    def answer(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """(o [T, H, L], lse [T, H]), computed in dtype."""
        return mqa_paged(
            self.q.to(dtype),
            self.pool if self.said is None else self.said,
            self.page_table.cpu(),
            self.kv_lens.tolist(),
            self.cu_q.tolist(),
            page_size=self.page_size,
            latent=self.latent,
            scale=SCALE,
        )


def quantise(rows: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [S, L + R] as FP8 rows uint8 [S, bytes], and what those say, fp32 [S, L + R]."""
    groups = rows[:, :latent].float().unflatten(1, (-1, 128))
    scale = groups.abs().amax(dim=2, keepdim=True) / 448
    values = (groups / scale).to(torch.float8_e4m3fn)
    rope = rows[:, latent:].bfloat16()
    parts = (values.flatten(1), scale.flatten(1), rope)
    stored = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
    return stored, torch.cat(((values.float() * scale).flatten(1), rope.float()), dim=1)


def make_mqa_case(
    sequences: list[tuple[int, int]],
    *,
    heads: int,
    latent: int,
    rope: int,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    shared: list[SharedPass] = [],  # noqa: B006  # read only
    seed: int = 0,
) -> MQACase:
    """`sequences`: (queries, rows) each, over scattered pages; `shared` ones get common pages."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_q, kv_lens = (np.array(x, dtype=np.int64) for x in zip(*sequences, strict=True))
    num_pages = -(-kv_lens // page_size)
    spare = 3
    total = int(num_pages.sum()) + spare
    ids = rng.permutation(total).astype(np.int32)
    table = np.full((len(sequences), int(num_pages.max()) + 1), ids[-1], dtype=np.int32)
    ends = np.cumsum(num_pages)
    for i, (end, count) in enumerate(zip(ends, num_pages, strict=True)):
        table[i, :count] = ids[end - count : end]
    for members, first, last in shared:
        pages = slice(first // page_size, last // page_size)
        table[list(members), pages] = table[members[0], pages]
    pool = torch.full((total * page_size, latent + rope), float("nan"))
    for i, length in enumerate(kv_lens.tolist()):
        slots = table[i, np.arange(length) // page_size].astype(np.int64) * page_size
        slots += np.arange(length) % page_size
        pool[slots] = torch.randn(length, latent + rope, generator=generator)
    q = torch.randn(int(num_q.sum()), heads, latent + rope, generator=generator)
    return MQACase(
        q=q.to(device, dtype),
        pool=pool.to(device, dtype),
        page_table=torch.from_numpy(table).to(device),
        cu_q=np.concatenate(([0], np.cumsum(num_q))),
        kv_lens=kv_lens,
        shared=list(shared),
        page_size=page_size,
        latent=latent,
    )
