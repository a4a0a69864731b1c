"""A real uvicorn on loopback: the openai client, X06 header limits, T09, drain."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import uvicorn
from support.fake_engine import FakeEngine, Script
from support.http_app import Harness

from radix_mla.text.tokenizer import Tokenizer
from server.draining import DrainingServer
from server.limits import MAX_HEADER_BYTES, MAX_HEADERS
from server.serve import uvicorn_config
from server.service import Service

MESSAGES: Any = [{"role": "user", "content": "hi"}]


class _Server(DrainingServer):
    """Says when it has started."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config, service)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()


class Running:
    """A harness behind a socket."""

    def __init__(
        self, harness: Harness, server: DrainingServer, task: asyncio.Task[None], port: int
    ) -> None:
        self.harness = harness
        self.server = server
        self.task = task
        self.port = port
        self.client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0
        )

    async def raw(self, data: bytes) -> bytes:
        """Sends bytes, reads until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(5):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


@asynccontextmanager
async def _serve(harness: Harness) -> AsyncIterator[Running]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn_config(harness.app, harness.service.settings)
    server = _Server(config, harness.service)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await server.has_started.wait()
    running = Running(harness, server, task, listener.getsockname()[1])
    try:
        yield running
    finally:
        await running.client.close()
        server.should_exit = True
        async with asyncio.timeout(10):
            await task


def _says(tokenizer: Tokenizer, text: str = "A brave fox 🦊") -> FakeEngine:
    ids = [*tokenizer.encode(text, add_special_tokens=False), 1]
    return FakeEngine(lambda request, index: Script(ids, "stop", 1, cached=2))


async def test_the_openai_client(tokenizer: Tokenizer) -> None:
    async with _serve(Harness(_says(tokenizer), tokenizer)) as running:
        client = running.client
        answer = await client.chat.completions.create(model="demo", messages=MESSAGES)
        assert answer.choices[0].message.content == "A brave fox 🦊"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 2
        assert answer._request_id == answer.id
        stream = await client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == "A brave fox 🦊"
        assert chunks[-1].usage is not None
        completion = await client.completions.create(
            model="demo", prompt=["a", "b"], logprobs=2, n=2, max_tokens=30
        )
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        assert [model.id async for model in client.models.list()] == ["demo", "demo-alias"]


async def test_a09_the_openai_clients_exceptions(tokenizer: Tokenizer) -> None:
    async with _serve(Harness(_says(tokenizer), tokenizer)) as running:
        create: Any = running.client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="gpt-9", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as overflow:
            await create(model="demo", messages=[{"role": "user", "content": "x" * 2000}])
        assert overflow.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model="demo", messages=MESSAGES, temperature=9)
        assert bad.value.param == "temperature"
        running.harness.engine.problem = "gone"
        with pytest.raises(openai.InternalServerError):
            await create(model="demo", messages=MESSAGES)


async def test_t08_the_openai_client_sees_the_error_of_a_stream(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script([70], error="x"))
    async with _serve(Harness(engine, tokenizer)) as running:
        stream = await running.client.chat.completions.create(
            model="demo", messages=MESSAGES, stream=True
        )
        with pytest.raises(openai.APIError, match="failed inside the engine"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [True, False])
async def test_t09_a_closed_socket_aborts(tokenizer: Tokenizer, stream: bool) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True))
    async with _serve(Harness(engine, tokenizer)) as running:
        body = json.dumps({"prompt": "a", "n": 4, "stream": stream}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(_post(body))
        await engine.submitted.wait()
        writer.close()
        async with asyncio.timeout(1):
            await engine.aborted.wait()
        assert await running.harness.metric("radix_mla_requests_running") == 0
        assert (
            await running.harness.metric("radix_mla_requests_finished_total", reason="abort") == 1
        )


@pytest.mark.parametrize("stream", [True, False])
async def test_t09_a_closed_socket_aborts_though_requests_wait_behind_on_it(
    tokenizer: Tokenizer, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True))
    async with _serve(Harness(engine, tokenizer)) as running:
        body = json.dumps({"prompt": "a", "stream": stream}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(_post(body) * 3)
        await engine.submitted.wait()
        writer.close()
        async with asyncio.timeout(1):
            await engine.aborted.wait()
        assert await running.harness.metric("radix_mla_requests_running") == 0
        assert len(engine.requests) == 1
    assert [record for record in caplog.records if record.exc_info] == []


async def test_x06_a_client_that_leaves_within_its_body_is_no_error_of_the_server(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with _serve(Harness(_says(tokenizer), tokenizer)) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(_post(b'{"prompt": "a"}')[:-5])
        await writer.drain()
        writer.close()
        answer = await running.client.completions.create(model="demo", prompt="a")
        assert answer.choices
    rejected = await running.harness.metric("radix_mla_rejections_total", reason="invalid_request")
    assert rejected == 1  # uvicorn has waited for the handler
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def _post(body: bytes, extra: bytes = b"") -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + extra + b"content-length: %d\r\n\r\n" % len(body) + body


async def test_x06_too_many_headers(tokenizer: Tokenizer) -> None:
    async with _serve(Harness(_says(tokenizer), tokenizer)) as running:
        extra = b"".join(b"x-%d: 1\r\n" % i for i in range(10_000))
        answer = await running.raw(_post(b'{"prompt":"a"}', extra))
        assert answer == b"" or answer.split(b" ")[1] in (b"400", b"431")
        few = (
            b"".join(b"x-%d: 1\r\n" % i for i in range(MAX_HEADERS - 10)) + b"connection: close\r\n"
        )
        assert b" 200 " in await running.raw(_post(b'{"prompt":"a"}', few))


async def test_x06_one_huge_header(tokenizer: Tokenizer) -> None:
    async with _serve(Harness(_says(tokenizer), tokenizer)) as running:
        extra = b"x-big: " + b"a" * (10 << 20) + b"\r\n"
        answer = await running.raw(_post(b'{"prompt":"a"}', extra))
        assert answer == b"" or b" 431 " in answer
        head = b"GET /health HTTP/1.1\r\nx-big: " + b"a" * (MAX_HEADER_BYTES + 1000)
        refused = await running.raw(head)
        assert b" 431 " in refused
        assert b'{"error":' in refused
        answer = await running.client.completions.create(model="demo", prompt="a")
        assert answer.choices


async def test_x06_garbage_is_a_400_in_the_error_shape(tokenizer: Tokenizer) -> None:
    async with _serve(Harness(_says(tokenizer), tokenizer)) as running:
        answer = await running.raw(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'{"error":' in answer


async def test_x06_idle_connections_do_not_keep_others_out(tokenizer: Tokenizer) -> None:
    async with _serve(Harness(_says(tokenizer), tokenizer)) as running:
        idle = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(200)]
        answer = await running.client.completions.create(model="demo", prompt="a")
        assert answer.choices
        for _, writer in idle:
            writer.close()


async def test_x06_pipelined_requests_are_answered_in_order(tokenizer: Tokenizer) -> None:
    async with _serve(Harness(_says(tokenizer), tokenizer)) as running:
        get = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
        last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answer = await running.raw(get * 3 + last)
        assert answer.count(b"HTTP/1.1 200") == 4
        assert answer.endswith(b'{"status":"ok"}')


async def test_a_drain_lets_running_requests_finish(tokenizer: Tokenizer) -> None:
    ids = [70] * 30
    engine = FakeEngine(lambda request, index: Script(ids), delay_s=0.01)
    async with _serve(Harness(engine, tokenizer)) as running:
        client = running.client
        request = asyncio.create_task(
            client.completions.create(model="demo", prompt="a", max_tokens=30)
        )
        await engine.submitted.wait()
        running.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model="demo", prompt="b")
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert (await request).usage.completion_tokens == 30  # type: ignore[union-attr]
        async with asyncio.timeout(5):
            await running.task
        assert not running.server.force_exit
    assert engine.aborts == []


async def test_the_drains_time_ends_what_still_runs_with_an_error(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True))
    harness = Harness(engine, tokenizer, drain_timeout=0.05)
    async with _serve(harness) as running:
        stream = await running.client.completions.create(model="demo", prompt="a", stream=True)
        running.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
    assert [reason for _, _, reason in engine.aborts] == ["abort"]


async def test_a_second_signal_ends_at_once(tokenizer: Tokenizer) -> None:
    async with _serve(Harness(_says(tokenizer), tokenizer)) as running:
        running.server.handle_exit(signal.SIGTERM, None)
        assert not running.server.should_exit
        running.server.handle_exit(signal.SIGINT, None)
        assert not await running.server.on_tick(1), "a tick for the errors of what is pending"
        assert await running.server.on_tick(2)
        assert running.server.should_exit
        assert running.server.force_exit
