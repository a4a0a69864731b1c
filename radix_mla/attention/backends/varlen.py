"""VarlenBackend: multi-head attention by FlashAttention's varlen functions, whatever the release.

LSE is natural, fp32, [H, T]; a query without keys gets -inf or +inf, depending on the release.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

import torch

from radix_mla.attention.backend import MHAWork, Partial
from radix_mla.attention.backends.ragged import DeviceMHA, RaggedPlan
from radix_mla.attention.workspace import MLADims

# (q [T, H, Dk], k [Tk, H, Dk], v [Tk, H, Dv], lengths, scale) → (out [T, H, Dv], lse [H, T])
Varlen: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, DeviceMHA, float], tuple[torch.Tensor, torch.Tensor]
]


class VarlenBackend:
    """`module`: where its function comes from."""

    def __init__(self, varlen: Varlen, module: str, device: str) -> None:
        self.module = module
        self._varlen = varlen
        self._ragged = RaggedPlan(device)

    def plan_mha(self, works: list[MHAWork]) -> None:
        self._ragged.plan(works)

    def run_mha(
        self, work: MHAWork, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Partial:
        planned = self._ragged.of(work)
        if k.shape[-1] > q.shape[-1]:
            q = torch.nn.functional.pad(q, (0, k.shape[-1] - q.shape[-1]))
        out, lse = self._varlen(
            q, k.transpose(0, 1), v.transpose(0, 1), planned, scale
        )  # k [Tk, H, Dk]
        return Partial(out, _natural_lse(lse, has_empty=planned.has_empty))


@cache
def find_varlen(*modules: str) -> tuple[str, Callable[..., Any] | None]:
    """(the first of the modules that has it, its varlen function), or (why there is none, None)."""
    reasons = []
    for name in modules:
        try:
            return name, import_module(name).flash_attn_varlen_func
        except (ImportError, OSError, AttributeError) as error:
            reasons.append(f"{name} not importable: {error}")
    return "; ".join(reasons), None


def public_varlen(function: Callable[..., Any], **wanted: object) -> Varlen:
    """A release's public function, with those of `wanted` that it knows."""
    known = inspect.signature(function).parameters
    extra = {name: value for name, value in wanted.items() if name in known}

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, planned: DeviceMHA, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = function(
            q,
            k,
            v,
            planned.cu_q,
            planned.cu_k,
            planned.max_q,
            planned.max_k,
            softmax_scale=scale,
            causal=planned.work.causal,
            **extra,
        )
        return out, lse

    return call


def unsuited_heads(dims: MLADims) -> str | None:
    """Why FlashAttention has no kernel for these widths, or None."""
    for width in (dims.qk, dims.value):
        if width > 256 or width % 8:
            return f"head width {width}: FlashAttention takes multiples of 8 up to 256"
    return None


def _natural_lse(lse: torch.Tensor, *, has_empty: bool) -> torch.Tensor:
    """lse [H, T] as [T, H]; rows of queries without keys may hold +inf, ours -inf."""
    lse = lse.transpose(0, 1)
    return lse.masked_fill(lse == float("inf"), float("-inf")) if has_empty else lse
