"""Rotary embedding of interleaved pairs, as DeepSeek lays them out: (x0, x1), (x2, x3), ..."""

from __future__ import annotations

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns pair i of x by the angle whose cosine and sine are cos[:, i] and sin[:, i].

    x [T, ..., R], any stride, fp32 or bf16; cos, sin fp32 [T, R/2]. Returns a new contiguous
    tensor of x's shape and dtype; the arithmetic is fp32.
    """
    half = cos.shape[1]
    turn = torch.complex(cos, sin).view(cos.shape[0], *(1,) * (x.dim() - 2), half)  # [T, 1..., R/2]
    values = x.float()
    if values.storage_offset() % 2 or any(stride % 2 for stride in values.stride()[:-1]):
        values = values.contiguous()  # a complex view needs whole pairs
    pairs = torch.view_as_complex(values.view(*x.shape[:-1], half, 2))  # [T, ..., R/2]
    return torch.view_as_real(pairs * turn).view(x.shape).to(x.dtype)


def rotate_(x: torch.Tensor, turn: torch.Tensor) -> None:
    """`apply_rope` in place: x [..., R] of any stride times turn = cos + i·sin.

    turn complex64, broadcast against x's pairs [..., R/2].
    """
    even = x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])
    if x.dtype == torch.float32 and even:
        torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2)).mul_(turn)
        return
    pairs = torch.view_as_complex(
        x.float().reshape(*x.shape[:-1], x.shape[-1] // 2, 2).contiguous()
    )
    x.copy_(torch.view_as_real(pairs * turn).view(x.shape))
