"""Absorbed attention of steps whose sequences share prefixes, by each family of captured steps.

    PYTHONPATH=. python tests/bench/gpu/bench_sharing.py [--heads 16] [--cases 14]

`us`: one layer's attention by each family that can take the step, as a graph replay with L2 cold
(medians of 20); `estimates`: what `attention/absorbed_cost.py` expects; `chosen` is the family with
the least estimate, `of_best` its time over that of the fastest. `plain` reads every sequence's rows
for itself, `shared` and Triton's `mixed` read those that sequences share once.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from timing import report, timed_ms

from radix_mla.attention.backend import AttentionBackend, Setting
from radix_mla.attention.metadata import RaggedBatch
from radix_mla.attention.select import choose_backends, device_arch, make_backend
from radix_mla.attention.shared_prefix import shared_in
from radix_mla.attention.static_plan import Family, StaticAbsorbed, work_of
from radix_mla.attention.workspace import MLADims
from radix_mla.cache.kv_layout import KVLayout
from radix_mla.cache.kv_pool import KVPool
from radix_mla.engine.step import Chunk

DEVICE, PAGE, MAX_PAGES = "cuda:0", 64, 2561


class Case(NamedTuple):
    """`groups` times `members` sequences on one prefix, each with a tail; the first `extends` of
    them bring `new` tokens, the others one.
    """

    groups: int
    members: int
    prefix: int
    tail: int
    extends: int = 0
    new: int = 1


CASES = [
    *(Case(batch, 1, 0, rows) for batch in (1, 4, 16, 64) for rows in (256, 1200, 4800)),
    Case(1, 1, 0, 32_768),
    Case(256, 1, 0, 1200),
    Case(1, 8, 131_072, 128),
    Case(1, 8, 32_768, 128),
    Case(1, 2, 131_072, 128),
    Case(1, 32, 131_072, 512),
    Case(8, 16, 4096, 320),
    Case(1, 64, 4096, 512),
    Case(1, 256, 1024, 320),
    Case(1, 256, 4096, 320),
    Case(1, 256, 256, 1000),
    Case(32, 8, 1024, 512),
    Case(1, 4, 8192, 256),
    Case(1, 8, 4096, 256),
    Case(1, 2, 4096, 64),
    Case(1, 64, 4096, 512, 1, 100),
    Case(64, 1, 0, 1200, 1, 100),
    Case(8, 1, 0, 4096, 1, 128),
    Case(4, 4, 8192, 300, 4, 16),
    Case(1, 200, 1024, 500, 2, 100),
]


def batch_of(case: Case, num_pages: int) -> RaggedBatch:
    order, used = np.random.default_rng(0).permutation(num_pages).astype(np.int32), 0

    def take(rows: int) -> np.ndarray:
        nonlocal used
        pages = order.take(np.arange(used, used - (-rows // PAGE)), mode="wrap")
        used += len(pages)
        return pages

    chunks: list[Chunk] = []
    for _ in range(case.groups):
        prefix = take(case.prefix)
        for _ in range(case.members):
            new = case.new if len(chunks) < case.extends else 1
            table = np.concatenate((prefix, take(case.tail + new)))
            tokens = np.zeros(new, dtype=np.int32)
            chunks.append(Chunk(tokens, case.prefix + case.tail, table, 1, is_decode=new == 1))
    return RaggedBatch.of(chunks, PAGE)


def measure(static: StaticAbsorbed, pair: AttentionBackend, pool: KVPool, num_heads: int) -> float:
    """Microseconds."""
    q = torch.randn(static.num_tokens, num_heads, pool.layout.width, device=DEVICE).bfloat16()
    absorbed = static.plan.absorbed
    assert absorbed is not None
    static.begin()
    return 1e3 * timed_ms(
        lambda: pair.run_mqa(absorbed.work, q, pool.layer(0), q[0], 512, 192**-0.5)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--backend", default="fa3,flashmla")
    parser.add_argument("--cases", nargs="*", type=int, default=list(range(len(CASES))))
    options = parser.parse_args()
    dims = MLADims(num_heads=options.heads, latent=512, nope=128, rope=64, value=128)
    setting = Setting(DEVICE, device_arch(DEVICE), "bf16", "bf16", PAGE, dims, 512, 512, MAX_PAGES)
    backend = make_backend(choose_backends(options.backend, setting), setting)
    pool = KVPool(KVLayout.of("bf16", latent=512, rope=64), 1, 1 << 15, PAGE, DEVICE)
    pool.layer(0).normal_()
    sharing: AttentionBackend = getattr(backend, "sharing", backend)
    pairs = {pair.name.rpartition(",")[2]: pair for pair in (backend, sharing)}
    families: dict[str, tuple[AttentionBackend, Family]] = {
        f"{name} {family}": (pair, family)
        for name, pair in pairs.items()
        for family in get_args(Family)
        if name == "flashmla" or family != "shared"  # Triton's is its mixed one
    }
    for case in (CASES[index] for index in options.cases):
        batch = batch_of(case, pool.num_pages)
        work = work_of(batch)
        work = replace(work, shared=shared_in(work))
        times, estimates = {}, {}
        for name, (pair, family) in families.items():
            static = StaticAbsorbed(pair, work.num_queries, pool, family)
            if static.fits(work):
                static.refill(batch, work)
                times[name] = measure(static, pair, pool, options.heads)
                estimates[name] = static.estimate_us(work)
        chosen = min(estimates, key=lambda name: estimates[name])
        report(
            case=tuple(case),
            us={name: round(us, 1) for name, us in times.items()},
            estimates={name: round(us, 1) for name, us in estimates.items()},
            chosen=chosen,
            of_best=times[chosen] / min(times.values()),
        )


if __name__ == "__main__":
    main()
