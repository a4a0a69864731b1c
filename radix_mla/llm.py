"""LLM: the engine in place, for scripts. Prompts in, texts out, the prefix cache in between.

with LLM("configs/demo") as llm:
    for output in llm.generate(["Once upon a time", [1, 17, 4]], max_tokens=32):
        print(output.num_cached_tokens, output.completions[0].text)
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, Unpack

import numpy as np

from radix_mla.cache.retention import check_retention
from radix_mla.config import EngineConfig
from radix_mla.errors import ContextOverflow, InvalidRequest, RadixMlaError
from radix_mla.request import FinishReason, Grammar, Request, SamplingParams
from radix_mla.request_output import Job, RequestOutput
from radix_mla.sampling.ranges import check_ranges

if TYPE_CHECKING:
    from radix_mla.engine.build import Progress
    from radix_mla.engine.engine import Engine
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
        jobs: dict[str, Job] = {}
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
                job = Job(request, self.tokenizer, stop)
                self.engine.add_request(request)
                jobs[request.request_id] = job
            self._run(jobs)
        finally:
            for request_id in jobs:
                self.engine.abort(request_id)  # those left by an exception
            self.engine.take_events()
        return [job.output for job in jobs.values()]

    def _run(self, jobs: dict[str, Job]) -> None:
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


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]
