"""FlashMLA for decode and extend, in pages of 64 (`flashmla_kernel.py` is the call itself).

Eager steps: sequences of unequal Sq are grouped by the next power of two; the queries that fill a
group up stand in front, where they see fewer rows, and their outputs are dropped. Captured ones:
`flashmla_static.py`, and `flashmla_shared.py` for decode over shared prefixes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from radix_mla.attention.absorbed_cost import FLASHMLA_MIXED, TILE_ROWS, absorbed_us
from radix_mla.attention.backend import Caps, MQAWork, Partial, Setting
from radix_mla.attention.backends import flashmla_kernel
from radix_mla.attention.backends.flashmla_kernel import PAGE_SIZE, FlashMLAKernel, Runs, by_query
from radix_mla.attention.backends.flashmla_shared import StaticShared
from radix_mla.attention.backends.flashmla_static import StaticRuns
from radix_mla.attention.page_tables import DevicePageTables
from radix_mla.attention.shared_prefix import shared_in
from radix_mla.upload import to_device

if TYPE_CHECKING:
    from radix_mla.attention.backends.triton import TritonBackend
    from radix_mla.attention.static_plan import Family, StaticMQA

CAPS = Caps(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"bf16"}),
    kv_dtypes=frozenset({"bf16"}),
    page_sizes=frozenset({PAGE_SIZE}),
    prefill=False,
    absorbed=True,
    pad_heads=False,
    graph_safe=True,
    archs=(90, 90),
)


def unavailable(setting: Setting) -> str | None:
    """Why this backend cannot be used here, beyond its `Caps`; None: it can."""
    reason, module = flashmla_kernel.find()
    if module is None:
        return reason
    dims = setting.dims
    if (dims.latent, dims.rope) != (512, 64):
        return f"rows of {dims.latent} + {dims.rope} values: FlashMLA reads 512 + 64"
    return None


def make(setting: Setting) -> FlashMLABackend:
    return FlashMLABackend(setting)


class _Group(NamedTuple):
    """One call: sequences of equal (padded) Sq. `tokens` None: all tokens in order, no padding."""

    runs: Runs
    tokens: torch.Tensor | None  # int64 [B · Sq]: which token each query is
    kept: tuple[torch.Tensor, torch.Tensor] | None  # int64: queries to keep, tokens they are


class FlashMLABackend:
    name = "flashmla"
    caps = CAPS

    def __init__(self, setting: Setting) -> None:
        self.kernel = FlashMLAKernel()
        self.num_heads = setting.dims.num_heads
        self.max_num_seqs = setting.max_num_seqs
        self.tables = DevicePageTables(setting.max_num_seqs, setting.max_pages, setting.device)
        self.sharing: TritonBackend | None = None
        self._device = setting.device
        self._delegated: MQAWork | None = None  # what `sharing` planned
        self._groups: list[_Group] = []
        self._planned: MQAWork | None = None
        self._static: dict[int, StaticRuns | StaticShared] = {}
        self._pages: list[torch.Tensor] = []  # of static works, which run one after the other

    def share_with(self, backend: TritonBackend) -> None:
        """`backend` takes steps of several queries a sequence where it is the faster one: it reads
        shared prefixes once. With 64 heads and more that saves nothing, attention is bound by
        arithmetic.
        """
        backend.tables = self.tables
        if self.num_heads < TILE_ROWS:
            self.sharing = backend

    def plan_mqa(self, work: MQAWork | None) -> None:
        self._planned, self._groups, self._delegated = work, [], None
        if work is None:
            return
        assert work.page_size == PAGE_SIZE, f"FlashMLA over pages of {work.page_size}"
        if self.sharing is not None and len(work.kv_lens) > 1:
            work = replace(work, shared=shared_in(work))
            ours = absorbed_us(work, FLASHMLA_MIXED, self.num_heads, TILE_ROWS // self.num_heads)
            if self.sharing.estimate_us(work) < ours:
                self._delegated = work
                self.sharing.plan_mqa(work)
                return
        self._groups = self._make_groups(work)

    def _make_groups(self, work: MQAWork) -> list[_Group]:
        num_q = np.diff(work.cu_q)
        rows = to_device(self.tables.update(work.page_tables), self._device)
        width = -(-int(work.kv_lens.max()) // PAGE_SIZE)
        pages = self.tables.tensor[:, :width].index_select(0, rows)
        lengths = to_device(work.kv_lens.astype(np.int32), self._device)
        if (num_q == num_q[0]).all():
            size = len(num_q), int(num_q[0])
            return [_Group(Runs(size, lengths, pages, self.kernel.new_schedule()), None, None)]
        padded = 1 << np.ceil(np.log2(num_q)).astype(np.int64)
        return [
            self._make_group(work, np.flatnonzero(padded == size), int(size), lengths, pages)
            for size in np.unique(padded)
        ]

    def _make_group(
        self,
        work: MQAWork,
        members: np.ndarray,
        size: int,
        lengths: torch.Tensor,
        pages: torch.Tensor,
    ) -> _Group:
        first, num_q = work.cu_q[members], np.diff(work.cu_q)[members]
        place = np.arange(size) - (size - num_q)[:, None]  # [B, Sq] query of the sequence, < 0: pad
        tokens = (first[:, None] + np.maximum(place, 0)).reshape(-1)
        kept = np.flatnonzero(place.reshape(-1) >= 0)
        chosen = to_device(members, self._device)
        runs = Runs(
            size=(len(members), size),
            lengths=lengths.index_select(0, chosen),
            pages=pages.index_select(0, chosen),
            schedule=self.kernel.new_schedule(),
        )
        places = to_device(kept, self._device), to_device(tokens[kept], self._device)
        return _Group(runs, to_device(tokens, self._device), places)

    def run_mqa(
        self,
        work: MQAWork,
        q: torch.Tensor,
        pool: torch.Tensor,
        scratch: torch.Tensor,
        latent: int,
        scale: float,
    ) -> Partial:
        static = self._static.get(id(work))
        if static is not None:
            return static.run(q, pool, latent, scale)
        assert work is self._planned, "run_mqa with work that was not planned for this step"
        if self._delegated is not None:
            assert self.sharing is not None
            return self.sharing.run_mqa(self._delegated, q, pool, scratch, latent, scale)
        if len(self._groups) == 1 and self._groups[0].tokens is None:
            part = self.kernel(self._groups[0].runs, q, pool, latent, scale)
            return Partial(part.out, by_query(part.lse)) if work.with_lse else part
        out = torch.empty(*q.shape[:2], latent, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for group in self._groups:
            assert group.tokens is not None
            assert group.kept is not None
            part = self.kernel(group.runs, q.index_select(0, group.tokens), pool, latent, scale)
            queries, tokens = group.kept
            out.index_copy_(0, tokens, part.out.index_select(0, queries))
            if work.with_lse:
                lse.index_copy_(0, tokens, by_query(part.lse).index_select(0, queries))
        return Partial(out, lse)

    def static_mqa(
        self, num_tokens: int, page_size: int, dummy_page: int, family: Family
    ) -> StaticMQA:
        assert page_size == PAGE_SIZE, f"FlashMLA over pages of {page_size}"
        self.tables.set_padding(dummy_page)
        static: StaticRuns | StaticShared
        if family == "shared":
            static = StaticShared(self, num_tokens)
        else:
            static = StaticRuns(self, num_tokens, mixed=family == "mixed")
        self._static[id(static.work)] = static
        return static

    def static_pages(self, num_rows: int) -> torch.Tensor:
        """int32 [num_rows, max_pages], at the same place for the same call."""
        fits = [pages for pages in self._pages if len(pages) >= num_rows]
        if not fits:
            tensor = self.tables.tensor
            fits = [tensor.new_zeros(num_rows, tensor.shape[1])]
            self._pages += fits
        return fits[0][:num_rows]
