"""Every exception that crosses a boundary of the engine.

RadixMlaError
├── ConfigError              a knob or a combination of knobs that cannot run
├── ModelError               a checkpoint that cannot be served
│   ├── UnsupportedModel     architecture or feature we do not implement, by name
│   └── CheckpointError      missing tensor, wrong shape, truncated file
├── RequestError             the client's fault: HTTP 4xx
│   ├── InvalidRequest       a field, its value and its limit
│   ├── ContextOverflow      prompt (+ output) over the context or the pool
│   └── ModelNotFound        unknown model name
├── Overloaded               queue full, draining: HTTP 429/503 with Retry-After
├── EngineError              the engine's fault: HTTP 5xx
│   ├── EngineDead           the engine process is gone
│   └── RequestFailed        one request failed inside the engine; the others go on
└── CacheError               misuse of the cache: our bug, or no space
    ├── NoSpace              fewer pages available than needed; nothing was changed
    ├── LeaseError           a lease used after its release
    └── AuditError           an invariant of the cache does not hold
"""

from __future__ import annotations


class RadixMlaError(Exception):
    """Base of all of ours."""


class ConfigError(RadixMlaError):
    """A knob or a combination of knobs that cannot run; the message names the knob."""


class ModelError(RadixMlaError):
    """A checkpoint that cannot be served."""


class UnsupportedModel(ModelError):
    """Architecture or feature that is not implemented; the message names it."""


class CheckpointError(ModelError):
    """Missing tensor, wrong shape, truncated or unreadable file; the message names it."""


class RequestError(RadixMlaError):
    """The client's fault. `param` is the field, `code` the machine-readable reason."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """A field with a value that cannot be served; the message has the value and the limit."""


class ContextOverflow(RequestError):
    """The prompt, or prompt and output, exceed the context. Clients parse this text."""

    def __init__(self, *, limit: int, prompt: int, completion: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt + completion} tokens ({prompt} in the messages, {completion} in the "
            "completion). Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )
        self.limit = limit
        self.prompt = prompt
        self.completion = completion


class ModelNotFound(RequestError):
    """Unknown model name."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(
            f"The model `{name}` does not exist. Available: {', '.join(known)}.",
            param="model",
            code="model_not_found",
        )


class Overloaded(RadixMlaError):
    """Not accepted now; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int, status: int = 503) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.status = status


class EngineError(RadixMlaError):
    """The engine's fault."""


class EngineDead(EngineError):
    """The engine process is gone; the message has the cause as far as it is known."""


class RequestFailed(EngineError):
    """One request failed inside the engine; the others go on."""


class CacheError(RadixMlaError):
    """Misuse of the prefix cache, or no space in it."""


class NoSpace(CacheError):
    """Fewer pages can be had than are needed; nothing was changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} pages needed, {available} available")
        self.needed = needed
        self.available = available


class LeaseError(CacheError):
    """A lease used after its release."""


class AuditError(CacheError):
    """An invariant of the cache does not hold."""
