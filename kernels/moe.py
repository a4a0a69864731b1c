"""Running tokens through their experts. T tokens, D hidden, I inner, E experts, k a token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from kernels.fp8 import BLOCK, dequantize_blocks
from kernels.silu_mul import silu_mul

ExpertMLP = Callable[[int, torch.Tensor], torch.Tensor]


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    mlp: ExpertMLP,
) -> torch.Tensor:
    """Sum over each token's experts of weight · mlp(expert, x).

    x [T, D]; ids int64 [T, k]; weights fp32 [T, k]. `mlp(e, rows [n, D]) -> [n, D]` is called once
    for every expert that is hit, in order of experts. Returns [T, D] in x's dtype.
    """
    num_tokens, top_k = ids.shape
    # Index arithmetic on the host: the counts are needed there, and few tokens are mostly calls.
    flat = ids.reshape(-1).cpu().numpy()  # [T·k]
    order = flat.argsort(kind="stable")  # (token, expert) pairs by expert
    counts = np.bincount(flat, minlength=num_experts).tolist()
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    rows = x.index_select(0, torch.from_numpy(order // top_k).to(x.device))  # [T·k, D]
    hit = [expert for expert, count in enumerate(counts) if count]
    parts = torch.split(rows, [counts[expert] for expert in hit])
    out = torch.cat([mlp(expert, part) for expert, part in zip(hit, parts, strict=True)])
    # One pass that gathers each token's k rows and adds them up, weighted.
    total: torch.Tensor = F.embedding_bag(
        torch.from_numpy(place.reshape(num_tokens, top_k)).to(x.device),
        out,
        mode="sum",
        per_sample_weights=weights.to(x.dtype),
    )
    return total


def run_experts_(
    out: torch.Tensor,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    scale_gate_up: torch.Tensor | None = None,
    scale_down: torch.Tensor | None = None,
) -> None:
    """out [T, D] += each token's experts of x [T, D], weighted, from stacked weights.

    w_gate_up [E, 2·I, D] (gate, then up), w_down [E, D, I]; ids [T, k] (int32 on a GPU), weights
    fp32 [T, k]. e4m3 weights come with the scales of their 128×128 blocks, fp32 [E, 2·I/128,
    D/128] and [E, D/128, I/128]. On a GPU nothing is asked of the host.
    """
    if x.is_cuda:
        from kernels.triton import moe as gpu  # Triton is imported where there is a GPU only

        gpu.run_experts_(
            out,
            x,
            w_gate_up,
            w_down,
            ids,
            weights,
            scale_gate_up=scale_gate_up,
            scale_down=scale_down,
        )
        return

    def matrix(stack: torch.Tensor, scale: torch.Tensor | None, expert: int) -> torch.Tensor:
        if scale is None:
            return stack[expert]
        return dequantize_blocks(stack[expert], scale[expert], block=BLOCK).to(x.dtype)

    def mlp(expert: int, rows: torch.Tensor) -> torch.Tensor:
        inner = silu_mul(rows @ matrix(w_gate_up, scale_gate_up, expert).t())
        return inner @ matrix(w_down, scale_down, expert).t()

    out += run_experts(x, ids, weights, num_experts=len(w_gate_up), mlp=mlp)
