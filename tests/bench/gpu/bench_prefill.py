"""Triton prefill attention against FA3 where it is installed: one JSON line a case.

usage: bench_prefill.py [--blocks 128,128,8,2 128,64,8,3] [--few]
`of_fa3` = FA3's time over ours. L2 cold, medians of 20; TFLOP/s count the visible pairs only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from timing import report, timed_ms

from kernels.triton.prefill import mha_prefill

DEVICE, DTYPE, WIDTH, VALUE = "cuda", torch.bfloat16, 192, 128
#         heads, queries, keys, causal, sequences
CASES = [
    (16, 8_192, 8_192, True, 1),
    (16, 32_768, 32_768, True, 1),
    (16, 256, 32_768, False, 1),
    (16, 2_048, 32_768, False, 1),
    (128, 4_096, 4_096, True, 1),
    (128, 256, 32_768, False, 1),
    (16, 512, 512, True, 16),
]


def fa3() -> Callable[..., object] | None:
    try:
        from fa3_fwd_interface import flash_attn_varlen_func
    except ImportError as error:
        print(f"no FA3: {error}", file=sys.stderr)
        return None
    found: Callable[..., object] = flash_attn_varlen_func
    return found


def measure(
    heads: int,
    queries: int,
    keys: int,
    causal: bool,
    sequences: int,
    blocks: list[tuple[int, int, int, int] | None],
) -> None:
    q = torch.randn(sequences * queries, heads, WIDTH, device=DEVICE, dtype=DTYPE)
    k = torch.randn(heads, sequences * keys, WIDTH, device=DEVICE, dtype=DTYPE)
    v = torch.randn(heads, sequences * keys, VALUE, device=DEVICE, dtype=DTYPE)
    count = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE)
    cu_q, cu_k = count * queries, count * keys
    scale = WIDTH**-0.5
    pairs = sequences * (queries * keys - (queries * (queries - 1) // 2 if causal else 0))
    flops = 2 * (WIDTH + VALUE) * heads * pairs
    theirs, peer = fa3(), None
    if theirs is not None:
        k3, v3 = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        peer = timed_ms(
            lambda: theirs(
                q,
                k3,
                v3,
                cu_q,
                cu_k,
                queries,
                keys,
                softmax_scale=scale,
                causal=causal,
                return_attn_probs=True,
            )
        )
        del k3, v3
    for shape in blocks:
        try:
            ms = timed_ms(
                lambda shape=shape: mha_prefill(
                    q, k, v, cu_q, cu_k, max_q=queries, scale=scale, causal=causal, blocks=shape
                )
            )
        except Exception as error:
            report(blocks=shape, error=f"{type(error).__name__}: {str(error)[:200]}")
            continue
        report(
            kernel="prefill",
            heads=heads,
            queries=queries,
            keys=keys,
            causal=causal,
            sequences=sequences,
            blocks=shape,
            ms=ms,
            tflop_s=flops / ms / 1e9,
            fa3_ms=peer,
            fa3_tflop_s=flops / peer / 1e9 if peer else None,
            of_fa3=peer / ms if peer else None,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", nargs="*", default=[])
    parser.add_argument("--few", action="store_true", help="the first and third case only")
    args = parser.parse_args()
    blocks = [tuple(int(x) for x in text.split(",")) for text in args.blocks] or [None]
    for case in CASES[:4:2] if args.few else CASES:
        measure(*case, blocks=blocks)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
