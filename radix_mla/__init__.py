"""radix-mla: a radix-tree prefix-cache engine for MLA models.

Names are imported when they are first used: `import radix_mla` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radix_mla.config import EngineConfig
    from radix_mla.errors import (
        CacheError,
        ConfigError,
        ContextOverflow,
        EngineDead,
        EngineError,
        InvalidRequest,
        ModelError,
        Overloaded,
        RadixMlaError,
        RequestError,
        RequestFailed,
    )
    from radix_mla.llm import LLM
    from radix_mla.request import FinishReason, SamplingParams
    from radix_mla.request_output import Completion, RequestOutput

_HOME = {
    "CacheError": "errors",
    "Completion": "request_output",
    "ConfigError": "errors",
    "ContextOverflow": "errors",
    "EngineConfig": "config",
    "EngineDead": "errors",
    "EngineError": "errors",
    "FinishReason": "request",
    "InvalidRequest": "errors",
    "LLM": "llm",
    "ModelError": "errors",
    "Overloaded": "errors",
    "RadixMlaError": "errors",
    "RequestError": "errors",
    "RequestFailed": "errors",
    "RequestOutput": "request_output",
    "SamplingParams": "request",
}

__all__ = [
    "LLM",
    "CacheError",
    "Completion",
    "ConfigError",
    "ContextOverflow",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "FinishReason",
    "InvalidRequest",
    "ModelError",
    "Overloaded",
    "RadixMlaError",
    "RequestError",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
