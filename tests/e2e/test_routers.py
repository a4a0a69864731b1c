"""Cache-aware routers, as real processes, in front of two real servers.

They drop fields of chat requests that they do not know, and pass `metadata` on: ours are read from
there too (`metadata["radix_mla.NAME"]`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.server_process import DEMO, ServerProcess, free_port, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODULES = {
    "smg": ["smg", "launch"],
    "sglang_router": ["sglang_router.launch_router"],
}
STORY = "Tell me a long story about a fox, an owl and a very old tree. " * 12


class Router:
    """A router process; `ask` sends through it."""

    def __init__(self, name: str, workers: list[ServerProcess], log: Path) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        command = [sys.executable, "-m", *MODULES[name], "--policy", "cache_aware"]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--prometheus-port", str(free_port()), "--worker-urls"]
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [*command, *(worker.url for worker in workers)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        )
        wait_for(self._is_ready, 60)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, "the router has ended"
        try:
            return bool(self.ask("/v1/completions", prompt="a", max_tokens=1)["choices"])
        except OSError:  # not listening, or no worker yet
            return False

    def ask(self, path: str, **body: Any) -> Any:
        """The answer; the list of chunks with `stream`. Raises HTTPError."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps({"model": "demo", **body}).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = reply.read().decode()
        if not body.get("stream"):
            return json.loads(text)
        datas = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert datas[-1] == "[DONE]"
        return [json.loads(data) for data in datas[:-1]]

    def chat(self, content: str, metadata: dict[str, str] | None = None, **body: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        more = {"metadata": metadata} if metadata else {}
        return self.ask("/v1/chat/completions", messages=messages, **more, **body)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ServerProcess]]:
    with ExitStack() as stack:
        flags = ("--kv-cache-tokens", "16384", "--served-model-name", "demo")
        yield [stack.enter_context(ServerProcess(DEMO, *flags)) for _ in range(2)]


@pytest.fixture(scope="module", params=sorted(MODULES))
def router(
    request: pytest.FixtureRequest,
    workers: list[ServerProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Router]:
    name = request.param
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'radix-mla[routers]'")
    for worker in workers:
        worker.request("DELETE", "/v1/cache")
    router = Router(name, workers, tmp_path_factory.mktemp(name) / "log.txt")
    yield router
    router.close()


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_completions_pass(router: Router, workers: list[ServerProcess]) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    answer = router.ask("/v1/completions", **body)
    assert (
        answer["choices"][0]["text"]
        == (workers[0].post("/v1/completions", model="demo", **body)["choices"][0]["text"])
    )
    chunks = router.ask("/v1/completions", stream=True, **body)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == answer["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_chat_passes(router: Router) -> None:
    body = {"max_tokens": 12, "temperature": 0}
    answer = router.chat("Hello", **body)
    assert answer["choices"][0]["message"]["content"]
    chunks = router.chat("Hello", stream=True, stream_options={"include_usage": True}, **body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == answer["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_a_conversation_stays_where_its_rows_are(router: Router) -> None:
    first = router.chat(STORY, max_tokens=4)
    assert cached(router.chat(STORY, max_tokens=4)) == first["usage"]["prompt_tokens"] - 1


def test_our_fields_pass_in_metadata(router: Router) -> None:
    """min_tokens and ignore_eos make an answer of full length; top_k 1 makes it greedy."""
    fields = {"radix_mla.top_k": "1", "radix_mla.ignore_eos": "true", "radix_mla.min_tokens": "30"}
    answers = [
        router.chat("Say one word.", fields, max_tokens=30, temperature=1.5, seed=seed)
        for seed in range(3)
    ]
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {30}
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    kept = router.chat(f"Not kept. {STORY}", {"radix_mla.cache_store": "false"}, max_tokens=2)
    again = router.chat(f"Not kept. {STORY}", {"radix_mla.cache_store": "false"}, max_tokens=2)
    assert cached(again) <= cached(kept) < 20
    with pytest.raises(urllib.error.HTTPError, match="400"):
        router.chat("Hello", {"radix_mla.priority": "many"})


def test_namespaces_hold(router: Router) -> None:
    text = f"A secret. {STORY}"
    salt = {"radix_mla.cache_salt": "tenant-1"}
    other = {"radix_mla.cache_salt": "tenant-2"}
    first = router.chat(text, salt, max_tokens=2)
    assert cached(first) == 0
    assert cached(router.chat(text, salt, max_tokens=2)) == first["usage"]["prompt_tokens"] - 1
    assert cached(router.chat(text, other, max_tokens=2)) == 0
    assert cached(router.chat(text, max_tokens=2)) < 20  # the template's head at most


def test_the_servers_are_sound_afterwards(router: Router, workers: list[ServerProcess]) -> None:
    for worker in workers:
        assert worker.get("/v1/cache/audit")["ok"] is True
