"""Every knob of the server: one model, three sources. YAML < environment (RADIX_MLA_*) < flags.

Unknown keys are errors in each source. The command line is generated from these fields (cli.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from radix_mla.config import EngineConfig
from radix_mla.errors import ConfigError

ENV_PREFIX = "RADIX_MLA_"
_ENGINE_FIELDS = frozenset(EngineConfig.__dataclass_fields__) - {"enable_prefix_cache"}

_ONE_GPU = "nothing: this version uses one GPU; run several servers behind a cache-aware router"
# What other servers call it → what it is called here.
PEER_NAMES: Mapping[str, str] = {
    "tensor-parallel-size": _ONE_GPU,
    "tp-size": _ONE_GPU,
    "tp": _ONE_GPU,
    "decode-context-parallel-size": _ONE_GPU,
    "data-parallel-size": "nothing: run several servers behind a cache-aware router",
    "mem-fraction-static": "kv-cache-tokens (a number of tokens, not a share of memory)",
    "gpu-memory-utilization": "kv-cache-tokens (a number of tokens, not a share of memory)",
    "max-total-tokens": "kv-cache-tokens",
    "num-gpu-blocks-override": "kv-cache-tokens",
    "context-length": "max-model-len",
    "block-size": "page-size",
    "kv-cache-dtype": "kv-dtype",
    "max-running-requests": "max-num-seqs",
    "chunked-prefill-size": "max-num-batched-tokens",
    "max-prefill-tokens": "max-num-batched-tokens",
    "long-prefill-token-threshold": "max-num-batched-tokens",
    "enable-prefix-caching": "nothing: the prefix cache is on, --disable-prefix-cache turns it off",
    "no-enable-prefix-caching": "disable-prefix-cache",
    "disable-radix-cache": "disable-prefix-cache",
    "scheduling-policy": "schedule-policy",
    "radix-eviction-policy": "eviction-policy",
    "model-path": "the first argument: radix-mla serve MODEL",
    "tokenizer-path": "nothing: the tokenizer is the model folder's",
    "max-num-queued-reqs": "max-queued-requests",
    "max-num-queued-tokens": "max-queued-tokens",
    "enable-force-include-usage": "force-include-usage",
    "enable-prompt-tokens-details": "nothing: cached_tokens is always reported",
    "enable-cache-report": "nothing: cached_tokens is always reported",
    "enable-metrics": "nothing: /metrics is always there",
    "uvicorn-log-level": "log-level",
}


class Settings(BaseModel):
    """Resolved and frozen at start. `model` None is the bundled demo model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="Model folder or hub id; default: the demo model.")
    # -- HTTP
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port; 0 takes a free one.")
    served_model_name: list[str] = Field(
        [], description="Name(s) in the API; default: the model folder's name."
    )
    model_alias: list[str] = Field(
        [],
        description="More names that requests may use, * and ? allowed ('claude-*'); not listed.",
    )
    api_key: list[SecretStr] = Field(
        [], description="Accepted API key(s); none: everybody may call."
    )
    admin_api_key: list[SecretStr] = Field(
        [], description="Key(s) that may also flush the whole cache under --cache-scope key."
    )
    strict_fields: bool = Field(False, description="Answer 400 to unknown request fields.")
    strict_max_tokens: bool = Field(
        False, description="Answer 400 where max_tokens would be cut to the context."
    )
    force_include_usage: bool = Field(
        False, description="Send usage at the end of every stream, asked for or not."
    )
    prompt_normalise: Literal["auto", "off"] = Field(
        "auto",
        description="auto: keep what differs from turn to turn out of the head of prompts.",
    )
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = Field(
        "reasoning_content", description="Name of the field that thinking text comes back in."
    )
    sse_keepalive: float = Field(
        15.0, ge=0, description="Seconds of silence before a keep-alive comment; 0: never."
    )
    max_body_bytes: int = Field(32 << 20, ge=1024, description="Largest request body.")
    max_prompts: int = Field(1024, ge=1, description="Most prompts in one completions request.")
    max_queued_requests: int = Field(
        2048, ge=0, description="Requests that may wait before new ones get 429; 0: no limit."
    )
    max_queued_tokens: int = Field(
        16_000_000, ge=0, description="Prompt tokens that may wait before 429; 0: no limit."
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="Seconds that SIGTERM gives running requests."
    )
    step_timeout: float = Field(
        120.0, gt=0, description="Seconds after which an engine step counts as stuck."
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="auto: the model's generation_config.json gives sampling defaults."
    )
    trust_remote_code: bool = Field(
        False, description="Run tokenizer code that comes with the model."
    )
    metrics_aliases: Literal["none", "vllm"] = Field(
        "none", description="vllm: also expose the names that routers scrape."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Log level."
    )
    log_format: Literal["console", "json"] = Field("console", description="Form of log lines.")
    access_log: bool = Field(True, description="Log a line for each request.")
    # -- cache
    cache_scope: Literal["global", "key"] = Field(
        "global", description="key: nothing is shared between API keys."
    )
    disable_prefix_cache: bool = Field(False, description="Compute every prompt from scratch.")
    eviction_policy: str = Field("lru", description="Which cached rows go first.")
    kv_cache_tokens: int | None = Field(
        None, ge=1, description="KV rows in the pool; default: from free memory."
    )
    kv_dtype: Literal["auto", "fp32", "bf16", "fp8"] = Field("auto", description="Type of KV rows.")
    page_size: int | None = Field(None, ge=1, description="Rows a page; default: the backend's.")
    # -- engine
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1 ...")
    dtype: Literal["auto", "fp32", "bf16"] = Field("auto", description="Compute type.")
    attention_backend: str = Field("auto", description="auto, a backend's name, or PREFILL,DECODE.")
    attention_form: Literal["auto", "absorbed", "non_absorbed", "one_shot"] = Field(
        "auto", description="Force one form of MLA attention."
    )
    workspace_tokens: int = Field(
        32_768, ge=1, description="Context rows that prefill attention decompresses at once."
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest prompt + output; default: the model's."
    )
    max_num_seqs: int = Field(256, ge=1, description="Sequences that run at once.")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Token budget of one step; default: 2048 on a CPU, 8192 on a GPU."
    )
    schedule_policy: str = Field("fcfs", description="fcfs, lpm or module:Class.")
    max_retractions: int = Field(4, ge=0, description="Most retractions of one request.")
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights, for tests of speed."
    )
    hf_overrides: dict[str, Any] | None = Field(
        None, description="Values of config.json to replace, as JSON: '{\"num_hidden_layers\": 4}'."
    )
    num_threads: int | None = Field(None, ge=1, description="CPU threads of the engine.")

    @field_validator("served_model_name", "model_alias", "api_key", "admin_api_key", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Environment variables and YAML may give several, separated by commas."""
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return value

    @field_validator("hf_overrides", mode="before")
    @classmethod
    def _parse_json(cls, value: object) -> object:
        """Flags and environment variables give text, YAML an object."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a JSON object: {error}") from None

    @model_validator(mode="after")
    def _key_scope_needs_keys(self) -> Self:
        if self.cache_scope == "key" and not self.api_key:
            raise ValueError("cache_scope key needs at least one api_key")
        return self

    def engine_config(self, model_dir: str) -> EngineConfig:
        """The engine's share of the knobs."""
        values = {name: getattr(self, name) for name in _ENGINE_FIELDS if name in self.knobs()}
        values["model"] = model_dir
        return EngineConfig(enable_prefix_cache=not self.disable_prefix_cache, **values)

    @classmethod
    def knobs(cls) -> Mapping[str, Any]:
        """Field name → pydantic field."""
        return cls.model_fields

    def public(self) -> dict[str, Any]:
        """For /server_info: everything but the keys, of which only the number is shown."""
        values = self.model_dump(mode="json", exclude={"api_key", "admin_api_key"})
        return values | {"num_api_keys": len(self.api_key) + len(self.admin_api_key)}


def load(
    flags: Mapping[str, Any],
    *,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from a YAML file, the environment and flags (only those given).

    Raises ConfigError that names the key and where it came from.
    """
    environ = os.environ if environ is None else environ
    config_file = config_file or environ.get(f"{ENV_PREFIX}CONFIG")
    from_env = _environment(environ)
    from_file = _yaml(Path(config_file)) if config_file else {}
    try:
        return Settings(**{**from_file, **from_env, **flags})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        shown = f" (got {first['input']!r})" if name in Settings.knobs() else ""
        text = first["msg"].removeprefix("Value error, ")
        secret = "api_key" in name
        raise ConfigError(f"{name}: {text}{'' if secret else shown}") from None


def peer_hint(name: str) -> str | None:
    """What a peer's knob is called here; None for names that no peer has either."""
    ours = PEER_NAMES.get(name.strip("-").replace("_", "-").lower())
    if ours is None:
        return None
    if ours.startswith(("nothing", "the first")):
        return ours.removeprefix("nothing: ")
    return f"it is called --{ours} here"


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    values = {}
    for key, value in environ.items():
        if not key.upper().startswith(ENV_PREFIX) or value == "":
            continue
        name = key.upper().removeprefix(ENV_PREFIX).lower()
        if name == "config":
            continue
        _check_known(name, f"environment variable {key}")
        values[name] = value
    return values


def _yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).replace("\n", " ")
        raise ConfigError(f"config file {path} cannot be read: {reason}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} must hold keys and values")
    renamed = {str(key).replace("-", "_"): value for key, value in values.items()}
    for name in renamed:
        _check_known(name, f"config file {path}: key {name}")
    return renamed


def _check_known(name: str, place: str) -> None:
    if name in Settings.knobs():
        return
    hint = peer_hint(name)
    raise ConfigError(f"{place} is unknown" + (f": {hint}" if hint else ""))
