"""A launch of Triton's absorbed attention: block shapes, partial answers, capacities."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from radix_mla.attention.absorbed_cost import TILE_ROWS, TRITON_MIXED, TRITON_PLAIN, absorbed_us
from radix_mla.attention.backend import MQAWork, Partial, Setting
from radix_mla.attention.shared_prefix import shared_in

if TYPE_CHECKING:
    from kernels.triton.mqa_plan import MQACapacity, SharedPass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Launch(NamedTuple):
    """A planned work: its list on the device, and where the answer goes."""

    kernel: MQAKernel
    work: MQAWork
    words: torch.Tensor
    capacity: MQACapacity
    combine: bool
    out: torch.Tensor | None  # None: made by the call


class MQAKernel:
    """Block shapes; and partial answers, which serve all capacities with as much sharing."""

    def __init__(self, setting: Setting, num_programs: int, *, mixed: bool) -> None:
        from kernels.triton.mqa import MQAPartials, choose_config

        dims = setting.dims
        self._heads, self._programs, self._mixed = dims.num_heads, num_programs, mixed
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
                num_heads=self._heads,
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
        launch: Launch,
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

    def estimate_us(self, work: MQAWork) -> float:
        """Of one layer."""
        if self._mixed:
            run_tokens = max(1, TILE_ROWS // self._heads)
            return absorbed_us(work, TRITON_MIXED, self._heads, run_tokens)
        return absorbed_us(work, TRITON_PLAIN, self._heads)


def shared_passes(work: MQAWork) -> list[SharedPass]:
    """The passes over shared prefixes, in rows."""
    from kernels.triton.mqa_plan import SharedPass

    size = work.page_size
    passes = shared_in(work).passes if len(work.kv_lens) > 1 else []
    return [SharedPass(p.members, p.first * size, p.last * size) for p in passes]
