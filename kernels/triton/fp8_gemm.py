"""Block-scaled FP8 (e4m3): quantised rows and the dense layer. T rows, K width, N features."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels.triton.grouped_gemm import FP8, GROUP, Shape, _product

_FEW_ROWS = 64  # beyond these cuBLASLt wins where it has block scales


@triton.jit
def _quantize_kernel(
    x, q, scales, stride_x, stride_row, stride_group, num_rows,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    col = group * 128 + tl.arange(0, 128)
    inside = row < num_rows
    value = tl.load(x + row[:, None] * stride_x + col[None, :], mask=inside[:, None], other=0.0)
    value = value.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), 1e-12) / 448.0
    place = q + row[:, None] * (GROUPS * 128) + col[None, :]
    tl.store(place, (value / scale[:, None]).to(q.dtype.element_ty), mask=inside[:, None])
    tl.store(scales + row * stride_row + group * stride_group, scale, mask=inside)


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [T, K], fp32 scales [T, K/128]) of x [T, K], as `kernels.fp8.quantize_groups`."""
    scales = torch.empty(len(x), x.shape[1] // GROUP, dtype=torch.float32, device=x.device)
    return _quantize(x, len(x), scales), scales


def _quantize(x: torch.Tensor, padded: int, scales: torch.Tensor) -> torch.Tensor:
    """e4m3 [padded, K], rows from T on undefined; fills scales [padded, K/128], any strides."""
    num_rows, width = x.shape
    assert width % GROUP == 0, width
    assert x.stride(1) == 1, x.stride()
    q = torch.empty(padded, width, dtype=FP8, device=x.device)
    if num_rows:
        rows = 4 if num_rows >= 64 else 1
        _quantize_kernel[(triton.cdiv(num_rows, rows), width // GROUP)](
            x, q, scales, x.stride(0), scales.stride(0), scales.stride(1), num_rows,
            GROUPS=width // GROUP, ROWS=rows, num_warps=4 if rows == 4 else 1,
        )  # fmt: skip
    return q


# One row must not become a constant: its tile would then be loaded past the pipeline.
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x, w, out, x_scale, w_scale, num_rows, N, K: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
    SWAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out[split] = x · wᵀ over the split's share of K, in steps of one scale group."""
    K_GROUPS: tl.constexpr = K // 128
    PER_SPLIT: tl.constexpr = (K_GROUPS + SPLIT_K - 1) // SPLIT_K
    pid, split = tl.program_id(0), tl.program_id(1)
    m_tiles, n_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    in_group = GROUP_M * n_tiles
    first = (pid // in_group) * GROUP_M
    group_rows = tl.minimum(m_tiles - first, GROUP_M)
    tile_m = first + (pid % in_group) % group_rows
    tile_n = (pid % in_group) // group_rows
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    near = tl.minimum(row, num_rows - 1).to(tl.int64)
    feature = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    near_feature = tl.minimum(feature, N - 1).to(tl.int64)
    begin = split * PER_SPLIT
    k = begin * 128 + tl.arange(0, 128)
    x_ptr = x + near[:, None] * K + k[None, :]
    w_ptr = w + near_feature[:, None] * K + k[None, :]
    x_scale_ptr = x_scale + near * K_GROUPS + begin
    w_scale_ptr = w_scale + tile_n * BLOCK_N // 128 * K_GROUPS + begin
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.minimum(PER_SPLIT, K_GROUPS - begin)):
        a = tl.load(x_ptr + step * 128)
        b = tl.load(w_ptr + step * 128)
        scale = tl.load(x_scale_ptr + step) * tl.load(w_scale_ptr + step)
        acc += _product(a, b, SWAP, UPCAST) * (scale[None, :] if SWAP else scale[:, None])
    if SWAP:
        acc = tl.trans(acc)
    out += split.to(tl.int64) * num_rows * N
    place = out + row.to(tl.int64)[:, None] * N + feature[None, :]
    keep = (row < num_rows)[:, None] & (feature < N)[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _sum_splits_kernel(parts, out, size, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(parts + split * size.to(tl.int64) + index, mask=inside, other=0.0)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    shape: tuple[int, int, Shape] | None = None,
) -> torch.Tensor:
    """x · weightᵀ → [T, N] in x's dtype, as `kernels.fp8.fp8_linear`.

    x [T, K] bf16, quantised here in groups of 128; weight e4m3 [N, K] contiguous; scale fp32
    [ceil(N/128), K/128]. `shape`: (rows a tile, splits of K, block shape), by default
    from (T, N, K). Splits are summed in order by a second kernel.
    """
    num_rows, width = x.shape
    features = weight.shape[0]
    assert weight.shape == (features, width), (x.shape, weight.shape)
    assert weight.dtype == FP8, weight.dtype
    assert weight.is_contiguous()
    assert scale.is_contiguous()
    assert scale.shape == (triton.cdiv(features, GROUP), width // GROUP), scale.shape
    if num_rows == 0:
        return torch.empty(0, features, dtype=x.dtype, device=x.device)
    if shape is None and num_rows > _FEW_ROWS and _fits_cublas(width, x.device):
        return _cublas(x, weight, scale)
    block_m, splits, tile = shape or linear_shape(num_rows, features, width)
    assert GROUP % tile.block_f == 0, tile
    q, x_scale = quantize_groups(x)
    out = torch.empty(num_rows, features, dtype=x.dtype, device=x.device)
    parts = out
    if splits > 1:
        parts = torch.empty(splits, num_rows, features, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(num_rows, block_m) * triton.cdiv(features, tile.block_f)
    _linear_kernel[(tiles, splits)](
        q, weight, parts, x_scale, scale, num_rows, features, K=width, SPLIT_K=splits,
        BLOCK_M=block_m, BLOCK_N=tile.block_f, GROUP_M=tile.group_m, SWAP=tile.swap,
        UPCAST=not x.is_cuda, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        _sum_splits_kernel[(triton.cdiv(out.numel(), 1024),)](
            parts, out, out.numel(), SPLIT_K=splits, BLOCK=1024, num_warps=4
        )
    return out


def _cublas(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Through cuBLASLt, which wants the rows' scales column by column, rows a multiple of 4.

    Microseconds on an H200, this against the kernel above, at (T, N, K): (256, 7168, 16384)
    60 : 90, (2048, 7168, 16384) 406 : 605, (2048, 36864, 7168) 849 : 1364; but at T = 16
    (7168, 16384) 45 : 42, (2112, 7168) 18 : 10; even at T = 64. One row is refused by cuBLASLt.
    """
    num_rows, width = x.shape
    padded = triton.cdiv(num_rows, 16) * 16
    scales = torch.empty(width // GROUP, padded, dtype=torch.float32, device=x.device).t()
    q = _quantize(x, padded, scales)
    out = torch._scaled_mm(
        q, weight.t(), scale_a=scales, scale_b=scale.t(), out_dtype=torch.bfloat16
    )
    return out[:num_rows].to(x.dtype)


def _fits_cublas(width: int, device: torch.device) -> bool:
    """cuBLASLt reads the weight's scales in fours along K, whatever their stride says."""
    return width % (4 * GROUP) == 0 and _cublas_has_block_scales(device)


@functools.cache
def _cublas_has_block_scales(device: torch.device) -> bool:
    """Hopper with CUDA 12.9 or newer."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and version >= (12, 9)
    )


def linear_shape(num_rows: int, features: int, width: int) -> tuple[int, int, Shape]:
    """(rows a tile, splits of K, block shape): enough programs for 132 SMs, twice over if small."""
    if num_rows <= 64:
        block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        programs = triton.cdiv(features, 64)
        splits = max(1, min(8, 264 // programs, width // GROUP // 4))
        return block_m, splits, Shape(64, GROUP, 4, 4, swap=True)
    block_m = 64 if num_rows <= 512 else 128
    return block_m, 1, Shape(128, GROUP, 8 if block_m == 128 else 4, 3)
