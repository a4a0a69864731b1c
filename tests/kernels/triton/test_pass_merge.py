"""The Triton kernel against its oracle."""

from __future__ import annotations

import pytest
import torch
from support.assert_close import assert_within_plain
from support.merge_passes_case import expected, passes

from kernels.merge_passes import merge_passes_ as plain_merge_passes_
from kernels.triton.merge_passes import merge_passes_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTOR = 2.0 if DEVICE == "cuda" else 4.0  # the interpreter cuts fp32 to bf16, it does not round


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "width"),
    [
        (5, 3, 32),
        (1, 1, 16),
        pytest.param(300, 16, 512, marks=pytest.mark.gpu),
        pytest.param(33, 40, 512, marks=pytest.mark.gpu),
    ],
)
def test_merge_passes(tokens: int, heads: int, width: int, dtype: torch.dtype) -> None:
    out, *others = passes(tokens, heads, width, dtype, DEVICE)
    on_host = [x.cpu() for x in (out, *others)]
    exact = expected(*on_host, torch.float64)  # type: ignore[arg-type]
    plain = on_host[0].clone()
    plain_merge_passes_(plain, *on_host[1:])
    merge_passes_(out, *others)
    keys = [token for token in range(tokens) if token % 4 != 1]
    bound = 1e-5 if dtype == torch.float32 else 1e-3
    assert_within_plain(out[keys].cpu(), plain[keys], exact[keys], factor=FACTOR, atol=bound)
    untouched = [token for token in range(tokens) if token % 4 == 1]
    assert torch.equal(out[untouched].cpu(), on_host[0][untouched])
