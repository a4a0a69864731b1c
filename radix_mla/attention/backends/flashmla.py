"""FlashMLA's dense decode on Hopper: absorbed attention over bf16 rows in pages of 64.

q [B, Sq, H, 576] over a block table, causal at the end, any Sq >= 1. Sequences of unequal Sq are
grouped by the next power of two; the queries that fill a group up stand in front, where they see
fewer rows, and their outputs are dropped. The kernel's schedule depends on the lengths and is not
checked by it: a new one is made by the first layer of every step. LSE is natural, fp32, [B, H, Sq];
+inf for a query without keys.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from radix_mla.attention.backend import Caps, MQAWork, Partial, Setting
from radix_mla.attention.page_tables import DevicePageTables
from radix_mla.attention.shared_prefix import find_shared
from radix_mla.upload import to_device

if TYPE_CHECKING:
    from radix_mla.attention.backends.triton import TritonBackend
    from radix_mla.attention.static_plan import StaticMQA

PAGE_SIZE = 64
_RUN_ROWS = 256  # queries · heads of a run in a mixed static step: four of the kernel's tiles
_SPARE_RUNS = 64  # sequences of such a step whose last run may be short
_SHARE_BELOW_HEADS = 64  # with more, attention is bound by arithmetic: reading once gains nothing
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


@cache
def _find() -> tuple[str, ModuleType | None]:
    """("", the module), or (why there is none, None)."""
    try:
        module = import_module("flash_mla")
        legacy = module.has_legacy()
    except (ImportError, OSError, AttributeError) as error:
        return f"flash_mla (sgl-flash-mla) not importable: {error}", None
    if not legacy:
        return "this flash_mla was built without its kernels for Hopper", None
    return "", module


def unavailable(setting: Setting) -> str | None:
    """Why this backend cannot be used here, beyond its `Caps`; None: it can."""
    reason, module = _find()
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

    size: tuple[int, int]  # B, Sq
    seqlens: torch.Tensor  # int32 [B]
    pages: torch.Tensor  # int32 [B, any]
    tokens: torch.Tensor | None  # int64 [B · Sq]: which token each query is
    kept: tuple[torch.Tensor, torch.Tensor] | None  # int64: queries to keep, tokens they are
    schedule: Any


class FlashMLABackend:
    name = "flashmla"
    caps = CAPS

    def __init__(self, setting: Setting) -> None:
        reason, module = _find()
        assert module is not None, reason
        self._attend, self._new_schedule = module.flash_mla_with_kvcache, module.get_mla_metadata
        self._device = setting.device
        self.tables = DevicePageTables(setting.max_num_seqs, setting.max_pages, setting.device)
        self.sharing: TritonBackend | None = None
        self._shares = setting.dims.num_heads < _SHARE_BELOW_HEADS
        self._delegated = False
        self._groups: list[_Group] = []
        self._planned: MQAWork | None = None
        self._static: dict[int, _StaticFlashMLA] = {}
        self._pages: list[torch.Tensor] = []  # of static works, which run one after the other
        self._num_heads = setting.dims.num_heads
        self._spare_runs = min(setting.max_num_seqs, _SPARE_RUNS)

    def share_with(self, backend: TritonBackend) -> None:
        """`backend` takes the steps in which sequences share long prefixes: it reads them once."""
        backend.tables = self.tables
        if self._shares:
            self.sharing = backend

    def plan_mqa(self, work: MQAWork | None) -> None:
        self._planned, self._groups, self._delegated = work, [], False
        if work is None:
            return
        assert work.page_size == PAGE_SIZE, f"FlashMLA over pages of {work.page_size}"
        if self.sharing is not None and len(work.kv_lens) > 1:
            num_q = np.diff(work.cu_q)
            self._delegated = bool(
                find_shared(work.page_tables, work.kv_lens - num_q, PAGE_SIZE).passes
            )
            if self._delegated:
                self.sharing.plan_mqa(work)
                return
        self._groups = self._make_groups(work)

    def _make_groups(self, work: MQAWork) -> list[_Group]:
        num_q = np.diff(work.cu_q)
        rows = to_device(self.tables.update(work.page_tables), self._device)
        width = -(-int(work.kv_lens.max()) // PAGE_SIZE)
        pages = self.tables.tensor[:, :width].index_select(0, rows)
        seqlens = to_device(work.kv_lens.astype(np.int32), self._device)
        if (num_q == num_q[0]).all():
            size = len(num_q), int(num_q[0])
            return [_Group(size, seqlens, pages, None, None, self._new_schedule()[0])]
        padded = 1 << np.ceil(np.log2(num_q)).astype(np.int64)
        return [
            self._make_group(work, np.flatnonzero(padded == size), int(size), seqlens, pages)
            for size in np.unique(padded)
        ]

    def _make_group(
        self,
        work: MQAWork,
        members: np.ndarray,
        size: int,
        seqlens: torch.Tensor,
        pages: torch.Tensor,
    ) -> _Group:
        first, num_q = work.cu_q[members], np.diff(work.cu_q)[members]
        place = np.arange(size) - (size - num_q)[:, None]  # [B, Sq] query of the sequence, < 0: pad
        tokens = (first[:, None] + np.maximum(place, 0)).reshape(-1)
        kept = np.flatnonzero(place.reshape(-1) >= 0)
        chosen = to_device(members, self._device)
        return _Group(
            size=(len(members), size),
            seqlens=seqlens.index_select(0, chosen),
            pages=pages.index_select(0, chosen),
            tokens=to_device(tokens, self._device),
            kept=(to_device(kept, self._device), to_device(tokens[kept], self._device)),
            schedule=self._new_schedule()[0],
        )

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
            return self._run_static(static.group, q, pool, latent, scale)
        assert work is self._planned, "run_mqa with work that was not planned for this step"
        if self._delegated:
            assert self.sharing is not None
            return self.sharing.run_mqa(work, q, pool, scratch, latent, scale)
        if len(self._groups) == 1 and self._groups[0].tokens is None:
            part = self._call(self._groups[0], q, pool, latent, scale)
            return Partial(part.out, no_inf(part.lse)) if work.with_lse else part
        out = torch.empty(*q.shape[:2], latent, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for group in self._groups:
            assert group.tokens is not None
            assert group.kept is not None
            part = self._call(group, q.index_select(0, group.tokens), pool, latent, scale)
            queries, tokens = group.kept
            out.index_copy_(0, tokens, part.out.index_select(0, queries))
            if work.with_lse:
                lse.index_copy_(0, tokens, no_inf(part.lse).index_select(0, queries))
        return Partial(out, lse)

    def _run_static(
        self, group: _Group, q: torch.Tensor, pool: torch.Tensor, latent: int, scale: float
    ) -> Partial:
        if group.kept is None or group.tokens is None:
            return self._call(group, q, pool, latent, scale)
        part = self._call(group, q.index_select(0, group.tokens), pool, latent, scale)
        places = group.kept[0]
        return Partial(part.out.index_select(0, places), part.lse)

    def _call(
        self, group: _Group, q: torch.Tensor, pool: torch.Tensor, latent: int, scale: float
    ) -> Partial:
        """q [B · Sq, H, L + R] → out [B · Sq, H, L], lse [B · Sq, H] as the kernel has it."""
        batch, num_q = group.size
        heads, width = q.shape[1:]
        out, lse = self._attend(
            q.view(batch, num_q, heads, width),
            pool.view(-1, PAGE_SIZE, 1, width),
            group.pages,
            group.seqlens,
            latent,
            group.schedule,
            softmax_scale=scale,
            causal=True,
            use_legacy=True,
        )
        lse = lse.transpose(1, 2)  # [B, Sq, H]
        if num_q == 1:
            return Partial(out.view(batch, heads, latent), lse[:, 0])
        return Partial(out.view(-1, heads, latent), lse.reshape(-1, heads))

    def static_mqa(
        self, num_tokens: int, page_size: int, dummy_page: int, *, mixed: bool | None = None
    ) -> StaticMQA:
        """A call of fixed shape over `num_rows` runs of `width` consecutive tokens of a sequence;
        a shorter run is filled up in front, one without tokens has no rows to read. Not `mixed`:
        runs of one token, which need no gathers. The words: lengths [num_rows], rows of the page
        tables [num_rows], and if mixed, tokens of the queries [num_rows · width] and queries of the
        tokens [num_tokens]. The block table is gathered behind the copy; a captured forward makes
        its own schedule on the device. Padding tokens have no rows: their outputs are zero.
        """
        assert page_size == PAGE_SIZE, f"FlashMLA over pages of {page_size}"
        self.tables.set_padding(dummy_page)
        width = max(1, _RUN_ROWS // self._num_heads) if mixed else 1
        # Each sequence may end in a run that is not full; one run is for padding.
        num_rows = num_tokens if width == 1 else -(-num_tokens // width) + self._spare_runs + 1
        static = _StaticFlashMLA(self, num_tokens, min(num_rows, num_tokens + 1), width)
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


class _StaticFlashMLA:
    """See `static_plan.StaticMQA`. The last run is for padding where width > 1."""

    def __init__(
        self, backend: FlashMLABackend, num_tokens: int, num_rows: int, width: int
    ) -> None:
        self._backend = backend
        self._num_tokens, self._num_rows, self._width = num_tokens, num_rows, width
        self.num_ints = 2 * num_rows + (num_rows * width + num_tokens if width > 1 else 0)
        one = np.ones(num_tokens, dtype=np.int64)
        self.work = MQAWork(np.arange(num_tokens + 1), one, (), PAGE_SIZE)

    def fits(self, work: MQAWork) -> bool:
        if self._width == 1:
            return True
        return int((-(-np.diff(work.cu_q) // self._width)).sum()) < self._num_rows

    def place(self, buffer: torch.Tensor) -> None:
        size, width = self._num_rows, self._width
        self._rows = buffer[size : 2 * size]
        tokens = buffer[2 * size : 2 * size + size * width] if width > 1 else None
        kept = None if tokens is None else (buffer[2 * size + size * width :], tokens)
        self.group = _Group(
            size=(size, width),
            seqlens=buffer[:size],
            pages=self._backend.static_pages(size),
            tokens=tokens,
            kept=kept,
            schedule=self._backend._new_schedule()[0],
        )

    def fill(self, work: MQAWork | None, padding: int, words: np.ndarray) -> None:
        size, width = self._num_rows, self._width
        lengths, rows = words[:size], words[size : 2 * size]
        lengths[:], rows[:] = 0, self._backend.tables.padding_row
        tokens = words[2 * size : 2 * size + size * width].reshape(-1, width)
        places = words[2 * size + size * width :]  # of each token among the queries
        if width > 1:
            places[:] = size * width - 1
        if work is None:
            return
        assert self.fits(work), "more sequences than this bucket has runs for"
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
        torch.index_select(tables, 0, self._rows, out=self.group.pages)

    def begin(self) -> None:
        self.group = self.group._replace(schedule=self._backend._new_schedule()[0])


def no_inf(lse: torch.Tensor) -> torch.Tensor:
    """-inf where a query has no keys."""
    return lse.masked_fill(lse == float("inf"), float("-inf"))
