"""Experts for the GPU: routed and shared ones in one pair of stacks, run by grouped GEMMs.

T tokens, D hidden, I inner, E routed experts, S shared ones. A model's shared experts are one MLP
S·I wide; cut along I it is the sum of S experts that every token chooses with weight 1.
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.fp8 import BLOCK, dequantize_blocks
from kernels.moe import run_experts_
from radix_mla.models.fp8_weight import FP8, num_blocks
from radix_mla.models.hf_config import ModelConfig
from radix_mla.models.layers import empty_parameter


class FusedExperts(nn.Module):
    """gate_up [E + S, 2·I, D], down [E + S, D, I]; the shared experts come last.

    With `fp8` both are e4m3 with `..._scale_inv` [E + S, 2·I/128, D/128] and [E + S, D/128, I/128],
    if all of it is whole blocks.
    """

    gate_up_proj_scale_inv: nn.Parameter | None
    down_proj_scale_inv: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.num_experts = config.n_routed_experts
        self.num_shared = config.n_shared_experts
        total = self.num_experts + self.num_shared
        self._dtype = dtype
        fp8 = fp8 and hidden % BLOCK == inner % BLOCK == 0

        def stack(rows: int, cols: int) -> tuple[nn.Parameter, nn.Parameter | None]:
            kind = FP8 if fp8 else dtype
            weight = empty_parameter(total, rows, cols, dtype=kind, device=device)
            if not fp8:
                return weight, None
            blocks = (total, num_blocks(rows), num_blocks(cols))
            return weight, empty_parameter(*blocks, dtype=torch.float32, device=device)

        self.gate_up_proj, self.gate_up_proj_scale_inv = stack(2 * inner, hidden)
        self.down_proj, self.down_proj_scale_inv = stack(hidden, inner)

    def finalize(self) -> None:
        """Nothing to pack: the stacks run as they were loaded."""

    def to_dense(self) -> None:
        """Gives up FP8: both stacks in the compute dtype from here on."""
        self.gate_up_proj = self._dense(self.gate_up_proj, self.gate_up_proj_scale_inv)
        self.down_proj = self._dense(self.down_proj, self.down_proj_scale_inv)
        self.gate_up_proj_scale_inv = self.down_proj_scale_inv = None

    def add_to(
        self, out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """out [T, D] += the chosen experts of x [T, D], weighted.

        ids and weights [T, k + S]: the gate has added the shared experts.
        """
        run_experts_(
            out,
            x,
            self.gate_up_proj,
            self.down_proj,
            ids,
            weights,
            scale_gate_up=self.gate_up_proj_scale_inv,
            scale_down=self.down_proj_scale_inv,
        )

    def _dense(self, codes: nn.Parameter, scales: nn.Parameter | None) -> nn.Parameter:
        if scales is None:
            return codes
        dense = torch.empty(codes.shape, dtype=self._dtype, device=codes.device)
        for matrix, code, scale in zip(dense, codes, scales, strict=True):
            matrix.copy_(dequantize_blocks(code, scale, block=BLOCK))
        return nn.Parameter(dense, requires_grad=False)
