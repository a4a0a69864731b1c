"""Dense FP8 layers of V3: `fp8_linear` against torch's block-scaled `_scaled_mm` and bf16 matmul.

usage: bench_fp8.py [--tokens 1,16,...]. One JSON line a case, microseconds in a CUDA graph over
enough weights to miss the L2; the quantisation of rows counts in both FP8 columns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from moe_case import COPY, MATMUL, graph_ms

from kernels.triton.fp8_gemm import fp8_linear, quantize_groups

SIZES = [(2112, 7168), (24576, 1536), (7168, 16384), (36864, 7168), (7168, 18432)]
TOKENS = [1, 4, 16, 64, 256, 2048]


def scaled_mm(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """cuBLASLt: 1×128 scales of the rows stand column by column, as it wants them."""
    q, x_scale = quantize_groups(x)
    columns = x_scale.t().contiguous().t()
    return torch._scaled_mm(q, w.t(), scale_a=columns, scale_b=scale.t(), out_dtype=torch.bfloat16)


def measure(
    codes: torch.Tensor, dense: torch.Tensor, scale: torch.Tensor, tokens: int
) -> dict[str, object]:
    features, width = codes.shape[1:]
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "us": lambda c, _: fp8_linear(x, c, scale),
        "scaled_mm_us": lambda c, _: scaled_mm(x, c, scale),
        "bf16_us": lambda _, d: x @ d.T,
    }
    line: dict[str, object] = {"n": features, "k": width, "tokens": tokens}
    for name, call in calls.items():
        try:
            pairs = zip(codes, dense, strict=True)
            ms = graph_ms([lambda c=c, d=d, f=call: f(c, d) for c, d in pairs])
            line[name] = round(ms * 1e3, 1)
        except Exception as error:
            line[name] = str(error)[:300]
    floor = max(features * width / COPY, 2 * features * width * tokens / MATMUL / 2)
    return line | {"floor_us": round(floor * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens")
    options = parser.parse_args()
    counts = [int(n) for n in options.tokens.split(",")] if options.tokens else TOKENS
    for features, width in SIZES:
        copies = max(2, min(8, 2 * 10**8 // (features * width)))
        raw = torch.randint(0, 256, (copies, features, width), dtype=torch.uint8, device="cuda")
        codes = raw.bitwise_and_(0xF7).view(torch.float8_e4m3fn)
        scale = torch.rand(-(-features // 128), width // 128, device="cuda") * 1e-3
        dense = torch.randn(copies, features, width, device="cuda", dtype=torch.bfloat16)
        for tokens in counts:
            print(json.dumps(measure(codes, dense, scale, tokens)), flush=True)


if __name__ == "__main__":
    main()
