"""`radix-mla chat` against the real app on a fake engine."""

from __future__ import annotations

import asyncio
import io
import urllib.error
from email.message import Message
from typing import Any

import pytest
from support.demo_app import demo_app, prompt_text, says
from support.fake_engine import FakeEngine, Script
from support.http_app import Harness
from typer.testing import CliRunner

from server import cli
from server.chat_cli import Terminal, summary
from server.chat_client import ChatClient, ChatError, Progress, Stats, Text


class _Client(ChatClient):
    """Goes to an app instead of a socket."""

    harness: Harness

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        call = self.harness.get(path) if body is None else self.harness.post(path, body)
        response = asyncio.run(call)
        if response.status_code != 200:
            stream = io.BytesIO(response.content)
            error = urllib.error.HTTPError(path, response.status_code, "", Message(), stream)
            from server.chat_client import _message_of

            raise ChatError(_message_of(error))
        return io.BytesIO(response.content)


def _client(engine: FakeEngine, **options: Any) -> _Client:
    client = _Client("http://test", "demo", options=options)
    client.harness = demo_app(engine)
    return client


def _terminal(client: ChatClient, *, colour: bool = False) -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    return Terminal(client, out, colour=colour), out


def test_an_answer_with_its_cached_tokens() -> None:
    client = _client(says("Hello world", cached=3))
    terminal, out = _terminal(client)
    assert terminal.turn("hi")
    answer, line = out.getvalue().splitlines()
    assert answer == "Hello world"
    total = len(client.harness.engine.requests[0].prompt_tokens)
    assert line.startswith(f"[3 of {total} prompt tokens cached (")
    assert "first token" in line
    assert client.messages[-1]["content"] == "Hello world"


def test_answers_go_back_as_ids() -> None:
    client = _client(says("Hello"))
    terminal, _ = _terminal(client)
    terminal.turn("hi")
    terminal.turn("more")
    first, later = (request.prompt_tokens.tolist() for request in client.harness.engine.requests)
    ids = client.messages[1]["token_ids"]
    assert later[: len(first) + len(ids)] == first + ids


def test_progress_is_shown_on_a_terminal_and_goes_away() -> None:
    client = _client(says("Hello", cached=3))
    pieces = list(client.ask("hi"))
    progress = [piece for piece in pieces if isinstance(piece, Progress)]
    assert progress[-1].done == progress[-1].total
    assert progress[0].cached == 3
    terminal, out = _terminal(_client(says("Hello", cached=3)), colour=True)
    terminal.turn("hi")
    shown, _, rest = out.getvalue().partition("\r\033[K" + "\033[0m" + "Hello")
    assert "prompt " in shown
    assert "prompt " not in rest.partition("[")[0]


def test_a_refusal_is_said_and_forgotten() -> None:
    client = _client(says("Hello"), max_tokens=0)
    terminal, out = _terminal(client)
    assert not terminal.turn("hi")
    assert "[error: max_tokens is 0" in out.getvalue()
    assert client.messages == []


def test_a_failure_in_the_stream_is_said() -> None:
    client = _client(FakeEngine(lambda request, index: Script([20], error="boom")))
    terminal, out = _terminal(client)
    assert not terminal.turn("hi")
    assert "[error: The request failed" in out.getvalue()


def test_an_answer_that_is_stopped_stays() -> None:
    client = _client(says("one two three"))
    pieces = client.ask("hi")
    while not isinstance(next(pieces), Text):
        pass
    pieces.close()
    assert [message["role"] for message in client.messages] == ["user", "assistant"]
    assert client.messages[-1]["content"] in "one two three"


def test_commands() -> None:
    client = _client(says("Hello"))
    client.messages.append({"role": "system", "content": "Be brief."})
    terminal, out = _terminal(client)
    lines = iter(["hi", "", "/what", "/clear", "again", "/exit", "never"])
    terminal.run(lambda prompt: next(lines))
    assert next(lines) == "never"
    assert len(client.harness.engine.requests) == 2
    assert prompt_text(client.harness).endswith("Be brief.<｜User｜>again<｜Assistant｜>")
    assert "a new conversation" in out.getvalue()


def test_summary() -> None:
    stats = Stats(1000, 900, 11, first_token_s=0.5, total_s=1.5, finish_reason="length")
    assert summary(stats) == (
        "900 of 1,000 prompt tokens cached (90%) · first token 0.50 s · 11 tokens at 10/s"
        " · ended by length"
    )


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(cli.app, ["chat", "hi", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "no answer from http://127.0.0.1:9" in result.output
