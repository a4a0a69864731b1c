"""FlashMLA steps of fixed shapes: one call over runs of consecutive tokens of a sequence.

A shorter run is filled up in front, one without tokens has no rows to read: its outputs are zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from radix_mla.attention.absorbed_cost import FLASHMLA_MIXED, FLASHMLA_PLAIN, absorbed_us
from radix_mla.attention.backend import MQAWork, Partial
from radix_mla.attention.backends.flashmla_kernel import PAGE_SIZE, Runs

if TYPE_CHECKING:
    from radix_mla.attention.backends.flashmla import FlashMLABackend

_RUN_ROWS = 256  # queries · heads of a run in a mixed step: four of the kernel's tiles
_SPARE_RUNS = 64  # sequences of a mixed step whose last run may be short


class StaticRuns:
    """See `static_plan.StaticMQA`. Not `mixed`: runs of one token, which need no gathers; else the
    last run is for padding.

    Words: rows of the runs [num_runs], rows of the page tables [num_runs], and if mixed, tokens of
    the queries [num_runs · width] and queries of the tokens [num_tokens]. The block table is
    gathered behind the copy.
    """

    def __init__(self, backend: FlashMLABackend, num_tokens: int, *, mixed: bool) -> None:
        self._backend = backend
        self._num_tokens = num_tokens
        self._width = max(1, _RUN_ROWS // backend.num_heads) if mixed else 1
        # Each sequence may end in a run that is not full; one run is for padding.
        spare = 0 if self._width == 1 else min(backend.max_num_seqs, _SPARE_RUNS) + 1
        self._num_runs = min(-(-num_tokens // self._width) + spare, num_tokens + (spare > 0))
        gathers = self._num_runs * self._width + num_tokens if self._width > 1 else 0
        self.num_ints = 2 * self._num_runs + gathers
        one = np.ones(num_tokens, dtype=np.int64)
        self.work = MQAWork(np.arange(num_tokens + 1), one, (), PAGE_SIZE)

    def fits(self, work: MQAWork) -> bool:
        num_q = np.diff(work.cu_q)
        if self._width == 1:
            return bool((num_q == 1).all())
        return int((-(-num_q // self._width)).sum()) < self._num_runs

    def estimate_us(self, work: MQAWork) -> float:
        rates = FLASHMLA_PLAIN if self._width == 1 else FLASHMLA_MIXED
        return absorbed_us(work, rates, self._backend.num_heads, self._width)

    def place(self, buffer: torch.Tensor) -> None:
        size, width = self._num_runs, self._width
        self._rows = buffer[size : 2 * size]
        if width > 1:
            self._tokens = buffer[2 * size : 2 * size + size * width]
            self._places = buffer[2 * size + size * width :]
        self._runs = Runs(
            size=(size, width),
            lengths=buffer[:size],
            pages=self._backend.static_pages(size),
            schedule=self._backend.kernel.new_schedule(),
        )

    def fill(self, work: MQAWork | None, padding: int, words: np.ndarray) -> None:
        size, width = self._num_runs, self._width
        lengths, rows = words[:size], words[size : 2 * size]
        lengths[:], rows[:] = 0, self._backend.tables.padding_row
        tokens = words[2 * size : 2 * size + size * width].reshape(-1, width)
        places = words[2 * size + size * width :]  # of each token among the queries
        if width > 1:
            places[:] = size * width - 1
        if work is None:
            return
        assert self.fits(work), "more sequences, or more queries of one, than there are runs for"
        num_q = np.diff(work.cu_q)
        runs = -(-num_q // width)
        owner = np.repeat(np.arange(len(runs)), runs)  # [runs] sequence
        later = np.cumsum(runs)[owner] - np.arange(len(owner)) - 1  # runs of it that come after
        end = work.cu_q[1:][owner] - later * width  # [runs] one past the last token
        lengths[: len(owner)] = work.kv_lens[owner] - later * width
        rows[: len(owner)] = self._backend.tables.update(work.page_tables)[owner]
        if width == 1:
            return
        token = end[:, None] - width + np.arange(width)  # [runs, width]
        there = token >= work.cu_q[:-1][owner][:, None]
        tokens[: len(owner)] = np.where(there, token, work.cu_q[:-1][owner][:, None])
        places[token[there]] = np.flatnonzero(there)

    def settle(self) -> None:
        tables = self._backend.tables.tensor
        torch.index_select(tables, 0, self._rows, out=self._runs.pages)

    def begin(self) -> None:
        self._runs = self._runs._replace(schedule=self._backend.kernel.new_schedule())

    def run(self, q: torch.Tensor, pool: torch.Tensor, latent: int, scale: float) -> Partial:
        """q [num_tokens, H, L + R]; lse as the kernel has it."""
        kernel = self._backend.kernel
        if self._width == 1:
            return kernel(self._runs, q, pool, latent, scale)
        part = kernel(self._runs, q.index_select(0, self._tokens), pool, latent, scale)
        return Partial(part.out.index_select(0, self._places), part.lse)
