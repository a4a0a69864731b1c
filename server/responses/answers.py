"""The shape of a response object, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from server.answers import Answer
from server.openai.answers import OutputDetails, PromptDetails, TokenLogprob

State = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class MessageItem(Answer):
    id: str
    type: Literal["message"]
    status: State
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer):
    id: str
    type: Literal["reasoning"]
    status: State
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: str = ""


class FunctionCallItem(Answer):
    id: str
    type: Literal["function_call"]
    status: State
    call_id: str
    name: str
    arguments: str


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Answer):
    code: str
    message: str


class Incomplete(Answer):
    reason: Literal["max_output_tokens"]


class Effort(Answer):
    effort: str | None
    summary: None


class TextFormat(Answer):
    format: dict[str, Any]


class ResponseAnswer(Answer):
    """With `stream: true` it is the `response` of the events response.created ... completed."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: Effort
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float | None
    text: TextFormat
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled", "auto"]
    usage: ResponseUsage | None
    user: None
    metadata: dict[str, Any]
    prompt_token_ids: list[int] = Field(default_factory=list)
    token_ids: list[int] = Field(default_factory=list)
