"""How the served model writes thinking and tool calls, and what follows for one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from radix_mla.request import Grammar, SamplingParams
from radix_mla.text.chat_template import ChatTemplate
from radix_mla.text.tokenizer import Tokenizer
from server.openai.assistant import AssistantPlan
from server.openai.call_ids import CallIds, used_ids
from server.openai.reasoning import find_reasoning, is_closed, is_open
from server.openai.tool_calls import ToolUse
from server.openai.tool_formats import find_tool_format
from server.openai.tool_grammar import GrammarBuilder

_TAIL_TOKENS = 16  # enough for a generation prompt
_NEVER = float("-inf")


class ModelFormats:
    """Found once from the chat template and the vocabulary."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.tools = find_tool_format(template.source)
        self.reasoning = find_reasoning(template, tokenizer)
        self._tokenizer = tokenizer
        self._thinks = self.reasoning is not None and self.reasoning.end in template.source
        self._grammar = GrammarBuilder(
            tools=self.tools, reasoning=self.reasoning, token_id=tokenizer.token_to_id
        )
        self._has_grammar = find_spec("xgrammar") is not None

    def info(self) -> dict[str, Any]:
        """For /server_info."""
        return {
            "tool_format": self.tools.name if self.tools is not None else None,
            "reasoning_format": list(self.reasoning) if self.reasoning is not None else None,
        }

    def plan(
        self,
        use: ToolUse,
        prompt: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        *,
        continued: bool = False,
    ) -> AssistantPlan:
        """How the answers to this prompt are parsed. `continued`: the last message goes on."""
        reader = None
        if self.tools is not None and use.mode != "none":
            make, schemas, used = self.tools.make_reader, use.schemas, used_ids(messages)
            reader = lambda: make(schemas, CallIds(used))  # noqa: E731
        tail = self._tail(prompt)
        continued_open = continued and self._leaves_open(messages[-1])
        return AssistantPlan(
            reasoning=self.reasoning,
            reasoning_open=is_open(self.reasoning, tail) or continued_open,
            reasoning_possible=self._thinks and not is_closed(self.reasoning, tail),
            reader=reader,
            max_calls=use.max_calls if use.mode != "none" else None,
            keep_ids=self._marker_ids(with_tools=reader is not None),
        )

    def constrain(
        self, params: SamplingParams, use: ToolUse, plan: AssistantPlan, ignored: list[str]
    ) -> SamplingParams:
        """tool_choice and strict as a grammar around the one that params have already.

        tool_choice none needs no grammar: the marker that begins calls is never sampled. Without
        the grammar extra `strict` of tools under auto is added to `ignored`.
        """
        if use.mode == "none" and use.shown:
            params = self._without_calls(params)
        wants_strict = use.mode == "auto" and any(tool.strict for tool in use.callable)
        if wants_strict and not self._has_grammar:
            ignored.append("tools[].function.strict")
        grammar: Grammar | None = self._grammar.build(
            use,
            params.grammar,
            reasoning_open=plan.reasoning_open,
            reasoning_possible=plan.reasoning_possible,
            strict=self._has_grammar,
        )
        return params if grammar is params.grammar else replace(params, grammar=grammar)

    def _without_calls(self, params: SamplingParams) -> SamplingParams:
        trigger = self._tokenizer.token_to_id(self.tools.trigger) if self.tools else None
        if trigger is None:
            return params
        return replace(params, logit_bias={**(params.logit_bias or {}), trigger: _NEVER})

    def _tail(self, prompt: Sequence[int]) -> str:
        return self._tokenizer.decode(list(prompt[-_TAIL_TOKENS:]), skip_special_tokens=False)

    def _leaves_open(self, message: Mapping[str, Any]) -> bool:
        content = message.get("content")
        if self.reasoning is None or not isinstance(content, str):
            return False
        return content.rfind(self.reasoning.start) > content.rfind(self.reasoning.end)

    def _marker_ids(self, *, with_tools: bool) -> frozenset[int]:
        markers = list(self.reasoning or ())
        if with_tools and self.tools is not None:
            markers += self.tools.markers
        ids = (self._tokenizer.token_to_id(marker) for marker in markers)
        return frozenset(token_id for token_id in ids if token_id is not None)
