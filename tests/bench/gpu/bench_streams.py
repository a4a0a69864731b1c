"""256 concurrent streams through the server on a GPU, against the offline decode rate.

    PYTHONPATH=. python tests/bench/gpu/bench_streams.py [--streams 256] [--clients 4]

Starts `radix-mla serve` on the DeepSeek-V2-Lite shape with dummy weights, sends every prompt (1,024
random ids) once, then all of them at once as streams, from `--clients` processes. `tokens_per_s`:
tokens out over the time from the first request to the last chunk. `--offline RATE`: what
bench_peer.py printed for this batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = Path(__file__).parents[3] / "configs" / "shapes" / "deepseek-v2-lite"
PORT = 8177


async def stream(session: Any, prompt: list[int], output: int) -> tuple[int, float, float]:
    """(tokens, time of the first chunk, of the last)."""
    body = {
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = 0.0
    tokens = 0
    async with session.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                last = time.time()
                first = first or last
                if b'"usage":{' in line:
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return tokens, first, last


def client(seed: int, streams: int, output: int, gate: Any, out: Any) -> None:
    import aiohttp

    random = np.random.default_rng(seed)
    prompts = [random.integers(1000, 90_000, 1024).tolist() for _ in range(streams)]

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(stream(session, prompt, 4) for prompt in prompts))
            gate.wait()
            begin = time.time()
            results = await asyncio.gather(*(stream(session, p, output) for p in prompts))
            out.put((begin, results))

    asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--offline", type=float, help="tokens a second to compare with")
    parser.add_argument("--model", default=str(SHAPE))
    parser.add_argument("arguments", nargs="*", help="more arguments of `serve`")
    options = parser.parse_args()
    command = [sys.executable, "-m", "server", "serve", options.model, "--load-format", "dummy"]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [*command, "--port", str(PORT), *options.arguments], stdout=log, stderr=log
        )
        try:
            wait_ready(server, log)
            measure(options)
        finally:
            server.terminate()
            server.wait(30)


def wait_ready(server: subprocess.Popen[bytes], log: Any) -> None:
    begin = time.time()
    while time.time() - begin < 200:
        if server.poll() is not None:
            log.seek(0)
            raise SystemExit(f"the server ended: {log.read().decode()[-3000:]}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=2)
            break
        except OSError:
            time.sleep(0.2)
    print(json.dumps({"case": "start", "seconds": round(time.time() - begin, 2)}), flush=True)


def measure(options: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    gate, out = context.Barrier(options.clients), context.Queue()
    share = options.streams // options.clients
    clients = [
        context.Process(target=client, args=(seed, share, options.output, gate, out))
        for seed in range(options.clients)
    ]
    for process in clients:
        process.start()
    results = [out.get(timeout=300) for _ in clients]
    for process in clients:
        process.join()
    begin = min(started for started, _ in results)
    every = [entry for _, entries in results for entry in entries]
    end = max(last for _, _, last in every)
    tokens = sum(count for count, _, _ in every)
    first = max(first for _, first, _ in every)
    rate = tokens / (end - begin)
    line = {
        "case": "http streams",
        "streams": options.streams,
        "clients": options.clients,
        "tokens": tokens,
        "tokens_per_s": round(rate, 1),
        "last_first_token_s": round(first - begin, 3),
        "decode_tokens_per_s": round(tokens / (end - first), 1),
    }
    if options.offline:
        line["share_of_offline"] = round(rate / options.offline, 3)
    print(json.dumps(line), flush=True)
    for name in ("step_host_seconds", "api_loop_lag_seconds"):
        print(metric(name), flush=True)


def metric(name: str) -> str:
    text = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics").read().decode()
    lines = [
        x for x in text.splitlines() if x.startswith(f"radix_mla_{name}") and "bucket" not in x
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
