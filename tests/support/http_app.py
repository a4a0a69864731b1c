"""The real app on a fake engine: an HTTP client without sockets, and single ASGI calls by hand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
from fastapi import FastAPI
from support.fake_engine import FakeEngine

from radix_mla.text.tokenizer import Tokenizer
from server.app import create_app
from server.service import ModelFacts, Service
from server.settings import load

FACTS = ModelFacts(
    names=("demo", "demo-alias"),
    path="/models/demo",
    vocab_size=400,  # padded above the tokenizer's 320
    max_model_len=128,
    kv_tokens=1024,
    page_size=16,
    created=1,
)


class Harness:
    """An app with its engine; `post` and `get` go through the whole stack."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        tokenizer: Tokenizer | None = None,
        facts: ModelFacts = FACTS,
        **settings: Any,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.app: FastAPI = create_app(
            self.engine, load(settings, environ={}), facts, tokenizer=tokenizer
        )
        self.service: Service = self.app.state.service
        transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://test")

    async def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=names)

    async def complete(self, **body: Any) -> httpx2.Response:
        return await self.post("/v1/completions", {"prompt": "a", **body})

    async def chat(self, **body: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": "hi"}]
        return await self.post("/v1/chat/completions", {"messages": messages, **body})

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self.client.get(path, headers=headers)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` that have these labels."""
        text = (await self.get("/metrics")).text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(label in head for label in wanted):
                total += float(value)
        return total


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """The parsed events of an SSE body; checks that the last one is [DONE]."""
    datas = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert datas[-1] == "[DONE]"
    return [json.loads(data) for data in datas[:-1]]


class Call:
    """One ASGI call in a task; the test is the server below and the client beyond."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait(
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        )
        self._outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task = asyncio.create_task(
            self._app(self._scope, self._incoming.get, self._outgoing.put)
        )

    async def next(self) -> dict[str, Any]:
        """The next message that the app sends."""
        async with asyncio.timeout(5):
            return await self._outgoing.get()

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def end(self) -> None:
        """Waits for the app to return."""
        async with asyncio.timeout(5):
            await self.task

    @property
    def num_unread(self) -> int:
        return self._outgoing.qsize()
