"""Choice of tokens without a host sync. N rows, V ids, S splits of a row.

Equal to `radix_mla.sampling`: the draws' uniform numbers, bit for bit; greedy choices, ties
included; the filters and their order; the inverse CDF in the order of ids. Not equal: the last bits
of exp and of sums (fp64 here and there, added in another order), so a draw differs where u, or a
filter's border, falls within such a rounding error of a border between two ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.draw import draw_kernel, keyed_uniform
from kernels.triton.top import row_top, tops

_LIST = 8192  # candidates that are gathered; with more, every pass reads the row
_BLOCK = 4096  # ids a step of a pass over the row
_TRIED = 2048  # the same where each meets all levels
_LEVELS = 16  # thresholds tried in one pass
_GREEDY_BELOW = 1e-3


@triton.jit
def _greedy_kernel(tops, ids, tokens, finite, splits, size, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, token, broken = row_top(tops, ids, row, splits, size, SPLITS)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, (broken == 0) & (tl.abs(top) < float("inf")))


@triton.jit
def _uniform_kernel(out, seeds, choices, positions, num, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num
    seed = tl.load(seeds + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
    choice = tl.load(choices + index, mask=inside, other=0).to(tl.uint64)
    position = tl.load(positions + index, mask=inside, other=0).to(tl.uint64)
    tl.store(out + index, keyed_uniform(seed, choice, position), mask=inside)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [N], finite bool [N]): the greatest logit of each row, of equals the first.

    logits fp32 or bf16 [N, V], last dim contiguous, any row stride (a slice leaves padding out). A
    row with a NaN gives its first NaN's id; `finite` tells whether the chosen logit is finite.
    """
    greatest, ids = tops(logits)
    tokens, finite = _results(logits)
    if len(logits):
        splits = greatest.shape[1]
        _greedy_kernel[(len(logits),)](
            greatest, ids, tokens, finite, splits, logits.shape[1],
            SPLITS=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
    return tokens, finite


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [N], finite bool [N]): greedy rows and keyed draws, in two launches.

    logits as for `greedy`. All others [N], on the device: temperature fp32 (below 1e-3: greedy),
    top_k int32 (0: off), top_p fp64 (>= 1: off), min_p fp32 (0: off), and what keys the draw, as
    `radix_mla.sampling.uniform` takes it: seeds int64 (the 64 bits of the seed), choices and
    positions int64. A row whose greatest logit is not finite gets `greedy`'s answer.
    """
    expected = {
        torch.float32: (temperature, min_p),
        torch.float64: (top_p,),
        torch.int32: (top_k,),
        torch.int64: (seeds, choices, positions),
    }
    for dtype, tensors in expected.items():
        for tensor in tensors:
            assert tensor.shape == (len(logits),), tensor.shape
            assert tensor.dtype == dtype, (tensor.dtype, dtype)
            assert tensor.is_contiguous()
    greatest, ids = tops(logits)
    tokens, finite = _results(logits)
    num_rows, size = logits.shape
    found_weights = torch.empty(num_rows, _LIST, dtype=torch.float32, device=logits.device)
    found_ids = torch.empty(num_rows, _LIST, dtype=torch.int32, device=logits.device)
    if num_rows:
        splits = greatest.shape[1]
        draw_kernel[(num_rows,)](
            logits, greatest, ids, tokens, finite, found_weights, found_ids,
            temperature, top_k, top_p, min_p, seeds, choices, positions,
            logits.stride(0), size, splits,
            SPLITS=triton.next_power_of_2(splits), BLOCK=_BLOCK, TRIED=_TRIED, LIST=_LIST,
            LEVELS=_LEVELS,
            GREEDY_BELOW=_GREEDY_BELOW, num_warps=16,
        )  # fmt: skip
    return tokens, finite


def uniform(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """fp64 [N] in [0, 1) of int64 [N]: `radix_mla.sampling.uniform.uniform`, bit for bit."""
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if len(seeds):
        _uniform_kernel[(triton.cdiv(len(seeds), 128),)](
            out, seeds, choices, positions, len(seeds), BLOCK=128
        )
    return out


def _results(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    return tokens, torch.empty(len(logits), dtype=torch.bool, device=logits.device)
