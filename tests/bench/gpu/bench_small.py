"""The small kernels of a step against torch: norms, gate, sort, products of few rows, sampling.

usage: bench_small.py [norms gates products sampling]
One JSON line a case: microseconds of one call in a CUDA graph of many.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from moe_case import COPY, graph_ms

from kernels import sample as plain_sample
from kernels.triton import gemv, moe_align, moe_gate, rmsnorm, sample, silu_mul
from kernels.triton.gemv import Lanes

REPEAT = 10


def show(
    name: str, size: int, calls: dict[str, list[Callable[[], object]]], **words: object
) -> None:
    line: dict[str, object] = {"kernel": name, **words}
    for key, call in calls.items():
        try:
            line[key] = round(graph_ms(call * REPEAT if len(call) == 1 else call) * 1e3, 2)
        except Exception as error:
            line[key] = str(error)[:200]
    line["copy_us"] = round(size / COPY * 1e6, 2)
    print(json.dumps(line), flush=True)


def norms() -> None:
    for tokens, hidden in [(1, 2048), (64, 2048), (256, 7168), (32768, 2048), (16384, 7168)]:
        x, residual = (torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(2))
        weight = torch.ones(hidden, device="cuda").bfloat16()
        show(
            "add_rms_norm", 4 * x.numel() * 2,
            {"us": [lambda r=residual, x=x, w=weight: rmsnorm.add_rms_norm_(r, x, w, 1e-6)]},
            tokens=tokens, hidden=hidden,
        )  # fmt: skip
    x = torch.randn(8192, 21888, device="cuda").bfloat16()
    show("silu_mul", 3 * x.numel(), {"us": [lambda: silu_mul.silu_mul(x)]}, tokens=8192)


def gates() -> None:
    for tokens in (1, 64, 512, 8192):
        for experts, words in [
            (64, {"top_k": 6, "scoring": "softmax", "num_shared": 2}),
            (256, {"top_k": 8, "scoring": "sigmoid", "n_group": 8, "topk_group": 4,
                   "group_score": "top2_sum", "num_shared": 1}),
        ]:  # fmt: skip
            logits = torch.randn(tokens, experts, device="cuda")
            _, ids = moe_gate.choose_experts(logits, **words, renormalize=True, scale=1.0)
            show(
                "gate and sort", 0,
                {
                    "gate_us": [
                        lambda x=logits, w=words: moe_gate.choose_experts(
                            x, **w, renormalize=True, scale=1.0
                        )
                    ],
                    "sort_us": [lambda i=ids, e=experts: moe_align.align(i, e + 2, 16)],
                },
                tokens=tokens, experts=experts,
            )  # fmt: skip


def products() -> None:
    lanes = [Lanes(2, 1024, 4), Lanes(4, 512, 4), Lanes(4, 1024, 4), Lanes(8, 256, 4),
             Lanes(8, 512, 4), Lanes(4, 2048, 4)]  # fmt: skip
    for features, width in [(64, 2048), (3648, 2048), (2048, 2048), (256, 7168), (21888, 2048)]:
        copies = max(1, min(16, 3 * 10**8 // (features * width * 2)))
        w = torch.randn(copies, features, width, device="cuda").bfloat16()
        for rows in (1, 2, 4, 8):
            x = torch.randn(rows, width, device="cuda").bfloat16()
            calls: dict[str, list[Callable[[], object]]] = {
                "cublas_us": [lambda m=m, x=x: x @ m.T for m in w],
                "us": [lambda m=m, x=x: gemv.gemv(x, m) for m in w],
            }
            if rows in (1, 4):
                for n in lanes:
                    calls[f"{n.block_n}x{n.block_k}"] = [
                        lambda m=m, x=x, n=n: gemv.gemv(x, m, lanes=n) for m in w
                    ]
            show("gemv", w[0].numel() * 2, calls, n=features, k=width, rows=rows)


def sampling() -> None:
    for rows in (1, 16, 256):
        for spread in (1.0, 4.0):
            logits = torch.randn(rows, 102_400, device="cuda") * spread
            ones = torch.ones(rows, device="cuda")
            keys = {
                name: torch.arange(rows, device="cuda")
                for name in ("seeds", "choices", "positions")
            }
            calls: dict[str, list[Callable[[], object]]] = {
                "argmax_us": [lambda x=logits: x.argmax(dim=1)],
                "greedy_us": [lambda x=logits: sample.greedy(x)],
            }
            for name, k, p in [
                ("plain", 0, 1.0),
                ("top_k", 50, 1.0),
                ("top_p", 0, 0.95),
                ("both", 50, 0.95),
            ]:
                words = {"temperature": ones, "top_k": (ones * k).int(), "top_p": ones.double() * p,
                         "min_p": ones * 0}  # fmt: skip
                calls[f"{name}_us"] = [lambda x=logits, w=words, y=keys: sample.sample(x, **w, **y)]
                if name == "both":
                    u = torch.rand(rows, device="cuda", dtype=torch.float64)
                    calls["torch_both_us"] = [
                        lambda x=logits, w=words, u=u: plain_sample.draw(x, u, **w)
                    ]
            show("sample", logits.numel() * 4, calls, rows=rows, spread=spread)


def main() -> None:
    parts = {part.__name__: part for part in (norms, gates, products, sampling)}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
