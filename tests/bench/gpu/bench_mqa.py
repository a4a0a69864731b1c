"""Absorbed attention over pages, FlashMLA beside it where it is installed: one JSON line a case.

usage: bench_mqa.py [--configs 64,64,8,2,1 16,64,8,3,0] [--pages 1 64] [--cases 0 1] [--compile]
A config is block_m, block_n, num_warps, num_stages, parted (none: the shipped choice). TB/s count
the KV rows once a sequence (a shared prefix once), TFLOP/s 2 · 1088 a pair of query head and row.
The last cases are 8 requests on one 131k prefix: `of_separate` is their time over that of 8
requests on prefixes of their own. L2 cold, medians of 20. --compile only runs each kernel once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from support.mqa_case import quantise
from timing import report, timed_ms

from kernels.triton.mqa import MQAConfig, MQAPartials, choose_config, mqa
from kernels.triton.mqa_plan import MQACapacity, SharedPass, plan_mqa

DEVICE, DTYPE, LATENT, WIDTH = "cuda", torch.bfloat16, 512, 576
SCALE = 192**-0.5
#         sequences, rows, heads
CASES = [(32, 8192, 16), (32, 8192, 128), (128, 4096, 128), (1, 32768, 16), (64, 1200, 16)]
PREFIX, TAIL, SHARERS = 131_072, 128, 8


class Problem:
    def __init__(
        self,
        seqs: int,
        rows: int,
        heads: int,
        page: int,
        *,
        shared: bool = False,
        fp8: bool = False,
    ):
        self.seqs, self.rows, self.heads, self.page = seqs, rows, heads, page
        per_seq = -(-rows // page)
        order = torch.randperm(seqs * per_seq, device=DEVICE, dtype=torch.int64)
        self.table = order.to(torch.int32).view(seqs, per_seq)
        self.passes: list[SharedPass] = []
        self.read = seqs * rows  # distinct rows
        if shared:
            self.table[:, : PREFIX // page] = self.table[0, : PREFIX // page]
            self.passes = [SharedPass(tuple(range(seqs)), 0, PREFIX)]
            self.read -= (seqs - 1) * PREFIX
        self.pool = torch.randn(seqs * per_seq * page, WIDTH, device=DEVICE, dtype=DTYPE)
        if fp8:
            self.pool = quantise(self.pool, LATENT)[0]
        self.row_bytes = self.pool.stride(0) * self.pool.element_size()
        self.q = torch.randn(seqs, heads, WIDTH, device=DEVICE, dtype=DTYPE)

    def ours(self, config: MQAConfig, *, once: bool, partial: torch.dtype) -> float:
        programs = torch.cuda.get_device_properties(0).multi_processor_count
        capacity = MQACapacity(
            self.heads, config.block_m, config.block_n, programs, max(self.seqs, 64), 256, 64
        )
        plan = plan_mqa(
            capacity, np.arange(self.seqs + 1), np.full(self.seqs, self.rows), self.passes
        )
        buffer = torch.from_numpy(plan.buffer).to(DEVICE)
        partials = MQAPartials(capacity, LATENT, DEVICE, partial)
        out = torch.empty(self.seqs, self.heads, LATENT, device=DEVICE, dtype=DTYPE)

        def call() -> None:
            mqa(
                self.q, self.pool, self.table, buffer, out, capacity=capacity, config=config,
                partials=partials, page_size=self.page, scale=SCALE,
            )  # fmt: skip

        if once:
            call()
            torch.cuda.synchronize()
            return 1.0
        return timed_ms(call)

    def flashmla(self) -> float | None:
        try:
            from flash_mla import flash_mla_with_kvcache, get_mla_metadata
        except ImportError as error:
            print(f"no FlashMLA: {error}", file=sys.stderr)
            return None
        cache = self.pool.view(-1, 64, 1, WIDTH)
        lens = torch.full((self.seqs,), self.rows, dtype=torch.int32, device=DEVICE)
        meta, _ = get_mla_metadata()
        return timed_ms(
            lambda: flash_mla_with_kvcache(
                self.q[:, None],
                cache,
                self.table,
                lens,
                LATENT,
                meta,
                softmax_scale=SCALE,
                causal=True,
                use_legacy=True,
            )
        )

    def show(self, config: MQAConfig | None, ms: float, **fields: object) -> None:
        report(
            kernel="mqa",
            seqs=self.seqs,
            rows=self.rows,
            heads=self.heads,
            page=self.page,
            row_bytes=self.row_bytes,
            config=None if config is None else list(vars_of(config)),
            ms=ms,
            tb_s=self.read * self.row_bytes / ms / 1e9,
            tflop_s=self.seqs * self.rows * self.heads * 2 * (WIDTH + LATENT) / ms / 1e9,
            **fields,
        )


def vars_of(config: MQAConfig) -> tuple[int, ...]:
    return (
        config.block_m,
        config.block_n,
        config.num_warps,
        config.num_stages,
        int(config.parted),
    )


def attempt(
    problem: Problem, config: MQAConfig, *, once: bool, partial: torch.dtype
) -> float | None:
    try:
        return problem.ours(config, once=once, partial=partial)
    except Exception as error:
        report(config=list(vars_of(config)), error=f"{type(error).__name__}: {str(error)[:200]}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", nargs="*", default=[])
    parser.add_argument("--pages", nargs="*", type=int, default=[1, 64])
    parser.add_argument("--cases", nargs="*", type=int, default=list(range(len(CASES) + 2)))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="rows of 656 bytes")
    parser.add_argument("--partials", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    partial = torch.float32 if args.partials == "fp32" else torch.bfloat16
    named = []
    for text in args.configs:
        *sizes, parted = (int(x) for x in text.split(","))
        named.append(MQAConfig(*sizes, bool(parted)))

    for page in args.pages:
        for index, (seqs, rows, heads) in enumerate(CASES):
            if index not in args.cases:
                continue
            problem = Problem(seqs, rows, heads, page, fp8=args.fp8)
            for config in named or [choose_config(heads, torch.uint8 if args.fp8 else DTYPE)]:
                ms = attempt(problem, config, once=args.compile, partial=partial)
                if ms is not None:
                    problem.show(config, ms)
            if page == 64 and not args.compile and not args.fp8:
                peer = problem.flashmla()
                if peer is not None:
                    problem.show(None, peer, backend="flashmla")
        for index, heads in enumerate((16, 128)):
            if len(CASES) + index not in args.cases:
                continue
            apart = Problem(SHARERS, PREFIX + TAIL, heads, page, fp8=args.fp8)
            together = Problem(SHARERS, PREFIX + TAIL, heads, page, shared=True, fp8=args.fp8)
            for config in named or [None]:
                single = config or choose_config(heads, torch.uint8 if args.fp8 else DTYPE)
                grouped = config or choose_config(
                    heads, torch.uint8 if args.fp8 else DTYPE, shared=True
                )
                alone = attempt(apart, single, once=args.compile, partial=partial)
                ms = attempt(together, grouped, once=args.compile, partial=partial)
                if alone is not None and ms is not None:
                    apart.show(single, alone)
                    together.show(grouped, ms, shared=PREFIX, of_separate=ms / alone)
            del apart, together


if __name__ == "__main__":
    main()
