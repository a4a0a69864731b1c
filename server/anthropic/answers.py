"""The shapes of answers of /v1/messages, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from server.answers import Answer


class TextBlock(Answer):
    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """input + cache_read + cache_creation are the prompt."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class Message(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    prompt_token_ids: list[int] = Field(default_factory=list)
    token_ids: list[int] = Field(default_factory=list)


class TokenCount(Answer):
    input_tokens: int
