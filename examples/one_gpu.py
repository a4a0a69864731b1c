"""What a cached prefix saves on one GPU: first token cold, warm and partly warm; and decode.

    python examples/one_gpu.py              DeepSeek-V2-Lite shape, random weights; minutes
    python examples/one_gpu.py --small      a tiny model on the CPU; seconds

The engine runs in this process (`radix_mla.LLM`), no server. Prompts are random token ids from a
fixed seed; weights are random at unit scale, so the texts mean nothing and the times are real.
Progress goes to stderr, one JSON object to stdout (and to --output FILE).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from radix_mla import LLM

SHAPE = Path(__file__).parents[1] / "configs" / "shapes" / "deepseek-v2-lite"
# Overrides of its config.json for a machine without a GPU.
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "vocab_size": 1024,
}


@dataclass(frozen=True)
class Workload:
    """Prefix and new tokens of the prompts; decode: batch sizes, prompt and output tokens."""

    prefixes: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    decode_prompt: int
    decode_output: int
    repeats: int


GPU = Workload(((2048, 128), (8192, 256), (32_768, 256)), (1, 16, 64, 256), 1024, 128, 5)
CPU = Workload(((1024, 16),), (1, 4), 64, 16, 3)


class Bench:
    """An engine and a stream of random tokens."""

    def __init__(self, llm: LLM, repeats: int) -> None:
        self._llm = llm
        self._repeats = repeats
        self._random = np.random.default_rng(0)
        self._vocab = int(llm.info["vocab_size"])

    def tokens(self, num: int) -> list[int]:
        ids: list[int] = self._random.integers(self._vocab // 100, self._vocab, num).tolist()
        return ids

    def first_token(self, prefix: int, new: int) -> dict[str, Any]:
        """Medians over fresh prefixes: nothing cached, the prefix cached, half of it cached."""
        times: dict[str, list[float]] = {"cold": [], "warm": [], "partial": []}
        cached: dict[str, int] = {}
        for turn in range(self._repeats + 1):  # the first one compiles and allocates
            head = self.tokens(prefix)
            prompts = {
                "cold": head + self.tokens(new),
                "warm": head + self.tokens(new),
                "partial": head[: prefix // 2] + self.tokens(prefix - prefix // 2 + new),
            }
            for kind, prompt in prompts.items():
                seconds, hits, _ = self._run([prompt], 1)
                cached[kind] = hits[0]
                if turn:
                    times[kind].append(seconds)
        return {
            "prefix": prefix,
            "new": new,
            **{f"{kind}_ms": round(1e3 * statistics.median(t), 3) for kind, t in times.items()},
            "cached_tokens": cached,
        }

    def decode(self, batch: int, prompt: int, output: int) -> dict[str, Any]:
        """Step time from the difference of a long and a one-token answer to warm prompts."""
        prompts = [self.tokens(prompt) for _ in range(batch)]
        self._run(prompts, output)  # warms prompts, kernels and graphs
        first = statistics.median(self._run(prompts, 1)[0] for _ in range(self._repeats))
        whole = statistics.median(self._run(prompts, output)[0] for _ in range(self._repeats))
        step_s = (whole - first) / (output - 1)
        return {
            "batch": batch,
            "prompt": prompt,
            "output": output,
            "step_ms": round(1e3 * step_s, 3),
            "tokens_per_s": round(batch * output / whole, 1),
        }

    def _run(self, prompts: list[list[int]], output: int) -> tuple[float, list[int], int]:
        """(seconds, cached tokens of each prompt, tokens out)."""
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, max_tokens=output, temperature=0.0, ignore_eos=True)
        seconds = time.perf_counter() - begin
        num = sum(len(each.completions[0].token_ids) for each in outputs)
        if num != output * len(prompts):
            raise RuntimeError(f"{num} tokens came out, not {output * len(prompts)}: {outputs[0]}")
        return seconds, [each.num_cached_tokens for each in outputs], num


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(SHAPE), help="folder with a config.json")
    parser.add_argument("--weights", choices=("dummy", "auto"), default="dummy")
    parser.add_argument("--small", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--output", type=Path, help="file for the JSON too")
    options = parser.parse_args(arguments)
    knobs: dict[str, Any] = {"load_format": options.weights}
    if options.small:
        knobs |= {"device": "cpu", "hf_overrides": SMALL, "kv_cache_tokens": 8192}
        knobs |= {"num_threads": 1, "workspace_tokens": 2048}
    workload = CPU if options.small else GPU

    begin = time.perf_counter()
    with LLM(options.model, progress=_show, **knobs) as llm:
        result: dict[str, Any] = {
            "model": llm.info["model"],
            "device": llm.info["config"]["device"],
            "num_params": llm.info["num_params"],
            "kv_tokens": llm.info["kv_tokens"],
            "decisions": llm.info["decisions"],
            "start_s": round(time.perf_counter() - begin, 2),
            "first_token": [],
            "decode": [],
        }
        bench = Bench(llm, workload.repeats)
        for prefix, new in workload.prefixes:
            result["first_token"].append(bench.first_token(prefix, new))
            _say(result["first_token"][-1])
        for batch in workload.batches:
            result["decode"].append(
                bench.decode(batch, workload.decode_prompt, workload.decode_output)
            )
            _say(result["decode"][-1])
    result["total_s"] = round(time.perf_counter() - begin, 2)
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return result


def _show(stage: str, done: int, total: int) -> None:
    if done == total:
        _say(f"{stage}: done")


def _say(what: object) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
