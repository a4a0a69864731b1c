"""FlashMLA's functions by plain torch."""

from __future__ import annotations

import torch


class FakeFlashMLA:
    """`flash_mla_with_kvcache` by plain torch; a schedule must not meet other lengths."""

    def __init__(self) -> None:
        self.schedules: list[dict[str, object]] = []
        self.calls: list[tuple[int, list[int]]] = []  # Sq, rows of each run

    def get_mla_metadata(self) -> tuple[dict[str, object], None]:
        self.schedules.append({})
        return self.schedules[-1], None

    def flash_mla_with_kvcache(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seqlens: torch.Tensor,
        latent: int,
        schedule: dict[str, object],
        *,
        softmax_scale: float,
        causal: bool,
        use_legacy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert use_legacy
        assert block_table.dtype == seqlens.dtype == torch.int32
        assert schedule.setdefault("lengths", seqlens.tolist()) == seqlens.tolist(), "stale"
        batch, num_q, heads, _ = q.shape
        out = torch.zeros(batch, num_q, heads, latent)
        lse = torch.full((batch, heads, num_q), float("inf"))
        self.calls.append((num_q, seqlens.tolist()))
        for b, length in enumerate(seqlens.tolist()):
            rows = cache[block_table[b].long()].flatten(0, 2)
            for i in range(num_q):
                seen = rows[: max(0, length - (num_q - 1 - i if causal else 0))]
                if len(seen):
                    scores = q[b, i] @ seen.T * softmax_scale
                    out[b, i] = scores.softmax(-1) @ seen[:, :latent]
                    lse[b, :, i] = scores.logsumexp(-1)
        return out, lse

    def has_legacy(self) -> bool:
        return True
