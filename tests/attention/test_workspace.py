from __future__ import annotations

import torch
from support.mla_case import ODD, TRUE, WIDE_V

from radix_mla.attention.workspace import Workspace


def test_bytes() -> None:
    space = Workspace(
        TRUE, context_rows=1_000, step_tokens=64, pad_heads=False, dtype=torch.bfloat16
    )
    row = 4 * (128 + 64 + 128) * 2 + 576 * 2
    assert space.num_bytes == 1_000 * row + 64 * 4 * 576 * 2


def test_padding_widens_to_the_larger_head() -> None:
    for dims, width in ((ODD, 32), (WIDE_V, 48)):
        space = Workspace(dims, context_rows=8, step_tokens=4, pad_heads=True, dtype=torch.float32)
        assert (space.keys(8) == 0).all()
        assert (space.values(8) == 0).all()
        assert space.keys(3).shape == space.values(3).shape == (dims.num_heads, 3, width)


def test_a_step_larger_than_the_context_rows_fits() -> None:
    space = Workspace(ODD, context_rows=8, step_tokens=20, pad_heads=True, dtype=torch.float32)
    assert space.keys(20).shape[1] == space.rows(20).shape[0] == 20
    assert space.context_rows == 8


def test_buffers_are_reused() -> None:
    space = Workspace(ODD, context_rows=8, step_tokens=4, pad_heads=True, dtype=torch.float32)
    assert space.keys(3).data_ptr() == space.keys(8).data_ptr()
    assert space.rows(2).data_ptr() == space.rows().data_ptr()
