"""Row kernels against `copy_` of as many bytes (read + written): one JSON line a case.

usage: bench_rows.py [--tokens 32768]
`of_copy` = time of the copy over time of the kernel; L2 cold, medians of 20.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from timing import report, timed_ms

from kernels.triton.kv_gather import kv_gather
from kernels.triton.latent_write import norm_rope_write_
from kernels.triton.merge_lse import combine_lse, merge_lse_
from kernels.triton.merge_passes import merge_passes_
from kernels.triton.page_copy import page_copy, pool_table

DEVICE, DTYPE, LATENT, ROPE = "cuda", torch.bfloat16, 512, 64
ROW = (LATENT + ROPE) * 2  # bytes


def compare(name: str, num_bytes: int, ms: float, **fields: object) -> None:
    """num_bytes: read and written, in all."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    copy = timed_ms(lambda: target.copy_(source))
    report(
        kernel=name,
        ms=ms,
        gb_s=num_bytes / ms / 1e6,
        copy_gb_s=num_bytes / copy / 1e6,
        of_copy=copy / ms,
        **fields,
    )


def bench_write(tokens: int, heads: int) -> None:
    kv = torch.randn(tokens, LATENT + ROPE, device=DEVICE, dtype=DTYPE)
    q = torch.randn(tokens, heads, 192, device=DEVICE, dtype=DTYPE)
    weight = torch.randn(LATENT, device=DEVICE, dtype=DTYPE)
    angle = torch.rand(tokens, ROPE // 2, device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    pool = torch.randn(4 * tokens, LATENT + ROPE, device=DEVICE, dtype=DTYPE)
    slots = torch.randperm(4 * tokens, device=DEVICE)[:tokens]
    ms = timed_ms(lambda: norm_rope_write_(kv, q[..., 128:], weight, 1e-6, cos, sin, pool, slots))
    num_bytes = tokens * (3 * ROW + 2 * heads * ROPE * 2 + 2 * ROPE * 2 + 8)
    compare("latent_write", num_bytes, ms, tokens=tokens, heads=heads)


def bench_gather(rows: int) -> None:
    pool = torch.randn(8 * rows, LATENT + ROPE, device=DEVICE, dtype=DTYPE)
    slots = torch.randperm(8 * rows, device=DEVICE)[:rows]
    out = torch.empty(rows, LATENT + ROPE, device=DEVICE, dtype=DTYPE)
    ms = timed_ms(lambda: kv_gather(pool, slots, out))
    compare("kv_gather", rows * (2 * ROW + 8), ms, rows=rows)


def bench_merge(tokens: int, heads: int, width: int = 128) -> None:
    o_a, o_b = (torch.randn(tokens, heads, width, device=DEVICE, dtype=DTYPE) for _ in range(2))
    lse_a, lse_b = (torch.randn(tokens, heads, device=DEVICE) for _ in range(2))
    ms = timed_ms(lambda: merge_lse_(o_a, lse_a, o_b, lse_b))
    num_bytes = 3 * (o_a.nbytes + lse_a.nbytes)
    compare("merge_lse", num_bytes, ms, tokens=tokens, heads=heads)


def bench_combine(tokens: int, heads: int, parts: int = 4, width: int = 128) -> None:
    o = torch.randn(parts, tokens, heads, width, device=DEVICE, dtype=DTYPE)
    lse = torch.randn(parts, tokens, heads, device=DEVICE)
    ms = timed_ms(lambda: combine_lse(o, lse))
    num_bytes = (o.nbytes + lse.nbytes) * (parts + 1) // parts
    compare("combine_lse", num_bytes, ms, tokens=tokens, heads=heads, parts=parts)


def bench_passes(tokens: int, heads: int, queries: int = 8, width: int = LATENT) -> None:
    """Each token with one part of a shared pass."""
    runs = -(-tokens // queries)
    out = torch.randn(tokens, heads, width, device=DEVICE, dtype=DTYPE)
    lse = torch.randn(tokens, heads, device=DEVICE)
    parts = torch.randn(runs * queries, heads, width, device=DEVICE, dtype=DTYPE)
    part_lse = torch.randn(runs, heads, queries, device=DEVICE)
    index = torch.full((tokens, 2), -1, dtype=torch.int32, device=DEVICE)
    index[:, 0] = torch.randperm(runs * queries, device=DEVICE)[:tokens]
    ms = timed_ms(lambda: merge_passes_(out, lse, parts, part_lse, index))
    num_bytes = 3 * out.nbytes + 2 * lse.nbytes
    compare("merge_passes", num_bytes, ms, tokens=tokens, heads=heads)


def bench_copy(rows: int, layers: int = 27) -> None:
    pools = [torch.randn(1 << 16, LATENT + ROPE, device=DEVICE, dtype=DTYPE) for _ in range(layers)]
    order = torch.randperm(1 << 16, device=DEVICE)
    src, dst = order[:rows].contiguous(), order[rows : 2 * rows].contiguous()
    table = pool_table(pools)
    ms = timed_ms(lambda: page_copy(pools, src, dst, table=table))
    compare("page_copy", 2 * layers * rows * ROW, ms, rows=rows, layers=layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    tokens = parser.parse_args().tokens
    bench_write(tokens, 16)
    bench_write(tokens, 128)
    bench_gather(tokens)
    bench_merge(tokens, 16)
    bench_merge(tokens, 128)
    bench_combine(tokens, 16)
    bench_passes(256, 16)
    bench_passes(tokens, 16)
    bench_copy(15)
    bench_copy(1000)
    for small in (1, 16, 256):
        bench_write(small, 16)


if __name__ == "__main__":
    main()
