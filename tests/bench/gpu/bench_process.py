"""Decode through the engine process (commands and events over ZeroMQ, no HTTP): vLLM's cases.

    PYTHONPATH=.:tests python tests/bench/gpu/bench_process.py [--batches 1 16 64 256]

The cases of bench_peer.py: 1,024-token prompts, all warm, 256 out, greedy. One JSON line a case;
`ratio` > 1: faster than vLLM 0.26.0.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_peer import DECODE, SHAPE, report

from radix_mla.config import EngineConfig
from radix_mla.engine.ipc import SequenceOutput
from radix_mla.engine.process import EngineHandle
from radix_mla.request import Request, SamplingParams
from server.engine_client import ChannelEngineClient
from server.zmq_channel import ZmqChannel


class Bench:
    def __init__(self, client: ChannelEngineClient) -> None:
        self._client = client
        self._random = np.random.default_rng(0)
        self._num_runs = 0

    def prompts(self, num: int) -> list[bytes]:
        drawn = self._random.integers(1000, 90_000, (num, 1024), dtype="<i4")
        return [prompt.tobytes() for prompt in drawn]

    async def run(self, prompts: list[bytes], output: int) -> float:
        """Seconds until the last token of the last answer has arrived."""
        self._num_runs += 1
        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        requests = [
            Request(request_id=f"{self._num_runs}-{i}", prompt=prompt, params=params)
            for i, prompt in enumerate(prompts)
        ]
        begin = time.perf_counter()
        stream = self._client.submit(requests)
        running, tokens = len(requests), 0
        while running:
            for event in await stream.receive():
                if isinstance(event, SequenceOutput):
                    tokens += len(event.token_ids)
                    if event.finish_reason:
                        assert event.error is None, event
                        self._client.forget(event.request_id)
                        running -= 1
        seconds = time.perf_counter() - begin
        assert tokens == output * len(prompts), f"{tokens} tokens came"
        return seconds

    async def decode(self, batch: int, output: int = 256) -> None:
        prompts = self.prompts(batch)
        for _ in range(2):
            await self.run(prompts, 8)
        first = statistics.median([await self.run(prompts, 1) for _ in range(3)])
        whole = statistics.median([await self.run(prompts, output) for _ in range(3)])
        rate = batch * output / whole
        report(
            case="decode through the engine process",
            batch=batch,
            tokens_per_s=rate,
            net_step_ms=1e3 * (whole - first) / (output - 1),
            ratio=rate / DECODE[batch],
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", nargs="*", type=int, default=list(DECODE))
    parser.add_argument("--model", default=str(SHAPE))
    options = parser.parse_args()
    handle = EngineHandle.start(EngineConfig(model=options.model, load_format="dummy"))
    try:
        begin = time.perf_counter()
        info = handle.wait_ready()
        report(case="start", seconds=time.perf_counter() - begin)
        channel = ZmqChannel(handle.command_address, handle.event_address)
        client = ChannelEngineClient(channel, handle, info)
        await client.start()
        bench = Bench(client)
        for batch in options.batches:
            await bench.decode(batch)
        await client.close()
    finally:
        handle.close()


if __name__ == "__main__":
    asyncio.run(main())
