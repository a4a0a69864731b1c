"""What `LLM.generate` answers, and how it grows while the engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radix_mla.engine.outputs import SequenceOutput, TokenLogprobs
from radix_mla.errors import InvalidRequest
from radix_mla.request import FinishReason, Request

if TYPE_CHECKING:
    from radix_mla.text.detokenizer import Detokenizer
    from radix_mla.text.stops import StopChecker
    from radix_mla.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Completion:
    """One choice. `text` is None without a tokenizer; a stop string is not part of it."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or token id
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt's result. `num_cached_tokens`: prompt tokens reused from the cache."""

    request_id: str
    prompt_token_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str | None:
        """Of the first choice."""
        return self.completions[0].text


class Job:
    """One prompt's output as it grows."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        self.output = RequestOutput(
            request.request_id,
            request.prompt_tokens.tolist(),
            [Completion(index) for index in range(request.n)],
        )
        if stop and tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer", param="stop")
        self._min_tokens = request.params.min_tokens
        self._texts = [_Text(tokenizer, stop) for _ in range(request.n)] if tokenizer else None

    def take(self, output: SequenceOutput) -> bool:
        """Adds an event; True when a stop string has just ended the sequence."""
        completion = self.output.completions[output.index]
        if completion.finish_reason is not None:
            return False  # the event of the abort that followed a stop string
        if output.prompt_logprobs is not None:
            self.output.prompt_logprobs = output.prompt_logprobs
        if output.logprobs is not None:
            completion.logprobs = [*(completion.logprobs or []), *output.logprobs]
        completion.token_ids += output.token_ids
        stopped = self._add_text(completion, output)
        completion.error = output.error
        if stopped is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP.value, stopped
            return output.finish_reason is None
        completion.finish_reason = output.finish_reason
        completion.stop_reason = output.stop_token_id
        return False

    def _add_text(self, completion: Completion, output: SequenceOutput) -> str | None:
        """The stop string that the new tokens complete."""
        if self._texts is None:
            return None
        text = self._texts[output.index]
        for position, token_id in enumerate(output.token_ids):
            if token_id != output.stop_token_id:
                num = len(completion.token_ids) - len(output.token_ids) + position + 1
                text.push(token_id, look_for_stops=num > self._min_tokens)
        if output.finish_reason is not None and text.stopped is None:
            text.flush()
        completion.text = text.text
        return text.stopped


class _Text:
    """Text of one choice, cut at the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        from radix_mla.text.detokenizer import make_detokenizer
        from radix_mla.text.stops import StopChecker

        self.text = ""
        self._detokenizer: Detokenizer = make_detokenizer(tokenizer)
        self._stops: StopChecker = StopChecker(stop)

    @property
    def stopped(self) -> str | None:
        return self._stops.matched

    def push(self, token_id: int, *, look_for_stops: bool) -> None:
        if self.stopped is None:
            piece = self._detokenizer.push(token_id)
            self.text += self._stops.push(piece) if look_for_stops else self._stops.skip(piece)

    def flush(self) -> None:
        self.text += self._stops.push(self._detokenizer.flush())
        if self.stopped is None:
            self.text += self._stops.flush()
