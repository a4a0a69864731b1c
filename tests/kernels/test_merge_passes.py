from __future__ import annotations

import pytest
import torch
from support.assert_close import assert_within_plain
from support.merge_passes_case import expected, passes

from kernels.merge_passes import merge_passes_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 17])
def test_merges_each_token_with_its_passes(tokens: int, dtype: torch.dtype) -> None:
    out, *others = passes(tokens, 3, 20, dtype)
    exact = expected(out, *others, torch.float64)  # type: ignore[arg-type]
    before = out.clone()
    merge_passes_(out, *others)
    keys = [token for token in range(tokens) if token % 4 != 1]
    assert_within_plain(out[keys], exact[keys].to(dtype), exact[keys])
    assert torch.equal(out[1::4], before[1::4])
