"""Hooks of the fuzz test: valid requests generate four tokens, so that each takes milliseconds."""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis import GenerationMode

_MAX_TOKENS = 4
_GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    if case.path not in _GENERATES or case.meta is None or not isinstance(case.body, dict):
        return
    if case.meta.generation.mode is GenerationMode.POSITIVE:
        case.body["max_tokens"] = _MAX_TOKENS
        case.body.pop("min_tokens", None)
