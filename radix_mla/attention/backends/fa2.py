"""FlashAttention 2: `flash_attn`, else the copy inside torch. Multi-head attention, sm80 and later.

One head width: K and V are padded to max(P + R, V), and V stays padded until after the last merge.
LSE is natural, fp32, [H, T]; +inf for a query without keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from radix_mla.attention.backend import Caps, MHAWork, Partial, Setting
from radix_mla.attention.backends.ragged import (
    DeviceMHA,
    RaggedPlan,
    natural_lse,
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

_Varlen = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, DeviceMHA, float], tuple[torch.Tensor, torch.Tensor]
]


@cache
def _flash_attn() -> Callable[..., Any] | None:
    try:
        function: Callable[..., Any] = import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, OSError, AttributeError):
        return None
    return function


def unavailable(setting: Setting) -> str | None:
    """Why this backend cannot be used here, beyond its `Caps`; None: it can."""
    if _flash_attn() is None and not torch.backends.cuda.is_flash_attention_available():
        return "flash_attn not importable, and this torch was built without flash attention"
    return unsuited_heads(setting.dims)


def make(setting: Setting) -> FA2Backend:
    return FA2Backend(setting.device)


class FA2Backend:
    name = "fa2"
    caps = CAPS

    def __init__(self, device: str) -> None:
        self._run: _Varlen = _aten if _flash_attn() is None else _package
        self.module = "torch" if _flash_attn() is None else "flash_attn"
        self._ragged = RaggedPlan(device)

    def plan_mha(self, works: list[MHAWork]) -> None:
        self._ragged.plan(works)

    def run_mha(
        self, work: MHAWork, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Partial:
        planned = self._ragged.of(work)
        if k.shape[-1] > q.shape[-1]:
            q = torch.nn.functional.pad(q, (0, k.shape[-1] - q.shape[-1]))
        out, lse = self._run(q, k.transpose(0, 1), v.transpose(0, 1), planned, scale)
        return Partial(out, natural_lse(lse, has_empty=planned.has_empty))


def _package(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, planned: DeviceMHA, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    function = _flash_attn()
    assert function is not None
    out, lse, _ = function(
        q,
        k,
        v,
        planned.cu_q,
        planned.cu_k,
        planned.max_q,
        planned.max_k,
        softmax_scale=scale,
        causal=planned.work.causal,
        return_attn_probs=True,
    )
    return out, lse


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
