"""Which parameter, or which part of one, each tensor of a checkpoint fills."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from radix_mla.models.fused_moe import FusedExperts
from radix_mla.models.hf_config import ModelConfig
from radix_mla.models.moe import Experts

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Target(NamedTuple):
    """What a checkpoint tensor of `shape` fills: `view`, part of a parameter of `owner`."""

    view: torch.Tensor
    shape: tuple[int, ...]
    owner: nn.Module

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies a tensor of `shape`, converted to the parameter's dtype."""
        self.view.copy_(tensor.reshape(self.view.shape))

    def value(self) -> torch.Tensor:
        """What was filled in, as the checkpoint has it."""
        return self.view.reshape(self.shape)


def checkpoint_targets(model: nn.Module) -> dict[str, Target]:
    """Checkpoint name → what it fills; the views cover every parameter.

    Merged matrices have one view a part: gate and up projections, experts. A tied head has no name
    of its own.
    """
    targets: dict[str, Target] = {}
    for name, param in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        owner = model.get_submodule(stem)
        for part, view, shape in _parts(stem, leaf, param.data, owner):
            targets[part] = Target(view, shape, owner)
    return targets


_Part = tuple[str, torch.Tensor, tuple[int, ...]]


def _parts(stem: str, leaf: str, param: torch.Tensor, owner: nn.Module) -> Iterator[_Part]:
    if isinstance(owner, Experts | FusedExperts):
        yield from _experts(stem, leaf, param, owner.num_experts)
    elif stem.endswith(".gate_up_proj"):
        yield from _gate_up(stem.removesuffix(".gate_up_proj"), leaf, param)
    else:
        yield f"{stem}.{leaf}", param, tuple(param.shape)


def _experts(stem: str, leaf: str, stack: torch.Tensor, num_routed: int) -> Iterator[_Part]:
    """stack [E + S, ...] of gate_up_proj or down_proj, or of their scales."""
    suffix = "weight_scale_inv" if leaf.endswith("_scale_inv") else "weight"
    merged = leaf.startswith("gate_up_proj")
    for expert, matrix in enumerate(stack[:num_routed]):
        if merged:
            yield from _gate_up(f"{stem}.{expert}", suffix, matrix)
        else:
            yield f"{stem}.{expert}.down_proj.{suffix}", matrix, tuple(matrix.shape)
    shared = stack[num_routed:]  # [S, ...], one MLP of S times the width in the checkpoint
    if not len(shared):
        return
    stem = stem.removesuffix("experts") + "shared_experts"
    if not merged:
        view = shared.transpose(0, 1)  # [D, S, I]
        yield f"{stem}.down_proj.{suffix}", view, (len(view), view[0].numel())
        return
    for name, view in zip(("gate_proj", "up_proj"), shared.chunk(2, dim=1), strict=True):
        num, rows, cols = view.shape
        yield f"{stem}.{name}.{suffix}", view, (num * rows, cols)


def _gate_up(stem: str, leaf: str, matrix: torch.Tensor) -> Iterator[_Part]:
    for name, view in zip(("gate_proj", "up_proj"), matrix.chunk(2, dim=0), strict=True):
        yield f"{stem}.{name}.{leaf}", view, tuple(view.shape)


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints hold and the served model does not need.

    Multi-token-prediction layers (exactly those from `num_hidden_layers` on), the rotary buffers
    of old checkpoints, the copy of a tied head.
    """
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= config.num_hidden_layers:
        return True
    if name.endswith("rotary_emb.inv_freq"):
        return True
    return config.tie_word_embeddings and name == "lm_head.weight"


def to_interleaved(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Reorders rope rows that pair (i, i + R/2) into pairs (2i, 2i + 1).

    Queries and keys are permuted alike, so their products do not change. Other tensors, and
    checkpoints that are interleaved already, come back as they are.
    """
    if config.rope_interleave:
        return tensor
    rope = config.qk_rope_head_dim
    order = torch.arange(rope).view(2, -1).t().reshape(-1)  # 0, R/2, 1, R/2 + 1, ...
    if name.endswith((".q_proj.weight", ".q_b_proj.weight")):
        heads = tensor.view(config.num_attention_heads, config.qk_head_dim, -1).clone()
        nope = config.qk_nope_head_dim
        heads[:, nope:] = heads[:, nope:][:, order]
        return heads.view_as(tensor)
    if ".kv_a_proj_with_mqa." in name:
        latent = config.kv_lora_rank
        return torch.cat((tensor[:latent], tensor[latent:][order]))
    return tensor
