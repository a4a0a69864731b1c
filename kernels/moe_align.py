"""Sort of (token, expert) pairs by expert, padded to tiles. N pairs, E experts, M rows a tile."""

from __future__ import annotations

import torch


def align(
    ids: torch.Tensor, num_experts: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pairs int32 [tiles · M], expert int32 [tiles], num_tiles int32 [1]) of ids [T, k].

    Pairs of one expert in their order, each expert's padded with N to whole tiles, experts
    ascending. Exactly as many tiles as are needed: the shape depends on the ids.
    """
    flat = ids.reshape(-1)
    pairs, experts = [], []
    for expert in range(num_experts):
        own = (flat == expert).nonzero()[:, 0].int()
        tiles = -(-len(own) // block_m)
        padding = own.new_full((tiles * block_m - len(own),), len(flat))
        pairs += [own, padding]
        experts += [expert] * tiles
    expert_of = torch.tensor(experts, dtype=torch.int32, device=ids.device)
    return torch.cat(pairs), expert_of, expert_of.new_tensor([len(experts)])
