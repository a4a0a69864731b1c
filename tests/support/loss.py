"""Why a turn does not find all of the turn before it in the cache: a reason for each lost token.

turn n      | prompt |------ answer ------|
turn n + 1  | prompt |- the same -|- differs, from here on: `explain` says why -|
"""

from __future__ import annotations

import json
import re
from typing import Any

from support.client_loop import Answer

from radix_mla.text.tokenizer import Tokenizer

NOTHING = "nothing lost"
LAST = "an end of turn that the template writes itself"
RETOKENISED = "the same text as other tokens"
NO_TEXT = "bytes that are no text, shown as U+FFFD"
NO_REASONING = "reasoning that the client or the template leaves out"
REWRITTEN = "arguments written anew"
CUT = "a call cut by max_tokens: half of its arguments cannot be sent back"
TRIMMED = "white space that the client or the template trims"
_MARKER = re.compile("<｜[^｜]*｜>")


def explain(tokenizer: Tokenizer, before: Answer, after: Answer, common: int) -> str | None:
    """The reason for the first token that differs; None: there is none that is known here."""
    whole = before.prompt_ids + before.token_ids
    if common >= len(whole):
        return NOTHING
    if common == len(whole) - 1:
        return LAST
    start = len(before.prompt_ids)
    said = tokenizer.decode(before.token_ids, skip_special_tokens=False)
    length = 2 * len(before.token_ids) + 200
    shown = tokenizer.decode(after.prompt_ids[start : start + length], skip_special_tokens=False)
    same = _same(said, shown)
    differing = before.token_ids[: common - start + 1]
    if same >= len(tokenizer.decode(differing, skip_special_tokens=False)):
        return RETOKENISED
    if "\ufffd" in said[max(0, same - 1) : same + 1] or "\ufffd" in shown[same : same + 1]:
        return NO_TEXT
    if before.reasoning and same <= len(before.reasoning):
        return NO_REASONING
    left, right = said[same:], shown[same:]
    if not left.strip() or said[:same].rstrip() + left.lstrip() == shown[:same].rstrip() + left:
        return TRIMMED
    if before.calls:
        found = _arguments(said)
        if found is None:
            return CUT
        if any(_value(call) == found for call in before.calls):
            return REWRITTEN
    return CUT if _MARKER.match(right) and _MARKER.match(left) is None else None


def _same(left: str, right: str) -> int:
    """Length of what both begin with."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return min(len(left), len(right))


def _arguments(said: str) -> Any:
    """The first JSON object in an answer; None where it was cut off."""
    try:
        return json.JSONDecoder().raw_decode(said, said.index("{"))[0]
    except ValueError:
        return None


def _value(call: dict[str, Any]) -> Any:
    """A call's arguments, which some clients keep as text and some as an object."""
    arguments = call.get("arguments", call.get("input"))
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return None
