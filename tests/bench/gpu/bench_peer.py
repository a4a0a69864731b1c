"""The cases of vLLM 0.26.0 on one H200 (DeepSeek-V2-Lite shape, unit-scale weights), with ours.

    PYTHONPATH=. python tests/bench/gpu/bench_peer.py [--only first,decode,shared] [--profile FILE]

The offline engine, prompts of random ids 1000..90000, greedy, `ignore_eos`. First token: medians of
5 fresh prefixes; decode: 1,024-token prompts, all warm, 256 out, the one-token prefill of the warm
prompts counted in, and the net step beside it; shared: 128 prompts on 8 prefixes, 64 out, nothing
cached before. One JSON line a case; `ratio` > 1: faster than vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radix_mla import LLM

SHAPE = Path(__file__).parents[3] / "configs" / "shapes" / "deepseek-v2-lite"
# (prefix, new): milliseconds cold, warm
FIRST = {(2048, 128): (76.8, 19.3), (8192, 256): (119.0, 22.7), (32_768, 256): (625.0, 41.9)}
DECODE = {1: 294.5, 16: 1868.0, 64: 4237.0, 256: 17_965.0}  # tokens a second
SHARED_S = 2.43
REPEATS = 5


class Bench:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.random = np.random.default_rng(0)

    def tokens(self, num: int) -> list[int]:
        ids: list[int] = self.random.integers(1000, 90_000, num).tolist()
        return ids

    def run(self, prompts: list[list[int]], output: int) -> tuple[float, list[int]]:
        """(seconds, cached tokens of each)."""
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, max_tokens=output, temperature=0.0, ignore_eos=True)
        seconds = time.perf_counter() - begin
        assert all(len(each.completions[0].token_ids) == output for each in outputs), outputs[0]
        return seconds, [each.num_cached_tokens for each in outputs]

    def first(self, prefix: int, new: int) -> None:
        cold_s, warm_s, cached = [], [], 0
        for turn in range(REPEATS + 1):  # the first one warms up
            head = self.tokens(prefix)
            cold, _ = self.run([head + self.tokens(new)], 1)
            warm, hits = self.run([head + self.tokens(new)], 1)
            cached = hits[0]
            if turn:
                cold_s.append(cold)
                warm_s.append(warm)
        assert cached == prefix, cached
        for kind, seconds, peer in zip(
            ("cold", "warm"), (cold_s, warm_s), FIRST[prefix, new], strict=True
        ):
            ms = 1e3 * statistics.median(seconds)
            report(case=f"first token, {kind}", prefix=prefix, new=new, ms=ms, ratio=peer / ms)

    def decode(self, batch: int, output: int = 256) -> None:
        prompts = [self.tokens(1024) for _ in range(batch)]
        self.run(prompts, 8)
        self.run(prompts, 8)
        first = statistics.median(self.run(prompts, 1)[0] for _ in range(3))
        engine = self.llm.engine
        before = engine.stats().num_steps, engine.stats().step_s, engine.stats().step_host_s
        whole = statistics.median(self.run(prompts, output)[0] for _ in range(3))
        stats = engine.stats()
        steps = stats.num_steps - before[0]
        rate = batch * output / whole
        report(
            case="decode",
            batch=batch,
            tokens_per_s=rate,
            ms_a_token=1e3 * whole / output,
            net_step_ms=1e3 * (whole - first) / (output - 1),
            step_ms=1e3 * (stats.step_s - before[1]) / steps,
            host_ms=1e3 * (stats.step_host_s - before[2]) / steps,
            ratio=rate / DECODE[batch],
        )

    def shared(self) -> None:
        seconds = []
        for _ in range(3):
            heads = [self.tokens(4096) for _ in range(8)]
            prompts = [heads[i % 8] + self.tokens(256) for i in range(128)]
            seconds.append(self.run(prompts, 64)[0])
        whole = statistics.median(seconds)
        rate = 128 * 4352 / whole
        report(case="shared", seconds=whole, prompt_tokens_per_s=rate, ratio=SHARED_S / whole)

    def long_shared(self) -> None:
        """Eight streams on one prefix of 32k: what the shared pass is for."""
        head = self.tokens(32_768)
        self.run([head], 1)
        prompts = [head + self.tokens(16) for _ in range(8)]
        self.run(prompts, 4)
        first = self.run(prompts, 1)[0]
        whole = self.run(prompts, 64)[0]
        report(case="8 on one 32k prefix", net_step_ms=1e3 * (whole - first) / 63)


def report(**fields: Any) -> None:
    short = {k: round(v, 3) if isinstance(v, float) else v for k, v in fields.items()}
    print(json.dumps(short), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="first,decode,shared")
    parser.add_argument("--model", default=str(SHAPE))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--profile", type=Path, help="a table of the decode steps' kernels")
    options = parser.parse_args()
    begin = time.perf_counter()
    llm = LLM(
        options.model,
        load_format="dummy",
        attention_backend=options.backend,
        max_num_batched_tokens=8192,
    )
    decisions = llm.info["decisions"]
    report(case="start", seconds=time.perf_counter() - begin, decisions=decisions)
    bench = Bench(llm)
    for name in options.only.split(","):
        try:
            if name == "first":
                for prefix, new in FIRST:
                    bench.first(prefix, new)
            elif name == "decode":
                for batch in DECODE:
                    bench.decode(batch)
            elif name == "shared":
                bench.shared()
            elif name == "long":
                bench.long_shared()
        except Exception as error:
            report(case=name, error=f"{type(error).__name__}: {error}")
    if options.profile:
        write_profile(bench, options.profile)
    llm.close()


def write_profile(bench: Bench, path: Path) -> None:
    """Kernels of decode steps at batch 1 and 64, and of a warm first token."""
    parts = []
    prompts = {batch: [bench.tokens(1024) for _ in range(batch)] for batch in (1, 16, 256)}
    for batch, asked in prompts.items():
        bench.run(asked, 4)
        with torch.profiler.profile() as profile:
            bench.run(asked, 16)
        parts += [f"decode, batch {batch}, 16 tokens", table(profile)]
    head = bench.tokens(8192)
    for _ in range(2):
        bench.run([head + bench.tokens(256)], 1)
    with torch.profiler.profile() as profile:
        bench.run([head + bench.tokens(256)], 1)
    parts += ["256 new on 8,192 cached", table(profile)]
    path.write_text("\n".join(parts))


def table(profile: torch.profiler.profile) -> str:
    averages = profile.key_averages()
    return "\n".join(
        averages.table(sort_by=key, row_limit=28, max_name_column_width=70)
        for key in ("self_cuda_time_total", "self_cpu_time_total")
    )


if __name__ == "__main__":
    main()
