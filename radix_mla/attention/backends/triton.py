"""Our own kernels on any GPU: multi-head attention, and absorbed attention over pages of any size.

Absorbed attention follows a work list that is planned on the host and sent by one copy; sequences
that share a prefix read its rows once (`kernels/triton/mqa_plan.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from radix_mla.attention.absorbed_cost import (
    TILE_ROWS,
    TRITON_MIXED,
    TRITON_PLAIN,
    absorbed_us,
)
from radix_mla.attention.backend import Caps, MHAWork, MQAWork, Partial, Setting
from radix_mla.attention.backends.ragged import RaggedPlan
from radix_mla.attention.page_tables import DevicePageTables
from radix_mla.attention.shared_prefix import shared_in
from radix_mla.upload import to_device

if TYPE_CHECKING:
    from kernels.triton.mqa_plan import MQACapacity, SharedPass
    from radix_mla.attention.static_plan import Family, StaticMQA

CAPS = Caps(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({"fp32", "bf16"}),
    kv_dtypes=frozenset({"fp32", "bf16"}),
    page_sizes=frozenset(1 << n for n in range(11)),
    prefill=True,
    absorbed=True,
    pad_heads=False,
    graph_safe=True,
    archs=(80, 99),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TABLE_ROW = 2  # column of a work list's piece: which page table


def unavailable(setting: Setting) -> str | None:
    """Why this backend cannot be used here, beyond its `Caps`; None: it can."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton not importable: {error}"
    dims = setting.dims
    for name, width in (("latent", dims.latent), ("rope", dims.rope)):
        if width < 16 or width & (width - 1):
            return f"{name} width {width}: the kernels take powers of two from 16"
    if setting.dtype != setting.kv_dtype:
        return f"KV rows in {setting.kv_dtype} under {setting.dtype}: the kernels take one type"
    return None


def make(setting: Setting) -> TritonBackend:
    count = torch.cuda.get_device_properties(setting.device).multi_processor_count
    return TritonBackend(setting, num_programs=count)


class _Launch(NamedTuple):
    """A planned work: its list on the device, and where the answer goes."""

    kernel: _MQAKernel
    work: MQAWork
    words: torch.Tensor
    capacity: MQACapacity
    combine: bool
    out: torch.Tensor | None  # None: made by the call


class TritonBackend:
    name = "triton"
    caps = CAPS

    def __init__(self, setting: Setting, *, num_programs: int) -> None:
        """`num_programs`: the fixed grid of absorbed attention, a multiprocessor each."""
        self._setting = setting
        self._device = setting.device
        self._ragged = RaggedPlan(setting.device)
        self._num_programs = num_programs
        self._kernels: dict[bool, _MQAKernel] = {}
        self._planned: _Launch | None = None
        self._static: dict[int, _StaticTriton] = {}
        self._outputs: list[torch.Tensor] = []  # of static works, which run one after the other

    @cached_property
    def tables(self) -> DevicePageTables:
        setting = self._setting
        return DevicePageTables(setting.max_num_seqs, setting.max_pages, setting.device)

    def kernel(self, *, mixed: bool) -> _MQAKernel:
        """For steps in which tokens read rows together (`mixed`), or each its own."""
        if mixed not in self._kernels:
            setting = self._setting
            self._kernels[mixed] = _MQAKernel(setting, self._num_programs, mixed=mixed)
        return self._kernels[mixed]

    def plan(self, mha: list[MHAWork], mqa: MQAWork | None) -> None:
        self.plan_mha(mha)
        self.plan_mqa(mqa)

    def plan_mha(self, works: list[MHAWork]) -> None:
        self._ragged.plan(works)

    def run_mha(
        self, work: MHAWork, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Partial:
        from kernels.triton.prefill import mha_prefill

        planned = self._ragged.of(work)
        out, lse = mha_prefill(
            q,
            k,
            v,
            planned.cu_q,
            planned.cu_k,
            max_q=planned.max_q,
            scale=scale,
            causal=work.causal,
        )
        return Partial(out, lse)

    def plan_mqa(self, work: MQAWork | None) -> None:
        self._planned = None
        if work is None:
            return
        shared = _shared(work)
        kernel = self.kernel(mixed=bool(shared) or work.num_queries > len(work.kv_lens))
        capacity = kernel.capacity(self._setting.max_tokens, self._setting.max_num_seqs)
        words = np.zeros(capacity.at.end, dtype=np.int32)
        num_units = self.fill(work, shared, capacity, words)
        sent = to_device(words, self._device)
        self._planned = _Launch(kernel, work, sent, capacity, num_units > 0, None)

    def fill(
        self,
        work: MQAWork,
        shared: list[SharedPass],
        capacity: MQACapacity,
        words: np.ndarray,
    ) -> int:
        """Writes the work list of `work` over our page table rows into host `words`; returns for
        how many tokens partial answers must be combined.
        """
        from kernels.triton.mqa_plan import ITEM, plan_mqa

        rows = self.tables.update(work.page_tables)
        plan = plan_mqa(capacity, work.cu_q, work.kv_lens, shared, buffer=words)
        first = capacity.at.items
        items = words[first : first + plan.num_pieces * ITEM].reshape(-1, ITEM)
        items[:, _TABLE_ROW] = rows[items[:, _TABLE_ROW]]
        return plan.num_units

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
        launch = self._planned if static is None else static.launch(q, latent)
        assert launch is not None, "run_mqa without a plan"
        assert launch.work is work, "run_mqa with work that was not planned for this step"
        return launch.kernel.run(launch, q, pool, self.tables.tensor, latent, scale)

    def estimate_us(self, work: MQAWork) -> float:
        """Of an eager step's layer."""
        return _estimate_us(work, self._setting.dims.num_heads, mixed=True)

    def static_mqa(
        self, num_tokens: int, page_size: int, dummy_page: int, family: Family
    ) -> StaticMQA:
        """The words are the work list of at most `num_tokens` tokens in any mix of Sq; padding
        tokens are not in it, their outputs are zero. Blocks are those for steps with shared
        prefixes, which are read once, or several queries a sequence; `plain`: those for decode that
        reads every sequence's rows for itself.
        """
        static = _StaticTriton(self, num_tokens, page_size, mixed=family != "plain")
        self._static[id(static.work)] = static
        return static

    def static_output(
        self, num_tokens: int, heads: int, latent: int, like: torch.Tensor
    ) -> torch.Tensor:
        """[num_tokens, heads, latent], finite, always at the same place for the same call."""
        fits = [out for out in self._outputs if len(out) >= num_tokens]
        if not fits:
            shape = (num_tokens, heads, latent)
            fits = [torch.zeros(shape, dtype=like.dtype, device=like.device)]
            self._outputs += fits
        return fits[0][:num_tokens]


class _MQAKernel:
    """Block shapes; and partial answers, which serve all capacities with as much sharing."""

    def __init__(self, setting: Setting, num_programs: int, *, mixed: bool) -> None:
        from kernels.triton.mqa import MQAPartials, choose_config

        dims = setting.dims
        self.num_heads, self._programs = dims.num_heads, num_programs
        self._max_shared = 2 * setting.max_num_seqs if mixed else 0
        self._config = choose_config(dims.num_heads, DTYPES[setting.kv_dtype], shared=mixed)
        self._capacities: dict[tuple[int, int], MQACapacity] = {}
        self._partials = MQAPartials(self.capacity(1, 1), dims.latent, setting.device)
        self.num_bytes = self._partials.num_bytes

    def capacity(self, max_tokens: int, max_seqs: int) -> MQACapacity:
        from kernels.triton.mqa_plan import MQACapacity

        key = (max_tokens, max_seqs)
        if key not in self._capacities:
            self._capacities[key] = MQACapacity(
                num_heads=self.num_heads,
                block_m=self._config.block_m,
                block_n=self._config.block_n,
                num_programs=self._programs,
                max_tokens=max_tokens,
                max_seqs=max_seqs,
                max_shared_tokens=self._max_shared,
            )
        return self._capacities[key]

    def run(
        self,
        launch: _Launch,
        q: torch.Tensor,
        pool: torch.Tensor,
        tables: torch.Tensor,
        latent: int,
        scale: float,
    ) -> Partial:
        from kernels.triton.mqa import mqa

        out, lse = launch.out, None
        if out is None:
            out = torch.empty(*q.shape[:2], latent, dtype=q.dtype, device=q.device)
        if launch.work.with_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        mqa(
            q,
            pool,
            tables,
            launch.words,
            out,
            capacity=launch.capacity,
            config=self._config,
            partials=self._partials,
            page_size=launch.work.page_size,
            scale=scale,
            lse=lse,
            combine=launch.combine,
        )
        return Partial(out, out.new_empty(0) if lse is None else lse)


class _StaticTriton:
    """See `static_plan.StaticMQA`."""

    def __init__(
        self, backend: TritonBackend, num_tokens: int, page_size: int, *, mixed: bool
    ) -> None:
        self._backend = backend
        self._num_tokens = num_tokens
        self._mixed = mixed
        self._kernel = backend.kernel(mixed=mixed)
        self._capacity = self._kernel.capacity(num_tokens, num_tokens)
        self.num_ints = self._capacity.at.end
        one = np.ones(num_tokens, dtype=np.int64)
        self.work = MQAWork(np.arange(num_tokens + 1), one, (), page_size)
        self._launch: _Launch | None = None
        self._out: torch.Tensor | None = None
        self._used = 0

    def fits(self, work: MQAWork) -> bool:
        return True

    def estimate_us(self, work: MQAWork) -> float:
        return _estimate_us(work, self._kernel.num_heads, mixed=self._mixed)

    def place(self, buffer: torch.Tensor) -> None:
        self._launch = _Launch(self._kernel, self.work, buffer, self._capacity, True, None)

    def launch(self, q: torch.Tensor, latent: int) -> _Launch:
        """With an output that stays: rows of padding tokens are not written, and must be finite."""
        assert self._launch is not None, "the buffer has no place yet"
        if self._out is None:
            self._out = self._backend.static_output(self._num_tokens, q.shape[1], latent, q)
            self._launch = self._launch._replace(out=self._out)
        return self._launch

    def fill(self, work: MQAWork | None, padding: int, words: np.ndarray) -> None:
        self._used = self._num_tokens - padding
        if work is None:
            work = replace(self.work, cu_q=np.zeros(1, dtype=np.int64), kv_lens=np.zeros(0))
        self._backend.fill(work, _shared(work) if self._mixed else [], self._capacity, words)

    def settle(self) -> None:
        if self._out is not None and self._used < self._num_tokens:
            self._out[self._used :].zero_()

    def begin(self) -> None:
        """The work list holds no state between forwards."""


def _estimate_us(work: MQAWork, num_heads: int, *, mixed: bool) -> float:
    if mixed:
        return absorbed_us(work, TRITON_MIXED, num_heads, max(1, TILE_ROWS // num_heads))
    return absorbed_us(work, TRITON_PLAIN, num_heads)


def _shared(work: MQAWork) -> list[SharedPass]:
    """The passes over shared prefixes, in rows."""
    from kernels.triton.mqa_plan import SharedPass

    size = work.page_size
    passes = shared_in(work).passes if len(work.kv_lens) > 1 else []
    return [SharedPass(p.members, p.first * size, p.last * size) for p in passes]
