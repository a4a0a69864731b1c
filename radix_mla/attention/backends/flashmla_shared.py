"""Decode steps of fixed shapes in which sequences share prefixes, with FlashMLA.

    passes   runs of tokens, one of each member, over the prefix that they share     not causal
    tails    each token over what is left of its own rows                            one run each
    merge    by log-sum-exp, a token's tail with its passes

A run of 128 query rows costs little more than one of 64 (50 and 46 us over 32k rows of an H200):
two tiles that read the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.merge_passes import merge_passes_
from radix_mla.attention.absorbed_cost import FLASHMLA_SHARED, absorbed_us
from radix_mla.attention.backend import MQAWork, Partial
from radix_mla.attention.backends.flashmla_kernel import PAGE_SIZE, Runs
from radix_mla.attention.shared_prefix import shared_in

if TYPE_CHECKING:
    from radix_mla.attention.backends.flashmla import FlashMLABackend

_RUN_ROWS = 128  # queries · heads of a pass's run
_SPARE_RUNS = 8  # passes whose last run may be short
_DEPTH = 2  # passes of one token, each inside the last


class StaticShared:
    """See `static_plan.StaticMQA`: one query a sequence. Passes beyond what there is room for are
    left out; their rows count as the members' own.

    Words: rows of the tails and of the runs [num_tokens + num_runs]; where in the page tables each
    of them begins, as many; tokens of the runs' queries [num_runs · width]; which queries answer
    for a token [num_tokens, _DEPTH], -1: none.
    """

    def __init__(self, backend: FlashMLABackend, num_tokens: int) -> None:
        self._backend = backend
        self._num_tokens = num_tokens
        self._width = max(1, _RUN_ROWS // backend.num_heads)
        self._num_runs = -(-num_tokens // self._width) + min(_SPARE_RUNS, num_tokens // 2)
        self._sizes = (
            num_tokens + self._num_runs,
            num_tokens + self._num_runs,
            self._num_runs * self._width,
            num_tokens * _DEPTH,
        )
        self.num_ints = sum(self._sizes)
        one = np.ones(num_tokens, dtype=np.int64)
        self.work = MQAWork(np.arange(num_tokens + 1), one, (), PAGE_SIZE)

    def fits(self, work: MQAWork) -> bool:
        return work.num_queries == len(work.kv_lens)

    def estimate_us(self, work: MQAWork) -> float:
        return absorbed_us(work, FLASHMLA_SHARED, self._backend.num_heads)

    def place(self, buffer: torch.Tensor) -> None:
        tables, kernel = self._backend.tables.tensor, self._backend.kernel
        lengths, self._begins, self._tokens, index = torch.split(buffer, list(self._sizes))
        self._index = index.view(-1, _DEPTH)
        self._columns = torch.arange(tables.shape[1], dtype=torch.int32, device=tables.device)
        self._places = self._columns.new_empty(len(lengths), tables.shape[1])
        self._pages = self._backend.static_pages(len(lengths))
        num = self._num_tokens
        self._tails = Runs((num, 1), lengths[:num], self._pages[:num], kernel.new_schedule())
        self._runs = Runs(
            (self._num_runs, self._width), lengths[num:], self._pages[num:], kernel.new_schedule()
        )

    def fill(self, work: MQAWork | None, padding: int, words: np.ndarray) -> None:
        lengths, begins, tokens, index = np.split(words, np.cumsum(self._sizes)[:-1])
        tables, num = self._backend.tables, self._num_tokens
        lengths[:], begins[:], index[:] = 0, tables.padding_row * tables.max_pages, -1
        if work is None:
            return
        assert self.fits(work), "several queries of one sequence"
        used = len(work.kv_lens)
        first_page = tables.update(work.page_tables) * tables.max_pages  # [B]
        tail = np.zeros(used, dtype=np.int64)  # first page outside passes
        depth = np.zeros(used, dtype=np.int64)
        by_token = index.reshape(-1, _DEPTH)
        run = 0
        for members, first, last in shared_in(work).passes:
            who = np.asarray(members)
            runs = -(-len(who) // self._width)
            if run + runs > self._num_runs or (tail[who] != first).any():
                continue  # no room, or inside a pass that had none
            if (depth[who] == _DEPTH).any():
                continue
            query = run * self._width + np.arange(len(who))
            tokens[query] = who
            tokens[query[-1] + 1 : (run + runs) * self._width] = who[0]
            lengths[num + run : num + run + runs] = (last - first) * PAGE_SIZE
            begins[num + run : num + run + runs] = first_page[who[0]] + first
            by_token[who, depth[who]] = query
            depth[who] += 1
            tail[who] = last
            run += runs
        lengths[:used] = work.kv_lens - tail * PAGE_SIZE
        begins[:used] = first_page + tail

    def settle(self) -> None:
        """The block tables: what follows each beginning, past its end into whatever comes next."""
        torch.add(self._begins[:, None], self._columns, out=self._places)
        tables = self._backend.tables.tensor.view(-1)
        torch.index_select(tables, 0, self._places.view(-1), out=self._pages.view(-1))

    def begin(self) -> None:
        kernel = self._backend.kernel
        self._tails = self._tails._replace(schedule=kernel.new_schedule())
        self._runs = self._runs._replace(schedule=kernel.new_schedule())

    def run(self, q: torch.Tensor, pool: torch.Tensor, latent: int, scale: float) -> Partial:
        """q [num_tokens, H, L + R]; lse of the tails."""
        kernel = self._backend.kernel
        tails = kernel(self._tails, q, pool, latent, scale)
        queries = q.index_select(0, self._tokens)
        parts = kernel(self._runs, queries, pool, latent, scale, causal=False)
        merge_passes_(tails.out, tails.lse[..., 0], parts.out, parts.lse, self._index)
        return tails
