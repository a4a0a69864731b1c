"""A client of /v1/chat/completions without dependencies: one conversation, streamed.

Answers go back as the ids that they were generated as, so a turn re-uses everything before it.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any


class ChatError(Exception):
    """The server refused, failed or is not there; the text is for people."""


@dataclass(slots=True)
class Stats:
    """What one answer cost."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    finish_reason: str | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None for fewer than two."""
        if self.first_token_s is None or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / max(1e-6, self.total_s - self.first_token_s)


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens done so far, cached ones included."""

    total: int
    cached: int
    done: int


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer, or of the thinking before it."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class ChatClient:
    """One conversation with one server."""

    url: str
    model: str | None = None
    api_key: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    timeout_s: float = 600.0

    def ask(self, text: str) -> Generator[Progress | Text, None, None]:
        """Sends a user's message; the turn joins the conversation when the stream ends or stops.

        Raises ChatError; the conversation is then as before. `stats` is filled on the way.
        """
        question = {"role": "user", "content": text}
        body = {
            **self.options,
            "messages": [*self.messages, question],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "return_progress": True,
        }
        if self.model is not None:
            body["model"] = self.model
        answer: dict[str, Any] = {"role": "assistant", "content": "", "token_ids": []}
        self.stats = Stats()
        started = time.monotonic()
        with closing(self._chunks(body)) as chunks:
            try:
                for chunk in chunks:
                    yield from self._read(chunk, answer, started)
            except GeneratorExit:  # the reader stopped: what it saw counts
                self._keep(question, answer)
                raise
        self.stats.total_s = time.monotonic() - started
        self._keep(question, answer)

    def served_model(self) -> str:
        """The name of the first model of the server. Raises ChatError."""
        with self._open("/v1/models", None) as reply:
            return str(json.load(reply)["data"][0]["id"])

    def _keep(self, question: dict[str, Any], answer: dict[str, Any]) -> None:
        if not answer["token_ids"]:
            del answer["token_ids"]
        self.messages += [question, answer]

    def _read(
        self, chunk: dict[str, Any], answer: dict[str, Any], started: float
    ) -> Iterator[Progress | Text]:
        if "error" in chunk:
            raise ChatError(str(chunk["error"].get("message", chunk["error"])))
        progress = chunk.get("prompt_progress")
        if progress is not None:
            yield Progress(progress["total"], progress["cache"], progress["processed"])
        usage = chunk.get("usage")
        if usage is not None:
            self.stats.prompt_tokens = usage["prompt_tokens"]
            self.stats.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            self.stats.completion_tokens = usage["completion_tokens"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            ids = choice.get("token_ids") or []
            if ids and self.stats.first_token_s is None:
                self.stats.first_token_s = time.monotonic() - started
            answer["token_ids"] += ids
            self.stats.finish_reason = choice["finish_reason"] or self.stats.finish_reason
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            if reasoning:
                yield Text(reasoning, is_reasoning=True)
            if delta.get("content"):
                answer["content"] += delta["content"]
                yield Text(delta["content"])

    def _chunks(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        with self._open("/v1/chat/completions", body) as reply:
            try:
                for line in reply:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield json.loads(line[6:])
            except OSError as error:
                raise ChatError(f"the connection broke: {error}") from None

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data=data)
        request.add_header("content-type", "application/json")
        if self.api_key:
            request.add_header("authorization", f"Bearer {self.api_key}")
        try:
            return urllib.request.urlopen(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            raise ChatError(_message_of(error)) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ChatError(f"no answer from {self.url}: {reason}") from None


def _message_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
