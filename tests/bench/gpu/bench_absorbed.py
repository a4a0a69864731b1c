"""Absorbed decode through a backend's `run_mqa`, plan not counted: one JSON line a case.

usage: bench_absorbed.py [--heads 16 128] [--backend auto] [--batch 32] [--context 8192]
`tb_s` counts every row once a sequence (1,152 bytes), `tflops` 2,176 FLOPs a pair and head. Then 8
sequences that share a prefix of 131,072 rows, with and without the sharing; `ratio` of both.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from attention_case import DEVICE, DTYPE, Bench, timed_ms

from radix_mla.attention.metadata import RaggedBatch

SHARED = 131_072


def run_ms(bench: Bench, batch: RaggedBatch) -> float:
    plan = bench.context(batch, "absorbed").plan.absorbed
    assert plan is not None
    q = torch.randn(len(batch.slots), bench.dims.num_heads, 576, device=DEVICE, dtype=DTYPE)
    scratch, pool = bench.workspace.rows(), bench.pool.layer(0)
    return timed_ms(lambda: bench.backend.run_mqa(plan.work, q, pool, scratch, 512, bench.scale))


def decode(heads: int, backend: str, batch: int, context: int) -> dict[str, object]:
    rows = batch * (context + 64)
    bench = Bench(heads, backend=backend, pool_tokens=rows, workspace_rows=64, max_tokens=256)
    ms = run_ms(bench, bench.batch([(1, context - 1)] * batch, decode=True))
    pairs = batch * context
    return {
        "heads": heads,
        "batch": batch,
        "context": context,
        "backend": bench.backend.name,
        "ms": round(ms, 4),
        "tb_s": round(pairs * 1152 / ms / 1e9, 2),
        "tflops": round(pairs * heads * 2176 / ms / 1e9),
    }


def shared(heads: int, backend: str) -> dict[str, object]:
    sequences = [(1, SHARED + 100 + 10 * i) for i in range(8)]
    rows = 8 * (SHARED + 256)
    bench = Bench(heads, backend=backend, pool_tokens=rows, workspace_rows=64, max_tokens=256)
    apart = run_ms(bench, bench.batch(sequences, decode=True))
    together = run_ms(bench, bench.batch(sequences, decode=True, shared=SHARED))
    ratio = round(together / apart, 3)
    return {
        "heads": heads,
        "shared_prefix": SHARED,
        "backend": bench.backend.name,
        "apart_ms": round(apart, 4),
        "together_ms": round(together, 4),
        "ratio": ratio,
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=8_192)
    options = parser.parse_args()
    for heads in options.heads:
        print(json.dumps(decode(heads, options.backend, options.batch, options.context)))
        print(json.dumps(shared(heads, options.backend)), flush=True)


if __name__ == "__main__":
    main()
