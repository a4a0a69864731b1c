"""Mixture of experts: gate, routed experts, shared experts. T tokens, D hidden, E experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kernels.linear_fp32 import linear_fp32
from kernels.moe import run_experts
from kernels.moe_gate import choose_experts, choose_experts_host
from kernels.silu_mul import silu_mul
from radix_mla.models.fused_moe import FusedExperts
from radix_mla.models.hf_config import ModelConfig
from radix_mla.models.layers import GatedMLP, empty_parameter
from radix_mla.models.packed import DenseWeight, PackedWeight, PlainWeight

_FEW_TOKENS = 32  # up to these the calls of a choice cost more than its arithmetic


class Gate(nn.Module):
    """Scores tokens against experts and chooses; always fp32, as the models were trained.

    `num_shared` experts are added to every choice, for experts that are stacked with the routed.
    """

    e_score_correction_bias: nn.Parameter | None

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str, num_shared: int = 0
    ) -> None:
        super().__init__()
        experts, fp32 = config.n_routed_experts, torch.float32
        self.weight = empty_parameter(experts, config.hidden_size, dtype=fp32, device=device)
        self.e_score_correction_bias = (
            empty_parameter(experts, dtype=fp32, device=device)
            if config.topk_method == "noaux_tc"
            else None
        )
        bias = self.e_score_correction_bias
        self._bias = None if bias is None else bias.detach()
        self._plain = DenseWeight(self.weight)
        self._bf16: torch.Tensor | None = None
        grouped = config.topk_method != "greedy"
        self._rule: dict[str, Any] = {
            "top_k": config.num_experts_per_tok,
            "scoring": config.scoring_func,
            "n_group": config.n_group if grouped else 1,
            "topk_group": config.topk_group if grouped else 1,
            "group_score": "top2_sum" if config.topk_method == "noaux_tc" else "max",
            "renormalize": config.norm_topk_prob,
            "scale": config.routed_scaling_factor,
        }
        self._num_shared = num_shared

    def finalize(self, dtype: torch.dtype) -> None:
        """Called once, after loading; `dtype` is that of the hidden states to come.

        A GPU multiplies bf16 by bf16 where the weights are bf16 values: products and sums are as
        exact as in fp32, at half the bytes.
        """
        if self.weight.is_cuda and dtype == torch.bfloat16:
            half = self.weight.detach().bfloat16()
            if torch.equal(half.float(), self.weight):
                self.weight = nn.Parameter(half, requires_grad=False)
                self._bf16, self._plain = half, DenseWeight(half)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, D] → (weights fp32 [T, k + S], ids [T, k + S]); int64, on a GPU int32."""
        bias, rule, num_shared = self._bias, self._rule, self._num_shared
        if self._bf16 is not None:
            logits = linear_fp32(x, self._bf16)
        else:
            logits = self._plain(x if x.dtype == torch.float32 else x.float())
        if not logits.is_cpu or logits.shape[0] > _FEW_TOKENS or num_shared:
            return choose_experts(logits, bias=bias, num_shared=num_shared, **rule)
        host_bias = None if bias is None else bias.numpy()
        weights, ids = choose_experts_host(logits.numpy(), bias=host_bias, **rule)
        return torch.from_numpy(weights), torch.from_numpy(ids)


class Experts(nn.Module):
    """The routed experts' weights, stacked: gate_up [E, 2·I, D], down [E, D, I]."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        experts, hidden = config.n_routed_experts, config.hidden_size
        inner = config.moe_intermediate_size
        self.num_experts = experts
        self.gate_up_proj = empty_parameter(experts, 2 * inner, hidden, dtype=dtype, device=device)
        self.down_proj = empty_parameter(experts, hidden, inner, dtype=dtype, device=device)
        self._plain = self._pairs(None, None)

    def finalize(self) -> None:
        """Packs each of the two stacks where that pays for all of its matrices."""
        gate_up, down = _pack_all(self.gate_up_proj), _pack_all(self.down_proj)
        self._plain = self._pairs(gate_up, down)
        empty = nn.Parameter(self.gate_up_proj.new_empty(0), requires_grad=False)
        if gate_up is not None:
            self.gate_up_proj = empty
        if down is not None:
            self.down_proj = empty

    def _pairs(
        self, gate_up: list[PackedWeight] | None, down: list[PackedWeight] | None
    ) -> list[tuple[PlainWeight, PlainWeight]]:
        """(gate_up, down) of each expert; where not packed, views of the parameter."""
        first: Sequence[PlainWeight] = gate_up or [
            DenseWeight(matrix) for matrix in self.gate_up_proj
        ]
        second: Sequence[PlainWeight] = down or [DenseWeight(matrix) for matrix in self.down_proj]
        return list(zip(first, second, strict=True))

    def add_to(
        self, out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """out [T, D] += the chosen experts of x [T, D], weighted; ids and weights [T, k]."""
        if x.shape[0] > 1:
            out += run_experts(x, ids, weights, num_experts=self.num_experts, mlp=self._mlp)
            return
        for expert, weight in zip(ids[0].tolist(), weights[0].tolist(), strict=True):
            gate_up, down = self._plain[expert]
            down.add_to(out, silu_mul(gate_up(x)), weight)

    def _mlp(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate_up, down = self._plain[expert]
        return down(silu_mul(gate_up(rows)))


def _pack_all(stack: torch.Tensor) -> list[PackedWeight] | None:
    """The packed matrices of stack [E, out, in], or None if one of them is not to be packed."""
    packed: list[PackedWeight] = []
    for matrix in stack:
        weight = PackedWeight.pack(matrix)
        if weight is None:
            return None
        packed.append(weight)
    return packed


class MoE(nn.Module):
    """Routed experts plus shared experts. With `fused` (the GPU's form) all are in one stack."""

    shared_experts: GatedMLP | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fused: bool = False,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self._dtype = dtype
        num_shared = config.n_shared_experts if fused else 0
        self.gate = Gate(config, device=device, num_shared=num_shared)
        self.experts: Experts | FusedExperts = (
            FusedExperts(config, dtype=dtype, device=device, fp8=fp8)
            if fused
            else Experts(config, dtype=dtype, device=device)
        )
        inner = 0 if fused else config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = (
            GatedMLP(config.hidden_size, inner, dtype=dtype, device=device) if inner else None
        )
        # Bound methods spare a decode step the calls of `nn.Module`.
        self._parts = (
            self.gate.forward,
            self.experts.add_to,
            self.shared_experts.add_to if self.shared_experts is not None else None,
        )

    def finalize(self) -> None:
        """Called once, after loading."""
        self.gate.finalize(self._dtype)
        self.experts.finalize()
        if self.shared_experts is not None:
            self.shared_experts.finalize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] → [T, D]."""
        out = torch.zeros_like(x)
        self.add_to(out, x)
        return out

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [T, D] += self(x)."""
        gate, experts, shared = self._parts
        weights, ids = gate(x)
        experts(out, x, ids, weights)
        if shared is not None:
            shared(out, x)
