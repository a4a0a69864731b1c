"""Where thinking begins and ends in a model's text, found from its chat template."""

from __future__ import annotations

from typing import NamedTuple

from radix_mla.text.chat_template import ChatTemplate
from radix_mla.text.tokenizer import Tokenizer


class ReasoningFormat(NamedTuple):
    """The two tags around thinking text."""

    start: str
    end: str


THINK = ReasoningFormat("<think>", "</think>")


def find_reasoning(template: ChatTemplate, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The tags, if the template writes the end tag or the vocabulary has both as tokens."""
    if THINK.end in template.source:
        return THINK
    if all(tokenizer.token_to_id(tag) is not None for tag in (THINK.start, THINK.end)):
        return THINK
    return None


def is_open(reasoning: ReasoningFormat | None, prompt_end: str) -> bool:
    """True when a prompt that ends with this text leaves the model inside its thinking."""
    return reasoning is not None and prompt_end.rstrip().endswith(reasoning.start)


def is_closed(reasoning: ReasoningFormat | None, prompt_end: str) -> bool:
    """True when the prompt ends behind thinking: the template was told to skip it."""
    return reasoning is not None and prompt_end.rstrip().endswith(reasoning.end)
