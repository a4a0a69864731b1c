"""CUDA graphs of small steps, made once at start: a step then costs the host one launch.

    step of T tokens, every sequence absorbed      bucket N: the least of `bucket_sizes` with N >= T
    host    refill(batch) ─ tokens, rows of logits ─ replay
    device  [T tokens | N - T padding] ─► layers ─► logits, checks          shapes depend on N alone

Of the families (`attention/static_plan.py`) that can take a step, the fastest takes it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from radix_mla.attention.context import ForwardContext
from radix_mla.attention.shared_prefix import shared_in
from radix_mla.attention.static_plan import Family, StaticAbsorbed, work_of

if TYPE_CHECKING:
    from radix_mla.attention.backend import AttentionBackend, MQAWork
    from radix_mla.attention.metadata import RaggedBatch
    from radix_mla.attention.workspace import Workspace
    from radix_mla.cache.kv_pool import KVPool
    from radix_mla.engine.step_tokens import StepTokens

MAX_TOKENS = 512


class StepOutputs(NamedTuple):
    """What a forward leaves on the device: logits fp32 [M, vocab] of the rows asked for, and
    whether a token's rows and hidden states (bool [T]) and a row of logits (bool [M]) are finite.
    """

    logits: torch.Tensor
    tokens_finite: torch.Tensor
    logits_finite: torch.Tensor


# (tokens int64 [T], context, rows int64 [M] of the hidden states that need logits, logits or None)
Forward = Callable[[torch.Tensor, ForwardContext, torch.Tensor, "torch.Tensor | None"], StepOutputs]


def bucket_sizes(max_tokens: int, *, fine: bool = True) -> list[int]:
    """1, 2, 4, 8, then steps of an eighth of the size and at least 8; `max_tokens` is the last.

    Not `fine`: steps of a half, for steps that are rarer.
    """
    share = 4 if fine else 2  # the step is size >> share of its highest bit
    sizes = [size for size in (1, 2, 4) if size < max_tokens]
    size = 8
    while size < max_tokens:
        sizes.append(size)
        size += max(8, 1 << max(0, size.bit_length() - share))
    return [*sizes, max_tokens]


class CapturedSteps:
    """Not thread-safe. Graphs of one family and size share memory with all others: one runs at a
    time, and its outputs stay until the next step.
    """

    def __init__(
        self,
        forward: Forward,
        backend: AttentionBackend,
        pool: KVPool,
        workspace: Workspace,
        *,
        max_tokens: int,
        max_logits: int,
        vocab_size: int,
    ) -> None:
        """`max_logits`: rows of logits that a step may ask for. Captures nothing yet."""
        device = pool.layer(0).device
        most = min(MAX_TOKENS, max_tokens)
        self._max_logits = max_logits
        logits = torch.empty(max_logits, vocab_size, dtype=torch.float32, device=device)
        families: dict[str, tuple[AttentionBackend, Family]] = {
            "plain": (backend, "plain"),
            "mixed": (backend, "mixed"),
        }
        sharing: AttentionBackend = getattr(backend, "sharing", backend)
        if sharing is not backend:
            families |= {"shared": (backend, "shared"), "mixed_shared": (sharing, "mixed")}
        self._sizes = {name: bucket_sizes(most, fine=name == "plain") for name in families}
        self._steps = {
            (name, size): _CapturedStep(
                forward,
                StaticAbsorbed(pair, size, pool, family),
                pair,
                pool,
                workspace,
                logits[: min(size, max_logits)],
            )
            for name, (pair, family) in families.items()
            for size in reversed(self._sizes[name])  # what they share is made for the largest
        }

    def __len__(self) -> int:
        return len(self._steps)

    def capture(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles and captures all, the largest first: the others fit into its memory."""
        memory = torch.cuda.graph_pool_handle()
        order = sorted(self._steps, key=lambda key: -key[1])
        with _no_collection():
            for done, key in enumerate(order):
                report(done, len(order))
                self._steps[key].capture(memory)
        report(len(order), len(order))

    def run(self, batch: RaggedBatch, tokens: StepTokens, rows: np.ndarray) -> StepOutputs | None:
        """Queues the step; None: there is no graph for it. T tokens, rows int64 [M], host; every
        sequence's form must be absorbed.
        """
        if len(tokens.known) > self._sizes["plain"][-1] or len(rows) > self._max_logits:
            return None
        work = work_of(batch)
        if len(work.kv_lens) > 1:
            work = replace(work, shared=shared_in(work))
        step = self._fastest(work)
        return None if step is None else step.run(batch, work, tokens, rows)

    def _fastest(self, work: MQAWork) -> _CapturedStep | None:
        """None: more sequences, some of several queries, than any family has room for."""
        decode = work.num_queries == len(work.kv_lens)
        if decode and not (work.shared and work.shared.passes):  # the usual step: nothing to weigh
            return self._step("plain", work.num_queries)
        steps = [self._step(name, work.num_queries) for name in self._sizes]
        fitting = (step for step in steps if step.fits(work))
        return min(fitting, key=lambda step: step.estimate_us(work), default=None)

    def _step(self, family: str, num_tokens: int) -> _CapturedStep:
        size = next(size for size in self._sizes[family] if size >= num_tokens)
        return self._steps[family, size]


@contextmanager
def _no_collection() -> Iterator[None]:
    """What garbage of an engine before this one holds is freed now: CUDA refuses that while it
    captures.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _CapturedStep:
    """A graph and the places of its inputs and outputs."""

    def __init__(
        self,
        forward: Forward,
        static: StaticAbsorbed,
        backend: AttentionBackend,
        pool: KVPool,
        workspace: Workspace,
        logits: torch.Tensor,
    ) -> None:
        self._static = static
        num_tokens = static.num_tokens
        self._ctx = ForwardContext(
            positions=self._static.positions,
            slots=self._static.slots,
            plan=self._static.plan,
            pool=pool,
            workspace=workspace,
            backend=backend,
        )
        self._forward = forward
        self._num_tokens = num_tokens
        self._inputs = torch.zeros(
            num_tokens + len(logits), dtype=torch.int64, device=logits.device
        )
        self._logits = logits
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: StepOutputs | None = None

    def fits(self, work: MQAWork) -> bool:
        return self._static.fits(work)

    def estimate_us(self, work: MQAWork) -> float:
        return self._static.estimate_us(work)

    def capture(self, memory: Any) -> None:
        self._static.refill(None)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and makes what is made once
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._static.begin()
        with torch.cuda.graph(graph, pool=memory):
            self._outputs = self._call()
        self._graph = graph

    def run(
        self,
        batch: RaggedBatch,
        work: MQAWork,
        tokens: StepTokens,
        rows: np.ndarray,
    ) -> StepOutputs:
        """Queues the step; without a graph (on CPU) it runs here and now."""
        self._static.refill(batch, work)
        pinned = torch.zeros(len(self._inputs), dtype=torch.int64, pin_memory=self._inputs.is_cuda)
        inputs = pinned.numpy()
        inputs[: len(tokens.known)] = tokens.known
        inputs[self._num_tokens : self._num_tokens + len(rows)] = rows
        self._inputs.copy_(pinned, non_blocking=True)
        tokens.draw_into(self._inputs)
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        assert self._outputs is not None
        outputs = self._outputs
        return StepOutputs(
            outputs.logits[: len(rows)],
            outputs.tokens_finite[: len(tokens.known)],
            outputs.logits_finite[: len(rows)],
        )

    def _run(self) -> None:
        self._static.begin()
        self._outputs = self._call()

    def _call(self) -> StepOutputs:
        tokens, rows = self._inputs[: self._num_tokens], self._inputs[self._num_tokens :]
        return self._forward(tokens, self._ctx, rows, self._logits)
