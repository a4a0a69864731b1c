"""MLA attention steps of chosen sizes on a GPU, and how they are timed; used by the benches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch

from radix_mla.attention.backend import AttentionBackend, Setting
from radix_mla.attention.context import ForwardContext
from radix_mla.attention.forms import Form, FormChooser, rates_of
from radix_mla.attention.metadata import LatentWeights, RaggedBatch
from radix_mla.attention.plan import plan_attention
from radix_mla.attention.select import Choice, choose_backends, device_arch, make_backend
from radix_mla.attention.workspace import MLADims, Workspace
from radix_mla.cache.kv_layout import KVLayout
from radix_mla.cache.kv_pool import KVPool
from radix_mla.engine.step import Chunk

DEVICE = "cuda:0"
DTYPE = torch.bfloat16


class Bench:
    """One layer of `heads` heads: pool, weights, workspace and backends, random and re-used."""

    def __init__(
        self,
        heads: int,
        *,
        backend: str = "auto",
        page_size: int | None = None,
        pool_tokens: int = 1 << 16,
        workspace_rows: int = 32_768,
        max_tokens: int = 2_048,
        max_num_seqs: int = 256,
    ) -> None:
        self.dims = dims = MLADims(num_heads=heads, latent=512, nope=128, rope=64, value=128)
        setting = Setting(
            device=DEVICE,
            arch=device_arch(DEVICE),
            dtype="bf16",
            kv_dtype="bf16",
            page_size=page_size,
            dims=dims,
            max_num_seqs=max_num_seqs,
            max_tokens=max_tokens,
            max_pages=pool_tokens,
        )
        self.choice: Choice = choose_backends(backend, setting)
        self.page_size = self.choice.page_size
        num_pages = pool_tokens // self.page_size
        self.setting = Setting(
            device=DEVICE,
            arch=setting.arch,
            dtype="bf16",
            kv_dtype="bf16",
            page_size=self.page_size,
            dims=dims,
            max_num_seqs=max_num_seqs,
            max_tokens=max_tokens,
            max_pages=num_pages,
        )
        self.backend: AttentionBackend = make_backend(self.choice, self.setting)
        layout = KVLayout.of("bf16", latent=dims.latent, rope=dims.rope)
        self.pool = KVPool(layout, 1, num_pages, self.page_size, DEVICE)
        self.pool.layer(0).normal_()
        w = torch.randn(heads, 256, dims.latent, device=DEVICE, dtype=DTYPE) / dims.latent**0.5
        self.weights = LatentWeights(w[:, :128], w[:, 128:])
        self.workspace = Workspace(
            dims,
            context_rows=workspace_rows,
            step_tokens=max_tokens,
            pad_heads=self.backend.caps.pad_heads,
            dtype=DTYPE,
            device=DEVICE,
        )
        self.scale = dims.qk**-0.5
        self._order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)

    def batch(
        self, sequences: Sequence[tuple[int, int]], *, decode: bool = False, shared: int = 0
    ) -> RaggedBatch:
        """(Sq, Sk) each, over scattered pages; the first `shared` rows lie on the same pages."""
        chunks, used = [], shared // self.page_size
        for num_new, num_context in sequences:
            own = -(-(num_new + num_context) // self.page_size) - shared // self.page_size
            table = np.concatenate(
                (self._order[: shared // self.page_size], self._order[used : used + own])
            )
            used += own
            assert used <= len(self._order), "the pool is too small for this case"
            tokens = np.zeros(num_new, dtype=np.int32)
            chunks.append(Chunk(tokens, num_context, table, 0, is_decode=decode))
        return RaggedBatch.of(chunks, self.page_size)

    def context(self, batch: RaggedBatch, form: Form | None) -> ForwardContext:
        chooser = FormChooser(
            self.dims, self.workspace.context_rows, rates_of(DEVICE), None if form is None else form
        )
        plan = plan_attention(batch, chooser, DEVICE)
        self.backend.plan(plan.mha, plan.absorbed.work if plan.absorbed else None)
        return ForwardContext(
            positions=torch.from_numpy(batch.positions).to(DEVICE),
            slots=torch.from_numpy(batch.slots).to(DEVICE),
            plan=plan,
            pool=self.pool,
            workspace=self.workspace,
            backend=self.backend,
        )

    def attend(self, ctx: ForwardContext) -> Callable[[], torch.Tensor]:
        """A call that runs the layer's attention; its rows are in the pool already."""
        num_tokens = ctx.positions.shape[0]
        q = torch.randn(num_tokens, self.dims.num_heads, self.dims.qk, device=DEVICE, dtype=DTYPE)
        rows = self.pool.layer(0)[ctx.slots]
        return lambda: ctx.attend(0, q, rows, self.weights, self.scale)


_FLUSH: list[torch.Tensor] = []


def timed_ms(call: Callable[[], object], *, runs: int = 20, flush: bool = True) -> float:
    """Median milliseconds between CUDA events, after 3 warm-ups; `flush`: L2 is cold."""
    if not _FLUSH:
        _FLUSH.append(torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE))
    for _ in range(3):
        call()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(runs)
    ]
    for start, stop in events:
        if flush:
            _FLUSH[0].zero_()
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def timed_graph_ms(call: Callable[[], object], *, runs: int = 20) -> float:
    """`timed_ms` of a graph replay: without what the host takes to launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return timed_ms(graph.replay, runs=runs)
