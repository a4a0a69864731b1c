"""Constraint: where one sequence stands in its grammar, and the mask for its next token.

The mask for token n+1 needs token n, so it is built by a thread while the next forward pass runs.
The sequence's tokens are the truth: a constraint that is not in step with them (after a failure of
that thread's work) catches up, or starts again.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radix_mla.sampling.grammar import CompiledGrammar, TokenMatcher

if TYPE_CHECKING:
    from radix_mla.scheduler.sequence import Sequence

MASK_TIMEOUT_S = 2.0
# Above -inf, far below any logit: taken only where nothing else is left.
_LAST_RESORT = np.float32(-1e30)


class Constraint:
    """Made once for a sequence; kept through retractions, as the sequence's tokens are."""

    __slots__ = (
        "_eos_ids",
        "_mask",
        "_matcher",
        "_num_accepted",
        "_num_masked",
        "is_busy",
        "problem",
    )

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._matcher: TokenMatcher = grammar.matcher()
        self._eos_ids = grammar.eos_ids
        self._mask = np.zeros(len(grammar.forbidden), dtype=np.int32)
        self._num_accepted = 0
        self._num_masked = -1  # the mask is the one after this many tokens
        self.is_busy = False  # a thread is at work on it
        self.problem = f"its mask took longer than {MASK_TIMEOUT_S:g} s"  # while it is not ready

    def is_ready(self, num_generated: int) -> bool:
        """Whether the mask is the one for the token after `num_generated`."""
        return self._num_masked == num_generated

    def advance(self, generated: NDArray[np.int32]) -> None:
        """Builds the mask for the token after `generated` (all tokens since the prompt).

        `problem` says why it is not ready afterwards.
        """
        self._num_masked = -1
        self.is_busy = True
        try:
            self._advance(generated)
        except Exception as error:  # of the matcher: it must not end the thread's other work
            self.problem = f"{type(error).__name__}: {error}"
        self.is_busy = False

    def _advance(self, generated: NDArray[np.int32]) -> None:
        if self._num_accepted > len(generated):
            self._matcher.reset()
            self._num_accepted = 0
        for token_id in generated[self._num_accepted :].tolist():
            if not self._matcher.accept(token_id):
                raise ValueError(f"token {token_id} does not follow in the grammar")
            self._num_accepted += 1
        self._matcher.fill(self._mask)
        self._num_masked = len(generated)

    def apply(self, scores: NDArray[np.float32], *, ignore_eos: bool) -> None:
        """Changes fp32 [num_sampleable] scores in place: -inf for what cannot follow.

        ignore_eos: the end is taken only where the grammar allows nothing else. Raises ValueError
        when nothing can follow.
        """
        bits = np.unpackbits(self._mask.view(np.uint8), count=len(scores), bitorder="little")
        allowed = bits.view(bool)
        if not allowed.any():
            raise ValueError("the grammar allows none of the vocabulary's tokens here")
        if ignore_eos:
            ends = [i for i in self._eos_ids if i < len(scores)]
            scores[ends] = np.minimum(scores[ends], _LAST_RESORT)
        scores[~allowed] = -np.inf


class MaskBuilder:
    """Builds masks in one background thread. Not thread-safe itself."""

    def __init__(self, timeout_s: float = MASK_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._pool: ThreadPoolExecutor | None = None
        self._pending: _Work | None = None

    def start(self, tokens: Iterable[tuple[Sequence, int]]) -> None:
        """Begins the masks of sequences that have just got a token, which is not booked yet."""
        work = [
            (seq.constraint, np.append(seq.tokens[seq.num_prompt_tokens :], np.int32(token_id)))
            for seq, token_id in tokens
            if seq.constraint is not None and token_id not in seq.stop_ids
        ]
        if work:
            self._submit(work)

    def wait(self, sequences: Iterable[Sequence]) -> None:
        """Returns when the masks of `sequences` are there, or cannot be had in time.

        Those are not `is_ready` then.
        """
        self._join()
        late = [
            (seq.constraint, seq.tokens[seq.num_prompt_tokens :].copy())
            for seq in sequences
            if seq.constraint is not None
            and not seq.constraint.is_ready(seq.num_generated)
            and not seq.constraint.is_busy
        ]
        if late:
            self._submit(late)
            self._join()

    def _submit(self, steps: list[tuple[Constraint, NDArray[np.int32]]]) -> None:
        self._join()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._pending = _Work(steps, self._pool)

    def _join(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_done_within(self._timeout_s):
            # Its thread cannot be ended: it is left behind, and the next work gets another one.
            assert self._pool is not None
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


class _Work:
    """Some constraints' next masks, one after the other."""

    def __init__(
        self, steps: list[tuple[Constraint, NDArray[np.int32]]], pool: ThreadPoolExecutor
    ) -> None:
        self._steps = steps
        self._abandoned = False
        self._future: Future[None] = pool.submit(self._run)

    def _run(self) -> None:
        for constraint, generated in self._steps:
            if self._abandoned:
                return
            constraint.advance(generated)

    def is_done_within(self, timeout_s: float) -> bool:
        """False: the constraint that it is at is lost, those after it have not been touched."""
        try:
            self._future.result(timeout_s)
        except FutureTimeout:
            self._abandoned = True
            return False
        return True
