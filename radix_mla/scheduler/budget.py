"""Budget arithmetic: what one step may hold, and the room that admission leaves for growth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radix_mla.scheduler.sequence import Sequence

# Logits of a prompt-logprobs chunk are [rows, vocab] fp32: 256 rows of 129,280 are 132 MB.
MAX_LOGPROB_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The scheduler's share of ResolvedConfig. Units: sequences, tokens, pages, seconds.

    max_skips: how many later ones may be admitted before one that does not fit; then it blocks.
    max_sibling_wait_s: the age bound of waiting for a prefix in flight.
    min_reserve_steps: decode steps that admission leaves room for at least.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    max_retractions: int = 4
    max_skips: int = 16
    min_reserve_steps: int = 8
    max_sibling_wait_s: float = 60.0
    min_in_common: int = 32
    commit_every: int = 256
    enable_prefix_cache: bool = True

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt of which one token can be sampled: context and pool both hold it.

        The pool keeps one page for the source of a partial hit.
        """
        return min(self.max_model_len - 1, (self.num_pages - 1) * self.page_size)

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def worst_case_pages(self, seq: Sequence) -> int:
        """All pages that `seq` can come to hold: its longest form, and a partial hit's source."""
        return self.pages(seq.max_num_tokens - 1) + 1


class GrowthReserve:
    """How many decode steps of each running sequence admission leaves room for.

    Doubles with a retraction, shrinks slowly without: the reserve is as large as the load needs,
    not max_tokens (which would refuse 50 tiny prompts with a huge max_tokens).
    """

    _MAX_STEPS = 512.0
    _DECAY = 0.98

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._steps = 2.0 * limits.min_reserve_steps

    @property
    def steps(self) -> int:
        return int(self._steps)

    def after_step(self, *, retracted: bool) -> None:
        """Adapts to what the step needed."""
        factor = 2.0 if retracted else self._DECAY
        floor = float(self._limits.min_reserve_steps)
        self._steps = min(self._MAX_STEPS, max(floor, self._steps * factor))

    def pages(self, sequences: Iterable[Sequence]) -> int:
        """Pages that running `sequences` are known to need: rest of their prefill, and growth."""
        steps, size = self.steps, self._limits.page_size
        total = 0
        for seq in sequences:
            assert seq.lease is not None
            end = min(seq.num_tokens + steps, seq.max_num_tokens - 1)
            total += max(0, -(-end // size) - seq.lease.num_pages)
        return total

    def target(self, seq: Sequence) -> int:
        """Rows that a waiting `seq` must find room for: its whole length, and growth."""
        return max(seq.num_tokens, min(seq.num_tokens + self.steps, seq.max_num_tokens - 1))
