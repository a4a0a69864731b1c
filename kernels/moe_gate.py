"""Choice of experts. T tokens, E experts, G groups, k chosen experts."""

from __future__ import annotations

from typing import Literal

import torch


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
    """(weights fp32 [T, k], expert ids int64 [T, k]), in no given order within a token.

    logits fp32 [T, E]. `bias` [E] takes part in the choice and never in the weights (DeepSeek-V3,
    arXiv 2412.19437, eq. 16). With n_group > topk_group the experts come from the topk_group groups
    of highest score. Weights: the chosen experts' scores, divided by their sum if `renormalize`,
    then times `scale` in either case.
    """
    scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid()  # [T, E]
    choice = scores if bias is None else scores + bias
    if n_group > topk_group:
        choice = _mask_groups(choice, n_group, topk_group, group_score)
    ids = choice.topk(top_k, dim=-1, sorted=False).indices  # [T, k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return (weights if scale == 1.0 else weights * scale), ids


def _mask_groups(
    choice: torch.Tensor, n_group: int, topk_group: int, group_score: str
) -> torch.Tensor:
    """choice [T, E] with -inf in every group that is not among the best.

    -inf and not 0: a biased score may be negative, and 0 would then win.
    """
    grouped = choice.view(choice.shape[0], n_group, -1)  # [T, G, E/G]
    if group_score == "max":
        score = grouped.amax(dim=-1)  # [T, G]
    else:
        score = grouped.topk(min(2, grouped.shape[-1]), dim=-1, sorted=False).values.sum(dim=-1)
    best = score.topk(topk_group, dim=-1, sorted=False).indices
    lost = torch.ones_like(score, dtype=torch.bool).scatter_(1, best, False)  # [T, G]
    return grouped.masked_fill(lost[:, :, None], float("-inf")).view_as(choice)
