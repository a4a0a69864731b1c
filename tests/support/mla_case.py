"""Random MLA attention problems over a poisoned KV pool, with their fp64 answer.

Rows that no sequence may read are NaN: an uninitialised row that gets in shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.reference_attention import mha_varlen
from radix_mla.attention.backend import AttentionBackend, Setting
from radix_mla.attention.backends.torch import TorchBackend
from radix_mla.attention.context import ForwardContext
from radix_mla.attention.forms import CPU_RATES, Form, FormChooser
from radix_mla.attention.metadata import LatentWeights, RaggedBatch, cumulative
from radix_mla.attention.plan import AttentionPlan, plan_attention
from radix_mla.attention.workspace import MLADims, Workspace
from radix_mla.cache.kv_layout import KVLayout
from radix_mla.cache.kv_pool import KVPool, slots_of
from radix_mla.engine.step import Chunk

ODD = MLADims(num_heads=3, latent=40, nope=24, rope=8, value=20)
TRUE = MLADims(num_heads=4, latent=512, nope=128, rope=64, value=128)
WIDE_V = MLADims(num_heads=2, latent=32, nope=8, rope=8, value=48)


@dataclass(frozen=True)
class MLACase:
    dims: MLADims
    batch: RaggedBatch
    pool: KVPool
    weights: LatentWeights
    q: torch.Tensor  # [T, H, P + R]
    rows: torch.Tensor  # [T, L + R], not yet in the pool
    scale: float

    @property
    def device(self) -> str:
        return str(self.q.device)

    def setting(self) -> Setting:
        """What a backend for this case must cope with."""
        lengths = self.batch.num_context + self.batch.num_new
        names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
        return Setting(
            device=self.device,
            arch=None,
            dtype=names[self.q.dtype],
            kv_dtype=self.pool.layout.name,
            page_size=self.batch.page_size,
            dims=self.dims,
            max_num_seqs=len(lengths) + 2,
            max_tokens=self.q.shape[0] + 3,
            max_pages=-(-int(lengths.max()) // self.batch.page_size) + 1,
        )

    def context(
        self,
        form: Form | None,
        *,
        workspace_rows: int = 4096,
        backend: AttentionBackend | None = None,
    ) -> ForwardContext:
        """A planned step; `form` None: the cost model chooses."""
        device = self.device
        backend = backend or TorchBackend(device)
        chooser = FormChooser(self.dims, workspace_rows, CPU_RATES, form)
        plan = plan_attention(self.batch, chooser, device)
        backend.plan(plan.mha, plan.absorbed.work if plan.absorbed else None)
        workspace = Workspace(
            self.dims,
            context_rows=workspace_rows,
            step_tokens=self.q.shape[0],
            pad_heads=backend.caps.pad_heads,
            dtype=self.q.dtype,
            device=device,
        )
        workspace.rows().fill_(float("nan"))
        workspace.absorbed_queries(self.q.shape[0]).fill_(float("nan"))
        return ForwardContext(
            positions=torch.from_numpy(self.batch.positions).to(device),
            slots=torch.from_numpy(self.batch.slots).to(device),
            plan=plan,
            pool=self.pool,
            workspace=workspace,
            backend=backend,
        )

    def run(
        self,
        form: Form | None,
        *,
        workspace_rows: int = 4096,
        backend: AttentionBackend | None = None,
    ) -> tuple[torch.Tensor, AttentionPlan]:
        """Writes the new rows and attends: (out [T, H, V], the plan)."""
        ctx = self.context(form, workspace_rows=workspace_rows, backend=backend)
        stored = ctx.write(0, self.rows)
        return ctx.attend(0, self.q, stored, self.weights, self.scale), ctx.plan

    def answer(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """[T, H, V] by decompressing every row of every sequence; after `run` has written."""
        w_uk, w_uv = (w.to(dtype) for w in self.weights)
        lengths = self.batch.num_context + self.batch.num_new
        slots = [
            slots_of(table, 0, int(n), self.batch.page_size)
            for table, n in zip(self.batch.page_tables, lengths, strict=True)
        ]
        at = torch.from_numpy(np.concatenate(slots)).to(self.q.device)
        rows = self.pool.layer(0)[at].to(dtype)
        c_kv, k_pe = rows.split([self.dims.latent, self.dims.rope], dim=-1)
        k_nope = torch.einsum("nl,hpl->nhp", c_kv, w_uk)
        k = torch.cat((k_nope, k_pe[:, None].expand(-1, self.dims.num_heads, -1)), dim=-1)
        out, _ = mha_varlen(
            self.q.to(dtype),
            k,
            torch.einsum("nl,hvl->nhv", c_kv, w_uv),
            self.batch.cu_q.tolist(),
            cumulative(lengths).tolist(),
            scale=self.scale,
            causal=True,
        )
        return out


def make_case(
    sequences: list[tuple[int, int]],
    *,
    dims: MLADims = ODD,
    page_size: int = 4,
    contiguous: bool = False,
    kv_dtype: str = "fp32",
    dtype: torch.dtype = torch.float32,
    decode: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> MLACase:
    """`sequences`: (Sq, Sk) each; pages are scattered over the pool unless `contiguous`."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-(new + context) // page_size) for new, context in sequences]
    order = np.arange(sum(pages) + 3, dtype=np.int32)
    if not contiguous:
        np.random.default_rng(seed).shuffle(order)
    first = np.cumsum([0, *pages])
    chunks = [
        Chunk(
            tokens=np.zeros(new, dtype=np.int32),
            start=context,
            page_table=order[first[i] : first[i + 1]],
            num_logits=0,
            is_decode=decode,
        )
        for i, (new, context) in enumerate(sequences)
    ]
    layout = KVLayout.of(kv_dtype, latent=dims.latent, rope=dims.rope)
    pool = KVPool(layout, 1, len(order), page_size, device)
    pool.layer(0).fill_(float("nan"))
    for chunk in chunks:
        slots = torch.from_numpy(slots_of(chunk.page_table, 0, chunk.start, page_size))
        rows = torch.randn(len(slots), dims.row, generator=generator)
        pool.write(0, slots.to(device), rows.to(device))
    batch = RaggedBatch.of(chunks, page_size)
    tokens = int(batch.cu_q[-1])
    w = torch.randn(dims.num_heads, dims.nope + dims.value, dims.latent, generator=generator)
    w = (w / dims.latent**0.5).to(device, dtype)
    return MLACase(
        dims=dims,
        batch=batch,
        pool=pool,
        weights=LatentWeights(w[:, : dims.nope], w[:, dims.nope :]),
        q=torch.randn(tokens, dims.num_heads, dims.qk, generator=generator).to(device, dtype),
        rows=torch.randn(tokens, dims.row, generator=generator).to(device, dtype),
        scale=dims.qk**-0.5,
    )
