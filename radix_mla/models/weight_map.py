"""Which parameter, or which part of one, each tensor of a checkpoint fills."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

from radix_mla.models.hf_config import ModelConfig

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def checkpoint_targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Checkpoint name → the view of a parameter that it fills; the views cover every parameter.

    Merged matrices have one view a part: gate and up projections, routed experts. A tied head has
    no name of its own.
    """
    targets: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        targets.update(_parts(name, param.data))
    return targets


def _parts(name: str, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    stem, _, leaf = name.rpartition(".")
    if stem.endswith(".experts"):  # stacked [E, ...]
        for expert, matrix in enumerate(param):
            if leaf == "gate_up_proj":
                yield from _gate_up(f"{stem}.{expert}", matrix)
            else:
                yield f"{stem}.{expert}.{leaf}.weight", matrix
    elif stem.endswith(".gate_up_proj"):
        yield from _gate_up(stem.removesuffix(".gate_up_proj"), param)
    else:
        yield name, param


def _gate_up(stem: str, matrix: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    gate, up = matrix.chunk(2, dim=0)
    yield f"{stem}.gate_proj.weight", gate
    yield f"{stem}.up_proj.weight", up


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
