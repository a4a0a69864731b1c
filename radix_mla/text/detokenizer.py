"""Incremental detokenisation: one token in, the text that is certain by now out.

The concatenated deltas, `flush` included, equal the decoding of all ids at once.

    ids:   |--- told ---|-- context --|-- pending --|   context: decoded again with pending, so that
    text:  |------- emitted ----------|  not yet    |   spaces at the border come out right
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from radix_mla.text.tokenizer import Tokenizer

_MAX_PENDING = 16  # a valid character never spans more tokens of a vocabulary without <0x..> tokens


class Detokenizer(Protocol):
    """Text of a growing list of ids."""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" while a character is incomplete."""

    def flush(self) -> str:
        """What is left at the end; an incomplete character becomes U+FFFD."""


def make_detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()
) -> Detokenizer:
    """The byte-level one where the vocabulary allows it (O(1) a token), else the general one.

    `keep`: special tokens that are not skipped.
    """
    skipped = tokenizer.special_ids - keep if skip_special_tokens else frozenset()
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, skipped)
    return WindowDetokenizer(tokenizer, skipped)


class ByteLevelDetokenizer:
    """For byte-level vocabularies: bytes of each token through an incremental UTF-8 decoder."""

    __slots__ = ("_decoder", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: decodes a short window twice, emits the difference."""

    __slots__ = ("_context", "_pending", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skipped
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._pending.append(token_id)
        if self._tokenizer.is_byte_fallback(token_id):
            return ""  # one more such byte may change the text of the whole run
        return self._emit(final=False)

    def flush(self) -> str:
        return self._emit(final=True) if self._pending else ""

    def _emit(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._context, False)
        text = self._tokenizer.decode(self._context + self._pending, False)
        if not final and text.endswith("\ufffd") and len(self._pending) < _MAX_PENDING:
            return ""
        self._context, self._pending = self._pending, []
        return text[len(before) :]
