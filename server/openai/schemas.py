"""What the generation endpoints accept: names, types, ranges. Null is absent before this is asked.

Numbers are strict (no "5" for 5, no true for 1), whole floats count as integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from radix_mla.cache.retention import MAX_RANK, MAX_TTL_S, Retention
from radix_mla.errors import InvalidRequest
from server.openai.parts import MESSAGES, PROMPT, TOKEN_IDS, TOOLS
from server.openai.retention import TTL_PATTERN, Hints, checked_ttl

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_N = 16
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256
_INT32 = 2**31
_INT64 = 2**63


def _whole(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def without_nulls(value: object) -> object:
    """Null is absent, one level down too."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if item is not None}
    return value


Int = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
Str = Annotated[str, Field(strict=True)]
Stop = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1), WithJsonSchema(MESSAGES)]
Tools = Annotated[list[dict[str, Any]], WithJsonSchema(TOOLS)]
# Any form is taken; those that mean nothing here are named in x-radix-ignored-fields.
Hint = Annotated[Any, WithJsonSchema({"description": "A hint; unknown forms are ignored."})]
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2)]
TtlNumber = Annotated[float, Field(strict=True, gt=0, le=MAX_TTL_S)]
TtlText = Annotated[str, Field(strict=True, pattern=TTL_PATTERN)]
Ttl = Annotated[TtlNumber, BeforeValidator(checked_ttl, json_schema_input_type=TtlNumber | TtlText)]


class StreamOptions(BaseModel):
    """`stream_options`; other keys (include_obfuscation) are ignored."""

    include_usage: Bool = False
    continuous_usage_stats: Bool = False


class GenerationFields(BaseModel):
    """Fields of every generation endpoint."""

    model_config = ConfigDict(extra="ignore")
    also_ignored: ClassVar[frozenset[str]] = frozenset()
    also_refused: ClassVar[Mapping[str, str]] = {}

    model: Annotated[str, Field(strict=True, max_length=512)] | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_N)] = 1
    best_of: Annotated[Int, Field(ge=1)] | None = None
    max_tokens: Annotated[Int, Field(ge=-1, lt=_INT64)] | None = None
    n_predict: Annotated[Int, Field(ge=-1, lt=_INT64)] | None = None
    min_tokens: Annotated[Int, Field(ge=0, lt=_INT32)] = 0
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1, lt=_INT32)] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    seed: Annotated[Int, Field(ge=-_INT64, lt=_INT64)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(strict=True, ge=0.01, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Field(strict=True, ge=-100, le=100)]] | None = None
    stop: Annotated[Stops, BeforeValidator(_as_list, json_schema_input_type=Stop | Stops)] = []
    stop_token_ids: Annotated[list[Int], Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    ignore_eos: Bool = False
    skip_special_tokens: Bool = True
    include_stop_str_in_output: Bool = False
    return_token_ids: Bool = False
    return_tokens_as_token_ids: Bool = False
    return_progress: Bool = False
    stream: Bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(without_nulls)] = StreamOptions()
    priority: Annotated[Int, Field(ge=-_INT32, lt=_INT32)] = 0
    request_id: Annotated[Str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    service_tier: Str | None = None
    prompt_cache_key: Annotated[Str, Field(max_length=1024)] | None = None
    cache_salt: Annotated[Str, Field(max_length=1024)] = ""
    cache_store: Bool = True
    cache_prompt: Bool = True
    cache_ttl: Ttl | None = None
    cache_priority: Annotated[Int, Field(ge=0, le=MAX_RANK)] | None = None
    cache_control: Hint = None
    prompt_cache_retention: Hint = None
    prompt_cache_options: Hint = None
    nvext: Hint = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | Bool | Str | None = None
    guided_regex: Str | None = None
    guided_choice: list[Str] | None = None
    guided_grammar: Str | None = None

    @property
    def session(self) -> str | None:
        """What says which requests belong together; never what may be shared."""
        return self.prompt_cache_key

    def retention(self, ignored: list[str]) -> Retention:
        """How long its rows are to be kept; hints of unknown form are added to `ignored`."""
        hints = Hints(ignored)
        hints.mark(self.cache_control, "cache_control")
        hints.openai(self.prompt_cache_retention, self.prompt_cache_options)
        hints.nvidia(self.nvext)
        hints.blocks(self.marked)
        return hints.retention(ttl_s=self.cache_ttl, priority=self.cache_priority)

    @property
    def marked(self) -> Sequence[object]:
        """What may carry marks of `cache_control`, in itself or in its content."""
        return ()


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt` is checked by `prompts.py` (its error texts are clearer)."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})

    prompt: Annotated[Any, WithJsonSchema(PROMPT)] = None
    echo: Bool = False
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: Bool | None = None


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[Int, Field(ge=-1, lt=_INT64)] | None = None
    logprobs: Bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools = []
    tool_choice: Str | dict[str, Any] | None = None
    parallel_tool_calls: Bool = True
    add_generation_prompt: Bool = True
    continue_final_message: Bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Str | None = None
    reasoning: dict[str, Any] | None = None
    thinking: Any = None
    enable_thinking: Bool | None = None
    modalities: list[Str] | None = None

    @property
    def marked(self) -> Sequence[object]:
        return (*self.messages, *self.tools)


class TokenizeRequest(BaseModel):
    """POST /tokenize: `prompt`, or `messages` with the chat fields."""

    model: Str | None = None
    prompt: Str | None = None
    messages: Messages | None = None
    tools: Tools = []
    add_special_tokens: Bool = True
    add_generation_prompt: Bool = True
    continue_final_message: Bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: Bool = False


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model: Str | None = None
    tokens: Annotated[Any, WithJsonSchema(TOKEN_IDS)]
    skip_special_tokens: Bool = False


Schema = TypeVar("Schema", bound=BaseModel)


def validate(schema: type[Schema], values: dict[str, Any]) -> Schema:
    """The values as `schema`. Raises InvalidRequest that names the first bad field and why."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = _param(first["loc"])
        text = first["msg"].removeprefix("Value error, ")
        message = text[:1].lower() + text[1:]
        shown = _shown(first["input"]) if first["type"] != "missing" else ""
        raise InvalidRequest(
            f"{param}: {message}{shown}", param=param, code="invalid_value"
        ) from None


def _param(location: tuple[int | str, ...]) -> str:
    """`stop[3]`, `stream_options.include_usage`; the tags that unions add are left out."""
    text = str(location[0]) if location else "body"
    for part in location[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            text += f".{part}"
    return text


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, int | float | str | bool) else ""
    return f", got {text}" if text and len(text) <= 80 else ""
