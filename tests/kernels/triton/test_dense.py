"""RMSNorm, SiLU-mul, products of few rows and block-scaled FP8 against their oracles.

Small shapes run under Triton's interpreter where there is no GPU; on one, natively.
"""

from __future__ import annotations

import pytest
import torch
from support.assert_close import assert_within_plain

from kernels import reference_model as oracle
from kernels.fp8 import dequantize_blocks
from kernels.triton import fp8_gemm, gemv, rmsnorm, silu_mul
from kernels.triton.grouped_gemm import Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts fp32 off to bf16 where the GPU rounds: twice the error.
FACTOR = 2.0 if DEVICE == "cuda" else 4.0
DTYPES = [torch.float32, torch.bfloat16]


def check(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, atol: float = 1e-6) -> None:
    assert_within_plain(got, plain, exact, factor=FACTOR, atol=atol)


def rand(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def rand_e4m3(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)


def check_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype)
    before = x.clone()
    exact = oracle.rms_norm(x.double(), weight.double(), 1e-6)
    plain = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)
    got = rmsnorm.rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    assert torch.equal(x, before)
    check(got, plain, exact)
    residual = rand(*shape, dtype=dtype)
    total = residual + x
    got = rmsnorm.add_rms_norm_(residual, x, weight, 1e-6)
    if DEVICE == "cuda" or dtype == torch.float32:
        assert torch.equal(residual, total)
    exact = oracle.rms_norm(residual.double(), weight.double(), 1e-6)
    plain = torch.nn.functional.rms_norm(residual, weight.shape, weight, 1e-6)
    check(got, plain, exact)


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (5, 40), (2, 3, 576)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_norm(shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 2048), (300, 2048), (2049, 7168), (7, 1536), (64, 512)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_real_sizes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_norm(shape, dtype)


def test_rms_norm_of_a_strided_slice() -> None:
    x, weight = rand(4, 96)[:, 16:80], rand(64)
    torch.testing.assert_close(rmsnorm.rms_norm(x, weight, 1e-6), oracle.rms_norm(x, weight, 1e-6))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damage_stays_in_its_row(value: float) -> None:
    x = rand(3, 16)
    x[1, 3] = value
    got = rmsnorm.rms_norm(x, torch.ones(16, device=DEVICE), 1e-6)
    assert got.isfinite().all(dim=1).tolist() == [True, False, True]


def check_silu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = rand(*shape, dtype=dtype, scale=4.0)
    gate, up = x.double().chunk(2, dim=-1)
    half = shape[-1] // 2
    plain = torch.nn.functional.silu(x[..., :half]) * x[..., half:]
    got = silu_mul.silu_mul(x)
    assert got.dtype == dtype
    check(got, plain, gate * gate.sigmoid() * up, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (5, 34), (2, 3, 96)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_silu(shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 21888), (1000, 2816), (513, 36864)])
def test_silu_mul_of_real_sizes(shape: tuple[int, ...]) -> None:
    check_silu(shape, torch.bfloat16)


def check_gemv(rows: int, features: int, width: int, dtype: torch.dtype) -> None:
    x = rand(rows, width, dtype=dtype)
    w = rand(features, width, dtype=dtype, scale=width**-0.5)
    exact = x.double() @ w.double().T
    check(gemv.gemv(x, w), (x @ w.T), exact, atol=1e-5)
    full = gemv.gemv(x, w, out_dtype=torch.float32)
    torch.testing.assert_close(full, exact.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "features", "width"), [(0, 4, 16), (1, 5, 40), (3, 9, 128), (8, 3, 64)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv(rows: int, features: int, width: int, dtype: torch.dtype) -> None:
    check_gemv(rows, features, width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize(("features", "width"), [(64, 2048), (3648, 2048), (576, 7168)])
def test_gemv_of_real_sizes(rows: int, features: int, width: int) -> None:
    check_gemv(rows, features, width, torch.bfloat16)


def test_gemv_of_fp32_weights_and_bf16_rows() -> None:
    x, w = rand(2, 48, dtype=torch.bfloat16), rand(6, 48)
    got = gemv.gemv(x, w, out_dtype=torch.float32)
    torch.testing.assert_close(got, x.float() @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(0, 128), (1, 128), (5, 384), (70, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_groups(rows: int, width: int, dtype: torch.dtype) -> None:
    x = rand(rows, width + 16, dtype=dtype)[:, :width]
    if rows:
        x[0, :128] = 0.0
    q, scale = fp8_gemm.quantize_groups(x)
    groups = x.float().unflatten(1, (-1, 128))
    want = groups.abs().amax(dim=-1).clamp_min(1e-12) / 448.0
    torch.testing.assert_close(scale, want, rtol=1e-6, atol=0.0)
    # Half a step of e4m3: 2^-4 of the value, or of the smallest normal number, 2^-6.
    back = q.float().unflatten(1, (-1, 128)) * scale[..., None]
    bound = groups.abs() * 2**-4 + scale[..., None] * 2**-10
    far = (back - groups).abs() > bound * 1.001
    # The interpreter halves what rounds up to a power of two: 1 in 50.
    assert float(far.sum()) <= (0 if DEVICE == "cuda" else 0.04 * far.numel())


def check_linear(
    rows: int, features: int, width: int, shape: tuple[int, int, Shape] | None = None
) -> None:
    x = rand(rows, width, dtype=torch.bfloat16)
    w = rand_e4m3(features, width)
    scale = torch.rand(-(-features // 128), width // 128, device=DEVICE) * 1e-3 + 1e-4
    dense = dequantize_blocks(w, scale, block=128).double()
    got = fp8_gemm.fp8_linear(x, w, scale, shape=shape)
    assert got.dtype == torch.bfloat16
    exact = x.double() @ dense.T
    q, x_scale = fp8_gemm.quantize_groups(x)
    rounded = q.double() * x_scale.double().repeat_interleave(128, dim=1)
    plain = (rounded @ dense.T).bfloat16()
    check(got, plain, exact)
    # Against the same rounding of x: what is left is the order of sums.
    torch.testing.assert_close(got.double(), rounded @ dense.T, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize(("features", "width"), [(128, 128), (192, 384), (40, 256)])
def test_fp8_linear(rows: int, features: int, width: int) -> None:
    check_linear(rows, features, width)


@pytest.mark.parametrize(
    "shape",
    [
        (16, 1, Shape(32, 128, 4, 2)),
        (16, 2, Shape(64, 128, 4, 2, swap=True)),
        (16, 3, Shape(64, 128, 4, 2, group_m=1)),
    ],
)
def test_fp8_linear_in_splits(shape: tuple[int, int, Shape]) -> None:
    check_linear(20, 136, 512, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 5, 16, 33, 64, 200, 2048])
@pytest.mark.parametrize(
    ("features", "width"), [(1536, 7168), (576, 7168), (24576, 1536), (7168, 2048)]
)
def test_fp8_linear_of_real_sizes(rows: int, features: int, width: int) -> None:
    check_linear(rows, features, width)
