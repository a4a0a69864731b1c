"""From a checkpoint (folder or hub id) to a model with its weights, or to an error that says why.

locate ─► TensorFiles (headers) ─► names and shapes checked ─► tensors copied ─► finalize
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from kernels.fp8 import dequantize_blocks
from radix_mla.errors import CheckpointError
from radix_mla.models.deepseek import DeepseekForCausalLM
from radix_mla.models.dummy import fill_dummy
from radix_mla.models.fp8_weight import FP8
from radix_mla.models.fused_moe import FusedExperts
from radix_mla.models.hf_config import FP8_BLOCK, ModelConfig
from radix_mla.models.hub import locate
from radix_mla.models.layers import Linear
from radix_mla.models.tensor_files import DTYPE_BYTES, TensorFiles
from radix_mla.models.weight_map import Target, checkpoint_targets, is_ignored, to_interleaved

__all__ = ["Progress", "load_model", "locate"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor."""

_SCALE = "_scale_inv"  # `weight` + this: the block scales of an FP8 matrix


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: Literal["auto", "dummy"] = "auto",
    progress: Progress | None = None,
    fused: bool | None = None,
    fp8: bool | None = None,
) -> DeepseekForCausalLM:
    """The model, loaded and finalized, its weights written to the device once, in their last place.

    `load_format` "dummy" needs no weight files. `fused` and `fp8`: see `DeepseekForCausalLM`; FP8
    weights that the model does not keep are dequantised. Raises CheckpointError for a missing,
    unknown, misshapen or unreadable tensor, by name; there is no partial model.
    """

    def make() -> DeepseekForCausalLM:
        return DeepseekForCausalLM(config, dtype=dtype, device=device, fused=fused, fp8=fp8)

    if load_format == "dummy":
        model = make()
        fill_dummy(model)
    else:
        with TensorFiles(Path(path)) as files:
            model = make()
            _load(_targets(model, files), files, config, progress)
    model.finalize()
    return model


def _targets(model: DeepseekForCausalLM, files: TensorFiles) -> dict[str, Target]:
    """`checkpoint_targets`, after layers whose tensors are not FP8 in the files have become dense.

    FP8 checkpoints leave some matrices out (`modules_to_not_convert`).
    """
    targets = checkpoint_targets(model)
    dense = {
        target.owner
        for name, target in targets.items()
        if target.view.dtype == FP8
        and (info := files.tensors.get(name)) is not None
        and info.dtype != "F8_E4M3"
    }
    for owner in dense:
        assert isinstance(owner, Linear | FusedExperts), "nothing else holds FP8"
        owner.to_dense()
    return checkpoint_targets(model) if dense else targets


def _load(
    targets: dict[str, Target],
    files: TensorFiles,
    config: ModelConfig,
    progress: Progress | None,
) -> None:
    _check(targets, files, config)
    sizes = {name: math.prod(files.tensors[name].shape) * _bytes(files, name) for name in targets}
    total, done = sum(sizes.values()), 0
    # File by file, in order of offsets as far as names tell: the files are mapped and read ahead.
    for name in sorted(targets, key=lambda name: (files.tensors[name].file, name)):
        tensor, target = files.read(name), targets[name]
        if tensor.dtype == FP8 and target.view.dtype != FP8:
            device = target.view.device  # widened where it will live: half the bytes to move
            scale = files.read(name + _SCALE).to(device)
            tensor = dequantize_blocks(tensor.to(device), scale, block=FP8_BLOCK)
        target.fill(to_interleaved(name, tensor, config))
        done += sizes[name]
        if progress is not None:
            progress(done, total)


def _check(targets: dict[str, Target], files: TensorFiles, config: ModelConfig) -> None:
    """Names, shapes and dtypes, from the headers alone."""
    for name, target in targets.items():
        if name not in files.tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        info = files.tensors[name]
        if info.shape != target.shape:
            raise CheckpointError(
                f"{info.file}: {name} has shape {list(info.shape)}, "
                f"the config says {list(target.shape)}"
            )
        if info.dtype not in DTYPE_BYTES:
            raise CheckpointError(f"{info.file}: {name} has dtype {info.dtype}, not supported")
        if info.dtype == "F8_E4M3":
            _check_scale(name, files, config)
    for name, info in files.tensors.items():
        if name in targets or is_ignored(name, config):
            continue
        matrix = files.tensors.get(name.removesuffix(_SCALE))
        if name.endswith(_SCALE) and matrix is not None and matrix.dtype == "F8_E4M3":
            continue
        raise CheckpointError(f"{info.file}: unknown tensor {name}")


def _check_scale(name: str, files: TensorFiles, config: ModelConfig) -> None:
    info = files.tensors[name]
    if not config.fp8:
        raise CheckpointError(
            f"{info.file}: {name} is FP8, but config.json has no quantization_config for it"
        )
    if len(info.shape) != 2:
        raise CheckpointError(f"{info.file}: {name} is FP8 and not a matrix")
    scale = files.tensors.get(name + _SCALE)
    if scale is None:
        raise CheckpointError(f"the checkpoint has no tensor {name}{_SCALE}")
    wanted = tuple(math.ceil(size / FP8_BLOCK) for size in info.shape)
    if scale.shape != wanted or scale.dtype not in ("F32", "BF16", "F16"):
        raise CheckpointError(
            f"{scale.file}: {name}{_SCALE} is {scale.dtype} {list(scale.shape)}, "
            f"a float of shape {list(wanted)} is needed"
        )


def _bytes(files: TensorFiles, name: str) -> int:
    return DTYPE_BYTES[files.tensors[name].dtype]
