"""One call of FlashMLA's dense decode on Hopper: absorbed attention over bf16 rows in pages of 64.

B runs of Sq queries each over a block table. Causal at the end: the last query of a run sees all
its rows. The kernel's schedule depends on the lengths, which it does not check: the first layer of
a step makes it on the device, the others use it. LSE is natural, fp32; +inf for a query without
keys, whose output is then 0.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

from radix_mla.attention.backend import Partial

PAGE_SIZE = 64


@cache
def find() -> tuple[str, ModuleType | None]:
    """("", the module), or (why there is none, None)."""
    try:
        module = import_module("flash_mla")
        legacy = module.has_legacy()
    except (ImportError, OSError, AttributeError) as error:
        return f"flash_mla (sgl-flash-mla) not importable: {error}", None
    if not legacy:
        return "this flash_mla was built without its kernels for Hopper", None
    return "", module


class Runs(NamedTuple):
    """What a call reads: rows of each run int32 [B], their pages int32 [B, any]."""

    size: tuple[int, int]  # B, Sq
    lengths: torch.Tensor
    pages: torch.Tensor
    schedule: Any


class FlashMLAKernel:
    def __init__(self) -> None:
        reason, module = find()
        assert module is not None, reason
        self._attend, self._metadata = module.flash_mla_with_kvcache, module.get_mla_metadata

    def new_schedule(self) -> Any:
        """For one step's lengths; filled by the first call that uses it."""
        return self._metadata()[0]

    def __call__(
        self,
        runs: Runs,
        q: torch.Tensor,
        pool: torch.Tensor,
        latent: int,
        scale: float,
        *,
        causal: bool = True,
    ) -> Partial:
        """q [B · Sq, H, L + R] contiguous → out [B · Sq, H, L], lse [B, H, Sq]."""
        batch, num_q = runs.size
        heads, width = q.shape[1:]
        out, lse = self._attend(
            q.view(batch, num_q, heads, width),
            pool.view(-1, PAGE_SIZE, 1, width),
            runs.pages,
            runs.lengths,
            latent,
            runs.schedule,
            softmax_scale=scale,
            causal=causal,
            use_legacy=True,
        )
        return Partial(out.view(-1, heads, latent), lse)


def by_query(lse: torch.Tensor) -> torch.Tensor:
    """lse [B, H, Sq] of a call as [B · Sq, H], -inf where a query has no keys."""
    flat = lse[..., 0] if lse.shape[2] == 1 else lse.transpose(1, 2).reshape(-1, lse.shape[1])
    return flat.masked_fill(flat == float("inf"), float("-inf"))
