"""Times block shapes of the expert kernels and prints rows for kernels/triton/moe_shapes.py.

usage: tune_moe.py [v2-lite v3] [--tokens 1,16,...] [--compile-only PART/PARTS]
Each kernel alone, over several random choices of experts, as a replayed CUDA graph: one JSON line a
(tokens, kernel, rows a tile), best first. `--compile-only` fills Triton's cache with one share of
the candidates and times nothing: start several of these first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from moe_case import CASES, COPY, Case, Layer, graph_ms, make_choices, make_layer

from kernels.triton import gemv
from kernels.triton.fp8_gemm import quantize_groups
from kernels.triton.gemv import Lanes
from kernels.triton.grouped_gemm import GROUP, Shape, down, gate_up, weighted_sum_
from kernels.triton.moe_align import align

TOKENS = {
    "v2-lite": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192],
    "v3": [1, 2, 4, 16, 64, 128, 256, 512, 2048],
}
LANES = [
    Lanes(2, 1024, 4), Lanes(2, 2048, 4), Lanes(4, 512, 4), Lanes(4, 1024, 4), Lanes(4, 2048, 4),
    Lanes(8, 512, 4), Lanes(8, 1024, 8), Lanes(1, 2048, 2), Lanes(2, 2048, 2),
]  # fmt: skip


def shapes(fp8: bool, gated: bool, block_m: int) -> list[Shape]:
    if fp8:
        if block_m == 128:
            return [
                Shape(128, 128, 8, 3), Shape(64, 128, 8, 4), Shape(64, 128, 4, 4),
                Shape(128, 128, 8, 4), Shape(128, 128, 4, 3),
            ]  # fmt: skip
        both = [Shape(128, 128, 4, 3), Shape(64, 128, 4, 4), Shape(128, 128, 8, 3)]
        if block_m == 64:
            both += [
                Shape(128, 128, 4, 2), Shape(128, 128, 4, 3, group_m=2), Shape(128, 128, 8, 4),
                Shape(128, 128, 4, 3, group_m=32), Shape(128, 128, 8, 2), Shape(128, 128, 4, 4),
            ]  # fmt: skip
        swapped = [
            Shape(f, 128, w, s, swap=True)
            for f, w, s in [
                (128, 4, 3),
                (64, 4, 4),
                (64, 4, 5),
                (128, 8, 3),
                (64, 4, 3),
                (128, 4, 4),
            ]
        ]
        return both + swapped
    if block_m == 128:
        few = [
            Shape(128, 64, 8, 3), Shape(128, 64, 8, 4), Shape(64, 64, 4, 4), Shape(64, 64, 8, 4),
            Shape(128, 64, 4, 3), Shape(128, 64, 8, 4, group_m=2), Shape(128, 64, 8, 4, group_m=32),
        ]  # fmt: skip
        wide = [Shape(256, 64, 8, s, group_m=m) for s in (3, 4) for m in (2, 8, 32)]
        return few if gated else [*few, *wide, Shape(128, 128, 8, 3)]
    if block_m == 64:
        few = [
            Shape(128, 64, 8, 3), Shape(128, 64, 4, 3), Shape(64, 64, 4, 4), Shape(64, 128, 4, 3),
            Shape(64, 64, 4, 5, swap=True), Shape(128, 64, 4, 4, swap=True),
            Shape(64, 64, 4, 4, swap=True), Shape(128, 64, 4, 3, swap=True),
            Shape(128, 64, 8, 4, swap=True), Shape(128, 64, 4, 2), Shape(128, 64, 8, 4),
            Shape(128, 64, 4, 4, group_m=2, swap=True), Shape(128, 64, 4, 4, group_m=32, swap=True),
            Shape(64, 64, 4, 3), Shape(128, 64, 4, 4),
        ]  # fmt: skip
        return few if gated else [*few, Shape(256, 64, 8, 3), Shape(256, 64, 8, 4)]
    few = [Shape(64, 128, 4, 3), Shape(64, 128, 4, 4), Shape(32, 128, 4, 4), Shape(64, 64, 4, 5)]
    return few + [
        Shape(f, k, w, s, swap=True)
        for f, k, w, s in [
            (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (64, 64, 4, 6), (128, 128, 8, 3),
            (128, 128, 4, 3),
        ]
    ]  # fmt: skip


def row_tiles(case: Case, tokens: int) -> list[int]:
    mean = tokens * case.top_k / case.experts
    return [
        m for m in (16, 32, 64, 128) if (m == 16 or mean >= m / 8) and (mean <= 3 * m or m == 128)
    ]


Timed = tuple[str, int, Shape | Lanes | None, list[Callable[[], object]]]


def candidates(case: Case, layer: Layer, tokens: int, experts: int | None) -> Iterator[Timed]:
    """(kernel, rows a tile, shape, calls over several choices of experts)."""
    sets = 1 if experts else max(1, min(8, 256 // tokens))
    choices = make_choices(case, tokens, sets, experts)
    x = torch.randn(tokens, case.hidden, device="cuda").bfloat16()
    h = torch.randn(tokens * case.width, case.inner, device="cuda").bfloat16()
    out = torch.zeros_like(x)
    if tokens <= 4:
        for lanes in LANES:
            yield from direct(case, layer, x, h, out, choices, lanes)
    x_scale = h_scale = None
    if case.fp8:
        yield "quantize", 0, None, [lambda: quantize_groups(x)]
        x8, x_scale = quantize_groups(x)
        h8, h_scale = quantize_groups(h)
    else:
        x8, h8 = x, h
    rows = torch.randn(tokens * case.width, case.hidden, device="cuda").bfloat16()
    weights = choices[0][1]
    yield "weighted_sum", 0, None, [lambda: weighted_sum_(out, rows, weights)]
    for block_m in row_tiles(case, tokens):
        tiles = [align(ids, case.total, block_m) for ids, _ in choices]
        yield (
            "align",
            block_m,
            None,
            [lambda ids=ids, m=block_m: align(ids, case.total, m) for ids, _ in choices],
        )
        for shape in shapes(case.fp8, True, block_m):
            yield "gate_up", block_m, shape, [
                lambda t=t, s=shape: gate_up(
                    x8, layer.gate_up, t, case.width, s, x_scale=x_scale,
                    w_scale=layer.scale_gate_up, quantize=case.fp8 and s.block_f == GROUP,
                )
                for t in tiles
            ]  # fmt: skip
        for shape in shapes(case.fp8, False, block_m):
            yield "down", block_m, shape, [
                lambda t=t, s=shape: down(
                    h8, layer.down, t, s, h_scale=h_scale, w_scale=layer.scale_down
                )
                for t in tiles
            ]  # fmt: skip


def direct(
    case: Case, layer: Layer, x: torch.Tensor, h: torch.Tensor, out: torch.Tensor,
    choices: list[tuple[torch.Tensor, torch.Tensor]], lanes: Lanes,
) -> Iterator[Timed]:  # fmt: skip
    yield (
        "direct_gate_up",
        1,
        lanes,
        [
            lambda c=c: gemv.direct_gate_up(
                x, layer.gate_up, c[0], lanes, scale=layer.scale_gate_up
            )
            for c in choices
        ],
    )
    yield (
        "direct_down",
        1,
        lanes,
        [
            lambda c=c: gemv.direct_down_(out, h, layer.down, *c, lanes, scale=layer.scale_down)
            for c in choices
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--tokens")
    parser.add_argument("--compile-only")
    options = parser.parse_args()
    part, parts = (int(n) for n in (options.compile_only or "0/1").split("/"))
    for name in options.cases:
        case = CASES[name]
        small = 1 if options.compile_only else None
        layer = make_layer(case, small)
        tokens = [int(n) for n in options.tokens.split(",")] if options.tokens else TOKENS[name]
        seen: dict[object, int] = {}
        for count in tokens:
            results: dict[tuple[str, int], list[tuple[float, str]]] = {}
            for kernel, block_m, shape, calls in candidates(case, layer, count, small):
                index = seen.setdefault((kernel, block_m, shape), len(seen))
                if small:
                    if index % parts == part:
                        try_call(calls[0])
                    continue
                try:
                    ms = graph_ms(calls, runs=10)
                except Exception as error:
                    print(
                        json.dumps(
                            {"failed": kernel, "shape": str(shape), "error": str(error)[:200]}
                        )
                    )
                    continue
                results.setdefault((kernel, block_m), []).append((ms, str(shape)))
            for (kernel, block_m), found in results.items():
                found.sort()
                line = {"case": name, "tokens": count, "kernel": kernel, "block_m": block_m}
                best = [f"{ms * 1e3:.1f} {shape}" for ms, shape in found[:3]]
                print(
                    json.dumps(line | {"us": best, "worst": round(found[-1][0] * 1e3, 1)}),
                    flush=True,
                )
        if not small:
            every = case.total * case.expert_bytes() / COPY * 1e6
            print(json.dumps({"case": name, "floor_us_all_experts": round(every, 1)}))
        del layer
        torch.cuda.empty_cache()


def try_call(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        print(str(error)[:200], file=sys.stderr)


if __name__ == "__main__":
    main()
