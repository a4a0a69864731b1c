"""Pipeline: the steps on their way, at most one that runs and one queued behind it.

schedule ─► execute ─► sample, or queue the draw ─► (queue the next step) ─► wait ─► postprocess
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple, Protocol

from radix_mla.engine.step import StepPlan, StepResult
from radix_mla.errors import EngineError
from radix_mla.scheduler.batch import Sampled, Scheduled, Work
from radix_mla.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    import torch

_MAX_FAILED_STEPS = 5  # in a row; then the engine itself is taken to be broken


class Runner(Protocol):
    """Runs one step's forward pass. `drawn`: what the step before it draws, for a plan that was
    made ahead of that.
    """

    def execute(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> StepResult: ...


class Queued(Protocol):
    """A step's tokens, drawn on the device: `tokens` there, `wait` for them here."""

    tokens: torch.Tensor

    def wait(self) -> list[Sampled]: ...


class TokenSampler(Protocol):
    """Makes tokens of a step's logits; a failure of one sequence is its Sampled.error."""

    def sample(self, logits: torch.Tensor, work: Items[Work]) -> list[Sampled]: ...

    def can_queue(self, work: Items[Work]) -> bool:
        """Whether `queue` takes these."""

    def queue(self, logits: torch.Tensor, work: Items[Work]) -> Queued:
        """`sample` without waiting, nor for what the step before it draws."""


class InFlight(NamedTuple):
    """A step that was queued. `drawn` None: its tokens are chosen when it is booked."""

    scheduled: Scheduled
    result: StepResult
    drawn: Queued | None


class Done(NamedTuple):
    """A step that is over; `result` is None if it failed on the way."""

    scheduled: Scheduled
    result: StepResult | None


class Pipeline:
    """Runs what the scheduler plans, and books it there. A step that raises fails its sequences
    only; `start` and `finish` raise EngineError when the device or several steps in a row failed.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, sampler: TokenSampler, *, overlap: bool
    ) -> None:
        """`overlap`: the runner only queues steps, in order; then short steps are queued before the
        one in front of them is waited for, if its tokens are drawn without the host.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._overlap = overlap
        self._current: InFlight | None = None
        self._ahead: InFlight | None = None
        self._num_failed = 0  # steps in a row

    @property
    def has_work(self) -> bool:
        """Whether a step is queued already."""
        return self._ahead is not None

    def start(self, now_s: float) -> bool:
        """Queues a step unless one was queued ahead; False: there is nothing to run."""
        self._current, self._ahead = self._ahead, None
        if self._current is None:
            scheduled = self._scheduler.schedule(now_s)
            if not scheduled.work:
                return False
            self._current = self._queue(scheduled)
        return True

    def finish(self, now_s: float, *, go_ahead: bool) -> Done | None:
        """Waits for what `start` queued and books it; None: it failed there.

        `go_ahead`: the next step may be queued before that.
        """
        current, self._current = self._current, None
        if current is None:
            return None
        num_failed = self._num_failed
        if go_ahead:
            self._ahead = self._queue_behind(current, now_s)
        if not self._book(current):
            return Done(current.scheduled, None)
        self._num_failed -= num_failed  # what failed behind it counts on
        return Done(current.scheduled, current.result)

    def _queue(self, scheduled: Scheduled, before: InFlight | None = None) -> InFlight | None:
        """Runs a step as far as it goes without waiting for the device; None: it failed.

        `before`: the step in front of it, for one that was planned ahead.
        """
        sampler = self._sampler
        tokens = None if before is None or before.drawn is None else before.drawn.tokens
        try:
            result = self._runner.execute(scheduled.plan, tokens)
            can_queue = self._overlap and sampler.can_queue(scheduled.work)
            drawn = sampler.queue(result.logits, scheduled.work) if can_queue else None
            return InFlight(scheduled, result, drawn)
        except Exception as error:
            self._fail(scheduled, error)
            return None

    def _queue_behind(self, current: InFlight, now_s: float) -> InFlight | None:
        """The step after `current`, if it can be queued before `current` is waited for."""
        if current.drawn is None:
            return None
        scheduled = self._scheduler.schedule_ahead(current.scheduled, now_s)
        return None if scheduled is None else self._queue(scheduled, current)

    def _book(self, step: InFlight) -> bool:
        """Waits for a step and tells the scheduler; whether it ran."""
        scheduled, result = step.scheduled, step.result
        try:
            if step.drawn is None:
                sampled = self._sampler.sample(result.logits, scheduled.work)
            else:
                sampled = step.drawn.wait()
            rows_finite = result.rows_finite
        except Exception as error:
            self._fail(scheduled, error)
            return False
        self._scheduler.postprocess(scheduled, rows_finite, sampled)
        return True

    def _fail(self, scheduled: Scheduled, error: Exception) -> None:
        self._scheduler.fail_step(scheduled, error)
        self._num_failed += 1
        if self._num_failed >= _MAX_FAILED_STEPS or _is_device_error(error):
            raise EngineError(
                f"{self._num_failed} steps in a row failed, the last one with "
                f"{type(error).__name__}: {error}"
            ) from error


def _is_device_error(error: BaseException) -> bool:
    """A GPU that has reported an error runs nothing more in this process."""
    return type(error).__name__ in ("AcceleratorError", "OutOfMemoryError") or (
        isinstance(error, RuntimeError) and "CUDA error" in str(error)
    )
