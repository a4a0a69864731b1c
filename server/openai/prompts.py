"""The `prompt` field of completions: text, token ids, or a list of either."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from radix_mla.errors import InvalidRequest


class TokenIds:
    """Checks lists of token ids against the vocabulary, in C: 100k ids take about a millisecond."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._type = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]

    def check(self, ids: object, param: str) -> list[int]:
        """`ids` if it is a list of ids of the vocabulary. Raises InvalidRequest with `param`."""
        try:
            checked: list[int] = msgspec.convert(ids, self._type, strict=True)
        except msgspec.ValidationError as error:
            place = re.search(r"\$\[(\d+)\]", str(error))  # where msgspec found the first bad one
            found = f"item {place[1]} is not" if place else "it is no list of them"
            raise InvalidRequest(
                f"{param} must be token ids in [0, {self.vocab_size}): {found}",
                param=param,
                code="invalid_token_id",
            ) from None
        return checked


def parse_prompts(value: Any, ids: TokenIds, *, max_prompts: int) -> Sequence[str | list[int]]:
    """The prompts, each not empty; all text or all token ids.

    Raises InvalidRequest (param "prompt") for "", [], [""], [[]], mixtures and too many prompts.
    """
    if value is None:
        raise _bad("prompt is required: text, a list of texts, token ids, or a list of such lists")
    if isinstance(value, str):
        return [_text(value)]
    if not isinstance(value, list):
        raise _bad(f"prompt must be text or a list, not {type(value).__name__}")
    if not value:
        raise _bad("prompt is an empty list")
    if type(value[0]) is int:
        return [ids.check(value, "prompt")]
    if len(value) > max_prompts:
        raise _bad(f"prompt has {len(value)} prompts, the limit is {max_prompts} (--max-prompts)")
    if isinstance(value[0], str):
        return [_text(item) for item in value]
    if not isinstance(value[0], list):
        raise _bad(f"prompt must not hold {type(value[0]).__name__}")
    return [_ids(item, ids) for item in value]


def _text(item: object) -> str:
    if not isinstance(item, str):
        raise _bad("prompt mixes text with something else")
    if not item:
        raise _bad("prompt is empty text")
    return item


def _ids(item: object, ids: TokenIds) -> list[int]:
    if not isinstance(item, list):
        raise _bad("prompt mixes lists of token ids with something else")
    if not item:
        raise _bad("prompt has an empty list of token ids")
    return ids.check(item, "prompt")


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message + ".", param="prompt", code="invalid_prompt")
