"""The lengths of ragged attention as the varlen kernels want them: int32, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from radix_mla.upload import pack_int32

if TYPE_CHECKING:
    from radix_mla.attention.backend import MHAWork


class DeviceMHA(NamedTuple):
    """cu_q, cu_k int32 [B + 1] on the device. `has_empty`: some query has no key."""

    work: MHAWork  # kept alive: the plan is found by its id
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    has_empty: bool


class RaggedPlan:
    """All multi-head works of a step, moved by one copy."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._planned: dict[int, DeviceMHA] = {}

    def plan(self, works: list[MHAWork]) -> None:
        self._planned = {}
        if not works:
            return
        arrays = [array for work in works for array in (work.cu_q, work.cu_k)]
        tensors = pack_int32(arrays, self._device)
        for number, work in enumerate(works):
            num_q, num_k = np.diff(work.cu_q), np.diff(work.cu_k)
            empty = (num_k < num_q) if work.causal else (num_k == 0)
            self._planned[id(work)] = DeviceMHA(
                work=work,
                cu_q=tensors[2 * number],
                cu_k=tensors[2 * number + 1],
                max_q=int(num_q.max(initial=0)),
                max_k=int(num_k.max(initial=0)),
                has_empty=bool((empty & (num_q > 0)).any()),
            )

    def of(self, work: MHAWork) -> DeviceMHA:
        planned = self._planned.get(id(work))
        assert planned is not None, "run_mha with work that was not planned for this step"
        return planned
