"""Choice of experts in one launch. T tokens, E experts, G groups of E/G, k chosen, S shared."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

_MAX_EXPERTS = 512


@triton.jit
def _best(value, candidate, index, NONE: tl.constexpr):
    """(index, value) of the greatest candidate, of equal ones the first; one per call."""
    value = tl.where(candidate, value, float("-inf"))
    top = tl.max(tl.max(value, 1), 0)
    hit = candidate & (value == top)
    return tl.min(tl.min(tl.where(hit, index, NONE), 1), 0)


@triton.jit
def _gate_kernel(
    logits, bias, weights, ids, stride_logits, scale,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    KEPT: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr,
    G_BLOCK: tl.constexpr, S_BLOCK: tl.constexpr, W_BLOCK: tl.constexpr,
    SOFTMAX: tl.constexpr, TOP2: tl.constexpr, BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """One token a program; its scores stand as [group, member]."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G_BLOCK)[:, None]
    member = tl.arange(0, S_BLOCK)[None, :]
    expert = group * SIZE + member
    exists = (group < GROUPS) & (member < SIZE)
    logit = tl.load(logits + token * stride_logits + expert, mask=exists, other=float("-inf"))
    if SOFTMAX:
        top = tl.max(tl.max(logit, 1), 0)
        score = tl.exp(logit - top)
        score = score / tl.sum(tl.sum(score, 1), 0)
    else:
        score = tl.sigmoid(logit)
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=exists, other=0.0)
    # NaN loses every comparison, so no id could be found: it is chosen last, and weighs NaN.
    choice = tl.where(choice == choice, choice, float("-inf"))
    if KEPT < GROUPS:
        first = tl.max(tl.where(exists, choice, float("-inf")), 1)  # [G]
        if TOP2 and SIZE > 1:
            place = tl.where(exists & (choice == first[:, None]), member, S_BLOCK)
            rest = exists & (member != tl.min(place, 1)[:, None])
            first += tl.max(tl.where(rest, choice, float("-inf")), 1)
        groups = tl.arange(0, G_BLOCK)
        kept = groups < 0
        for _ in tl.static_range(KEPT):
            open_group = (groups < GROUPS) & ~kept
            value = tl.where(open_group, first, float("-inf"))
            hit = open_group & (value == tl.max(value, 0))
            kept = kept | (groups == tl.min(tl.where(hit, groups, G_BLOCK), 0))
        choice = tl.where(kept[:, None], choice, float("-inf"))
    column = tl.arange(0, W_BLOCK)
    chosen = EXPERTS + column - TOP_K  # the shared experts; the first TOP_K are set below
    weight = tl.where(column < TOP_K, 0.0, 1.0)
    left = exists
    for j in tl.static_range(TOP_K):
        best = _best(choice, left, expert, G_BLOCK * S_BLOCK * 2)
        here = expert == best
        value = tl.sum(tl.sum(tl.where(here & exists, score, 0.0), 1), 0)
        left = left & ~here
        chosen = tl.where(column == j, best, chosen)
        weight = tl.where(column == j, value, weight)
    routed = column < TOP_K
    if RENORMALIZE:
        weight = tl.where(routed, weight / (tl.sum(tl.where(routed, weight, 0.0), 0) + 1e-20), 1.0)
    weight = tl.where(routed, weight * scale, weight)
    inside = column < WIDTH
    tl.store(weights + token * WIDTH + column, weight, mask=inside)
    tl.store(ids + token * WIDTH + column, chosen, mask=inside)


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
    num_shared: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32 [T, k + S], ids int32 [T, k + S]), as `kernels.moe_gate.choose_experts`.

    logits fp32 [T, E], E <= 512, last dim contiguous; bias fp32 [E]. The k experts come in order of
    their choice; of equal ones the lowest id first. `num_shared` appends the ids E .. E + S - 1 at
    weight 1. A row of NaN chooses distinct ids below E, so that nothing reads out of bounds, and
    weighs NaN.
    """
    num_tokens, num_experts = logits.shape
    assert num_experts <= _MAX_EXPERTS, num_experts
    assert num_experts % n_group == 0, (num_experts, n_group)
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    assert bias is None or (bias.shape == (num_experts,) and bias.dtype == torch.float32)
    if n_group <= topk_group:
        n_group = topk_group = 1
    assert top_k <= topk_group * (num_experts // n_group), "too few experts in the chosen groups"
    width, size = top_k + num_shared, num_experts // n_group
    weights = torch.empty(num_tokens, width, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, width, dtype=torch.int32, device=logits.device)
    if num_tokens:
        _gate_kernel[(num_tokens,)](
            logits, logits if bias is None else bias, weights, ids, logits.stride(0), scale,
            EXPERTS=num_experts, GROUPS=n_group, SIZE=size,
            KEPT=topk_group, TOP_K=top_k, SHARED=num_shared, WIDTH=width,
            G_BLOCK=triton.next_power_of_2(n_group), S_BLOCK=triton.next_power_of_2(size),
            W_BLOCK=triton.next_power_of_2(width),
            SOFTMAX=scoring == "softmax", TOP2=group_score == "top2_sum", BIAS=bias is not None,
            RENORMALIZE=renormalize, num_warps=1,
        )  # fmt: skip
    return weights, ids
