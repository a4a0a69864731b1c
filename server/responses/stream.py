"""The `response` object, whole or as events.

response.created ─ response.in_progress ─ items ... ─ response.completed | incomplete | failed
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from server.choice import Delta
from server.errors import Problem
from server.generation import Generation
from server.openai.assistant_events import TextDelta
from server.openai.logprobs import TokenNames, chat_logprobs
from server.openai.schemas import ChatRequest
from server.openai.stream import KEEP_ALIVE, Dialect
from server.responses.items import Items
from server.responses.schemas import ResponsesRequest


class ResponseRenderer:
    """One response."""

    def __init__(
        self,
        response_id: str,
        model: str,
        fields: ResponsesRequest,
        chat: ChatRequest,
        prompt: list[int],
        names: TokenNames,
    ) -> None:
        self._id = response_id
        self._model = model
        self._fields = fields
        self._chat = chat
        self._prompt = prompt
        self._names = names
        self._created = int(time.time())
        self._items = Items(seal_reasoning=fields.wants_encrypted_reasoning)
        self._token_ids: list[int] = []
        self._sequence_number = -1
        self._begun = False

    @property
    def dialect(self) -> Dialect:
        return Dialect(KEEP_ALIVE, self.failure, self.opening)

    def opening(self, generation: Generation) -> bytes:
        """The first two events, once the prompt is admitted."""
        if self._begun:
            return b""
        self._begun = True
        return self._state("response.created") + self._state("response.in_progress")

    def events(self, deltas: list[Delta], generation: Generation) -> bytes:
        return self.opening(generation) + b"".join(
            self._sse(event) for delta in deltas for event in self._feed(delta)
        )

    def end(self, generation: Generation) -> bytes:
        response = self.body(generation)
        return self._sse({"type": f"response.{response['status']}", "response": response})

    def collect(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            for _ in self._feed(delta):
                pass

    def body(self, generation: Generation) -> dict[str, Any]:
        cut = generation.choices[0].finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = usage_of(generation)
        if self._fields.return_token_ids:
            response["prompt_token_ids"] = self._prompt
            response["token_ids"] = self._token_ids
        return response

    def failure(self, problem: Problem) -> bytes:
        """The events of a stream that fails."""
        error = {"code": problem.code or "server_error", "message": problem.message}
        response = self._response("failed") | {"error": error}
        event = {"type": "error", **error, "param": problem.param}
        return self._sse(event) + self._sse({"type": "response.failed", "response": response})

    def _feed(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._token_ids += delta.token_ids
        logprobs: list[Any] = []
        if self._chat.logprobs:
            logprobs = chat_logprobs(delta.entries, self._names)["content"]
        for event in delta.parts:
            yield from self._items.feed(event, logprobs if isinstance(event, TextDelta) else [])
        if delta.finish_reason is not None:
            cut = delta.finish_reason == "length"
            yield from self._items.close("incomplete" if cut else "completed")

    def _state(self, name: str) -> bytes:
        return self._sse({"type": name, "response": self._response("in_progress")})

    def _sse(self, event: Mapping[str, Any]) -> bytes:
        self._sequence_number += 1
        name = str(event["type"]).encode()
        data = msgspec.json.encode({**event, "sequence_number": self._sequence_number})
        return b"event: " + name + b"\ndata: " + data + b"\n\n"

    def _response(self, status: str) -> dict[str, Any]:
        """Every field of the object; those that were asked for are told back."""
        fields = self._fields
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": None,
            "model": self._model,
            "output": self._items.output,
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {"effort": fields.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": fields.temperature,
            "text": {"format": fields.text.format},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools,
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": fields.top_p,
            "truncation": fields.truncation,
            "usage": None,
            "user": None,
            "metadata": fields.metadata or {},
        }


def usage_of(generation: Generation) -> dict[str, Any]:
    """Token counts in this API's names."""
    usage = generation.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
