"""How long a prompt and its output may be (docs/api.md, "Lengths").

|------------------- max_model_len -------------------|
|---- prompt ----|---- max_tokens, cut to the room ---|      prompt ≥ max_model_len: 400
"""

from __future__ import annotations

from radix_mla.errors import ContextOverflow, InvalidRequest


def requested_max_tokens(*values: int | None) -> int | None:
    """The smallest of those given; -1 and None are absent."""
    given = [value for value in values if value is not None and value != -1]
    return min(given, default=None)


def effective_max_tokens(
    requested: int | None,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    default: int | None,
    strict: bool,
    param: str,
) -> int:
    """Output tokens that may be generated, at least 0.

    `default` None: the rest of the context. Raises ContextOverflow when the prompt leaves no room,
    or under `strict` when prompt and output together do not fit.
    """
    room = max_model_len - num_prompt_tokens
    wanted = requested if requested is not None else default
    too_long = wanted is not None and wanted > room and strict
    if room <= 0 or too_long:
        overflow = ContextOverflow(
            limit=max_model_len,
            prompt=num_prompt_tokens,
            completion=wanted if wanted is not None else 1,
        )
        overflow.param = param
        raise overflow
    return room if wanted is None else min(wanted, room)


def check_zero(requested: int | None, *, echo: bool) -> None:
    """max_tokens 0 scores the prompt only, so it needs `echo`. Raises InvalidRequest."""
    if requested == 0 and not echo:
        raise InvalidRequest(
            "max_tokens is 0; it must be at least 1, or 0 together with echo.",
            param="max_tokens",
            code="invalid_value",
        )
