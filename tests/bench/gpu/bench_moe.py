"""Experts of one layer against the bytes and FLOPs that they need, and torch's grouped GEMM.

usage: bench_moe.py [v2-lite v3] [--tokens 1,16,...]
One JSON line a case: microseconds of `run_experts_` in a CUDA graph over several random choices of
experts; `copy_share` of 4.25 TB/s for the weights of the experts that are hit, `matmul_share` of
766 TFLOP/s. torch: the same through `torch._grouped_mm` (bf16 only), gathers included.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from moe_case import (
    CASES,
    COPY,
    MATMUL,
    Case,
    Layer,
    graph_ms,
    make_choices,
    make_layer,
    touched_bytes,
)

from kernels.triton.grouped_gemm import weighted_sum_
from kernels.triton.moe import run_experts_
from kernels.triton.silu_mul import silu_mul

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192]


def torch_experts(
    out: torch.Tensor, x: torch.Tensor, layer: Layer, ids: torch.Tensor, weights: torch.Tensor
) -> None:
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    experts = torch.arange(len(layer.down), device="cuda", dtype=torch.int32)
    ends = torch.searchsorted(flat[order], experts, right=True, out_int32=True)
    rows = x[order // ids.shape[1]]
    h = silu_mul(torch._grouped_mm(rows, layer.gate_up.transpose(1, 2), offs=ends))
    down = torch._grouped_mm(h, layer.down.transpose(1, 2), offs=ends)
    back = torch.empty_like(down)
    back[order] = down
    weighted_sum_(out, back, weights)


def measure(case: Case, layer: Layer, tokens: int) -> dict[str, object]:
    choices = make_choices(case, tokens, max(1, min(8, 256 // tokens)))
    x = torch.randn(tokens, case.hidden, device="cuda").bfloat16()
    out = torch.zeros_like(x)
    scales = {"scale_gate_up": layer.scale_gate_up, "scale_down": layer.scale_down}
    weights = layer.gate_up, layer.down
    ms = graph_ms([lambda c=c: run_experts_(out, x, *weights, *c, **scales) for c in choices])
    size = sum(touched_bytes(case, ids) for ids, _ in choices) / len(choices)
    line: dict[str, object] = {
        "case": case.name,
        "tokens": tokens,
        "us": round(ms * 1e3, 1),
        "copy_share": round(size / ms / COPY * 1e3, 3),
        "matmul_share": round(case.flops(tokens) / ms / MATMUL * 1e3, 3),
        "tflops": round(case.flops(tokens) / ms / 1e9, 1),
    }
    if not case.fp8:
        try:
            torch_ms = graph_ms([lambda c=c: torch_experts(out, x, layer, *c) for c in choices])
            line["torch_us"] = round(torch_ms * 1e3, 1)
        except Exception as error:
            line["torch_error"] = str(error)[:200]
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--tokens")
    options = parser.parse_args()
    counts = [int(n) for n in options.tokens.split(",")] if options.tokens else TOKENS
    for name in options.cases:
        case = CASES[name]
        layer = make_layer(case)
        for tokens in counts:
            print(json.dumps(measure(case, layer, tokens)), flush=True)
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
