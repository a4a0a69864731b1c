"""What /metrics shows, and the events that move it. Names and meanings: docs/metrics.md.

Counted once a request: a request is one prompt with its n choices (a list of prompts is several).
    accepted == finished + running + waiting       queries == hits + missed
Gauges of the engine come from `EngineStats`; running and waiting are counted here, so that the
first identity holds at every scrape.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from radix_mla.engine.ipc import Admitted
from server.instruments import Counter, Histogram

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0),
)
GAP_BUCKETS = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0),
)
LENGTH_BUCKETS = (0.0, *(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)
RATIO_BUCKETS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)

MISS_REASONS = ("new", "last_token", "evicted", "namespace", "in_flight", "not_stored", "disabled")
FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error")
REJECTIONS = (
    *("invalid_request", "context_length", "model_not_found", "queue_requests", "queue_tokens"),
    *("draining", "engine_dead", "unauthorized", "request_too_large"),
)
_TURNS = (("first",), ("later",))
_MAX_SESSIONS = 100_000


@dataclass(slots=True)
class RequestRecord:
    """One accepted request, from acceptance to its one terminal event."""

    request_id: str
    num_prompt_tokens: int
    num_choices: int
    arrival_s: float
    turn: str = "first"
    admitted: Admitted | None = None
    reason: str | None = None  # why it ends, where that is not choice 0's finish reason
    finished: str | None = None
    open_choices: set[int] = field(default_factory=set)
    last_token_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open_choices = set(range(self.num_choices))
        self.last_token_s = [0.0] * self.num_choices

    @property
    def cache(self) -> str:
        """hit (≥ 90% of the prompt), partial (> 0), miss."""
        cached = self.admitted.num_cached_tokens if self.admitted else 0
        if cached == 0:
            return "miss"
        return "hit" if cached >= 0.9 * self.num_prompt_tokens else "partial"


class Metrics:
    """The API process's own counters, moved by the life of requests."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_running = 0
        self.waiting_tokens = 0
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = Counter("generation_tokens", "Generated tokens received.")
        self.queries = Counter(
            "prefix_cache_queries",
            "Prompt tokens looked up, once a request.",
            ("turn",),
            _TURNS,
        )
        self.hits = Counter(
            "prefix_cache_hits", "Prompt tokens found in the cache.", ("turn",), _TURNS
        )
        self.missed = Counter(
            "prefix_cache_missed_tokens",
            "Prompt tokens not found, by reason; hits + missed == queries.",
            ("reason",),
            [(reason,) for reason in MISS_REASONS],
        )
        self.hit_length = Histogram(
            "prefix_cache_hit_length_tokens", "Cached tokens of a request.", LENGTH_BUCKETS
        )
        self.hit_ratio = Histogram(
            "prefix_cache_hit_ratio", "Cached share of a request's prompt.", RATIO_BUCKETS
        )
        self.accepted = Counter("requests_accepted", "Requests accepted (one a prompt).")
        self.finished = Counter(
            "requests_finished",
            "Requests ended, by reason; of n choices the first one's.",
            ("reason",),
            [(reason,) for reason in FINISH_REASONS],
        )
        self.rejections = Counter(
            "rejections",
            "HTTP requests refused before acceptance.",
            ("reason",),
            [(reason,) for reason in REJECTIONS],
        )
        self.ttft = Histogram(
            "time_to_first_token_seconds",
            "From the request's arrival to its first token; cache: hit >= 90% of the prompt.",
            LATENCY_BUCKETS,
            ("cache", "turn"),
            [(cache, turn) for cache in ("hit", "partial", "miss") for (turn,) in _TURNS],
        )
        self.itl = Histogram(
            "inter_token_latency_seconds", "Gap between tokens of a sequence.", GAP_BUCKETS
        )
        self.e2e = Histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_BUCKETS
        )
        self.queue_time = Histogram(
            "queue_time_seconds", "From submission to admission.", LATENCY_BUCKETS
        )

    @property
    def instruments(self) -> list[Counter | Histogram]:
        """All counters and histograms, in the order of exposition."""
        return [value for value in vars(self).values() if isinstance(value, Counter | Histogram)]

    def turn(self, session: str | None) -> str:
        """ "later" when the session was seen before; the newest 100,000 are remembered."""
        if not session:
            return "first"
        seen = session in self._sessions
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return "later" if seen else "first"

    def on_accepted(self, record: RequestRecord) -> None:
        self.accepted.add()
        self.num_waiting += 1
        self.waiting_tokens += record.num_prompt_tokens

    def on_admitted(self, record: RequestRecord, admitted: Admitted) -> None:
        """Counts the first admission of choice 0; the others share its prompt."""
        if admitted.index != 0 or record.admitted is not None or record.finished:
            return
        record.admitted = admitted
        self._leave_queue(record)
        self.num_running += 1
        cached, turn = admitted.num_cached_tokens, (record.turn,)
        self.prompt_tokens.add(record.num_prompt_tokens)
        self.queries.add(record.num_prompt_tokens, turn)
        self.hits.add(cached, turn)
        for reason, tokens in admitted.missed.items():
            self.missed.add(tokens, (reason,))
        self.hit_length.observe(cached)
        self.hit_ratio.observe(cached / record.num_prompt_tokens)
        self.queue_time.observe(admitted.queue_s)

    def on_tokens(self, record: RequestRecord, index: int, num_tokens: int) -> None:
        """`num_tokens` of choice `index` have arrived."""
        if num_tokens == 0:
            return
        now = time.monotonic()
        self.generation_tokens.add(num_tokens)
        last = record.last_token_s[index]
        record.last_token_s[index] = now
        if last:
            self.itl.observe((now - last) / num_tokens, (), num_tokens)
        elif index == 0:
            self.ttft.observe(now - record.arrival_s, (record.cache, record.turn))

    def on_finished(self, record: RequestRecord, reason: str) -> None:
        """The terminal event; later ones of the same request are ignored."""
        if record.finished:
            return
        record.finished = reason
        if record.admitted is None:
            self._leave_queue(record)
        else:
            self.num_running -= 1
        self.finished.add(1, (reason,))
        self.e2e.observe(time.monotonic() - record.arrival_s)

    def _leave_queue(self, record: RequestRecord) -> None:
        self.num_waiting -= 1
        self.waiting_tokens -= record.num_prompt_tokens
