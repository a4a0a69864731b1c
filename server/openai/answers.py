"""The shapes of answers of completions and chat, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from server.answers import Answer


class PromptDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    reasoning_tokens: int


class UsageAnswer(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: list[int] = Field(default_factory=list)
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(Answer):
    """With `stream: true` its chunks: `usage` null before the last, `finish_reason` as well."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] = "default"
    choices: list[CompletionChoice]
    usage: UsageAnswer


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class FunctionCall(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Answer):
    """`reasoning_content`, `reasoning`: as --reasoning-field says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] = Field(default_factory=list)


class ChatAnswer(Answer):
    """With `stream: true` `chat.completion.chunk`s, whose choices have `delta` for `message`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] = "default"
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] = Field(default_factory=list)
