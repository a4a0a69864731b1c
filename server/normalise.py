"""What `--prompt-normalise auto` changes, so that turn n + 1 starts as turn n did.

the `x-anthropic-billing-header: ...` line of Claude Code differs from turn to turn: dropped
a system message between turns would change the head of the prompt under templates that gather
system text there: it becomes a user turn in its place
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from radix_mla.text.chat_template import ChatTemplate

# The line may be a part of its own that was joined to the next part without a line break: it ends
# with its last `key=value;`.
_BILLING = re.compile(
    r"^x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*;?)*[ \t]*\n?", re.MULTILINE
)


def without_billing_line(text: str) -> str:
    """`text` without the billing header that Claude Code puts into its system prompt."""
    return _BILLING.sub("", text) if "x-anthropic-billing-header:" in text else text


def normalised(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> list[dict[str, Any] | None]:
    """Prepared messages, changed as above; None where nothing is left of one."""
    changed: list[dict[str, Any] | None] = []
    leading = True
    for message in messages:
        copy = dict(message)
        if copy["role"] == "system":
            text = copy["content"] or ""
            copy["content"] = without_billing_line(text)
            if text and not copy["content"]:
                changed.append(None)
                continue
            if not leading and not template.keeps_system_in_place:
                copy["role"] = "user"
        else:
            leading = False
        changed.append(copy)
    return changed
