"""Logprobs in the two shapes: lists side by side (completions), a list of objects (chat).

JSON has no -inf and no NaN: -9999.0 is the floor and stands for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from radix_mla.engine.ipc import TokenLogprobs
from radix_mla.text.tokenizer import Tokenizer
from server.choice import TokenEntry

FLOOR = -9999.0


def floored(logprob: float) -> float:
    """The logprob as JSON can hold it."""
    return FLOOR if math.isnan(logprob) or logprob < FLOOR else logprob


class TokenNames:
    """How single tokens are written. Without a tokenizer, or when asked: "token_id:123"."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer = None if as_ids else tokenizer

    @property
    def has_text(self) -> bool:
        """False without a tokenizer (or when ids were asked for in place of text)."""
        return self._tokenizer is not None

    def raw(self, token_id: int) -> bytes | None:
        """The token's own bytes; None where tokens are written as ids."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.token_bytes(token_id)

    def unique(self, token_id: int) -> str:
        """For the keys of completions: bytes that are no text by themselves are spelled out."""
        raw = self.raw(token_id)
        if raw is None:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def text(self, token_id: int) -> str:
        """For chat, where `bytes` stands beside it."""
        raw = self.raw(token_id)
        return f"token_id:{token_id}" if raw is None else raw.decode(errors="replace")


def completion_logprobs(entries: Iterable[TokenEntry], names: TokenNames) -> dict[str, Any]:
    """tokens, token_logprobs, top_logprobs, text_offset: four lists of equal length.

    An entry without logprobs (the first prompt token of an echo) is null in the middle two.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, logprobs, offset in entries:
        tokens.append(names.unique(token_id))
        values.append(None if logprobs is None else floored(logprobs.logprob))
        tops.append(None if logprobs is None else _top(token_id, logprobs, names))
        offsets.append(offset)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(entries: Iterable[TokenEntry], names: TokenNames) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}."""
    content = []
    for token_id, logprobs, _ in entries:
        if logprobs is None:
            continue
        item = _chat_token(token_id, logprobs.logprob, names)
        item["top_logprobs"] = [
            _chat_token(top_id, logprob, names)
            for top_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        ]
        content.append(item)
    return {"content": content, "refusal": None}


def _top(token_id: int, logprobs: TokenLogprobs, names: TokenNames) -> dict[str, float]:
    """The k most likely, and the token itself where it is not among them."""
    top = {
        names.unique(top_id): floored(logprob)
        for top_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    }
    top.setdefault(names.unique(token_id), floored(logprobs.logprob))
    return top


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    raw = names.raw(token_id)
    return {
        "token": names.text(token_id),
        "logprob": floored(logprob),
        "bytes": None if raw is None else list(raw),
    }
