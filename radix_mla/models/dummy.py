"""Dummy weights: random at unit scale, made where the model lives."""

from __future__ import annotations

import torch
from torch import nn

from kernels.fp8 import BLOCK
from radix_mla.models.fp8_weight import FP8

_SEED = 0
_FP8_STD = 64.0  # of the codes: 448 is seven times as much


def fill_dummy(model: nn.Module) -> None:
    """Norms 1, biases 0, embeddings N(0, 1), every matrix N(0, 1/fan_in).

    With smaller weights every sequence would decode the same token and hit the same experts. The
    values are ones that bf16 holds, as in the checkpoints they stand for, or e4m3 codes with block
    scales whose product is so distributed. The seed is fixed; nothing is copied between devices.
    """
    params = {name: param.data for name, param in model.named_parameters()}
    generators: dict[torch.device, torch.Generator] = {}
    for name, param in params.items():
        if name.endswith("norm.weight"):
            param.fill_(1.0)
        elif name.endswith("bias"):
            param.zero_()
        elif not name.endswith("_scale_inv"):
            if param.device not in generators:
                generators[param.device] = torch.Generator(param.device).manual_seed(_SEED)
            generator = generators[param.device]
            std = 1.0 if name.endswith("embed_tokens.weight") else param.shape[-1] ** -0.5
            if param.dtype == FP8:
                _fill_fp8(param, params[f"{name}_scale_inv"], std, generator)
            else:
                _fill(param, std, generator)


def _fill(param: torch.Tensor, std: float, generator: torch.Generator) -> None:
    for part in param if param.dim() == 3 else (param,):
        if part.is_cuda and part.dtype == torch.bfloat16:
            part.normal_(0.0, std, generator=generator)
            continue
        values = torch.empty(part.shape, device=part.device)
        values.normal_(0.0, std, generator=generator)
        part.copy_(values.bfloat16())


def _fill_fp8(
    codes: torch.Tensor, scales: torch.Tensor, std: float, generator: torch.Generator
) -> None:
    """Scales differ by up to two from block to block, codes by as much the other way."""
    scales.uniform_(1.0, 2.0, generator=generator)  # for now the blocks' share of the deviation
    stack = (codes, scales) if codes.dim() == 3 else (codes[None], scales[None])
    for matrix, blocks in zip(*stack, strict=True):
        values = torch.empty(matrix.shape, device=matrix.device)
        values.normal_(0.0, _FP8_STD, generator=generator)
        rows = blocks.repeat_interleave(BLOCK, dim=0)[: len(matrix)]
        values /= rows.repeat_interleave(BLOCK, dim=1)[:, : matrix.shape[1]]
        matrix.copy_(values)
    scales *= std / _FP8_STD
