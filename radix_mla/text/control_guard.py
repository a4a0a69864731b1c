"""Keeps control-token strings in messages plain text.

A tokenizer turns the string `<|User|>` into the control token wherever it stands, in the text of a
user as well, who could so end his turn and write the assistant's. A mark behind the first character
of each such string survives the template; the rendered text is cut there before it is tokenised,
and the string falls apart into ordinary tokens. Text without such strings is untouched.

    content   a <|User|> b      guarded   a <[mark]|User|> b      encoded   "a <"  "|User|> b"
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from radix_mla.text.tokenizer import Tokenizer

_PREFIX = 3
_LOOKS_LIKE_CONTROL = re.compile(r"<.*>|\[.*\]", re.DOTALL)


class ControlGuard:
    """For one tokenizer and template. Immutable, safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._mark = f"[plain {secrets.token_hex(12)}]"
        self._by_prefix: dict[str, list[str]] = {}
        for text, is_special in tokenizer.added_tokens.items():
            is_control = is_special or text in template or _LOOKS_LIKE_CONTROL.fullmatch(text)
            if is_control and len(text) >= _PREFIX:
                self._by_prefix.setdefault(text[:_PREFIX], []).append(text)
        prefixes = "|".join(map(re.escape, self._by_prefix)) or r"(?!)"
        self._candidates = re.compile(f"(?=({prefixes}))")

    def guard(self, value: Any, *, keep: Collection[str] = ()) -> Any:
        """`value` with marks in its strings, keys of objects included; `keep` stay as they are."""
        if isinstance(value, str):
            return self._guard_text(value, keep)
        if isinstance(value, Mapping):
            return {
                self.guard(key, keep=keep): self.guard(item, keep=keep)
                for key, item in value.items()
            }
        if isinstance(value, Sequence):
            return [self.guard(item, keep=keep) for item in value]
        return value

    def split(self, text: str) -> list[str]:
        """Rendered text, cut at the marks: the pieces are tokenised one by one."""
        return text.split(self._mark)

    def _guard_text(self, text: str, keep: Collection[str]) -> str:
        cuts = [
            match.start() + 1
            for match in self._candidates.finditer(text)
            if any(
                text.startswith(control, match.start()) and control not in keep
                for control in self._by_prefix[match.group(1)]
            )
        ]
        if not cuts:
            return text
        places = zip([0, *cuts], [*cuts, len(text)], strict=True)
        return self._mark.join(text[start:end] for start, end in places)
