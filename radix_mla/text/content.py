"""The text of a message's content, in whatever form a client sends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from radix_mla.errors import InvalidRequest


def content_text(content: object, index: int) -> str:
    """A message's content as one string: parts joined without separator, null is empty.

    Raises InvalidRequest for parts other than text (image, audio, file).
    """
    param = f"messages[{index}].content"
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{param} must be a string or a list of text parts", param=param)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise InvalidRequest(
                f"{param} has a part of type {kind!r}; this model takes text parts only",
                param=param,
                code="unsupported_content",
            )
        texts.append(text)
    return "".join(texts)
