"""Two-stage prefill of few new tokens on a long context, against its parts: one JSON line a case.

usage: bench_two_stage.py [--heads 16 128] [--new 256] [--context 32768] [--backend auto]
`ratio` = the whole over (attention kernels alone + decompression GEMMs alone + gather and k_pe
assembly at the speed of a copy of as many bytes). `host_ms` is what the host takes to queue the
layer. All other times in ms, of graph replays with a cold L2, medians of 20. `k_pe_*`: other ways
to assemble k_pe.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from attention_case import DEVICE, DTYPE, Bench, timed_graph_ms

from kernels.kv_gather import kv_gather
from kernels.merge_lse import merge_lse_
from radix_mla.attention.two_stage import _broadcast, decompress


def copy_ms(num_bytes: int) -> float:
    """A copy that reads and writes `num_bytes` in all."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return timed_graph_ms(lambda: target.copy_(source))


def host_ms(call: object, runs: int = 10) -> float:
    assert callable(call)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(runs):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / runs * 1e3


def measure(heads: int, num_new: int, num_context: int, backend: str) -> dict[str, object]:
    bench = Bench(heads, backend=backend)
    batch = bench.batch([(num_new, num_context)])
    ctx = bench.context(batch, "non_absorbed")
    whole = bench.attend(ctx)
    plan = ctx.plan.non_absorbed
    assert plan is not None
    assert len(plan.passes) == 1, "this bench takes one context chunk apart"
    part, space, weights = plan.passes[0], bench.workspace, bench.weights
    rows = space.rows(num_context)
    nope = bench.dims.nope
    q = torch.randn(num_new, heads, bench.dims.qk, device=DEVICE, dtype=DTYPE)
    k, v = space.keys(num_context), space.values(num_context)
    c_kv = rows[:, : bench.dims.latent].expand(heads, num_context, -1)
    w_uk, w_uv = weights
    at_new = (space.keys(num_new), space.values(num_new))
    run = bench.backend.run_mha

    def gemms() -> None:
        torch.bmm(c_kv, w_uk.transpose(1, 2), out=k[..., :nope])
        torch.bmm(c_kv, w_uv.transpose(1, 2), out=v[..., : bench.dims.value])

    whole()
    o, lse = run(plan.new, q, *at_new, bench.scale)
    o_2, lse_2 = run(part.work, q, k, v, bench.scale)
    k_pe_bytes = (heads + 1) * num_context * bench.dims.rope * 2
    times = {
        "whole": timed_graph_ms(whole),
        "gather": timed_graph_ms(lambda: kv_gather(bench.pool.layer(0), part.slots, rows)),
        "gemms": timed_graph_ms(gemms),
        "k_pe": timed_graph_ms(lambda: _broadcast(k[..., nope:], rows[:, bench.dims.latent :])),
        "decompress": timed_graph_ms(lambda: decompress(space, rows, weights)),
        "attend_new": timed_graph_ms(lambda: run(plan.new, q, *at_new, bench.scale)),
        "attend_context": timed_graph_ms(lambda: run(part.work, q, k, v, bench.scale)),
        "merge": timed_graph_ms(lambda: merge_lse_(o, lse, o_2, lse_2)),
        "gather_as_copy": copy_ms(2 * num_context * bench.dims.row * 2),
        "k_pe_as_copy": copy_ms(k_pe_bytes),
    }
    floor = sum(
        times[name]
        for name in ("attend_new", "attend_context", "gemms", "gather_as_copy", "k_pe_as_copy")
    )
    gemm_flops = 2 * num_context * 512 * heads * (nope + bench.dims.value)
    return {
        "heads": heads,
        "new": num_new,
        "context": num_context,
        "backend": bench.backend.name,
        "ratio": round(times["whole"] / floor, 3),
        "gemm_tflops": round(gemm_flops / times["gemms"] / 1e9),
        "attend_tflops": round(num_new * num_context * heads * 640 / times["attend_context"] / 1e9),
        "host_ms": round(host_ms(whole), 3),
        "workspace_mb": space.num_bytes >> 20,
        **{f"{name}_ms": round(ms, 4) for name, ms in times.items()},
        **variants(bench, k, rows),
    }


def variants(bench: Bench, k: torch.Tensor, rows: torch.Tensor) -> dict[str, object]:
    """Other ways to do a part, each on its own; what fails says so."""
    dims, found = bench.dims, {}
    pe, latent = k[..., dims.nope :], dims.latent
    attempts = {
        "k_pe_plain": lambda: pe.copy_(rows[:, latent:]),
        "k_pe_16_bytes": lambda: pe.view(torch.complex128).copy_(
            rows[:, latent:].view(torch.complex128)
        ),
    }
    for name, call in attempts.items():
        try:
            found[f"{name}_ms"] = round(timed_graph_ms(call), 4)
        except Exception as error:
            found[f"{name}_ms"] = f"{type(error).__name__}: {error}"[:200]
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    for heads in options.heads:
        result = measure(heads, options.new, options.context, options.backend)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
