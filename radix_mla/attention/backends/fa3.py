"""FlashAttention 3: multi-head attention on Hopper, the main path of prefill there.

Reads K and V where decompression wrote them (head-major, through strides).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from radix_mla.attention.backend import Caps, Setting
from radix_mla.attention.backends.ragged import DeviceMHA
from radix_mla.attention.backends.varlen import (
    Varlen,
    VarlenBackend,
    find_varlen,
    public_varlen,
    unsuited_heads,
)
from radix_mla.attention.workspace import MLADims

CAPS = Caps(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"bf16"}),
    kv_dtypes=frozenset({"bf16", "fp32"}),  # rows are converted while they are gathered
    page_sizes=None,
    prefill=True,
    absorbed=False,
    pad_heads=False,
    archs=(90, 90),
)
# 0: FA3 cuts long keys where queries and heads alone would leave multiprocessors idle: 256 queries
# of 16 heads on 32k keys take 0.14 ms, uncut 0.41 (H200, tests/bench/gpu/bench_two_stage.py).
_SPLITS = 0


def _find() -> tuple[str, Callable[..., Any] | None]:
    return find_varlen("flash_attn_interface", "fa3_fwd_interface")


def unavailable(setting: Setting) -> str | None:
    """Why this backend cannot be used here, beyond its `Caps`; None: it can."""
    reason, function = _find()
    return reason if function is None else unsuited_heads(setting.dims)


def make(setting: Setting) -> FA3Backend:
    return FA3Backend(setting.device, setting.dims)


def needs_padding(dims: MLADims) -> bool:
    """Whether K and V must have one width: FA3 has few kernels with two (P + R, V)."""
    qk, value = dims.qk, dims.value
    return not (qk == value or (128 < qk <= 192 and 96 < value <= 128))


class FA3Backend(VarlenBackend):
    name = "fa3"

    def __init__(self, device: str, dims: MLADims) -> None:
        module, function = _find()
        assert function is not None, module
        public = public_varlen(function, return_attn_probs=True, num_splits=_SPLITS)
        super().__init__(_without_autograd(module) or public, module, device)
        self.caps = replace(CAPS, pad_heads=needs_padding(dims))


def _without_autograd(module: str) -> Varlen | None:
    """The function that the public one wraps for autograd and for tracing, which take the host
    about 0.1 ms a call; None where a release has no such function.
    """
    forward = getattr(import_module(module), "_flash_attn_forward", None)
    forward = getattr(forward, "_init_fn", forward)  # the body of a `torch.library.custom_op`
    if forward is None:
        return None
    wanted = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    wanted |= {"softmax_scale", "causal", "num_splits"}
    parameters = inspect.signature(forward).parameters
    required = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}
    if not required <= wanted <= set(parameters):
        return None
    body: Callable[..., Any] = forward

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, planned: DeviceMHA, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = body(
            q,
            k,
            v,
            cu_seqlens_q=planned.cu_q,
            cu_seqlens_k=planned.cu_k,
            max_seqlen_q=planned.max_q,
            max_seqlen_k=planned.max_k,
            softmax_scale=scale,
            causal=planned.work.causal,
            num_splits=_SPLITS,
        )
        return out, lse

    return call
