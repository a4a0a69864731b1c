"""What /v1/messages accepts. Fields of the other endpoints (cache_salt, seed ...) work here too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from server.openai.parts import ANTHROPIC_MESSAGES
from server.openai.schemas import MAX_STOPS, GenerationFields, Stop, Str


class MessagesRequest(GenerationFields):
    """POST /v1/messages, and /v1/messages/count_tokens."""

    also_ignored: ClassVar[frozenset[str]] = frozenset(
        (
            "context_management",
            "output_config",
            "betas",
            "speed",
            "container",
            "inference_geo",
            "output_format",
            "anthropic_version",
            "anthropic_beta",
        )
    )
    also_refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "this server does not call MCP servers; give their tools as tools"
    }

    messages: Annotated[
        list[dict[str, Any]], Field(min_length=1), WithJsonSchema(ANTHROPIC_MESSAGES)
    ]
    system: Str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    stop_sequences: list[Stop] = Field(default_factory=list, max_length=MAX_STOPS)
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def marked(self) -> Sequence[object]:
        system = self.system if isinstance(self.system, list) else []
        return (*system, *self.messages, *self.tools)

    @property
    def session(self) -> str | None:
        """`prompt_cache_key`, else Anthropic's `metadata.user_id`."""
        user_id = (self.metadata or {}).get("user_id")
        return self.prompt_cache_key or (user_id if isinstance(user_id, str) else None)
