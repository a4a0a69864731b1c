"""A Runner over FakeModel with a seam for faults, and an Engine around it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import torch
from support.fake_model import FakeModel
from support.scheduler_sim import VOCAB

from radix_mla.cache.prefix_cache import PrefixCache
from radix_mla.engine.engine import Engine
from radix_mla.engine.step import StepPlan, StepResult
from radix_mla.engine.step_tokens import StepTokens
from radix_mla.sampling.sampler import Sampler
from radix_mla.scheduler.batch import Sampled, Work
from radix_mla.scheduler.budget import Limits
from radix_mla.scheduler.policy import load_policy
from radix_mla.scheduler.scheduler import Scheduler


class FakeRunner:
    """Logits are 10 at FakeModel's next token, else 0. `fault` may raise, or change the result."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.model = FakeModel(num_pages, page_size, VOCAB)
        self.fault: Callable[[StepPlan, StepResult], None] | None = None
        self.num_steps = 0

    def execute(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> StepResult:
        self.num_steps += 1
        if plan.drawn is not None:
            ids = torch.from_numpy(np.concatenate([c.tokens for c in plan.chunks])).long()
            StepTokens.of(plan, drawn).draw_into(ids)
            parts = ids.int().split([len(c.tokens) for c in plan.chunks])
            chunks = zip(plan.chunks, parts, strict=True)
            plan = replace(plan, chunks=[replace(c, tokens=p.numpy()) for c, p in chunks])
        tokens = self.model.run(plan)
        logits = torch.zeros(sum(chunk.num_logits for chunk in plan.chunks), VOCAB)
        row = 0
        for chunk, token in zip(plan.chunks, tokens, strict=True):
            row += chunk.num_logits
            if chunk.num_logits:
                logits[row - 1, token] = 10.0
        finite = np.ones(len(plan.chunks), dtype=bool)
        result = StepResult(logits, finite, {"fake": plan.num_tokens}, 0, 0.0)
        if self.fault is not None:
            self.fault(plan, result)
        return result


class QueueSampler(Sampler):
    """Greedy, as on a device: the tokens are there at once, and come here when they are asked for.

    Counts the steps that were queued before the one in front of them was read, and those of them
    that hold more than plain decode.
    """

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.num_ahead = 0
        self.num_mixed_ahead = 0

    def queue(self, logits: torch.Tensor, work: Items[Work]) -> QueueSampler.Tokens:  # type: ignore[override]
        if any(item.is_drawn for item in work):
            self.num_ahead += 1
            self.num_mixed_ahead += not all(item.is_drawn for item in work)
        return QueueSampler.Tokens(logits, work)

    class Tokens:
        def __init__(self, logits: torch.Tensor, work: Items[Work]) -> None:
            self._work = work
            rows = [item.first_row + item.num_logits - 1 for item in work if item.samples]
            self._finite = torch.isfinite(logits[rows].amax(dim=-1))
            self.tokens = logits[rows].argmax(dim=-1)

        def wait(self) -> list[Sampled]:
            pairs = zip(self.tokens.tolist(), self._finite.tolist(), strict=True)
            return [
                self._one(*next(pairs), item) if item.samples else Sampled() for item in self._work
            ]

        def _one(self, token: int, is_finite: bool, item: Work) -> Sampled:
            seq = item.sequence
            assert not seq.is_running or item.position == seq.num_tokens, "a draw's position"
            return Sampled(token) if is_finite else Sampled(error="not finite", nonfinite=True)


def make_fake_engine(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    sampler: Sampler | None = None,
    clock: Callable[[], float] | None = None,
    overlap: bool = False,
    **limits,
) -> tuple[Engine, FakeRunner]:
    cache = PrefixCache(num_pages, page_size, seed=1)
    runner = FakeRunner(num_pages, page_size)
    fields = {"max_num_seqs": 8, "max_num_batched_tokens": 32} | limits
    scheduler = Scheduler(
        cache,
        Limits(
            max_model_len=(num_pages - 1) * page_size,
            page_size=page_size,
            num_pages=num_pages,
            **fields,
        ),
        load_policy("fcfs"),
    )
    options = {} if clock is None else {"clock": clock}
    engine = Engine(
        cache=cache,
        runner=runner,
        scheduler=scheduler,
        sampler=sampler or Sampler(VOCAB),
        vocab_size=VOCAB,
        overlap=overlap,
        **options,
    )
    return engine, runner
