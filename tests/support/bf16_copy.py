"""A checkpoint folder's bf16 copy, without FP8 blocks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from kernels.fp8 import dequantize_blocks
from radix_mla.models.hf_config import FP8_BLOCK
from radix_mla.models.tensor_files import TensorFiles

_SCALE = "_scale_inv"


def bf16_copy(source: Path, target: Path) -> Path:
    """Writes `source`'s model and tokenizer to the folder `target`; returns it."""
    tensors = {}
    with TensorFiles(source) as files:
        for name in files.tensors:
            if name.endswith(_SCALE):
                continue
            tensor = files.read(name)
            if tensor.dtype == torch.float8_e4m3fn:
                tensor = dequantize_blocks(tensor, files.read(name + _SCALE), block=FP8_BLOCK)
            tensors[name] = tensor.to(torch.bfloat16)
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config))
    for path in source.glob("*token*.json"):
        shutil.copy(path, target)
    return target
