"""Triton's absorbed steps of fixed shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from radix_mla.attention.backend import MQAWork
from radix_mla.attention.backends.triton_kernel import Launch, shared_passes

if TYPE_CHECKING:
    from radix_mla.attention.backends.triton import TritonBackend


class StaticTriton:
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
        self._launch: Launch | None = None
        self._out: torch.Tensor | None = None
        self._used = 0

    def fits(self, work: MQAWork) -> bool:
        return True

    def estimate_us(self, work: MQAWork) -> float:
        return self._kernel.estimate_us(work)

    def place(self, buffer: torch.Tensor) -> None:
        self._launch = Launch(self._kernel, self.work, buffer, self._capacity, True, None)

    def launch(self, q: torch.Tensor, latent: int) -> Launch:
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
        self._backend.fill(work, shared_passes(work) if self._mixed else [], self._capacity, words)

    def settle(self) -> None:
        if self._out is not None and self._used < self._num_tokens:
            self._out[self._used :].zero_()

    def begin(self) -> None:
        """The work list holds no state between forwards."""
