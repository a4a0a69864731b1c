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
from radix_mla.models.hf_config import FP8_BLOCK, ModelConfig
from radix_mla.models.hub import locate
from radix_mla.models.tensor_files import DTYPE_BYTES, TensorFiles
from radix_mla.models.weight_map import checkpoint_targets, is_ignored, to_interleaved

__all__ = ["Progress", "fill_dummy", "load_model", "locate"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor."""

_SCALE = "_scale_inv"  # `weight` + this: the block scales of an FP8 matrix
_DUMMY_SEED = 0


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: Literal["auto", "dummy"] = "auto",
    progress: Progress | None = None,
) -> DeepseekForCausalLM:
    """The model, loaded and finalized. `load_format` "dummy" needs no weight files.

    Raises CheckpointError for a missing, unknown, misshapen or unreadable tensor, by name; there
    is no partial model.
    """
    if load_format == "dummy":
        model = DeepseekForCausalLM(config, dtype=dtype, device=device)
        fill_dummy(model)
    else:
        with TensorFiles(Path(path)) as files:
            model = DeepseekForCausalLM(config, dtype=dtype, device=device)
            _load(checkpoint_targets(model), files, config, progress)
    model.finalize()
    return model


def _load(
    targets: dict[str, torch.Tensor],
    files: TensorFiles,
    config: ModelConfig,
    progress: Progress | None,
) -> None:
    _check(targets, files, config)
    sizes = {name: math.prod(files.tensors[name].shape) * _bytes(files, name) for name in targets}
    total, done = sum(sizes.values()), 0
    # File by file, in order of offsets as far as names tell: the files are mapped and read ahead.
    for name in sorted(targets, key=lambda name: (files.tensors[name].file, name)):
        tensor = files.read(name)
        if tensor.dtype == torch.float8_e4m3fn:
            tensor = dequantize_blocks(tensor, files.read(name + _SCALE), block=FP8_BLOCK)
        targets[name].copy_(to_interleaved(name, tensor, config))
        done += sizes[name]
        if progress is not None:
            progress(done, total)


def _check(targets: dict[str, torch.Tensor], files: TensorFiles, config: ModelConfig) -> None:
    """Names, shapes and dtypes, from the headers alone."""
    for name, target in targets.items():
        if name not in files.tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        info = files.tensors[name]
        if info.shape != tuple(target.shape):
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


def fill_dummy(model: DeepseekForCausalLM) -> None:
    """Random weights at unit scale: norms 1, biases 0, embeddings N(0, 1), matrices N(0, 1/fan_in).

    With smaller weights every sequence would decode the same token and hit the same experts. The
    values are ones that bf16 holds, as in the checkpoints they stand for; the seed is fixed.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, param in model.named_parameters():
        if name.endswith("norm.weight"):
            param.data.fill_(1.0)
        elif name.endswith(("bias",)):
            param.data.zero_()
        else:
            device = param.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(_DUMMY_SEED)
            std = 1.0 if name.endswith("embed_tokens.weight") else param.shape[-1] ** -0.5
            for part in param.data if param.dim() == 3 else (param.data,):
                values = torch.empty(part.shape, device=device)
                values.normal_(0.0, std, generator=generators[device])
                part.copy_(values.bfloat16())
