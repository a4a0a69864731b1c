"""The forms that the GPU's layers take: their torch side, which is the oracle of the Triton side,
and that every call that is passed on to Triton has a taker.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

import pytest
import torch

import kernels.reference_model as oracle
from kernels import fp8, kv_gather, latent_write, merge_lse, moe, moe_gate, page_copy, rmsnorm
from kernels import silu_mul as silu
from kernels.linear_fp32 import linear_fp32

DISPATCHED: list[tuple[ModuleType, str, str]] = [
    (fp8, "fp8_gemm", "quantize_groups"),
    (fp8, "fp8_gemm", "fp8_linear"),
    (kv_gather, "kv_gather", "kv_gather"),
    (latent_write, "latent_write", "norm_rope_write_"),
    (merge_lse, "merge_lse", "merge_lse_"),
    (merge_lse, "merge_lse", "combine_lse"),
    (moe, "moe", "run_experts_"),
    (moe_gate, "moe_gate", "choose_experts"),
    (page_copy, "page_copy", "page_copy"),
    (page_copy, "page_copy", "pool_table"),
    (rmsnorm, "rmsnorm", "rms_norm"),
    (rmsnorm, "rmsnorm", "add_rms_norm_"),
    (silu, "silu_mul", "silu_mul"),
]


@pytest.mark.parametrize(("module", "file", "name"), DISPATCHED)
def test_triton_takes_what_torch_takes(module: ModuleType, file: str, name: str) -> None:
    pytest.importorskip("triton")
    gpu = importlib.import_module(f"kernels.triton.{file}")
    ours = inspect.signature(getattr(module, name)).parameters.values()
    theirs = inspect.signature(getattr(gpu, name)).parameters
    assert list(theirs)[: len(ours)] == [item.name for item in ours]
    for item in ours:
        assert theirs[item.name].kind == item.kind
        assert theirs[item.name].default == item.default
    extra = list(theirs.values())[len(ours) :]
    assert all(item.default is not inspect.Parameter.empty for item in extra)


@pytest.mark.parametrize("num", [0, 1, 5])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_norm_rope_write(num: int, dtype: torch.dtype, stored: torch.dtype) -> None:
    latent, rope, heads, nope = 40, 8, 3, 24
    down = torch.randn(num, 96 + latent + rope).to(dtype)
    q = torch.randn(num, heads, nope + rope).to(dtype)
    weight, angle = torch.randn(latent).to(dtype), torch.randn(num, rope // 2) * 10
    cos, sin = angle.cos(), angle.sin()
    pool, slots = torch.randn(32, latent + rope).to(stored), torch.randperm(32)[:num]
    before, q_before, pool_before = down.clone(), q.clone(), pool.clone()

    latent_write.norm_rope_write_(down[:, 96:], q[..., nope:], weight, 1e-6, cos, sin, pool, slots)
    rows = before[:, 96:]
    want = torch.cat(
        (
            oracle.rms_norm(rows[:, :latent].contiguous(), weight, 1e-6),
            oracle.apply_rope(rows[:, latent:].contiguous(), cos, sin),
        ),
        dim=1,
    ).to(stored)
    torch.testing.assert_close(pool[slots], want)
    assert torch.equal(down[:, 96:], pool[slots].to(dtype))  # rows as they are stored
    assert torch.equal(down[:, :96], before[:, :96])
    torch.testing.assert_close(
        q[..., nope:], oracle.apply_rope(q_before[..., nope:].contiguous(), cos, sin)
    )
    assert torch.equal(q[..., :nope], q_before[..., :nope])
    rest = torch.ones(32, dtype=torch.bool).index_fill_(0, slots, False)
    assert torch.equal(pool[rest], pool_before[rest])


def test_add_rms_norm() -> None:
    residual, x, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    want = residual + x
    got = rmsnorm.add_rms_norm_(residual, x, weight, 1e-6)
    assert torch.equal(residual, want)
    torch.testing.assert_close(got, oracle.rms_norm(want, weight, 1e-6))


@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_shared_experts_are_always_chosen(num_shared: int, num_tokens: int) -> None:
    logits = torch.randn(num_tokens, 12)
    words = {"top_k": 3, "scoring": "softmax", "renormalize": True, "scale": 2.5}
    weights, ids = moe_gate.choose_experts(logits, **words)  # type: ignore[arg-type]
    wide, wide_ids = moe_gate.choose_experts(logits, num_shared=num_shared, **words)  # type: ignore[arg-type]
    assert torch.equal(wide[:, :3], weights)
    assert torch.equal(wide_ids[:, :3], ids)
    assert wide_ids[:, 3:].tolist() == [list(range(12, 12 + num_shared))] * num_tokens
    assert bool((wide[:, 3:] == 1).all())


def stacks(experts: int, inner: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.randn(experts, 2 * inner, hidden) / hidden**0.5,
        torch.randn(experts, hidden, inner) / inner**0.5,
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_experts_from_stacks(num_tokens: int) -> None:
    gate_up, down = stacks(5, 24, 16)
    x, out = torch.randn(num_tokens, 16), torch.randn(num_tokens, 16)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(num_tokens)]).int()
    weights = torch.rand(num_tokens, 2)
    want = out.double()
    for token in range(num_tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            want[token] += weight * (down[expert].double() @ inner)
    moe.run_experts_(out, x, gate_up, down, ids, weights)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_experts_from_fp8_stacks_are_those_of_the_widened_ones() -> None:
    gate_up, down = stacks(3, 128, 256)
    codes = [stack.mul(64).to(torch.float8_e4m3fn) for stack in (gate_up, down)]
    scales = [torch.rand(3, stack.shape[1] // 128, stack.shape[2] // 128) / 64 for stack in codes]
    wide = [
        torch.stack([fp8.dequantize_blocks(c, s, block=128) for c, s in zip(*pair, strict=True)])
        for pair in zip(codes, scales, strict=True)
    ]
    x, ids = torch.randn(4, 256), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    got, want = torch.zeros(4, 256), torch.zeros(4, 256)
    weights = torch.rand(4, 2)
    moe.run_experts_(got, x, *codes, ids, weights, scale_gate_up=scales[0], scale_down=scales[1])
    moe.run_experts_(want, x, *wide, ids, weights)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (5, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_groups(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 10).to(dtype)
    if len(x):
        x[0, :128] = 0
    codes, scale = fp8.quantize_groups(x)
    assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scale.shape == (shape[0], shape[1] // 128)
    wide = codes.float() * scale.repeat_interleave(128, dim=1)
    # Half an ulp of 3 bits, and half the smallest step of the group below the normal range.
    bound = x.float().abs() * 2.0**-4 + scale.repeat_interleave(128, dim=1) * 2.0**-10
    assert bool(((wide - x.float()).abs() <= bound).all())
    if len(x) > 1:
        assert float(codes[-1].float().abs().max()) == 448.0


@pytest.mark.parametrize("shape", [(1, 128, 128), (3, 130, 256), (7, 64, 128)])
def test_fp8_linear(shape: tuple[int, int, int]) -> None:
    rows, features, width = shape
    x = torch.randn(rows, width)
    codes = (torch.randn(features, width) * 60).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-features // 128), width // 128) / 60
    rounded, groups = fp8.quantize_groups(x)
    wide = rounded.double() * groups.repeat_interleave(128, dim=1)
    want = wide @ oracle.dequantize_blocks(codes, scale, block=128).double().t()
    got = fp8.fp8_linear(x, codes, scale)
    assert got.dtype == x.dtype
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_page_copy_in_all_layers() -> None:
    pools = [torch.randn(16, 6) for _ in range(3)]
    want = [pool.clone() for pool in pools]
    src, dst = torch.tensor([1, 5, 7]), torch.tensor([0, 9, 15])
    for pool in want:
        pool[dst] = pool[src]
    page_copy.page_copy(pools, src, dst, table=page_copy.pool_table(pools))
    assert all(torch.equal(a, b) for a, b in zip(pools, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_with_fp32_result(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 40).to(dtype), torch.randn(7, 40).to(dtype)
    got = linear_fp32(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ weight.double().t(), rtol=1e-4, atol=1e-4)
