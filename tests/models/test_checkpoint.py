"""Loading: every layout that is served, and every fault by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_checkpoint import make_checkpoint, quantize_tensors, write_tensors

from kernels.reference_model import dequantize_blocks
from radix_mla.errors import CheckpointError
from radix_mla.models import checkpoint
from radix_mla.models.checkpoint import load_model, locate
from radix_mla.models.deepseek import DeepseekForCausalLM
from radix_mla.models.dummy import fill_dummy
from radix_mla.models.hf_config import ModelConfig
from radix_mla.models.weight_map import checkpoint_targets

FILE = "model.safetensors"
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
SMALL = {"kv_lora": 16, "nope": 8, "rope": 4, "v": 8, "heads": 2, "q_lora": 8}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(path: Path, **words: Any) -> DeepseekForCausalLM:
    config = ModelConfig.from_dir(path)
    return load_model(path, config, dtype=torch.float32, device="cpu", **words)


def weights(model: DeepseekForCausalLM) -> dict[str, torch.Tensor]:
    return {name: target.value() for name, target in checkpoint_targets(model).items()}


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: value.clone() for name, value in load_file(path / FILE).items()}
    change(tensors)
    save_file(tensors, path / FILE)


@pytest.mark.parametrize("arch", ["v2", "v3", "youtu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_tensor_arrives_where_it_belongs(tmp_path: Path, arch: Any, dtype: Any) -> None:
    path = make_checkpoint(tmp_path, arch=arch, dtype=dtype)
    tensors = load_file(path / FILE)
    got = weights(load(path))
    assert got.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(got[name], value.float()), name


def test_num_params_counts_every_tensor(tmp_path: Path) -> None:
    for number, arch in enumerate(("v2", "v3", "youtu")):
        path = make_checkpoint(tmp_path / str(number), arch=arch, attention_bias=number == 1)
        total = sum(value.numel() for value in load_file(path / FILE).values())
        config = ModelConfig.from_dir(path)
        assert config.num_params == total, arch


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    one = weights(load(make_checkpoint(tmp_path / "one", **SMALL)))
    three = weights(load(make_checkpoint(tmp_path / "three", shards=3, **SMALL)))
    assert one.keys() == three.keys()
    assert all(torch.equal(one[name], three[name]) for name in one)


@pytest.mark.parametrize("arch", ["v3", "youtu"])
def test_tied_head(tmp_path: Path, arch: Any) -> None:
    path = make_checkpoint(tmp_path, arch=arch, tied=True, **SMALL)
    model = load(path)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    copy = load_file(path / FILE)["model.embed_tokens.weight"].clone()
    edit(path, lambda tensors: tensors.update({"lm_head.weight": copy}))  # some savers keep it
    load(path)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **SMALL)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(path, lambda tensors: tensors.update({name: torch.ones(2)}))
    load(path)


@pytest.mark.parametrize("q_lora", [None, 16])
def test_m10_with_and_without_q_lora(tmp_path: Path, q_lora: int | None) -> None:
    path = make_checkpoint(tmp_path, **SMALL | {"q_lora": q_lora})
    names = weights(load(path)).keys()
    assert ("model.layers.0.self_attn.q_proj.weight" in names) == (q_lora is None)
    assert ("model.layers.0.self_attn.q_b_proj.weight" in names) == (q_lora is not None)


@pytest.mark.parametrize("arch", ["v2", "v3"])
def test_m14_layers_from_num_hidden_layers_on_are_skipped(tmp_path: Path, arch: Any) -> None:
    path = make_checkpoint(tmp_path, arch=arch, layers=5, mtp_layers=1, **SMALL)
    assert "model.layers.5.eh_proj.weight" in load_file(path / FILE)
    model = load(path)
    assert len(model.model.layers) == 5


def test_m14_layer_61_may_be_real(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path, layers=63, mtp_layers=1, first_dense=63, hidden=8, intermediate=8, **SMALL
    )
    got = weights(load(path))
    name = "model.layers.61.mlp.down_proj.weight"
    assert torch.equal(got[name], load_file(path / FILE)[name])
    edit(path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=r"layers\.61\.mlp\.down_proj"):
        load(path)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    # 200, 192 and 140 are no multiples of 128: ragged last blocks in both directions.
    path = make_checkpoint(
        tmp_path, fp8=True, hidden=200, intermediate=140, moe_intermediate=192, layers=2
    )
    edit(
        path,
        lambda tensors: tensors.update(
            {n: t.to(scale_dtype) for n, t in tensors.items() if n.endswith("_scale_inv")}
        ),
    )
    tensors = load_file(path / FILE)
    assert tensors[KV_B].dtype == torch.float8_e4m3fn
    got = weights(load(path))
    for name, value in tensors.items():
        if value.dtype == torch.float8_e4m3fn:
            value = dequantize_blocks(value, tensors[f"{name}_scale_inv"], block=128)
        elif name.endswith("_scale_inv"):
            continue
        assert torch.equal(got[name], value), name


def test_fp8_scales_in_another_shard(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, fp8=True, **SMALL)
    want = weights(load(path))
    write_tensors(path, load_file(path / FILE), shards=7)
    got = weights(load(path))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dtype="bf16", mtp_layers=1, **SMALL)
    calls: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: calls.append((done, total)))
    served = {n: t for n, t in load_file(path / FILE).items() if "layers.2." not in n}
    total = sum(t.numel() * t.element_size() for t in served.values())
    assert len(calls) == len(served)
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)
    assert {size for _, size in calls} == {total}


def swap_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors[KV_B] = tensors[KV_B].to(torch.int64)


def add_fp8_without_config(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update(quantize_tensors({KV_B: tensors[KV_B]}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(KV_B), f"no tensor {KV_B}"),
        (lambda t: t.pop("lm_head.weight"), "no tensor lm_head.weight"),
        (
            lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            r"experts\.3\.up_proj",
        ),
        (
            lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"),
            "e_score_correction_bias",
        ),
        (lambda t: t.update({KV_B: t[KV_B][:-1]}), r"kv_b_proj\.weight has shape \[31, 16\]"),
        (
            lambda t: t.update({"model.layers.0.self_attn.extra": torch.ones(1)}),
            r"unknown tensor model\.layers\.0\.self_attn\.extra",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.8.up_proj.weight": torch.ones(1)}),
            r"unknown tensor .*experts\.8",
        ),
        (
            lambda t: t.update({f"{KV_B}_scale_inv": torch.ones(1, 1)}),
            "unknown tensor .*scale_inv",
        ),
        (swap_dtype, "kv_b_proj.weight has dtype I64"),
        (add_fp8_without_config, "kv_b_proj.weight is FP8, but config"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: Any, named: str) -> None:
    path = make_checkpoint(tmp_path, **SMALL)
    edit(path, change)
    with pytest.raises(CheckpointError, match=named):
        load(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(f"{KV_B}_scale_inv"), "no tensor .*kv_b_proj.weight_scale_inv"),
        (
            lambda t: t.update({f"{KV_B}_scale_inv": torch.ones(2, 1)}),
            r"kv_b_proj.weight_scale_inv is F32 \[2, 1\]",
        ),
        (
            lambda t: t.update({f"{KV_B}_scale_inv": torch.ones(1, 1, dtype=torch.int32)}),
            r"kv_b_proj.weight_scale_inv is I32",
        ),
    ],
)
def test_wrong_fp8_scales_are_named(tmp_path: Path, change: Any, named: str) -> None:
    path = make_checkpoint(tmp_path, fp8=True, **SMALL)
    edit(path, change)
    with pytest.raises(CheckpointError, match=named):
        load(path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = make_checkpoint(tmp_path, **SMALL)
    data = (path / FILE).read_bytes()
    (path / FILE).write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(path)


def test_corrupt_header(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **SMALL)
    data = bytearray((path / FILE).read_bytes())
    data[8:20] = b"not a header"
    (path / FILE).write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or no safetensors"):
        load(path)


def test_folder_without_weights(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **SMALL)
    (path / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(path)


def test_missing_shard(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, shards=2, **SMALL)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="names model-00002-of-00002"):
        load(path)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("{", "not readable JSON"),
        ({}, "no weight_map"),
        ({"weight_map": {KV_B: "../secret.safetensors"}}, "not a file name"),
        ({"weight_map": {KV_B: 7}}, "not a file name"),
    ],
)
def test_broken_index(tmp_path: Path, index: Any, named: str) -> None:
    path = make_checkpoint(tmp_path, shards=2, **SMALL)
    text = index if isinstance(index, str) else json.dumps(index)
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=named):
        load(path)


def test_index_that_places_a_tensor_in_the_wrong_shard(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, shards=2, **SMALL)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    index["weight_map"][KV_B] = (other - {index["weight_map"][KV_B]}).pop()
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"places {KV_B} in"):
        load(path)


def test_errors_come_before_any_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, **SMALL)
    edit(path, lambda tensors: tensors.pop("model.norm.weight"))
    read: list[str] = []
    monkeypatch.setattr(checkpoint.TensorFiles, "read", lambda _, name: read.append(name))
    with pytest.raises(CheckpointError):
        load(path)
    assert read == []


@pytest.mark.parametrize("arch", ["v2", "v3", "youtu"])
def test_dummy_weights_have_unit_scale(tmp_path: Path, arch: Any) -> None:
    path = make_checkpoint(tmp_path, arch=arch, hidden=256, attention_bias=True)
    config = ModelConfig.from_dir(path)

    def dummy() -> dict[str, torch.Tensor]:
        model = DeepseekForCausalLM(config, dtype=torch.float32, device="cpu")
        fill_dummy(model)
        return weights(model)

    got = dummy()
    for name, value in got.items():
        if name.endswith("norm.weight"):
            assert bool((value == 1).all()), name
        elif name.endswith("bias"):
            assert bool((value == 0).all()), name
        else:
            std = 1.0 if "embed_tokens" in name else value.shape[-1] ** -0.5
            assert float(value.std()) == pytest.approx(std, rel=0.1), name
            assert torch.equal(value, value.bfloat16().float()), name
    expert = "model.layers.1.mlp.experts.{}.up_proj.weight"
    if arch != "youtu":
        assert not torch.equal(got[expert.format(0)], got[expert.format(1)])
    again = dummy()
    assert all(torch.equal(got[name], again[name]) for name in got)


def test_dummy_needs_no_weight_files(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, **SMALL)
    (path / FILE).unlink()
    model = load(path, load_format="dummy")
    logits = model.compute_logits(torch.randn(3, 64))
    assert logits.shape == (3, 256)
    assert logits.dtype == torch.float32
    assert bool(logits.isfinite().all())


def test_locate_a_folder(tmp_path: Path) -> None:
    assert locate(tmp_path) == tmp_path
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "missing", "a/b/c"])
def test_locate_names_a_missing_folder(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        locate(name)


def test_locate_names_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(name: str, **_: Any) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"owner/model .*ConnectionError: offline"):
        locate("owner/model")


def test_locate_downloads_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[str] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert "*.safetensors" in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/model") == tmp_path
    assert asked == ["owner/model"]
