"""Greedy runs of an in-process engine, and the near-tie rule that compares two of them.

fp32 greedy tokens must be equal except where the top-2 gap of the reference is below 1e-4: there
the runs may part, and what follows is not comparable (other tokens were fed); up to there the
log-probabilities of the chosen tokens must agree within 1e-3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from radix_mla.engine.engine import Engine
from radix_mla.request import Request, SamplingParams

NEAR_TIE = 1e-4
LOGPROB_TOLERANCE = 1e-3


@dataclass(slots=True)
class Greedy:
    """tokens [num generated]; logprobs of them; gaps: top-1 less top-2 log-probability."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    cached: int = 0
    finish_reason: str = ""
    error: str | None = None


def make_request(name: str, prompt: np.ndarray, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=2, ignore_eos=True)
    return Request(request_id=name, prompt=prompt.astype("<i4").tobytes(), params=params)


def run(
    engine: Engine, requests: list[Request], *, after_step: Callable[[], None] | None = None
) -> dict[str, Greedy]:
    """Runs all at once to their end; `after_step` is called after each step (audits, aborts)."""
    results = {request.request_id: Greedy() for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        events = engine.step()
        for admitted in events.admitted:
            results[admitted.request_id].cached = admitted.num_cached_tokens
        for output in events.sequences:
            result = results[output.request_id]
            result.tokens += output.token_ids
            for entry in output.logprobs or []:
                result.logprobs.append(entry.logprob)
                result.gaps.append(entry.top_logprobs[0] - entry.top_logprobs[1])
            if output.finish_reason:
                result.finish_reason, result.error = output.finish_reason, output.error
        if after_step:
            after_step()
    return results


def run_one_at_a_time(engine: Engine, requests: list[Request]) -> dict[str, Greedy]:
    results: dict[str, Greedy] = {}
    for request in requests:
        results |= run(engine, [request])
    return results


def assert_equal_runs(reference: dict[str, Greedy], other: dict[str, Greedy]) -> int:
    """By the near-tie rule; the number of requests that parted at a near tie."""
    parted = 0
    assert reference.keys() == other.keys()
    for name, want in reference.items():
        have = other[name]
        assert have.error is None, (name, have.error)
        assert len(have.tokens) == len(want.tokens), name
        length = next(
            (i for i, (a, b) in enumerate(zip(want.tokens, have.tokens, strict=True)) if a != b),
            len(want.tokens),
        )
        if length < len(want.tokens):
            gap = want.gaps[length]
            assert gap < NEAR_TIE, f"{name} parts at {length} where the gap is {gap}"
            parted += 1
        difference = np.abs(np.subtract(want.logprobs[:length], have.logprobs[:length]))
        assert not len(difference) or difference.max() < LOGPROB_TOLERANCE, (name, difference.max())
    return parted


def prefix_families(
    seed: int, *, families: int, prompts: int, vocab: int, max_prefix: int = 150, max_own: int = 60
) -> list[np.ndarray]:
    """Random prompts; each extends its family's prefix, cut at a random place half of the time."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(3, vocab, rng.integers(20, max_prefix)) for _ in range(families)]
    out = []
    for i in range(prompts):
        head = heads[i % families]
        cut = int(rng.integers(1, len(head) + 1)) if rng.random() < 0.5 else len(head)
        out.append(np.concatenate([head[:cut], rng.integers(3, vocab, rng.integers(1, max_own))]))
    return out
