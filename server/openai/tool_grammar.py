"""What the answer must look like, tool calls and thinking included, as an xgrammar structural tag.

    [thinking] (calls)                     tool_choice required, named
    [thinking] text with calls inside      tool_choice auto, where calls are restricted
    [thinking] (content or calls)          response_format beside tools

Markers that are tokens of the vocabulary are matched as tokens, so that what the model writes is
what the template will write when the answer comes back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radix_mla.errors import InvalidRequest
from radix_mla.request import Grammar
from server.openai.json_schema import prepare_schema
from server.openai.reasoning import ReasoningFormat
from server.openai.tool_calls import Tool, ToolUse
from server.openai.tool_formats import ToolFormat

Format = dict[str, Any]
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBuilder:
    """Builds for one model. `token_id`: id of a string that is one token, else None."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    token_id: Callable[[str], int | None]

    def build(
        self,
        use: ToolUse,
        content: Grammar | None,
        *,
        reasoning_open: bool,
        reasoning_possible: bool,
        strict: bool = True,
    ) -> Grammar | None:
        """The grammar of an answer; None when everything is permitted.

        `content`: what text must match. `strict`: honour `strict` of tools under auto.
        Raises InvalidRequest for a strict tool whose schema cannot be enforced.
        """
        body = self._body(use, content, strict=strict)
        if body is None:
            return None
        if not reasoning_open and not reasoning_possible and body is content:
            return content
        if isinstance(body, Grammar):
            body = as_format(body)
        prefix = self._thinking(reasoning_open, reasoning_possible)
        whole = {"type": "sequence", "elements": [*prefix, body]} if prefix else body
        text = json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False)
        return Grammar("structural_tag", text)

    def _body(
        self, use: ToolUse, content: Grammar | None, *, strict: bool
    ) -> Format | Grammar | None:
        if self.tools is None or use.mode == "none":
            return content
        if use.mode == "required":
            return self._calls(self.tools, use, enforce_all=True)
        if content is not None:
            calls = self._calls(self.tools, use, enforce_all=False)
            return {"type": "or", "elements": [as_format(content), calls]}
        if use.limited or (strict and any(tool.strict for tool in use.callable)):
            return self._triggered(self.tools, use)
        return None

    def _calls(self, tools: ToolFormat, use: ToolUse, *, enforce_all: bool) -> Format:
        """One or more calls with the section around them. Forced calls always follow the schema."""
        call = _either([self._call(tools, tool, enforce_all) for tool in use.callable])
        elements = [call]
        if use.max_calls != 1:
            more = [*self._literal(tools.shape.separator), call]
            elements.append({"type": "star", "content": _sequence(more)})
        if tools.section is not None:
            begin, end = tools.section
            elements = [*self._literal(begin), *elements, *self._literal(end)]
        return _sequence(elements)

    def _triggered(self, tools: ToolFormat, use: ToolUse) -> Format:
        """Free text in which the first marker of a call leads into the grammar of calls."""
        trigger, end = tools.trigger, tools.section[1] if tools.section else tools.shape.end
        content = self._inside(tools, use)
        one = use.max_calls == 1
        begin_id, end_id = self.token_id(trigger), self.token_id(end)
        if begin_id is not None and end_id is not None:
            begin = {"type": "token", "token": begin_id}
            tag = {
                "type": "tag",
                "begin": begin,
                "content": content,
                "end": {"type": "token", "token": end_id},
            }
            return {
                "type": "token_triggered_tags",
                "trigger_tokens": [begin_id],
                "tags": [tag],
                "stop_after_first": one,
            }
        return {
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": [{"type": "tag", "begin": trigger, "content": content, "end": end}],
            "stop_after_first": one,
        }

    def _inside(self, tools: ToolFormat, use: ToolUse) -> Format:
        """What stands between the trigger and its end marker."""
        if tools.section is not None:
            elements: list[Format] = self._calls(tools, use, enforce_all=False)["elements"]
            return _sequence(elements[1:-1])
        return _either([self._call(tools, tool, False, inside=True) for tool in use.callable])

    def _call(
        self, tools: ToolFormat, tool: Tool, enforce: bool, *, inside: bool = False
    ) -> Format:
        """One call; `inside`: without the markers around it."""
        shape = tools.shape
        arguments = {
            "type": "json_schema",
            "json_schema": _enforceable(tool, enforce),
            "style": shape.style,
        }
        begin = shape.begin.replace("{name}", tool.name)
        elements = self._literal(begin.removeprefix(tools.trigger) if inside else begin)
        if shape.pattern:
            elements.append({"type": "regex", "pattern": shape.pattern})
        elements += self._literal(shape.before)
        return _sequence([*elements, arguments, *self._literal("" if inside else shape.end)])

    def _thinking(self, is_open: bool, possible: bool) -> list[Format]:
        """What may stand before the answer, blank lines behind thinking included."""
        if self.reasoning is None or not (is_open or possible):
            return []
        end_id = self.token_id(self.reasoning.end)
        if end_id is not None:
            inside: Format = {"type": "any_tokens", "exclude_tokens": [end_id]}
            thought = [inside, {"type": "token", "token": end_id}]
        else:
            inside = {"type": "any_text"}
            thought = [{"type": "tag", "begin": "", "content": inside, "end": self.reasoning.end}]
        thought.append({"type": "regex", "pattern": r"\n{0,2}"})
        if is_open:
            return thought
        start = self._literal(self.reasoning.start)
        return [{"type": "optional", "content": _sequence([*start, *thought])}]

    def _literal(self, text: str) -> list[Format]:
        """Exactly this text: markers as tokens where they are tokens."""
        markers = self.tools.markers if self.tools is not None else ()
        if self.reasoning is not None:
            markers = (*markers, self.reasoning.start, self.reasoning.end)
        tokens = {marker: self.token_id(marker) for marker in markers}
        known = sorted((m for m, token in tokens.items() if token is not None), key=len)
        pattern = "|".join(re.escape(marker) for marker in reversed(known))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return [
            {"type": "token", "token": tokens[part]}
            if tokens.get(part) is not None
            else {"type": "const_string", "value": part}
            for part in parts
            if part
        ]


def as_format(grammar: Grammar) -> Format:
    """A grammar as a part of a structural tag. Raises ValueError when its JSON is broken."""
    match grammar.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": dict(_ANY_OBJECT)}
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "choice":
            options = json.loads(grammar.text)
            return _either([{"type": "const_string", "value": option} for option in options])
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            inner: Format = json.loads(grammar.text)["format"]
            return inner


def _enforceable(tool: Tool, enforce: bool) -> Any:
    """The schema of a tool's arguments; any object where it cannot or need not be enforced.

    Raises InvalidRequest where `strict` asks for what cannot be enforced.
    """
    if not tool.parameters or not (enforce or tool.strict):
        return dict(_ANY_OBJECT)
    try:
        return json.loads(prepare_schema(dict(tool.parameters), tool.param))
    except InvalidRequest:
        if tool.strict:
            raise
        return dict(_ANY_OBJECT)


def _either(options: Sequence[Format]) -> Format:
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def _sequence(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}
