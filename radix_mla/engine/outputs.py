"""What happens to sequences in a step, and the engine's gauges and counters, as plain values.

Made by the engine; `engine/ipc.py` carries them to the API process.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Admitted:
    """A sequence left the queue for the first time (once a sequence; not after a retraction).

    `missed` maps reasons (new, last_token, evicted, namespace, in_flight, not_stored, disabled) to
    tokens; cached + sum(missed) == prompt tokens. Counted in metrics for index 0 only.
    """

    request_id: str
    index: int
    num_cached_tokens: int
    missed: dict[str, int]
    queue_s: float


@dataclass(slots=True)
class TokenLogprobs:
    """`logprob` of the token, its rank (1 = most likely), and the k most likely (ids, logprobs)."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class SequenceOutput:
    """New tokens of one sequence in this step (0 or 1 for now), and its end if it ended.

    `stop_token_id` is the id that ended it (EOS or one of stop_token_ids), else None; that id is
    the last of `token_ids`. `error` is set with finish_reason "error"; with `rejected` it is the
    client's fault and says why, in words meant for the client.
    `prompt_logprobs` comes once, with the first token: entry 0 is None.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    rejected: bool = False


@dataclass(slots=True)
class PrefillProgress:
    """Prompt tokens whose rows exist (cached + computed) of a sequence still in prefill."""

    request_id: str
    index: int
    num_computed: int


@dataclass(slots=True)
class EngineStats:
    """Gauges now and counters since the start; page counts are given in slots (tokens)."""

    num_running: int = 0
    num_waiting: dict[str, int] = field(default_factory=dict)  # reason → sequences
    waiting_tokens: int = 0
    # free, evictable, protected, private, pinned
    kv_slots: dict[str, int] = field(default_factory=dict)
    kv_slots_total: int = 0
    evicted_tokens: dict[str, int] = field(default_factory=dict)  # reason → tokens
    prefill_tokens: dict[str, int] = field(default_factory=dict)  # computed, recomputed, device
    attention_path_tokens: dict[str, int] = field(default_factory=dict)  # path → tokens
    prefill_context_chunks: int = 0
    retractions: int = 0
    nonfinite_requests: int = 0
    audit_failures: int = 0
    aborted_tokens: dict[str, int] = field(default_factory=dict)  # phase → tokens
    num_steps: int = 0
    step_s: float = 0.0  # sum of step times
    step_host_s: float = 0.0  # of which outside the forward
    last_step_s: float = 0.0
    last_prefill_step_s: float = 0.0  # last step that held prefill tokens
