"""What completions and chat have in common on the wire: head, usage, and the end of a stream."""

from __future__ import annotations

import secrets
import time
from typing import Any

from server.choice import Delta
from server.generation import Generation
from server.openai.common import Parsed, wants_usage
from server.openai.schemas import GenerationFields
from server.openai.stream import DONE, sse
from server.service import Service
from server.version import FINGERPRINT


class Frame:
    """One answer without its choices. `id` names it."""

    def __init__(
        self, service: Service, parsed: Parsed[Any], *, prefix: str, whole: str, chunk: str
    ) -> None:
        """`request_id` becomes part of the id. `whole`, `chunk`: the two values of `object`."""
        self._fields: GenerationFields = parsed.fields
        self.id = f"{prefix}-{self._fields.request_id or secrets.token_hex(16)}"
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": chunk if self._fields.stream else whole,
            "created": int(time.time()),
            "model": parsed.model,
            "system_fingerprint": FINGERPRINT,
        }
        if self._fields.service_tier is not None:
            self._head["service_tier"] = "default"
        self._usage = wants_usage(service, self._fields)
        self._begun: set[int] = set()
        self._kept: dict[int, list[Delta]] = {}

    def begin(self, choice: int) -> bool:
        """Notes that the choice has begun; True when it had not yet."""
        first = choice not in self._begun
        self._begun.add(choice)
        return first

    def has_begun(self, choice: int) -> bool:
        return choice in self._begun

    def collect(self, deltas: list[Delta]) -> None:
        """Keeps deltas for the whole answer."""
        for delta in deltas:
            self._kept.setdefault(delta.choice, []).append(delta)

    def collected(self, choice: int) -> list[Delta]:
        return self._kept.get(choice, [])

    def whole(self, choices: list[dict[str, Any]], generation: Generation) -> dict[str, Any]:
        """The answer of a request without stream."""
        return {**self._head, "choices": choices, "usage": generation.usage.as_dict()}

    def chunk(self, choice: dict[str, Any], generation: Generation) -> dict[str, Any]:
        """One event of a stream; `usage` is null before the last, where that one has it."""
        chunk = {**self._head, "choices": [choice]}
        if self._fields.stream_options.continuous_usage_stats:
            chunk["usage"] = generation.usage.as_dict()
        elif self._usage:
            chunk["usage"] = None
        return chunk

    def end(self, generation: Generation) -> bytes:
        """The last events of a stream."""
        if not self._usage:
            return DONE
        return sse(self.whole([], generation)) + DONE
