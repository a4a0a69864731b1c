"""The real scheduler and the real cache over FakeModel, with every promise checked each step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from support.fake_model import FakeModel, Oracle

from radix_mla.cache.prefix_cache import PrefixCache
from radix_mla.engine.outputs import Admitted, SequenceOutput, TokenLogprobs
from radix_mla.request import FinishReason, Request, SamplingParams
from radix_mla.scheduler.batch import Sampled, Scheduled, Work
from radix_mla.scheduler.budget import Limits
from radix_mla.scheduler.policy import load_policy
from radix_mla.scheduler.scheduler import Scheduler

VOCAB = 97
Key = tuple[str, int]


def make_request(request_id: str, prompt: list[int], max_tokens: int = 4, **fields) -> Request:
    names = set(SamplingParams.__dataclass_fields__)
    params = {name: fields.pop(name) for name in list(fields) if name in names}
    return Request(
        request_id=request_id,
        prompt=np.asarray(prompt, dtype="<i4").tobytes(),
        params=SamplingParams(max_tokens=max_tokens, **params),
        **fields,
    )


def _fake_prompt_logprobs(work: Work) -> list[TokenLogprobs]:
    """The predicted token's id stands for its logprob; only where they are asked for."""
    if not work.sequence.needs_prompt_logprobs:
        assert work.num_logits == int(work.samples)
        return []
    assert work.num_logits == work.num_tokens
    return [TokenLogprobs(t, 1, [], []) for t in work.sequence.prompt_targets(work.num_tokens)]


@dataclass
class Outcome:
    """What one sequence's events added up to."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    admitted: Admitted | None = None
    first_step: int = -1


class Simulation:
    """One logical second a step. Failing checks raise AssertionError or AuditError."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int | None = None,
        policy: str = "fcfs",
        eos_ids: frozenset[int] = frozenset(),
        cache: PrefixCache | None = None,
        step_s: float = 1.0,
        **limits,
    ) -> None:
        self.cache = cache or PrefixCache(num_pages, page_size, seed=1)
        pool = (num_pages - 1) * page_size
        self.limits = Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len or pool,
            page_size=page_size,
            num_pages=num_pages,
            **limits,
        )
        self.scheduler = Scheduler(self.cache, self.limits, load_policy(policy), eos_ids=eos_ids)
        self.model = FakeModel(num_pages, page_size, VOCAB)
        self.oracle = Oracle(VOCAB)
        self.eos_ids = eos_ids
        self.requests: dict[str, Request] = {}
        self.outcomes: dict[Key, Outcome] = {}
        self.stopped: dict[Key, str] = {}  # aborted from outside: the expected finish reason
        self.failing: set[Key] = set()  # fails at its next chunk
        self.failed: set[Key] = set()
        self.now = 0.0
        self.num_steps = 0
        self.max_retractions_seen = 0
        self._step_s = step_s

    # -- what a test does

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        for index in range(request.n):
            self.outcomes[request.request_id, index] = Outcome()

    def submit(self, request_id: str, prompt: list[int], max_tokens: int = 4, **fields) -> None:
        fields.setdefault("arrival_s", self.now)
        self.add(make_request(request_id, prompt, max_tokens, **fields))

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        for key, outcome in self.outcomes.items():
            if key[0] == request_id and index in (None, key[1]) and not outcome.finish_reason:
                self.stopped[key] = reason
        self.scheduler.abort(request_id, index, FinishReason(reason))
        self._take_events()

    def fail_next(self, request_id: str, index: int = 0) -> None:
        """The sequence's next chunk has a non-finite row."""
        self.failing.add((request_id, index))

    def step(self) -> Scheduled:
        self.now += self._step_s
        self.num_steps += 1
        oldest = min((s.order for s in self.scheduler.running), default=None)
        before = {s.order for s in self.scheduler.running}
        self.model.poison(self.cache._allocator.free_pages)
        num_retractions = self.scheduler.counters.retractions
        scheduled = self.scheduler.schedule(self.now)
        if self.scheduler.counters.retractions > num_retractions:
            assert {s.order for s in self.scheduler.running} <= before, "no thrashing"
        self._check_plan(scheduled, oldest, before)
        next_tokens = self.model.run(scheduled.plan)
        finite = np.ones(len(scheduled.work), dtype=bool)
        sampled = []
        for i, work in enumerate(scheduled.work):
            key = (work.sequence.request_id, work.sequence.index)
            if key in self.failing:
                finite[i] = False
                self.failing.discard(key)
                self.failed.add(key)
            prompt = _fake_prompt_logprobs(work)
            sampled.append(Sampled(next_tokens[i] if work.samples else None, None, prompt))
        self.scheduler.postprocess(scheduled, finite, sampled)
        self._take_events()
        self.cache.audit()
        self._check_leases()
        return scheduled

    def run(self, max_steps: int = 5000) -> None:
        """To the end of all work; checks every sequence."""
        while self.scheduler.has_work:
            assert self.num_steps < max_steps, self.scheduler.num_waiting()
            self.step()
        self.check_outcomes()

    # -- what must hold

    def _check_plan(self, scheduled: Scheduled, oldest: int | None, before: set[int]) -> None:
        limits = self.limits
        assert scheduled.plan.num_tokens <= limits.max_num_batched_tokens
        assert len(self.scheduler.running) <= limits.max_num_seqs
        kinds = [work.is_decode for work in scheduled.work]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        waiting = {s.order: s for s in self.scheduler.waiting}
        if oldest is not None:
            assert oldest not in waiting, "the oldest was retracted"
        for seq in [*self.scheduler.waiting, *self.scheduler.running]:
            self.max_retractions_seen = max(self.max_retractions_seen, seq.num_retractions)
        assert self.max_retractions_seen <= limits.max_retractions
        for seq in self.scheduler.waiting:
            assert seq.lease is None
        # Something is always done while there is work.
        assert (
            scheduled.work
            or not self.scheduler.has_work
            or before - {s.order for s in self.scheduler.running}
        ), "no progress"

    def _check_leases(self) -> None:
        counts = self.cache.counts()
        if not self.scheduler.running:
            assert counts.protected == counts.private == 0, counts
        assert len(self.cache._leases) == len(self.scheduler.running)

    def _take_events(self) -> None:
        events = self.scheduler.take_events()
        for admitted in events.admitted:
            outcome = self.outcomes[admitted.request_id, admitted.index]
            assert outcome.admitted is None, "admitted twice"
            outcome.admitted = admitted
            outcome.first_step = self.num_steps
            self._check_admitted(admitted)
        for output in events.sequences:
            self._check_output(output)

    def _check_admitted(self, admitted: Admitted) -> None:
        num_prompt = len(self.requests[admitted.request_id].prompt_tokens)
        assert 0 <= admitted.num_cached_tokens <= num_prompt - 1
        assert all(num > 0 for num in admitted.missed.values())
        assert admitted.num_cached_tokens + sum(admitted.missed.values()) == num_prompt

    def _check_output(self, output: SequenceOutput) -> None:
        outcome = self.outcomes[output.request_id, output.index]
        assert outcome.finish_reason is None, "an event after the terminal one"
        if output.token_ids and not outcome.tokens:
            self._check_prompt_logprobs(output)
        outcome.tokens += output.token_ids
        outcome.finish_reason = output.finish_reason
        outcome.error = output.error

    def _check_prompt_logprobs(self, output: SequenceOutput) -> None:
        request = self.requests[output.request_id]
        if request.params.prompt_logprobs is None or output.index > 0:
            assert output.prompt_logprobs is None
            return
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        predicted = [entry.logprob for entry in output.prompt_logprobs[1:]]
        assert predicted == request.prompt_tokens[1:].tolist(), "T14: one each, in order"

    def expected(self, request: Request, index: int) -> list[int]:
        params = request.params
        stop = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop |= self.eos_ids
        return self.oracle.generate(request.prompt_tokens.tolist(), params.max_tokens, stop)

    def check_outcomes(self) -> None:
        """One terminal event each, with the right tokens."""
        for (request_id, index), outcome in self.outcomes.items():
            key = (request_id, index)
            request = self.requests[request_id]
            expected = self.expected(request, index)
            assert outcome.finish_reason is not None, key
            if key in self.failed:
                assert outcome.finish_reason == "error"
                assert outcome.tokens == expected[: len(outcome.tokens)], key
            elif key in self.stopped:
                assert outcome.finish_reason == self.stopped[key]
                assert outcome.tokens == expected[: len(outcome.tokens)], key
            elif outcome.finish_reason == "length" and len(outcome.tokens) < len(expected):
                # only who cannot fit alone
                num_rows = len(request.prompt_tokens) + len(outcome.tokens)
                assert num_rows > (self.limits.num_pages - 1) * self.limits.page_size, key
                assert outcome.tokens == expected[: len(outcome.tokens)], key
            else:
                assert outcome.tokens == expected, key
                stop = expected[-1] in self.eos_ids and not request.params.ignore_eos
                stop = stop or expected[-1] in request.params.stop_token_ids
                assert outcome.finish_reason == ("stop" if stop else "length")

    def reasons(self) -> Counter[str]:
        return Counter(str(outcome.finish_reason) for outcome in self.outcomes.values())
