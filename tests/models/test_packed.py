"""fp16-packed weights: taken where they are exact, refused where they are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from radix_mla.models.layers import GatedMLP, Linear
from radix_mla.models.packed import PackedWeight, packable

SHAPE = (320, 512)  # 2^17 weights and a bit


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


pytestmark = pytest.mark.skipif(
    not packable(torch.empty(SHAPE)), reason="this build of torch has no FBGEMM"
)


def bf16_weight(std: float = 0.05, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    return (torch.randn(shape) * std).bfloat16().float()


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 17, 100])
@pytest.mark.parametrize("std", [1e-6, 0.05, 300.0])
def test_product_is_in_fp32_arithmetic(rows: int, std: float) -> None:
    weight, x = bf16_weight(std), torch.randn(rows, SHAPE[1])
    packed = PackedWeight.pack(weight)
    assert packed is not None
    got, exact = packed(x), x.double() @ weight.double().t()
    assert got.dtype == torch.float32
    # A sum of K rounded products drifts like a random walk; fp16 anywhere would be 2^12 as far off.
    bound = 2.0**-24 * SHAPE[1] ** 0.5 * (x.abs().double() @ weight.abs().double().t())
    assert bool(((got - exact).abs() <= bound).all())


def test_bias_and_strided_input() -> None:
    weight, bias = bf16_weight(), torch.randn(SHAPE[0])
    packed = PackedWeight.pack(weight, bias)
    assert packed is not None
    x = torch.randn(5, 2 * SHAPE[1])[:, SHAPE[1] :]
    torch.testing.assert_close(packed(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_full_fp32_weights_are_refused() -> None:
    assert PackedWeight.pack(torch.randn(SHAPE)) is None
    almost = bf16_weight()
    almost[-1, -1] = 0.1  # one value that fp16 rounds
    assert PackedWeight.pack(almost) is None


def test_values_of_every_magnitude_that_a_bf16_checkpoint_holds() -> None:
    weight = bf16_weight()
    weight[0, :5] = torch.tensor([1e-9, -3e-12, 0.0, 1e-30, 2e-7]).bfloat16().float()
    assert PackedWeight.pack(weight) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = bf16_weight()
    weight[3, 3] = value
    assert PackedWeight.pack(weight) is None


def test_small_and_bf16_weights_are_refused() -> None:
    assert PackedWeight.pack(bf16_weight(shape=(64, 64))) is None
    assert PackedWeight.pack(bf16_weight().bfloat16()) is None


def test_linear_packs_once_and_frees_its_weight() -> None:
    linear = Linear(SHAPE[1], SHAPE[0], dtype=torch.float32, device="cpu")
    linear.weight.data.copy_(bf16_weight())
    tied = linear.weight
    x = torch.randn(4, SHAPE[1])
    before = linear(x)
    linear.pack()
    assert linear.weight.numel() == 0
    assert tied.shape == SHAPE
    torch.testing.assert_close(linear(x), before, rtol=1e-5, atol=1e-5)


def test_linear_of_fp32_weights_stays_as_it_is() -> None:
    linear = Linear(SHAPE[1], SHAPE[0], dtype=torch.float32, device="cpu")
    linear.weight.data.normal_()
    x = torch.randn(4, SHAPE[1])
    before = linear(x)
    linear.pack()
    assert torch.equal(linear(x), before)


def test_mlp_is_the_same_before_and_after() -> None:
    mlp = GatedMLP(512, 640, dtype=torch.float32, device="cpu")
    for param in mlp.parameters():
        param.data.copy_(bf16_weight(0.04, tuple(param.shape)))  # type: ignore[arg-type]
    x = torch.randn(3, 512)
    before = mlp(x)
    mlp.finalize()
    assert mlp.down_proj.weight.numel() == 0
    torch.testing.assert_close(mlp(x), before, rtol=1e-4, atol=1e-5)
