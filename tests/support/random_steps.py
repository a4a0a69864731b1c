"""A whole engine over FakeModel, driven at random: requests of all kinds, aborts, flushes, faults.

Each step: the cache's audit, free pages overwritten, one terminal event a sequence, sums of prompt
tokens. At the end: the oracle's tokens, and every page free after a flush.
"""

from __future__ import annotations

from functools import partial
from random import Random
from unittest.mock import patch

import numpy as np
from support.fake_model import Oracle
from support.fake_runner import QueueSampler, make_fake_engine
from support.scheduler_sim import VOCAB, Key, make_request

from radix_mla.engine.outputs import SequenceOutput
from radix_mla.engine.step import StepPlan, StepResult
from radix_mla.request import FinishReason, Request
from radix_mla.scheduler import scheduler
from radix_mla.scheduler.batch import Batch
from radix_mla.scheduler.policy import load_policy

_FAULT = "a fault of the test"


class RandomSteps:
    """`overlap` False: the same without steps ahead."""

    def __init__(self, seed: int, page_size: int, *, overlap: bool = True) -> None:
        rng = self.rng = Random(seed)
        is_tight = rng.random() < 0.4  # pages, slots or tokens run out again and again
        self.num_rows = rng.choice([36, 64, 120]) if is_tight else rng.choice([200, 400])
        num_pages = max(4, self.num_rows // page_size)
        self.num_rows = (num_pages - 1) * page_size
        self.sampler = QueueSampler()
        self.now = 0.0
        self.engine, self.runner = make_fake_engine(
            num_pages=num_pages,
            page_size=page_size,
            sampler=self.sampler,
            clock=lambda: self.now,
            overlap=overlap,
            max_num_seqs=rng.choice([1, 2, 4] if is_tight else [4, 8]),
            max_num_batched_tokens=rng.choice([5, 9] if is_tight else [32, 64]),
            commit_every=rng.choice([1, 5, 256]),
            max_retractions=rng.choice([0, 1, 4]),
            max_skips=rng.choice([0, 2, 16]),
            min_reserve_steps=rng.choice([0, 1, 8]),
            min_in_common=rng.choice([1, 4, 32]),
            max_sibling_wait_s=rng.choice([1.0, 60.0]),
            enable_prefix_cache=rng.random() < 0.9,
        )
        policy = load_policy(rng.choice(["fcfs", "lpm", "priority"]))
        self.engine.scheduler._admission._policy = policy
        self.ahead_tokens = rng.choice([4, 20, 2048])
        self.logprob_rows = rng.choice([3, 8, 256])
        self.sees_host = rng.random() < 0.4  # some of what cannot be queued
        self.fault_rate = rng.choice([0.0, 0.0, 0.0, 0.01, 0.03])
        self.runner.fault = self._fault
        self.heads = [[rng.randrange(VOCAB) for _ in range(34)] for _ in range(2)]
        self.requests: dict[str, Request] = {}
        self.tokens: dict[Key, list[int]] = {}
        self.ends: dict[Key, SequenceOutput] = {}
        self.aborted: dict[Key, FinishReason] = {}
        self.admitted: set[Key] = set()
        self.may_fail = 0  # sequences

    def run(self) -> RandomSteps:
        rng, engine = self.rng, self.engine
        pending, rate = rng.randrange(3, 14), rng.choice([0.05, 0.15, 0.5])
        abort_rate, flush_rate = rng.choice([0.0, 0.02, 0.06]), rng.choice([0.0, 0.03])
        batch = partial(Batch, logprob_rows_left=self.logprob_rows)
        with (
            patch.object(scheduler, "MAX_AHEAD_TOKENS", self.ahead_tokens),
            patch.object(scheduler, "Batch", batch),
        ):
            for _ in range(4000):
                if not pending and not engine.has_work:
                    break
                while pending and rng.random() < rate:
                    pending -= 1
                    self._submit(f"r{pending}")
                if self.requests and rng.random() < abort_rate:
                    self._abort(rng.choice(list(self.requests)), rng.choice([None, 0, 1]))
                if rng.random() < flush_rate:
                    engine.flush(rng.choice([None, "", "other"]))
                self._step()
            else:
                raise AssertionError(f"stuck: {engine.scheduler.num_waiting()}")
        self._check()
        return self

    def _submit(self, name: str) -> None:
        rng = self.rng
        prompt = rng.choice(self.heads)[: rng.randrange(34)]
        prompt = [*prompt, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6)))]
        prompt = prompt[: self.num_rows - 1]
        num = min(rng.choice([1, 2, 5, 12, 25]), self.num_rows - len(prompt))
        params: dict[str, object] = {"temperature": 0.0}
        if rng.random() < 0.5:
            params["stop_token_ids"] = tuple(rng.sample(range(VOCAB), 6))
        else:
            params["min_tokens"] = rng.choice([0, 0, 3])  # not queued before; changes no token here
        if self.sees_host:
            of_host = [{}, {}, {"logprobs": 1}, {"prompt_logprobs": 0}, {"presence_penalty": 0.01}]
            params |= rng.choice(of_host)
        request = make_request(
            name,
            prompt,
            num,
            n=rng.choice([1, 1, 1, 2, 3]),
            store=rng.random() < 0.9,
            priority=rng.randrange(3),
            namespace=rng.choice(["", "", "other"]),
            cache_priority=rng.choice([0, 0, 5]),
            arrival_s=self.now,
            **params,
        )
        self.engine.add_request(request)
        self.requests[name] = request
        self.tokens |= {(name, index): [] for index in range(request.n)}

    def _abort(self, name: str, index: int | None) -> None:
        reason = self.rng.choice([FinishReason.ABORT, FinishReason.STOP])
        for key in self.tokens.keys() - self.ends.keys():
            if key[0] == name and index in (None, key[1]):
                self.aborted[key] = reason
        self.engine.abort(name, index, reason)

    def _fault(self, plan: StepPlan, result: StepResult) -> None:
        rng = self.rng
        if rng.random() >= self.fault_rate:
            return
        kind = rng.randrange(3)
        if kind == 0:
            self.may_fail += len(plan.chunks)
            raise RuntimeError(_FAULT)
        self.may_fail += 1
        if kind == 1:
            result.rows_finite[rng.randrange(len(plan.chunks))] = False
        elif len(result.logits):
            result.logits[rng.randrange(len(result.logits))] = np.nan

    def _step(self) -> None:
        engine = self.engine
        self.now += self.rng.choice([0.01, 0.3])
        before = self.runner.num_steps, engine.num_steps
        has_work = engine.has_work
        events = engine.step() if has_work else engine.take_events()
        goes_on = bool(events) or (self.runner.num_steps, engine.num_steps) != before
        assert goes_on or not has_work, "a step without work"
        engine.cache.audit()
        self.runner.model.poison(engine.cache.free_pages())
        for admitted in events.admitted:
            key = admitted.request_id, admitted.index
            assert key not in self.admitted, "admitted twice"
            self.admitted.add(key)
            num_prompt = len(self.requests[key[0]].prompt_tokens)
            assert admitted.num_cached_tokens + sum(admitted.missed.values()) == num_prompt
        for output in events.sequences:
            key = output.request_id, output.index
            assert key not in self.ends, "an event after the last one"
            self.tokens[key] += output.token_ids
            if output.finish_reason:
                self.ends[key] = output

    def _check(self) -> None:
        assert self.ends.keys() == self.tokens.keys()
        oracle, failed, cut = Oracle(VOCAB), 0, 0
        for key, have in self.tokens.items():
            params, end = self.requests[key[0]].params, self.ends[key]
            prompt = self.requests[key[0]].prompt_tokens.tolist()
            want = oracle.generate(prompt, params.max_tokens, frozenset(params.stop_token_ids))
            assert have == want[: len(have)], key
            if end.finish_reason == FinishReason.ERROR:
                assert _FAULT in (end.error or "") or "finite" in (end.error or "")
                failed += 1
            elif key in self.aborted and have != want:
                assert end.finish_reason == self.aborted[key]
            elif have != want:
                assert end.finish_reason == FinishReason.LENGTH
                assert len(prompt) + len(have) > self.num_rows, "ended early"
            cut += have != want
        assert failed <= self.may_fail
        engine = self.engine
        stats = engine.stats()
        assert stats.waiting_tokens == sum(stats.num_waiting.values()) == stats.num_running == 0
        total = sum(len(self.requests[name].prompt_tokens) for name, _ in self.tokens)
        found = stats.prefill_tokens["computed"] + stats.prefill_tokens["device"]
        assert found == total or (found < total and (cut or self.aborted or stats.retractions))
        engine.flush()
        assert engine.cache.counts().free == engine.cache.num_pages
