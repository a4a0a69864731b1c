r"""131,072 tokens in one prompt at 128 heads (DeepSeek-V3, 4 layers, FP8): time and memory.

    PYTHONPATH=. python tests/bench/gpu/bench_long_prompt.py

`transient_gib` is what the prompt needed beyond weights, pool, workspace and graphs; `planned_gib`
what the engine set aside for a step when it sized the pool. Prints the decode step too.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import torch

from radix_mla import LLM

SHAPE = Path(__file__).parents[3] / "configs" / "shapes" / "deepseek-v3"
LENGTH = 131_072


def main() -> None:
    begin = time.perf_counter()
    llm = LLM(
        SHAPE,
        load_format="dummy",
        hf_overrides={"num_hidden_layers": 4},
        max_num_batched_tokens=8192,
    )
    start_s = time.perf_counter() - begin
    random = np.random.default_rng(0)
    prompt = random.integers(1000, 90_000, LENGTH).tolist()
    llm.generate([prompt[:9000]], max_tokens=4, temperature=0.0, ignore_eos=True)  # compiles
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    llm.generate([prompt], max_tokens=1, temperature=0.0, ignore_eos=True)
    prefill_s = time.perf_counter() - begin
    transient = torch.cuda.max_memory_allocated() - before
    again = []
    for num in (1, 33):
        begin = time.perf_counter()
        llm.generate([prompt], max_tokens=num, temperature=0.0, ignore_eos=True)
        again.append(time.perf_counter() - begin)
    decisions = " ".join(llm.info["decisions"])
    planned = re.search(r"a step takes ([\d.]+)", decisions)
    line = {
        "case": "131,072-token prompt, 128 heads, 4 layers",
        "start_s": round(start_s, 1),
        "prefill_s": round(prefill_s, 3),
        "decode_step_ms": round(1e3 * (again[1] - again[0]) / 32, 3),
        "workspace_gib": round(llm.info["workspace_bytes"] / 2**30, 3),
        "transient_gib": round(transient / 2**30, 3),
        "planned_gib": float(planned.group(1)) if planned else None,
        "decisions": decisions,
    }
    print(json.dumps(line), flush=True)
    llm.close()


if __name__ == "__main__":
    main()
