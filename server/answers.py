"""The shapes of answers, for /openapi.json: errors, and what is no generation.

They describe; nothing is built from them. The fuzz test holds the server to them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An object whose properties are all here; one with a default may be absent."""

    model_config = ConfigDict(extra="forbid")


class ErrorFields(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorFields


class AnthropicErrorFields(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    type: Literal["error"]
    error: AnthropicErrorFields
    request_id: str | None


class Status(Answer):
    status: str


class Version(Answer):
    version: str


class ServerInfo(Answer):
    version: str
    served_model_names: list[str]
    kv_tokens: int
    page_size: int
    max_model_len: int
    engine: dict[str, Any]
    settings: dict[str, Any]
    has_tokenizer: bool
    has_chat_template: bool
    tool_format: str | None = None
    reasoning_format: list[str] | None = None


class ModelInfo(Answer):
    """Beside these the dimensions of the model."""

    model_config = ConfigDict(extra="allow")

    model_path: str
    tokenizer_path: str | None
    is_generation: Literal[True]
    vocab_size: int
    max_model_len: int


class Load(Answer):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_waiting_tokens: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


class Loads(Answer):
    version: str
    dp_rank_count: int
    loads: list[Load]


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    prompt: str


class Flushed(Answer):
    flushed_tokens: int


class Audit(Answer):
    """`counts` in slots."""

    model_config = ConfigDict(extra="allow")

    ok: bool
    counts: dict[str, int]


class CacheStats(Answer):
    queried_tokens: int
    hit_tokens: int
    hit_rate: float
    evicted_tokens: dict[str, int]
    kv_tokens: dict[str, int]
    page_size: int
    retractions: int
