"""fp32 oracles of the model's operations: plain loops and formulas, for tests only."""

from __future__ import annotations

import math
from typing import Literal

import torch

from kernels.moe import ExpertMLP


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As `kernels.rope.apply_rope`: each pair is a complex number times cos + i·sin."""
    turn = torch.complex(cos.double(), sin.double())  # [T, R/2]
    turn = turn.view(turn.shape[0], *(1,) * (x.dim() - 2), turn.shape[1])
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], x.shape[-1] // 2, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `kernels.rmsnorm.rms_norm`."""
    wide = x.double()
    mean = (wide * wide).sum(dim=-1, keepdim=True) / x.shape[-1]
    return (wide / torch.sqrt(mean + eps) * weight.double()).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `kernels.silu_mul.silu_mul`."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].double(), gate_up[..., half:].double()
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def choose_experts(
    logits: torch.Tensor,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"],
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: Literal["max", "top2_sum"] = "max",
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.moe_gate.choose_experts`, token by token; experts in order of their id."""
    num_tokens, num_experts = logits.shape
    weights = torch.zeros(num_tokens, top_k)
    ids = torch.zeros(num_tokens, top_k, dtype=torch.int64)
    size = num_experts // n_group
    for token in range(num_tokens):
        row = [float(value) for value in logits[token]]
        if scoring == "softmax":
            top = max(row)
            total = sum(math.exp(value - top) for value in row)
            scores = [math.exp(value - top) / total for value in row]
        else:
            scores = [1 / (1 + math.exp(-value)) for value in row]
        choice = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]

        def value_of(group: int, choice: list[float] = choice) -> float:
            members = sorted(choice[group * size : (group + 1) * size], reverse=True)
            return sum(members[: 1 if group_score == "max" else 2])

        groups = sorted(range(n_group), key=value_of, reverse=True)[:topk_group]
        allowed = [e for e in range(num_experts) if n_group <= topk_group or e // size in groups]
        chosen = sorted(sorted(allowed, key=lambda e: choice[e], reverse=True)[:top_k])
        total = sum(scores[e] for e in chosen) if renormalize else 1.0
        ids[token] = torch.tensor(chosen)
        weights[token] = torch.tensor([scores[e] / total * scale for e in chosen])
    return weights, ids


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    mlp: ExpertMLP,
) -> torch.Tensor:
    """As `kernels.moe.run_experts`, one (token, expert) pair at a time."""
    assert int(ids.max()) < num_experts
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            out[token] += weight * mlp(expert, x[token : token + 1])[0].double()
    return out.to(x.dtype)


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor, *, block: int) -> torch.Tensor:
    """As `kernels.fp8.dequantize_blocks`, block by block."""
    out = weight.float()
    for i in range(0, weight.shape[0], block):
        for j in range(0, weight.shape[1], block):
            out[i : i + block, j : j + block] *= scale[i // block, j // block].float()
    return out
