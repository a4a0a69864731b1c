r"""Loads dummy weights of a shape straight on the GPU and runs steps of a few sizes.

    PYTHONPATH=. python tests/bench/gpu/bench_model.py configs/shapes/deepseek-v2-lite
    PYTHONPATH=. python tests/bench/gpu/bench_model.py configs/shapes/deepseek-v3 \
        '{"num_hidden_layers": 4, "first_k_dense_replace": 1}'

One JSON line for loading, one a step: wall clock around the step, its device time by events, in
all and for each layer (the head is counted in), and the floor: the larger of its bytes at the copy
rate and its FLOPs at the rate of large products. Steps run as the engine runs them, small ones as
CUDA graphs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radix_mla.config import EngineConfig, detect_hardware
from radix_mla.engine.model_runner import DTYPES, ModelRunner, make_pool
from radix_mla.engine.step import Chunk, StepPlan
from radix_mla.models.checkpoint import load_model
from radix_mla.models.hf_config import ModelConfig

DEVICE = "cuda:0"
STEPS = ((1, 1024), (16, 1024), (64, 1024), (256, 1024))  # decode: sequences, context
PREFILLS = ((2048, 0), (256, 8192))  # new, context
REPEATS = 20
# What one H200 reaches: a copy, read and written; 8,192 cubed products in bf16, twice that in FP8.
BYTES_PER_S, BF16_FLOPS, FP8_FLOPS = 4.25e12, 766e12, 1532e12


def main() -> None:
    folder = Path(sys.argv[1])
    overrides: dict[str, Any] = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    model_config = ModelConfig.from_dir(folder, overrides)
    torch.cuda.init()
    begin = time.perf_counter()
    model = load_model(
        folder, model_config, dtype=torch.bfloat16, device=DEVICE, load_format="dummy"
    )
    torch.cuda.synchronize()
    report(
        case="load",
        shape=folder.name,
        seconds=round(time.perf_counter() - begin, 2),
        gib=round(torch.cuda.memory_allocated() / 2**30, 2),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
        params=model_config.num_params,
    )
    config = EngineConfig(model="", device=DEVICE, kv_cache_tokens=1 << 19).resolve(
        model_config, detect_hardware(DEVICE)
    )
    report(case="config", decisions=config.decisions)
    runner = ModelRunner(model, make_pool(model_config, config), config)
    assert DTYPES[config.dtype] == torch.bfloat16
    begin = time.perf_counter()
    runner.warm_up()
    report(case="warm-up", seconds=round(time.perf_counter() - begin, 2))
    for num_seqs, context in STEPS:
        measure(runner, model_config, num_seqs, 1, context)
    for new, context in PREFILLS:
        measure(runner, model_config, 1, new, context)


def floor_ms(model: ModelConfig, num_seqs: int, new: int, context: int) -> dict[str, float]:
    """Milliseconds that a step's bytes and FLOPs take at least.

    Bytes: weights that are read, experts as often as random routing hits one, and KV rows. FLOPs:
    linear layers, and attention in its cheaper form (absorbed for decode).
    """
    tokens, layers, fp8 = num_seqs * new, model.num_hidden_layers, model.fp8
    hidden, heads, latent = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    kv_b = latent * heads * (model.qk_nope_head_dim + model.v_head_dim)  # bf16: absorbed
    head = hidden * model.vocab_size
    expert = 3 * hidden * model.moe_intermediate_size
    num_moe = sum(model.is_moe_layer(i) for i in range(layers))
    chosen = num_moe * model.num_experts_per_tok
    missed = (1 - model.num_experts_per_tok / max(model.n_routed_experts, 1)) ** tokens
    touched = num_moe * model.n_routed_experts * (1 - missed)
    weights = model.active_params + (touched - chosen) * expert - layers * kv_b
    num_bytes = weights * (1 if fp8 else 2) + 2 * layers * kv_b + 2 * head
    num_bytes += num_seqs * context * model.kv_row_width * 2 * layers
    pairs = num_seqs * (new * context + new * (new + 1) // 2)
    if new == 1:
        attention = 2 * (2 * latent + model.qk_rope_head_dim) * heads * pairs * layers
    else:
        attention = 2 * (model.qk_head_dim + model.v_head_dim) * heads * pairs * layers
        attention += 2 * kv_b * num_seqs * context * layers
    linear = 2 * model.active_params * tokens
    flops_s = linear / (FP8_FLOPS if fp8 else BF16_FLOPS)
    flops_s += (attention + 2 * head * num_seqs) / BF16_FLOPS
    return {"bytes": 1e3 * num_bytes / BYTES_PER_S, "flops": 1e3 * flops_s}


def measure(runner: ModelRunner, model: ModelConfig, num_seqs: int, new: int, context: int) -> None:
    """Sequences of their own pages each, random tokens; rows of the context are whatever is there,
    made finite once.
    """
    size = runner.pool.page_size
    pages = -(-(context + new) // size)
    for layer in range(runner.pool.num_layers):
        runner.pool.layer(layer)[: num_seqs * pages * size].normal_()
    random, vocab = np.random.default_rng(0), 90_000

    def step(number: int) -> StepPlan:
        chunks = [
            Chunk(
                random.integers(vocab // 100, vocab, new).astype(np.int32),
                context,
                np.arange(i * pages, (i + 1) * pages, dtype=np.int32),
                1,
                new == 1,
            )
            for i in range(num_seqs)
        ]
        return StepPlan(number, chunks, [])

    floors = floor_ms(model, num_seqs, new, context)
    walls, devices = [], []
    for number in range(3 + REPEATS):
        plan = step(number)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = runner.execute(plan)
        torch.cuda.synchronize()
        if number >= 3:
            walls.append(time.perf_counter() - begin)
            devices.append(result.forward_s)
    report(
        case="decode" if new == 1 else "prefill",
        sequences=num_seqs,
        new=new,
        context=context,
        wall_ms=round(1e3 * statistics.median(walls), 3),
        device_ms=round(1e3 * statistics.median(devices), 3),
        layer_ms=round(1e3 * statistics.median(devices) / runner.pool.num_layers, 4),
        floor_ms={name: round(ms, 3) for name, ms in floors.items()},
        of_floor=round(1e3 * statistics.median(devices) / max(floors.values()), 2),
        finite=bool(np.all(result.rows_finite)),
    )


def report(**line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
