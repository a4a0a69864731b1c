"""What a request asks for and what the engine answers, as plain values.

`SamplingParams` and `Request` are validated where they are made (the HTTP edge, `LLM`); the engine
trusts them. Plain dataclasses (msgspec encodes them too), so that the offline engine needs no
package beyond torch and numpy; change one with `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np


class FinishReason(StrEnum):
    """Why a sequence ended; the values are the ones of /metrics."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the generated text must match, from its first token to its end.

    text: json_object: ""; json_schema: the schema as JSON; regex and ebnf: the expression (a regex
    matches the whole answer); choice: a JSON array of strings; structural_tag: its JSON.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence is sampled and when it ends.

    `max_tokens` is already cut to the room left in the context. `temperature` 0 is greedy.
    `logprobs`: None = none, k = the sampled token's and the k most likely ones'.
    `prompt_logprobs` likewise for the prompt. `seed`: draws are keyed by (seed, position), so they
    do not depend on batching or retraction; None = a fresh seed per request, drawn at the edge.
    Stop *strings* are matched where text is made, outside the engine.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with n sampled continuations; choice i has the sequence id (request_id, i).

    prompt: int32 little-endian bytes, [num_prompt_tokens]. `store` False: the request runs in a
    namespace of its own that is dropped at its end. Choice i > 0 attaches to choice 0's prompt.
    """

    request_id: str
    prompt: bytes
    params: SamplingParams
    n: int = 1
    namespace: str = ""
    priority: int = 0  # lower runs first
    store: bool = True
    cache_ttl_s: float = 0.0  # its rows are evicted after others for so long; 0: not asked for
    cache_priority: int = 0  # 0 to 10: rows of a greater one are evicted later
    arrival_s: float = 0.0  # time.monotonic() of the API process (one host, one clock)

    @property
    def prompt_tokens(self) -> np.ndarray:
        """int32 [num_prompt_tokens], read-only view."""
        return np.frombuffer(self.prompt, dtype="<i4")
