"""Timing of GPU work for the kernel benches: graph replays, L2 cold, median of 20."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import torch

_FLUSH_BYTES = 1 << 29  # many times the L2, and long enough that the host stays ahead


def timed_ms(call: Callable[[], object], runs: int = 20) -> float:
    """Milliseconds of `call` as a CUDA graph (eagerly if it cannot be captured)."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
        replay: Callable[[], object] = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
        replay = call
    replay()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    pairs = []
    for _ in range(runs):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def report(**fields: object) -> None:
    """One JSON line; floats to four places."""
    short = {k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}
    print(json.dumps(short), flush=True)
