"""Engine steps of a model, without scheduler and HTTP: one JSON line a case.

usage: bench_step.py [--model FOLDER] [--dummy] [--threads 2] [--runs 7] [--profile CASE]
prefill   cold tokens; `gemm_share`: model FLOPs (2 · active parameters a token + 640 · H a causal
          (query, key) pair and layer, at the true head dims) over the step's time, as a share of
          what a 2048³ product reaches, timed in turn with the steps. Minima of `runs`.
extend    16 new tokens on a cached prefix
decode    one token of each of `batch` sequences
`cpu_ms` is the process's CPU time over all threads: on a shared machine it is the steadier figure.
Without --model it is the bundled one; --dummy: random weights of the config's shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from radix_mla.config import EngineConfig, Hardware
from radix_mla.engine.model_runner import ModelRunner, make_pool
from radix_mla.engine.step import Chunk, StepPlan
from radix_mla.models.checkpoint import load_model
from radix_mla.models.hf_config import ModelConfig

PAGE = 16
DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"


def make_runner(
    folder: Path, model: ModelConfig, *, dummy: bool, threads: int, kv_tokens: int
) -> ModelRunner:
    config = EngineConfig(
        model=str(folder),
        page_size=PAGE,
        kv_cache_tokens=kv_tokens,
        load_format="dummy" if dummy else "auto",
    ).resolve(model, Hardware("cpu", 1 << 34, threads, native_bf16=False))
    weights = load_model(
        folder, model, dtype=torch.float32, device="cpu", load_format=config.load_format
    )
    return ModelRunner(weights, make_pool(model, config), config)


def model_flops(model: ModelConfig, num_new: int, num_context: int) -> float:
    """2 · active parameters a token, 2 · (P + R + V) a causal pair and head, one lm_head row."""
    pairs = num_new * num_context + num_new * (num_new + 1) / 2
    heads = model.num_attention_heads * model.num_hidden_layers
    attention = pairs * heads * 2 * (model.qk_head_dim + model.v_head_dim)
    head = 2 * model.vocab_size * model.hidden_size
    return 2.0 * model.active_params * num_new + attention + head


def step(
    sizes: list[tuple[int, int]], vocab: int, *, decode: bool = False, shared: bool = False
) -> StepPlan:
    """(new, context) of each sequence, on consecutive pages; one logits row each.

    `shared`: all stand on the full pages of the first one's context.
    """
    rng, page, chunks = np.random.default_rng(0), 0, []
    for new, context in sizes:
        pages = -(-(new + context) // PAGE)
        table = np.arange(page, page + pages, dtype=np.int32)
        if shared:
            table[: context // PAGE] = np.arange(context // PAGE)
        tokens = rng.integers(0, vocab, new).astype(np.int32)
        chunks.append(Chunk(tokens, context, table, 1, is_decode=decode))
        page += pages
    return StepPlan(step_id=1, chunks=chunks, copies=[])


def least(call: Callable[[], object], runs: int) -> tuple[float, float]:
    """(least wall seconds, least CPU seconds) after a warm-up."""
    call()
    wall, cpu = [], []
    for _ in range(runs):
        start, used = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return min(wall), min(cpu)


def report(case: str, wall: float, cpu: float, **more: object) -> None:
    result = {"case": case, "ms": round(wall * 1e3, 3), "cpu_ms": round(cpu * 1e3, 3)}
    print(json.dumps(result | more), flush=True)


def prefill(runner: ModelRunner, model: ModelConfig, threads: int, runs: int) -> None:
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    out = torch.empty(2048, 2048)
    for num_new in (512, 1500, 2000):
        plan = step([(num_new, 0)], model.vocab_size)
        gemm, steps = [], []
        for _ in range(runs):
            gemm.append(least(lambda: torch.mm(a, b, out=out), 1))
            steps.append(least(lambda p=plan: runner.execute(p), 1))
        (gemm_s, gemm_cpu), (wall, cpu) = (
            (min(s[0] for s in samples), min(s[1] for s in samples)) for samples in (gemm, steps)
        )
        flops = model_flops(model, num_new, 0)
        report(
            "prefill",
            wall,
            cpu,
            num_new=num_new,
            threads=threads,
            gflops=round(flops / wall / 1e9, 1),
            gemm_gflops=round(2 * 2048**3 / gemm_s / 1e9, 1),
            gemm_share=round(flops / wall * gemm_s / (2 * 2048**3), 3),
            gemm_share_cpu=round(flops / cpu * gemm_cpu / (2 * 2048**3), 3),
        )


def extend(runner: ModelRunner, model: ModelConfig, threads: int, runs: int) -> None:
    for num_new, num_context in ((1, 2000), (16, 1500), (100, 2000)):
        plan = step([(num_new, num_context)], model.vocab_size)
        wall, cpu = least(lambda p=plan: runner.execute(p), runs)
        report("extend", wall, cpu, num_new=num_new, num_context=num_context, threads=threads)


def decode(runner: ModelRunner, model: ModelConfig, threads: int, runs: int) -> None:
    cases = [(batch, context, False) for batch in (1, 8, 64) for context in (100, 2000)]
    for batch, context, shared in [*cases, (8, 2000, True), (64, 2000, True)]:
        plan = step([(1, context)] * batch, model.vocab_size, decode=True, shared=shared)
        wall, cpu = least(lambda p=plan: runner.execute(p), runs)
        more = {"batch": batch, "num_context": context, "shared": shared, "threads": threads}
        report("decode", wall, cpu, **more)


CASES = {"prefill": prefill, "extend": extend, "decode": decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="a model folder")
    parser.add_argument("--dummy", action="store_true", help="random weights of its config")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--profile", choices=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = ModelConfig.from_dir(options.model)
    runner = make_runner(
        options.model, model, dummy=options.dummy, threads=options.threads, kv_tokens=64 * 2_032
    )
    for layer in range(runner.pool.num_layers):
        runner.pool.layer(layer).normal_()
    if options.profile is None:
        for name in options.only.split(","):
            CASES[name](runner, model, options.threads, options.runs)
        return
    CASES[options.profile](runner, model, options.threads, 1)  # warm
    with torch.profiler.profile() as profile:
        CASES[options.profile](runner, model, options.threads, options.runs)
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


if __name__ == "__main__":
    main()
