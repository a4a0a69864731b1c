"""What /v1/responses accepts; fields of the other endpoints (cache_salt, seed ...) work too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from server.openai.schemas import MAX_LOGPROBS, Bool, GenerationFields, Int, Str, without_nulls

_NOT_STORED = "this server stores no conversations; send them whole as input"


class TextOptions(BaseModel):
    """`text`; its verbosity is ignored."""

    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})


class ReasoningOptions(BaseModel):
    """`reasoning`; other keys (summary, context) are ignored."""

    effort: Str | None = None


class ResponsesRequest(GenerationFields):
    """POST /v1/responses."""

    also_ignored: ClassVar[frozenset[str]] = frozenset(
        ("client_metadata", "max_tool_calls", "context_management", "stream_id")
    )
    also_refused: ClassVar[Mapping[str, str]] = {
        "previous_response_id": _NOT_STORED,
        "conversation": _NOT_STORED,
        "background": _NOT_STORED,
        "prompt": "this server stores no prompts; send instructions and input",
    }

    input: Str | list[dict[str, Any]]
    instructions: Str | None = None
    max_output_tokens: Annotated[Int, Field(ge=-1, lt=2**63)] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Str | dict[str, Any] | None = None
    parallel_tool_calls: Bool = True
    reasoning: Annotated[ReasoningOptions, BeforeValidator(without_nulls)] = ReasoningOptions()
    text: Annotated[TextOptions, BeforeValidator(without_nulls)] = TextOptions()
    include: list[Str] = Field(default_factory=list)
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["disabled", "auto"] = "disabled"
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in self.include
