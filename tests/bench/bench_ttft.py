"""TTFT cold and warm over HTTP, and what the edge adds to the engine's step.

usage: bench_ttft.py [MODEL_DIR] [--prefix 1500] [--new 16] [--pairs 9] [--page-size 16]
Alternating pairs: a fresh random prefix (cold), then the same prefix with other new tokens (warm).
`edge_ms` is HTTP TTFT less the engine's time in the steps of that request. One JSON line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.server_process import DEMO, ServerProcess


def ttft(server: ServerProcess, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first event with a choice, and the cached tokens of the usage chunk."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.connect()
    start = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    reply = connection.getresponse()
    first, cached = 0.0, -1
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event["choices"] and not first:
            first = time.perf_counter() - start
        if event.get("usage"):
            cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    connection.close()
    return first, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(DEMO))
    parser.add_argument("--prefix", type=int, default=1500)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--page-size", type=int, default=16)
    args = parser.parse_args()
    rng = random.Random(0)
    cold, warm, edge = [], [], []
    with ServerProcess(
        args.model, "--page-size", str(args.page_size), "--kv-cache-tokens", "65536"
    ) as server:
        vocab = server.get("/model_info")["vocab_size"]

        def tokens(count: int) -> list[int]:
            return [rng.randrange(100, vocab - 100) for _ in range(count)]

        ttft(server, tokens(32))
        for _ in range(args.pairs):
            prefix = tokens(args.prefix)
            seconds, cached = ttft(server, prefix + tokens(args.new))
            assert cached == 0, cached
            cold.append(seconds)
            before = server.metrics().total("step_seconds_sum")
            seconds, cached = ttft(server, prefix + tokens(args.new))
            step = server.metrics().total("step_seconds_sum") - before
            assert cached == args.prefix, cached
            warm.append(seconds)
            edge.append(seconds - step)
        ready_s = server.ready_after_s
    print(
        json.dumps(
            {
                "bench": "ttft",
                "prefix": args.prefix,
                "new": args.new,
                "page_size": args.page_size,
                "cold_ms": round(statistics.median(cold) * 1e3, 2),
                "warm_ms": round(statistics.median(warm) * 1e3, 2),
                "ratio": round(statistics.median(cold) / statistics.median(warm), 1),
                "edge_ms": round(statistics.median(edge) * 1e3, 2),
                "start_to_ready_s": round(ready_s, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
