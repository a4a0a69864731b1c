"""A model whose next token is a hash of every KV row that its page table names.

The row of a token is a hash of the tokens up to it. A row that is missing, stale, foreign or out of
place changes the next token, so equal tokens mean that the whole context was read right.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radix_mla.engine.step import Chunk, StepPlan

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = (values ^ (values >> _SHIFT)) * _MULTIPLIER
    return mixed ^ (mixed >> np.uint64(32))


def _new_rows(last: np.uint64, tokens: NDArray[np.int32], start: int) -> NDArray[np.uint64]:
    """Row of position p: running sum of mix(token, position), so each depends on its prefix."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    steps = _mix(tokens.astype(np.uint64) * np.uint64(1_000_003) + positions)
    return np.cumsum(steps, dtype=np.uint64) + last


def _next_token(rows: NDArray[np.uint64], vocab_size: int) -> int:
    positions = np.arange(1, len(rows) + 1, dtype=np.uint64)
    total = _mix(rows + positions * _MULTIPLIER).sum(dtype=np.uint64)
    return int(_mix(np.asarray([total], dtype=np.uint64))[0] % np.uint64(vocab_size))


class Oracle:
    """The same model without a cache: one sequence at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def generate(self, prompt: list[int], max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
        tokens = list(prompt)
        rows = _new_rows(np.uint64(0), np.asarray(tokens, dtype=np.int32), 0)
        while len(tokens) < len(prompt) + max_tokens:
            token = _next_token(rows, self._vocab_size)
            tokens.append(token)
            if token in stop_ids:
                break
            new = _new_rows(rows[-1], np.asarray([token], dtype=np.int32), len(tokens) - 1)
            rows = np.concatenate([rows, new])
        return tokens[len(prompt) :]


class FakeModel:
    """Runs a StepPlan over one uint64 "row" a slot. `poison` overwrites pages nobody may read."""

    def __init__(self, num_pages: int, page_size: int, vocab_size: int) -> None:
        self._page_size = page_size
        self._vocab_size = vocab_size
        rng = np.random.default_rng(7)
        self._pool = rng.integers(0, 1 << 63, num_pages * page_size, dtype=np.uint64)
        self.num_computed_tokens = 0

    def poison(self, pages: NDArray[np.int32]) -> None:
        self._pool.reshape(-1, self._page_size)[pages] += _MULTIPLIER

    def run(self, plan: StepPlan) -> list[int]:
        """The next token after each chunk that asks for logits; -1 after the others."""
        view = self._pool.reshape(-1, self._page_size)
        for copy in plan.copies:
            view[copy.dst_page, : copy.num_rows] = view[copy.src_page, : copy.num_rows]
        written = [slot for chunk in plan.chunks for slot in self._write(chunk).tolist()]
        assert len(set(written)) == len(written), "two sequences write one slot in a step"
        self.num_computed_tokens += plan.num_tokens
        return [self._read(chunk) if chunk.num_logits else -1 for chunk in plan.chunks]

    def _slots(self, chunk: Chunk, start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop)
        pages = chunk.page_table[positions // self._page_size].astype(np.int64)
        return pages * self._page_size + positions % self._page_size

    def _write(self, chunk: Chunk) -> NDArray[np.int64]:
        assert len(chunk.tokens) > 0
        stop = chunk.start + len(chunk.tokens)
        assert len(chunk.page_table) == -(-stop // self._page_size)
        last = np.uint64(0)
        if chunk.start:
            last = self._pool[self._slots(chunk, chunk.start - 1, chunk.start)][0]
        slots = self._slots(chunk, chunk.start, stop)
        self._pool[slots] = _new_rows(last, chunk.tokens, chunk.start)
        return slots

    def _read(self, chunk: Chunk) -> int:
        stop = chunk.start + len(chunk.tokens)
        return _next_token(self._pool[self._slots(chunk, 0, stop)], self._vocab_size)
