"""Choice of experts. T tokens, E experts, G groups, k chosen experts."""

from __future__ import annotations

from typing import Literal

import numpy as np
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
    num_shared: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32 [T, k], expert ids [T, k]), in no given order within a token.

    ids are int64, on a GPU int32: what the expert kernels take. `num_shared` experts follow the
    k chosen ones for every token: ids E, E + 1, ..., weight 1.

    logits fp32 [T, E]. `bias` [E] takes part in the choice and never in the weights (DeepSeek-V3,
    arXiv 2412.19437, eq. 16). With n_group > topk_group the experts come from the topk_group groups
    of highest score. Weights: the chosen experts' scores, divided by their sum if `renormalize`,
    then times `scale` in either case.
    """
    if logits.is_cuda:
        from kernels.triton import moe_gate as gpu  # Triton is imported where there is a GPU only

        return gpu.choose_experts(
            logits,
            top_k=top_k,
            scoring=scoring,
            bias=bias,
            n_group=n_group,
            topk_group=topk_group,
            group_score=group_score,
            renormalize=renormalize,
            scale=scale,
            num_shared=num_shared,
        )
    scores = logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid()  # [T, E]
    choice = scores if bias is None else scores + bias
    if n_group > topk_group:
        choice = _mask_groups(choice, n_group, topk_group, group_score)
    ids = choice.topk(top_k, dim=-1, sorted=False).indices  # [T, k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    if scale != 1.0:
        weights = weights * scale
    if num_shared:
        first = logits.shape[1]
        shared = torch.arange(first, first + num_shared, dtype=ids.dtype).expand(len(ids), -1)
        ids = torch.cat((ids, shared), dim=1)
        weights = torch.cat((weights, weights.new_ones(len(ids), num_shared)), dim=1)
    return weights, ids


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


def choose_experts_host(
    logits: np.ndarray,
    *,
    top_k: int,
    scoring: Literal["softmax", "sigmoid"],
    bias: np.ndarray | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    group_score: Literal["max", "top2_sum"] = "max",
    renormalize: bool,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """`choose_experts` on host arrays: for a few tokens a third of the time."""
    with np.errstate(over="ignore", invalid="ignore"):  # exp(-logit) = inf: the score is 0
        return _choose_host(
            logits, top_k, scoring, bias, n_group, topk_group, group_score, renormalize, scale
        )


def _choose_host(
    logits: np.ndarray,
    top_k: int,
    scoring: str,
    bias: np.ndarray | None,
    n_group: int,
    topk_group: int,
    group_score: str,
    renormalize: bool,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    if scoring == "softmax":
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
    else:
        scores = 1.0 / (1.0 + np.exp(-logits))
    choice = scores if bias is None else scores + bias
    rows = np.arange(len(logits))[:, None]
    if n_group > topk_group:
        grouped = choice.reshape(len(logits), n_group, -1)  # [T, G, E/G]
        size = grouped.shape[-1]
        if group_score == "max" or size == 1:
            score = grouped.max(axis=-1)
        else:
            score = np.partition(grouped, size - 2, axis=-1)[..., size - 2 :].sum(axis=-1)
        lost = np.argpartition(score, n_group - topk_group - 1, axis=-1)[:, : n_group - topk_group]
        grouped = grouped.copy()
        grouped[rows, lost] = -np.inf
        choice = grouped.reshape(logits.shape)
    ids = np.argpartition(choice, -top_k, axis=-1)[:, -top_k:]  # [T, k]
    weights = scores[rows, ids]
    if renormalize:
        weights /= weights.sum(axis=-1, keepdims=True) + np.float32(1e-20)
    return (weights if scale == 1.0 else weights * np.float32(scale)), ids
