"""`StaticAbsorbed`: an absorbed step of fixed shapes, so that a CUDA graph can replay it.

    tokens   | the step's T tokens | N - T padding tokens |     N: the bucket

A padding token writes its row to the pool's dummy page and attends to nothing: its output is 0.

How a graph is captured, once for each bucket N (the pair must be `caps.graph_safe`):

    static = StaticAbsorbed(pair, N, pool, "mixed")
    tokens = torch.zeros(N, dtype=torch.int64, device=device)
    ctx = ForwardContext(positions=static.positions, slots=static.slots, plan=static.plan,
                         pool=pool, workspace=workspace, backend=pair)
    static.refill(batch)        # any batch of at most N tokens; an empty one will do
    side = torch.cuda.Stream()  # warm-up outside the capture: compiles, fills allocators
    with torch.cuda.stream(side):
        static.begin(); model(tokens, ctx)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    static.begin()              # in front of EVERY forward: kernels' schedules are made anew
    with torch.cuda.graph(graph):
        hidden = model(tokens, ctx)

and replayed, all on one stream:

    static.refill(batch)        # one copy for positions, slots and the attention's plan; page
                                # tables: one more, only where a sequence got a page
    tokens[:T].copy_(...)       # from the host, or from the sampler on the device
    graph.replay()              # hidden[:T]

`refill` may be called for step n + 1 while step n runs: copies are queued behind it. Each backend
says in its `static_mqa` what lies in its part of the buffer.

Families, because a kernel that is best for one kind of step is not for another:

    plain     one query a sequence, which reads all its rows
    mixed     any number of queries
    shared    one query a sequence, prefixes that several share are read once

A backend says of each what it `fits` and how long it takes. Triton's `mixed` and `shared` are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from radix_mla.attention.backend import MQAWork
from radix_mla.attention.plan import AbsorbedPlan, AttentionPlan
from radix_mla.errors import ConfigError

if TYPE_CHECKING:
    from radix_mla.attention.backend import AttentionBackend
    from radix_mla.attention.metadata import RaggedBatch
    from radix_mla.cache.kv_pool import KVPool


Family = Literal["plain", "mixed", "shared"]


class StaticMQA(Protocol):
    """A backend's part: a work whose device metadata has fixed places and shapes.

    `work` is what `run_mqa` is called with; `num_ints` int32 words of metadata.
    """

    work: MQAWork
    num_ints: int

    def fits(self, work: MQAWork) -> bool:
        """Whether there is room for the sequences of `work`; its tokens are counted elsewhere."""

    def estimate_us(self, work: MQAWork) -> float:
        """Microseconds of a layer's attention."""

    def place(self, buffer: torch.Tensor) -> None:
        """The device words int32 [num_ints] that the kernels will read, given once."""

    def fill(self, work: MQAWork | None, padding: int, words: np.ndarray) -> None:
        """Writes the metadata of `work`, behind which come `padding` tokens, into host words int32
        [num_ints], which are zero; brings the device's page tables up to date.
        """

    def settle(self) -> None:
        """Queues what must follow the copy of the words."""

    def begin(self) -> None:
        """In front of every forward, captured or not."""


class StaticAbsorbed:
    """Positions, slots and attention metadata of at most `num_tokens` tokens, in fixed places."""

    def __init__(
        self,
        backend: AttentionBackend,
        num_tokens: int,
        pool: KVPool,
        family: Family,
    ) -> None:
        """Raises ConfigError when the backend cannot run with fixed shapes."""
        make = getattr(backend, "static_mqa", None)
        if make is None:
            raise ConfigError(f"attention_backend {backend.name} cannot run in a CUDA graph")
        device = pool.layer(0).device
        self.num_tokens = num_tokens
        self._page_size = pool.page_size
        self._dummy = pool.dummy_page
        self._mqa: StaticMQA = make(num_tokens, pool.page_size, pool.dummy_page, family)
        self._num_bytes = 16 * num_tokens + 4 * self._mqa.num_ints
        self._buffer = torch.zeros(self._num_bytes, dtype=torch.uint8, device=device)
        longs = self._buffer[: 16 * num_tokens].view(torch.int64)
        self.positions, self.slots = longs[:num_tokens], longs[num_tokens:]  # int64 [N]
        self._mqa.place(self._buffer[16 * num_tokens :].view(torch.int32))
        self.plan = AttentionPlan(
            absorbed=AbsorbedPlan(slice(0, num_tokens), self._mqa.work),
            non_absorbed=None,
            one_shot=None,
            paths={},
        )

    def fits(self, work: MQAWork) -> bool:
        """Whether `refill` can take the step: tokens, and sequences where these are padded."""
        return work.num_queries <= self.num_tokens and self._mqa.fits(work)

    def estimate_us(self, work: MQAWork) -> float:
        """Microseconds of a layer's attention."""
        return self._mqa.estimate_us(work)

    def refill(self, batch: RaggedBatch | None, work: MQAWork | None = None) -> None:
        """Queues the copies for a step of at most `num_tokens` tokens; None: padding alone.

        work: `work_of(batch)`, if it is there already. Does not wait for the device, and allocates
        nothing on it.
        """
        pinned = self._buffer.is_cuda
        host = torch.zeros(self._num_bytes, dtype=torch.uint8, pin_memory=pinned)
        view = host.numpy()
        longs = view[: 16 * self.num_tokens].view(np.int64)
        positions, slots = longs[: self.num_tokens], longs[self.num_tokens :]
        used = 0 if batch is None else int(batch.cu_q[-1])
        assert used <= self.num_tokens, f"{used} tokens in a bucket of {self.num_tokens}"
        slots[:] = self._dummy * self._page_size
        if batch is not None:
            positions[:used], slots[:used] = batch.positions, batch.slots
        words = view[16 * self.num_tokens :].view(np.int32)
        if work is None and batch is not None:
            work = work_of(batch)
        self._mqa.fill(work, self.num_tokens - used, words)
        self._buffer.copy_(host, non_blocking=True)
        self._mqa.settle()

    def begin(self) -> None:
        """To be called in front of every forward with `plan`, captured or eager."""
        self._mqa.begin()


def work_of(batch: RaggedBatch) -> MQAWork:
    """All of the step, absorbed."""
    return MQAWork(
        cu_q=batch.cu_q,
        kv_lens=batch.num_context + batch.num_new,
        page_tables=batch.page_tables,
        page_size=batch.page_size,
    )
