"""The forms that a decode step takes: host gate, rope in place, norm with prepared weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kernels.reference_model as oracle
from kernels.moe_gate import choose_experts_host
from kernels.rmsnorm import rms_norm_scaled, rms_norm_scaled_, scaled_weight
from kernels.rope import rotate_


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(
    "words",
    [
        {"scoring": "softmax", "renormalize": False, "scale": 1.0},
        {"scoring": "sigmoid", "renormalize": True, "scale": 2.5, "with_bias": True},
        {"scoring": "softmax", "renormalize": True, "scale": 1.5, "n_group": 4, "topk_group": 2},
        {
            "scoring": "sigmoid",
            "renormalize": True,
            "scale": 1.0,
            "n_group": 4,
            "topk_group": 1,
            "group_score": "top2_sum",
            "with_bias": True,
        },
    ],
)
def test_host_gate(words: dict[str, Any], tokens: int) -> None:
    words = dict(words)
    logits = torch.randn(tokens, 16) * 3
    bias = torch.randn(16) * 0.3 - 1 if words.pop("with_bias", False) else None
    host_bias = None if bias is None else bias.numpy()
    weights, ids = choose_experts_host(logits.numpy(), top_k=3, bias=host_bias, **words)
    want_weights, want_ids = oracle.choose_experts(logits, top_k=3, bias=bias, **words)
    order = ids.argsort(axis=-1)
    assert (np.take_along_axis(ids, order, -1) == want_ids.numpy()).all()
    got = torch.from_numpy(np.take_along_axis(weights, order, -1))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want_weights)


def test_host_gate_takes_every_expert_and_any_logit() -> None:
    logits = np.array([[-1e4, 1e4, np.nan]], dtype=np.float32)
    weights, ids = choose_experts_host(
        logits, top_k=3, scoring="sigmoid", renormalize=False, scale=1.0
    )
    assert sorted(ids[0].tolist()) == [0, 1, 2]
    got = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert (got[0], got[1]) == (0.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 24, 25])
def test_rotate_in_place(dtype: torch.dtype, offset: int) -> None:
    wide = torch.randn(5, 3, 40).to(dtype)
    before = wide.clone()
    angle = torch.randn(5, 4) * 10
    turn = torch.complex(angle.cos(), angle.sin())
    rotate_(wide[..., offset : offset + 8], turn[:, None])
    want = before.clone()
    part = before[..., offset : offset + 8].contiguous()
    want[..., offset : offset + 8] = oracle.apply_rope(part, angle.cos(), angle.sin())
    torch.testing.assert_close(wide, want)


def test_norm_in_place_of_a_slice() -> None:
    wide, weight = torch.randn(4, 96), torch.randn(64)
    before = wide.clone()
    want = oracle.rms_norm(before[:, 16:80].contiguous(), weight, 1e-6)
    torch.testing.assert_close(rms_norm_scaled(wide[:, 16:80], *scaled_weight(weight, 1e-6)), want)
    rms_norm_scaled_(wide[:, 16:80], *scaled_weight(weight, 1e-6))
    torch.testing.assert_close(wide[:, 16:80], want)
    assert torch.equal(wide[:, :16], before[:, :16])
    assert torch.equal(wide[:, 80:], before[:, 80:])
