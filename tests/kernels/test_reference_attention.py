"""The oracles themselves, against torch's attention and against each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.reference_attention import merge_lse, mha_varlen, mqa_paged


def test_mha_is_torch_attention() -> None:
    q, k, v = torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 5)
    for causal in (True, False):
        out, _ = mha_varlen(q, k, v, [0, 9], [0, 9], scale=0.3, causal=causal)
        want = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=causal, scale=0.3
        )
        torch.testing.assert_close(out, want.transpose(0, 1))


def test_causal_is_aligned_to_the_end() -> None:
    q, k, v = torch.randn(2, 1, 4), torch.randn(5, 1, 4), torch.randn(5, 1, 4)
    out, lse = mha_varlen(q, k, v, [0, 2], [0, 5], scale=1.0, causal=True)
    first, first_lse = mha_varlen(q[:1], k[:4], v[:4], [0, 1], [0, 4], scale=1.0, causal=False)
    torch.testing.assert_close(out[:1], first)
    torch.testing.assert_close(lse[:1], first_lse)


def test_no_keys_give_zero_and_minus_infinity() -> None:
    q = torch.randn(3, 2, 4)
    out, lse = mha_varlen(q, q[:0], q[:0], [0, 3], [0, 0], scale=1.0, causal=False)
    assert torch.equal(out, torch.zeros(3, 2, 4))
    assert (lse == float("-inf")).all()


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    q, k, v = torch.randn(4, 2, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 6)
    whole = mha_varlen(q, k, v, [0, 4], [0, 11], scale=0.5, causal=False)
    parts = [
        mha_varlen(q, k[s], v[s], [0, 4], [0, len(k[s])], scale=0.5, causal=False)
        for s in (slice(0, 3), slice(3, 11))
    ]
    out, lse = merge_lse(*parts[0], *parts[1])
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])


def test_mqa_is_mha_with_every_head_on_the_same_rows() -> None:
    pool = torch.randn(16, 10)
    table = torch.tensor([[3, 0], [1, 2]])
    q = torch.randn(5, 2, 10)
    out, lse = mqa_paged(q, pool, table, [7, 5], [0, 3, 5], page_size=4, latent=6, scale=0.4)
    rows = torch.cat((pool[12:16], pool[0:3], pool[4:8], pool[8:9]))  # [7 + 5, 10]
    keys = rows[:, None].expand(-1, 2, -1)
    want, want_lse = mha_varlen(
        q, keys, keys[..., :6], [0, 3, 5], [0, 7, 12], scale=0.4, causal=True
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
