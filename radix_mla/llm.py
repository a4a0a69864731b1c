"""LLM: the engine in place, for scripts. Prompts in, texts out, the prefix cache in between.

with LLM("configs/demo") as llm:
    for output in llm.generate(["Once upon a time", [1, 17, 4]], max_tokens=32):
        print(output.num_cached_tokens, output.completions[0].text)
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, Unpack

import numpy as np

from radix_mla.cache.retention import check_retention
from radix_mla.config import EngineConfig
from radix_mla.engine.outputs import SequenceOutput, TokenLogprobs
from radix_mla.errors import ContextOverflow, InvalidRequest, RadixMlaError
from radix_mla.request import FinishReason, Grammar, Request, SamplingParams
from radix_mla.sampling.ranges import check_ranges

if TYPE_CHECKING:
    from radix_mla.engine.build import Progress
    from radix_mla.engine.engine import Engine
    from radix_mla.text.detokenizer import Detokenizer
    from radix_mla.text.stops import StopChecker
    from radix_mla.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int]

_MAX_TOKENS = 256


class SamplingFields(TypedDict, total=False):
    """The fields of SamplingParams; what is left out comes from the model's generation config."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar


_SAMPLING_FIELDS = frozenset(SamplingFields.__annotations__)


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


class LLM:
    """A model, its cache and its scheduler in this process. Not thread-safe."""

    def __init__(
        self, model: str | Path, *, progress: Progress | None = None, **config: Any
    ) -> None:
        """`config`: fields of EngineConfig. Raises ConfigError or ModelError."""
        from radix_mla.engine.build import build_engine  # torch: not before it is needed
        from radix_mla.text.tokenizer import Tokenizer

        self._engine: Engine | None = build_engine(
            EngineConfig(model=str(model), **config), progress
        )
        self.info = self._engine.info
        self.tokenizer: Tokenizer | None = Tokenizer.from_dir(self.info["model_path"])
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model and the cache; idempotent."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    @property
    def engine(self) -> Engine:
        """For audit, flush and statistics. Raises RadixMlaError after `close`."""
        if self._engine is None:
            raise RadixMlaError("this LLM is closed")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        cache_salt: str = "",
        cache_store: bool = True,
        cache_ttl: float | None = None,
        cache_priority: int = 0,
        **sampling: Unpack[SamplingFields],
    ) -> list[RequestOutput]:
        """One output a prompt, in order; all prompts run as one batch.

        `params`, or fields of it as keywords. `cache_ttl` (seconds, up to a day) and
        `cache_priority` (0 to 10) ask that the rows be evicted after those of others; a time alone
        is priority 1, a priority alone holds for an hour. Raises RequestError for what cannot be
        served; then none of the prompts runs. A request that fails in the engine has finish_reason
        "error".
        """
        unknown = sampling.keys() - _SAMPLING_FIELDS
        if unknown:
            raise TypeError(f"generate() has no keyword {min(unknown)!r}")
        check_retention(cache_priority, cache_ttl)
        if params is not None and sampling:
            raise InvalidRequest("give params or its fields, not both", param="params")
        jobs: dict[str, _Job] = {}
        try:
            for prompt in _as_list(prompts):
                ids = self._encode(prompt)
                own = params if params is not None else self._params(sampling, len(ids))
                check_ranges(own)
                request = Request(
                    request_id=f"llm-{self._num_requests}",
                    prompt=ids.tobytes(),
                    params=own,
                    n=n,
                    namespace=cache_salt,
                    store=cache_store,
                    cache_ttl_s=cache_ttl or 0.0,
                    cache_priority=cache_priority,
                    arrival_s=time.monotonic(),
                )
                self._num_requests += 1
                job = _Job(request, self.tokenizer, stop)
                self.engine.add_request(request)
                jobs[request.request_id] = job
            self._run(jobs)
        finally:
            for request_id in jobs:
                self.engine.abort(request_id)  # those left by an exception
            self.engine.take_events()
        return [job.output for job in jobs.values()]

    def _run(self, jobs: dict[str, _Job]) -> None:
        engine = self.engine
        while engine.has_work:
            events = engine.step()
            for admitted in events.admitted:
                if admitted.index == 0:
                    jobs[admitted.request_id].output.num_cached_tokens = admitted.num_cached_tokens
            for output in events.sequences:
                if jobs[output.request_id].take(output):
                    engine.abort(output.request_id, output.index, FinishReason.STOP)

    def _encode(self, prompt: Prompt) -> np.ndarray:
        """int32 [num tokens], little-endian. No Python work per token: prompts are long."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest(
                    f"{self.info['model']} has no tokenizer: give token ids", param="prompts"
                )
            return np.asarray(self.tokenizer.encode_prompt(prompt), dtype="<i4")
        ids = np.asarray(prompt)
        if ids.size and (ids.dtype.kind not in "iu" or ids.ndim != 1):
            raise InvalidRequest("prompts must be texts or lists of token ids", param="prompts")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
            raise InvalidRequest("prompt has ids that no vocabulary has", param="prompts")
        return ids.astype("<i4")

    def _params(self, sampling: SamplingFields, num_prompt: int) -> SamplingParams:
        limit = int(self.info["max_model_len"])
        room = limit - num_prompt
        if room < 1:
            raise ContextOverflow(
                limit=limit, prompt=num_prompt, completion=sampling.get("max_tokens", 1)
            )
        known = {item.name for item in fields(SamplingParams)}
        defaults = {k: v for k, v in self.info["generation_defaults"].items() if k in known}
        values: dict[str, Any] = {
            "max_tokens": _MAX_TOKENS,
            "seed": secrets.randbits(63),
            **defaults,
            **sampling,
        }
        if isinstance(values["max_tokens"], int):  # else `check_ranges` refuses it
            values["max_tokens"] = min(values["max_tokens"], room)
        return SamplingParams(**values)


class _Job:
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


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]
