"""One sequence on its way from ids to text: detokenise, look for stop strings, keep counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from radix_mla.engine.ipc import SequenceOutput, TokenLogprobs
from radix_mla.text.detokenizer import make_detokenizer
from radix_mla.text.stops import StopChecker
from radix_mla.text.tokenizer import Tokenizer
from server.openai.assistant import AssistantPlan
from server.openai.assistant_events import AssistantEvent, merge_events


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How tokens become output. `discard`: max_tokens 0, the one token that was made is dropped.

    `assistant`: how the text is split into thinking, content and tool calls (`Delta.parts`).
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    discard: bool = False
    assistant: AssistantPlan | None = None


class TokenEntry(NamedTuple):
    """One token with its logprobs and the length of the text before it."""

    token_id: int
    logprobs: TokenLogprobs | None
    text_offset: int


@dataclass(slots=True)
class Delta:
    """What is new of one choice. Text may lag behind tokens while a stop string is possible."""

    choice: int
    text: str
    token_ids: list[int]
    entries: list[TokenEntry]
    finish_reason: str | None
    parts: list[AssistantEvent] = field(default_factory=list)


class Choice:
    """One sequence on its way to text."""

    __slots__ = (
        "_assistant",
        "_detokenizer",
        "_num_chars",
        "_options",
        "_stops",
        "finish_reason",
        "index",
        "num_tokens",
        "prompt_logprobs",
        "stop_reason",
    )

    def __init__(self, index: int, tokenizer: Tokenizer | None, options: OutputOptions) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._options = options
        self._num_chars = 0
        self._stops = StopChecker(options.stops, include_stop=options.include_stop)
        plan = options.assistant
        self._assistant = plan.parser() if plan is not None else None
        self._detokenizer = (
            make_detokenizer(
                tokenizer,
                skip_special_tokens=options.skip_special_tokens,
                keep=plan.keep_ids if plan is not None else frozenset(),
            )
            if tokenizer is not None
            else None
        )

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens generated inside thinking."""
        return self._assistant.num_reasoning_tokens if self._assistant is not None else 0

    def feed(self, output: SequenceOutput) -> Delta:
        """Takes the output of some steps. After a stop string the rest of it is dropped."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        delta = Delta(self.index, "", [], [], None)
        if self._options.discard:
            self.finish_reason = delta.finish_reason = "length"
            return delta
        for position, token_id in enumerate(output.token_ids):
            is_last = position == len(output.token_ids) - 1
            stops_here = is_last and output.stop_token_id is not None
            logprobs = output.logprobs[position] if output.logprobs is not None else None
            delta.token_ids.append(token_id)
            delta.entries.append(TokenEntry(token_id, logprobs, self._num_chars))
            text = self._push(token_id, silent=stops_here and not self._options.include_stop)
            self._add(delta, text, num_tokens=1)
            if self._stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.matched
                break
            if self._assistant is not None and self._assistant.full:
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and output.finish_reason is not None:
            self._add(delta, self._finish(output))
        if self.finish_reason is not None and self._assistant is not None:
            delta.parts = merge_events([*delta.parts, *self._assistant.finish()])
            self.finish_reason = self._assistant.finish_reason(self.finish_reason)
        delta.finish_reason = self.finish_reason
        return delta

    def _add(self, delta: Delta, text: str, *, num_tokens: int = 0) -> None:
        delta.text += text
        if self._assistant is not None:
            self._assistant.count(num_tokens)
            delta.parts = merge_events([*delta.parts, *self._assistant.push(text)])

    def _push(self, token_id: int, *, silent: bool) -> str:
        self.num_tokens += 1
        if self._detokenizer is None or silent:
            return ""
        return self._release(self._detokenizer.push(token_id))

    def _release(self, piece: str) -> str:
        self._num_chars += len(piece)
        if self.num_tokens < self._options.min_tokens:
            return self._stops.skip(piece)
        return self._stops.push(piece)

    def _finish(self, output: SequenceOutput) -> str:
        text = ""
        if self._detokenizer is not None:
            text = self._release(self._detokenizer.flush())
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
            return text
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_token_id
        return text + self._stops.flush()


def joined(deltas: list[Delta]) -> list[Delta]:
    """Deltas of one choice put together, in order of first appearance."""
    if len(deltas) < 2:
        return deltas
    merged: dict[int, Delta] = {}
    for delta in deltas:
        known = merged.setdefault(delta.choice, delta)
        if known is not delta:
            known.text += delta.text
            known.parts = merge_events([*known.parts, *delta.parts])
            known.token_ids += delta.token_ids
            known.entries += delta.entries
            known.finish_reason = delta.finish_reason
    return list(merged.values())
