"""GEMMs over tiles of one expert each. N pairs (token, expert), K reduced, F output features.

Rows of the result stand in order of pairs (token · k + choice), so that nothing is permuted back:
`weighted_sum` adds a token's k rows to the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.moe_align import Tiles

FP8 = torch.float8_e4m3fn
GROUP = 128  # values of one scale, along both dims of a weight and along K of a row


class Shape(NamedTuple):
    """Block shape of one GEMM; `swap` puts the weights on the side where the MMA wants 64 rows."""

    block_f: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    swap: bool = False


@triton.jit
def _tile_of(pid, tiles, F_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """(row tile, feature tile): GROUP_M row tiles share their weights through L2."""
    in_group = GROUP_M * F_TILES
    first = (pid // in_group) * GROUP_M
    rows = tl.minimum(tiles - first, GROUP_M)
    return first + (pid % in_group) % rows, (pid % in_group) // rows


@triton.jit
def _product(a, b, SWAP: tl.constexpr, UPCAST: tl.constexpr):
    """a [M, K] · b [F, K]ᵀ as fp32 [M, F], or transposed if SWAP."""
    if UPCAST:  # the interpreter's product of bf16 or fp8 operands is wrong
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if SWAP:
        return tl.dot(b, tl.trans(a), input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def _grouped_kernel(
    x, w, out, x_scale, w_scale, out_scale, pairs, tile_expert, num_tiles, num_pairs,
    stride_x, F: tl.constexpr, K: tl.constexpr, DIVIDE: tl.constexpr,
    GATED: tl.constexpr, SCALED: tl.constexpr, QUANT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SWAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // DIVIDE] · w[expert]ᵀ; GATED: silu(gate) · up of two weight tiles.

    The grid is as large as any choice of experts needs: programs without a tile return.
    """
    F_TILES: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    K_GROUPS: tl.constexpr = K // 128
    W_ROWS: tl.constexpr = F * 2 if GATED else F
    pid = tl.program_id(0)
    tiles = tl.load(num_tiles)
    if pid >= tiles * F_TILES:
        return
    tile_m, tile_f = _tile_of(pid, tiles, F_TILES, GROUP_M)
    expert = tl.load(tile_expert + tile_m).to(tl.int64)
    pair = tl.load(pairs + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    real = pair < num_pairs
    row = tl.where(real, pair // DIVIDE, 0)  # padding computes what nobody stores
    feature = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
    near = tl.minimum(feature, F - 1)  # the last tile's tail repeats a row
    k = tl.arange(0, BLOCK_K)
    x_ptr = x + row[:, None] * stride_x + k[None, :]
    w_ptr = w + (expert * W_ROWS + near)[:, None] * K + k[None, :]
    if SCALED:  # one weight scale a tile: BLOCK_F divides 128
        x_scale_ptr = x_scale + row * K_GROUPS
        w_scale_ptr = w_scale + (expert * (W_ROWS // 128) + tile_f * BLOCK_F // 128) * K_GROUPS
    if SWAP:
        acc = tl.zeros([BLOCK_F, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    up = acc
    for step in range(K // BLOCK_K):
        a = tl.load(x_ptr + step * BLOCK_K)
        b = tl.load(w_ptr + step * BLOCK_K)
        if SCALED:
            a_scale = tl.load(x_scale_ptr + step)
            a_scale = a_scale[None, :] if SWAP else a_scale[:, None]
            acc += _product(a, b, SWAP, UPCAST) * (a_scale * tl.load(w_scale_ptr + step))
        else:
            acc += _product(a, b, SWAP, UPCAST)
        if GATED:
            c = tl.load(w_ptr + F * K + step * BLOCK_K)
            if SCALED:
                c_scale = tl.load(w_scale_ptr + (F // 128) * K_GROUPS + step)
                up += _product(a, c, SWAP, UPCAST) * (a_scale * c_scale)
            else:
                up += _product(a, c, SWAP, UPCAST)
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    if SWAP:
        acc = tl.trans(acc)
    place = out + pair[:, None] * F + feature[None, :]
    keep = real[:, None] & (feature < F)[None, :]
    if QUANT:  # BLOCK_F is 128: the tile is one group of each row
        acc = acc.to(tl.bfloat16).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(acc), 1), 1e-12) / 448.0
        tl.store(place, (acc / scale[:, None]).to(out.dtype.element_ty), mask=keep)
        tl.store(out_scale + pair * (F // 128) + tile_f, scale, mask=real)
    else:
        tl.store(place, acc.to(out.dtype.element_ty), mask=keep)


def _grouped(
    x: torch.Tensor,
    w: torch.Tensor,
    tiles: Tiles,
    num_pairs: int,
    divide: int,
    shape: Shape,
    *,
    gated: bool,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    quantize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    features, width = w.shape[1] // (2 if gated else 1), w.shape[2]
    scaled = w_scale is not None
    assert w.is_contiguous(), w.stride()
    assert x.stride(1) == 1, x.stride()
    assert x.shape[1] == width, (x.shape, w.shape)
    assert x.dtype == w.dtype, (x.dtype, w.dtype)
    assert width % shape.block_k == 0, (width, shape)
    if w_scale is not None:
        assert x_scale is not None
        assert x_scale.is_contiguous()
        assert w_scale.is_contiguous()
        assert features % GROUP == 0
        assert shape.block_k == GROUP
        assert GROUP % shape.block_f == 0
        assert w_scale.shape == (w.shape[0], w.shape[1] // GROUP, width // GROUP), w_scale.shape
    assert not quantize or shape.block_f == GROUP, shape
    dtype = FP8 if quantize else torch.bfloat16 if scaled else x.dtype
    out = torch.empty(num_pairs, features, dtype=dtype, device=x.device)
    out_scale = None
    if quantize:
        out_scale = torch.empty(num_pairs, features // GROUP, device=x.device)
    grid = (len(tiles.expert) * triton.cdiv(features, shape.block_f),)
    _grouped_kernel[grid](
        x, w, out, x_scale, w_scale, out_scale, tiles.pairs, tiles.expert, tiles.num_tiles,
        num_pairs, x.stride(0), F=features, K=width, DIVIDE=divide,
        GATED=gated, SCALED=scaled, QUANT=quantize,
        BLOCK_M=tiles.block_m, BLOCK_F=shape.block_f, BLOCK_K=shape.block_k,
        GROUP_M=shape.group_m, SWAP=shape.swap, UPCAST=not x.is_cuda,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return out, out_scale


def gate_up(
    x: torch.Tensor,
    w: torch.Tensor,
    tiles: Tiles,
    top_k: int,
    shape: Shape,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    quantize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """silu(x · gateᵀ) · (x · upᵀ) of every pair → [T·k, I], with its scales if `quantize`.

    x [T, D]; w [E, 2·I, D] holds gate, then up. FP8: x and w e4m3 with x_scale fp32 [T, D/128] and
    w_scale fp32 [E, 2·I/128, D/128]; the result is bf16, or e4m3 with fp32 [T·k, I/128].
    """
    pairs = x.shape[0] * top_k
    return _grouped(
        x, w, tiles, pairs, top_k, shape,
        gated=True, x_scale=x_scale, w_scale=w_scale, quantize=quantize,
    )  # fmt: skip


def down(
    h: torch.Tensor,
    w: torch.Tensor,
    tiles: Tiles,
    shape: Shape,
    *,
    h_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """h · wᵀ of every pair: h [T·k, I], w [E, D, I] → [T·k, D], not weighted yet.

    FP8: h and w e4m3 with h_scale fp32 [T·k, I/128], w_scale fp32 [E, D/128, I/128]; bf16 out.
    """
    out, _ = _grouped(
        h, w, tiles, h.shape[0], 1, shape, gated=False, x_scale=h_scale, w_scale=w_scale
    )
    return out


@triton.jit
def _weighted_sum_kernel(
    out, rows, weights, stride_out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    place = out + token * stride_out + cols
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        value = tl.load(rows + (token * TOP_K + j) * WIDTH + cols, mask=inside, other=0.0)
        total += tl.load(weights + token * TOP_K + j) * value.to(tl.float32)
    total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def weighted_sum_(out: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
    """out [T, D] += sum over j of weights[t, j] · rows[t·k + j]; fp32 inside, rounded once.

    rows [T·k, D] contiguous; weights fp32 [T, k] contiguous; out's last dim contiguous.
    """
    num_tokens, top_k = weights.shape
    width = out.shape[1]
    assert rows.shape == (num_tokens * top_k, width), (rows.shape, weights.shape, out.shape)
    assert rows.is_contiguous()
    assert weights.is_contiguous()
    assert out.stride(1) == 1
    block = min(1024, triton.next_power_of_2(width))
    _weighted_sum_kernel[(num_tokens, triton.cdiv(width, block))](
        out, rows, weights, out.stride(0), WIDTH=width, TOP_K=top_k, BLOCK=block, num_warps=4
    )
