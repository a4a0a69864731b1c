"""Our own kernels on any GPU: multi-head attention, and absorbed attention over pages of any size.

Absorbed attention follows a work list that is planned on the host and sent by one copy; sequences
that share a prefix read its rows once (`kernels/triton/mqa_plan.py`).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from radix_mla.attention.backend import Caps, MHAWork, MQAWork, Partial, Setting
from radix_mla.attention.backends.ragged import RaggedPlan
from radix_mla.attention.backends.triton_kernel import Launch, MQAKernel, shared_passes
from radix_mla.attention.backends.triton_static import StaticTriton
from radix_mla.attention.page_tables import DevicePageTables
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


class TritonBackend:
    name = "triton"
    caps = CAPS

    def __init__(self, setting: Setting, *, num_programs: int) -> None:
        """`num_programs`: the fixed grid of absorbed attention, a multiprocessor each."""
        self._setting = setting
        self._device = setting.device
        self._ragged = RaggedPlan(setting.device)
        self._num_programs = num_programs
        self._kernels: dict[bool, MQAKernel] = {}
        self._planned: Launch | None = None
        self._static: dict[int, StaticTriton] = {}
        self._outputs: list[torch.Tensor] = []  # of static works, which run one after the other

    @cached_property
    def tables(self) -> DevicePageTables:
        setting = self._setting
        return DevicePageTables(setting.max_num_seqs, setting.max_pages, setting.device)

    def kernel(self, *, mixed: bool) -> MQAKernel:
        """For steps in which tokens read rows together (`mixed`), or each its own."""
        if mixed not in self._kernels:
            setting = self._setting
            self._kernels[mixed] = MQAKernel(setting, self._num_programs, mixed=mixed)
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
        shared = shared_passes(work)
        kernel = self.kernel(mixed=bool(shared) or work.num_queries > len(work.kv_lens))
        capacity = kernel.capacity(self._setting.max_tokens, self._setting.max_num_seqs)
        words = np.zeros(capacity.at.end, dtype=np.int32)
        num_units = self.fill(work, shared, capacity, words)
        sent = to_device(words, self._device)
        self._planned = Launch(kernel, work, sent, capacity, num_units > 0, None)

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
        return self.kernel(mixed=True).estimate_us(work)

    def static_mqa(
        self, num_tokens: int, page_size: int, dummy_page: int, family: Family
    ) -> StaticMQA:
        """The words are the work list of at most `num_tokens` tokens in any mix of Sq; padding
        tokens are not in it, their outputs are zero. Blocks are those for steps with shared
        prefixes, which are read once, or several queries a sequence; `plain`: those for decode that
        reads every sequence's rows for itself.
        """
        static = StaticTriton(self, num_tokens, page_size, mixed=family != "plain")
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
