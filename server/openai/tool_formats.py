"""How models write tool calls; the format is found in the text of the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.openai import tool_reader_glm as glm
from server.openai.assistant import CallReader
from server.openai.call_ids import CallIds
from server.openai.tool_reader import MarkedReader, Markers

Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """A call as a grammar sees it: text or (pattern) around the arguments, `{name}` put in.

    style: how xgrammar writes the arguments. separator: between two calls.
    """

    begin: str
    before: str = ""
    pattern: str = ""  # a regex between `begin` and `before`
    end: str
    separator: str = ""
    style: str = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing tool calls. `section`: markers around all calls of an answer, if any."""

    name: str
    sign: tuple[str, ...]  # a template that contains all of these is of this format
    markers: tuple[str, ...]
    shape: CallShape
    section: tuple[str, str] | None
    make_reader: Callable[[Schemas, CallIds], CallReader]

    @property
    def trigger(self) -> str:
        """The marker that begins the first call."""
        return self.section[0] if self.section is not None else self.shape.begin.partition("{")[0]


_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"
_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"

_V3 = Markers(
    section_begin=_BEGIN,
    section_end=_END,
    call_begin=_CALL,
    call_end=_CALL_END,
    header_end="```json",
    header=re.compile(rf"\s*function{_SEP}\s*(?P<name>[^\s<>]{{1,256}})\s*"),
    fenced=True,
)
_V31 = Markers(
    section_begin=_BEGIN,
    section_end=_END,
    call_begin=_CALL,
    call_end=_CALL_END,
    header_end=_SEP,
    header=re.compile(r"\s*(?P<name>[^\s<>]{1,256})\s*"),
)
_KIMI = Markers(
    section_begin=_KIMI_BEGIN,
    section_end=_KIMI_END,
    call_begin=_KIMI_CALL,
    call_end=_KIMI_CALL_END,
    header_end=_KIMI_ARGUMENTS,
    header=re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>]{1,256}?)(?::\d{1,9})?)\s*"),
)

DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    sign=(_BEGIN, "```json"),
    markers=(_BEGIN, _END, _CALL, _CALL_END, _SEP),
    shape=CallShape(
        begin=f"{_CALL}function{_SEP}{{name}}\n```json\n",
        end=f"\n```{_CALL_END}",
        separator="\n",
    ),
    section=(_BEGIN, _END),
    make_reader=lambda schemas, ids: MarkedReader(_V3, ids),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v3.1",
    sign=(_BEGIN,),
    markers=(_BEGIN, _END, _CALL, _CALL_END, _SEP),
    shape=CallShape(begin=f"{_CALL}{{name}}{_SEP}", end=_CALL_END),
    section=(_BEGIN, _END),
    make_reader=lambda schemas, ids: MarkedReader(_V31, ids),
)
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    sign=(_KIMI_ARGUMENTS,),
    markers=(_KIMI_BEGIN, _KIMI_END, _KIMI_CALL, _KIMI_CALL_END, _KIMI_ARGUMENTS),
    shape=CallShape(
        begin=f"{_KIMI_CALL}functions.{{name}}:",
        pattern=r"\d{1,4}",
        before=_KIMI_ARGUMENTS,
        end=_KIMI_CALL_END,
    ),
    section=(_KIMI_BEGIN, _KIMI_END),
    make_reader=lambda schemas, ids: MarkedReader(_KIMI, ids),
)
GLM = ToolFormat(
    name="glm",
    sign=(glm.BEGIN, glm.KEY),
    markers=(glm.BEGIN, glm.END, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END),
    shape=CallShape(begin=glm.BEGIN + "{name}", end=glm.END, style="glm_xml"),
    section=None,
    make_reader=glm.GlmReader,
)
FORMATS = (DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, GLM)


def find_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template's source shows; None when it knows no tool calls of ours."""
    for tool_format in FORMATS:
        if all(text in template for text in tool_format.sign):
            return tool_format
    return None
