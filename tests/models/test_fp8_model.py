"""FP8 checkpoints that stay FP8 in memory: what is kept, what is widened, and that it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_checkpoint import make_checkpoint, quantize_blocks

from radix_mla.config import EngineConfig, Hardware
from radix_mla.engine.model_runner import ModelRunner, make_pool
from radix_mla.engine.step import Chunk, StepPlan
from radix_mla.errors import CheckpointError
from radix_mla.models.checkpoint import load_model
from radix_mla.models.deepseek import DeepseekForCausalLM
from radix_mla.models.dummy import fill_dummy
from radix_mla.models.fp8_weight import FP8, Fp8Weight, fuse_fp8
from radix_mla.models.fused_moe import FusedExperts
from radix_mla.models.hf_config import ModelConfig
from radix_mla.models.layers import Linear, fuse
from radix_mla.models.packed import DenseWeight
from radix_mla.models.weight_map import checkpoint_targets

FILE = "model.safetensors"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
# Whole blocks but for kv_a_proj_with_mqa: 512 + 64 rows, as in every real checkpoint.
BLOCKS: dict[str, Any] = {
    "fp8": True,
    "hidden": 256,
    "q_lora": 128,
    "intermediate": 256,
    "moe_intermediate": 128,
    "shared_experts": 2,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(path: Path, *, fp8: bool = True, **words: Any) -> DeepseekForCausalLM:
    config = ModelConfig.from_dir(path)
    return load_model(path, config, dtype=torch.float32, device="cpu", fused=True, fp8=fp8, **words)


def kept(model: DeepseekForCausalLM) -> set[str]:
    """The checkpoint matrices that are FP8 in memory."""
    targets = checkpoint_targets(model)
    return {name for name, target in targets.items() if target.view.dtype == FP8}


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: value.clone() for name, value in load_file(path / FILE).items()}
    change(tensors)
    save_file(tensors, path / FILE)


def logits_of(model: DeepseekForCausalLM, tokens: np.ndarray) -> torch.Tensor:
    config = EngineConfig(model="", dtype="fp32", kv_cache_tokens=512).resolve(
        model.config, Hardware("cpu", 1 << 30, 1, False)
    )
    runner = ModelRunner(model, make_pool(model.config, config), config)
    pages = np.arange(-(-len(tokens) // config.page_size), dtype=np.int32)
    chunk = Chunk(tokens, 0, pages, len(tokens), False)
    return runner.execute(StepPlan(0, [chunk], [])).logits


def median_error(model: DeepseekForCausalLM, exact: DeepseekForCausalLM) -> float:
    """Of the tokens' relative errors: e4m3 has 3 bits behind the point, so a few percent; where
    routing turns over, a token has much more.
    """
    tokens = np.random.default_rng(0).integers(0, 256, 60, dtype=np.int32)
    want = logits_of(exact, tokens)
    return float(((logits_of(model, tokens) - want).norm(dim=1) / want.norm(dim=1)).median())


@pytest.mark.parametrize("q_lora", [128, None])
def test_codes_and_scales_are_kept_bit_for_bit(tmp_path: Path, q_lora: int | None) -> None:
    path = make_checkpoint(tmp_path, **BLOCKS | {"q_lora": q_lora})
    tensors = load_file(path / FILE)
    model = load(path)
    targets = checkpoint_targets(model)
    want = {
        name for name, value in tensors.items() if value.dtype == FP8 and "kv_b_proj" not in name
    }
    assert kept(model) == want
    for name in want:
        assert torch.equal(targets[name].value().view(torch.uint8), tensors[name].view(torch.uint8))
        scale = f"{name}_scale_inv"
        assert torch.equal(targets[scale].value(), tensors[scale]), scale


def test_kv_b_is_widened_for_absorption(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **BLOCKS)
    wide, narrow = load(path, fp8=False), load(path)
    weight = narrow.get_submodule("model.layers.0.self_attn.kv_b_proj").weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, checkpoint_targets(wide)[KV_B].value())


def test_logits_are_those_of_the_widened_model_but_for_rounded_inputs(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **BLOCKS)
    assert 1e-4 < median_error(load(path), load(path, fp8=False)) < 0.1


def test_fused_down_projection_is_the_parts(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **BLOCKS)
    tensors = load_file(path / FILE)
    attention: Any = load(path).get_submodule("model.layers.0.self_attn")
    assert isinstance(attention._down, Fp8Weight)
    q_a = "model.layers.0.self_attn.q_a_proj.weight"
    parts = [
        Fp8Weight(tensors[name], tensors[f"{name}_scale_inv"]).dequantized() for name in (q_a, KV_A)
    ]
    assert torch.equal(attention._down.dequantized(), torch.cat(parts))


def test_matrices_that_the_file_has_in_bf16_become_dense(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **BLOCKS)
    names = [KV_A, "model.layers.1.mlp.experts.3.up_proj.weight"]
    dense = {name: torch.randn(576 if name == KV_A else 128, 256).bfloat16() for name in names}

    def leave_out(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[f"{name}_scale_inv"]
        tensors.update(dense)

    edit(path, leave_out)
    model = load(path)
    left = kept(model)
    assert KV_A not in left
    assert not any(".experts." in name for name in left)  # one stack, one dtype
    assert any("o_proj" in name for name in left)
    targets = checkpoint_targets(model)
    for name, value in dense.items():
        assert torch.equal(targets[name].value(), value.float())
    other = "model.layers.1.mlp.experts.0.up_proj.weight"
    tensors = load_file(path / FILE)
    want = Fp8Weight(tensors[other], tensors[f"{other}_scale_inv"]).dequantized()
    assert torch.equal(targets[other].value(), want)


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ({"hidden": 200}, ("q_a_proj", "experts", "gate_proj")),  # K is no whole blocks
        ({"moe_intermediate": 96, "intermediate": 140}, ("experts", "mlp.gate_proj")),
        ({"rope_interleave": False}, ("q_b_proj", "kv_a_proj")),
        ({"q_lora": 96}, ("q_a_proj", "kv_a_proj", "q_b_proj")),  # a cut inside a block
    ],
)
def test_what_blocks_do_not_allow_is_widened(
    tmp_path: Path, words: dict[str, Any], lost: tuple[str, ...]
) -> None:
    path = make_checkpoint(tmp_path, **BLOCKS | words)
    model = load(path)
    left = kept(model)
    assert not any(part in name for name in left for part in lost)
    assert any("o_proj" in name for name in left)
    assert median_error(model, load(path, fp8=False)) < 0.1


def test_missing_scales_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **BLOCKS)
    edit(path, lambda tensors: tensors.pop(f"{KV_A}_scale_inv"))
    with pytest.raises(CheckpointError, match=r"no tensor .*kv_a_proj_with_mqa.weight_scale_inv"):
        load(path)


def test_bf16_compute_on_a_cpu_widens_everything(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **BLOCKS)
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, dtype=torch.bfloat16, device="cpu")
    assert not kept(model)


def quantized(rows: int, cols: int) -> Linear:
    linear = Linear(cols, rows, dtype=torch.float32, device="cpu", fp8=True)
    codes, scale = quantize_blocks(torch.randn(rows, cols))
    assert linear.weight_scale_inv is not None
    linear.weight.data.copy_(codes)
    linear.weight_scale_inv.data.copy_(scale)
    return linear


def test_product_is_exact_where_the_input_is_on_the_grid() -> None:
    linear = quantized(200, 256)
    x = torch.randint(-8, 9, (5, 256)).float() * 32.0
    x[:, ::128] = 448.0  # the largest of each group: its scale is then 1
    weight = linear.plain()
    assert isinstance(weight, Fp8Weight)
    want = x @ weight.dequantized().t()
    torch.testing.assert_close(weight(x), want, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-2)
    out = torch.randn(5, 200)
    before = out.clone()
    weight.add_to(out, x, 0.5)
    torch.testing.assert_close(out, before + 0.5 * want, rtol=1e-5, atol=1e-2)


def test_bias_of_a_fused_layer() -> None:
    first, second = quantized(128, 128), quantized(72, 128)
    second.bias = torch.nn.Parameter(torch.randn(72), requires_grad=False)
    fused = fuse([first, second])
    assert isinstance(fused, Fp8Weight)
    x = torch.randn(3, 128)
    torch.testing.assert_close(fused(x), torch.cat((first(x), second(x)), dim=1))


def test_parts_of_unlike_kind_are_fused_dense() -> None:
    first, second = quantized(128, 128), Linear(128, 8, dtype=torch.float32, device="cpu")
    second.weight.data.normal_()
    wide = Fp8Weight(first.weight, first.weight_scale_inv).dequantized()  # type: ignore[arg-type]
    fused = fuse([first, second])
    assert isinstance(fused, DenseWeight)
    x = torch.randn(3, 128)
    torch.testing.assert_close(fused(x), x @ torch.cat((wide, second.weight)).t())
    assert first.weight_scale_inv is None


def test_blocks_are_fused_at_their_ends_only() -> None:
    a, b = quantize_blocks(torch.randn(130, 128)), quantize_blocks(torch.randn(128, 128))
    assert fuse_fp8([a, b]) is None
    fused = fuse_fp8([b, a])
    assert fused is not None
    codes, scale = fused
    assert torch.equal(
        Fp8Weight(codes, scale).dequantized(),
        torch.cat((Fp8Weight(*b).dequantized(), Fp8Weight(*a).dequantized())),
    )


def test_dummy_codes_times_scales_have_unit_scale(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **BLOCKS)
    config = ModelConfig.from_dir(path)
    model = DeepseekForCausalLM(config, dtype=torch.float32, device="cpu", fused=True, fp8=True)
    fill_dummy(model)
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert isinstance(experts, FusedExperts)
    assert experts.down_proj_scale_inv is not None
    for codes, scale in (
        (attention.q_b_proj.weight, attention.q_b_proj.weight_scale_inv),
        (attention.kv_a_proj_with_mqa.weight, attention.kv_a_proj_with_mqa.weight_scale_inv),
        (experts.down_proj[0], experts.down_proj_scale_inv[0]),
        (experts.down_proj[-1], experts.down_proj_scale_inv[-1]),
    ):
        matrix = Fp8Weight(codes, scale).dequantized()
        assert bool(matrix.isfinite().all())
        assert float(matrix.std()) == pytest.approx(codes.shape[1] ** -0.5, rel=0.03)
        if scale.numel() > 1:
            assert float(scale.max() / scale.min()) > 1.01
    first, second = (experts.down_proj[i].float() for i in (0, 1))
    assert not torch.equal(first, second)
    model.finalize()
    assert bool(logits_of(model, np.arange(20, dtype=np.int32)).isfinite().all())
