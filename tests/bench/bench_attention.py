"""Attention of one MLA layer in each form over (Sq, Sk), fp32: one JSON line a case.

usage: bench_attention.py [--heads 4] [--threads 2] [--runs 9] [--scattered]
`model_gflops` counts 640 FLOPs a causal (query, key) pair and head, and nothing for decompression;
`gemm_gflops` is a 2048³ product in the same process. Times are medians; `min_ms` is the least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.mla_case import TRUE, make_case

from radix_mla.attention.forms import Form

SIZES = [
    (1, 100),
    (1, 2_000),
    (1, 8_000),
    (16, 1_500),
    (64, 2_000),
    (128, 2_000),
    (192, 2_000),
    (256, 2_000),
    (512, 2_000),
    (512, 0),
    (2_000, 0),
    (2_000, 4_000),
]


def timed(call: Callable[[], object], runs: int) -> list[float]:
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def gemm_gflops(runs: int) -> float:
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    out = torch.empty(2048, 2048)
    return 2 * 2048**3 / min(timed(lambda: torch.mm(a, b, out=out), runs)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--scattered", action="store_true", help="pages in random order")
    parser.add_argument("--batch", type=int, default=1, help="equal sequences in the step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    common = {
        "heads": options.heads,
        "threads": options.threads,
        "batch": options.batch,
        "gemm_gflops": round(gemm_gflops(options.runs), 1),
    }
    dims = replace(TRUE, num_heads=options.heads)
    for num_new, num_context in SIZES:
        case = make_case(
            [(num_new, num_context)] * options.batch,
            dims=dims,
            page_size=16,
            contiguous=not options.scattered,
        )
        pairs = options.batch * (num_new * num_context + num_new * (num_new + 1) / 2)
        for form in get_args(Form):
            with torch.inference_mode():
                ctx = case.context(form, workspace_rows=32_768)
                stored = ctx.write(0, case.rows)
                times = timed(
                    lambda c=case, x=ctx, s=stored: x.attend(0, c.q, s, c.weights, c.scale),
                    options.runs,
                )
            result = {
                "num_new": num_new,
                "num_context": num_context,
                "form": form,
                "ms": round(statistics.median(times) * 1e3, 3),
                "min_ms": round(min(times) * 1e3, 3),
                "model_gflops": round(pairs * options.heads * 640 / min(times) / 1e9, 1),
            }
            print(json.dumps(result | common), flush=True)


if __name__ == "__main__":
    main()
