"""FlashAttention 2: `flash_attn`, else the copy inside torch. Multi-head attention, sm80 and later.

One head width: K and V are padded to max(P + R, V), and V stays padded until after the last merge.
The LSE of a query without keys is +inf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from radix_mla.attention.backend import Caps, Setting
from radix_mla.attention.backends.ragged import DeviceMHA
from radix_mla.attention.backends.varlen import (
    VarlenBackend,
    find_varlen,
    public_varlen,
    unsuited_heads,
)

CAPS = Caps(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"bf16"}),
    kv_dtypes=frozenset({"bf16", "fp32"}),  # rows are converted while they are gathered
    page_sizes=None,
    prefill=True,
    absorbed=False,
    pad_heads=True,
    archs=(80, 99),
)


def unavailable(setting: Setting) -> str | None:
    """Why this backend cannot be used here, beyond its `Caps`; None: it can."""
    if _find()[1] is None and not torch.backends.cuda.is_flash_attention_available():
        return "flash_attn not importable, and this torch was built without flash attention"
    return unsuited_heads(setting.dims)


def make(setting: Setting) -> FA2Backend:
    return FA2Backend(setting.device)


class FA2Backend(VarlenBackend):
    name = "fa2"
    caps = CAPS

    def __init__(self, device: str) -> None:
        _, function = _find()
        if function is None:
            super().__init__(_aten, "torch", device)
        else:
            super().__init__(public_varlen(function, return_attn_probs=True), "flash_attn", device)


def _find() -> tuple[str, Callable[..., Any] | None]:
    return find_varlen("flash_attn")


def _aten(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, planned: DeviceMHA, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        planned.cu_q,
        planned.cu_k,
        planned.max_q,
        planned.max_k,
        0.0,
        planned.work.causal,
        False,
        scale=scale,
    )
    return out, lse
