"""`ModelRunner`: one forward pass of a `StepPlan`, from token ids to logits.

    copies ─► ragged batch ─► attention plan ─► layers (write rows, attend) ─► logits asked for

It holds the model, the pool and the workspace; it knows no requests and frees no pages.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from radix_mla.attention.backend import select_backend
from radix_mla.attention.context import ForwardContext
from radix_mla.attention.forms import CPU_RATES, FormChooser
from radix_mla.attention.metadata import RaggedBatch
from radix_mla.attention.mla import mla_dims
from radix_mla.attention.plan import plan_attention
from radix_mla.attention.workspace import Workspace
from radix_mla.cache.kv_layout import KVLayout
from radix_mla.cache.kv_pool import KVPool
from radix_mla.engine.step import Chunk, StepPlan, StepResult

if TYPE_CHECKING:
    from radix_mla.config import ResolvedConfig
    from radix_mla.models.hf_config import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class CausalLM(Protocol):
    """What the runner needs of a model."""

    config: ModelConfig

    def __call__(self, tokens: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """tokens int64 [T] → hidden states after the final norm [T, D]."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] → fp32 [N, vocab]."""


def make_pool(model: ModelConfig, config: ResolvedConfig) -> KVPool:
    """The pool that `config` asks for, of the model's width and depth."""
    layout = KVLayout.of(config.kv_dtype, latent=model.kv_lora_rank, rope=model.qk_rope_head_dim)
    return KVPool(
        layout, model.num_hidden_layers, config.num_pages, config.page_size, config.device
    )


class ModelRunner:
    """Not thread-safe: one step at a time."""

    def __init__(self, model: CausalLM, pool: KVPool, config: ResolvedConfig) -> None:
        """Raises ConfigError when the attention backend cannot run here."""
        self._model = model
        self.pool = pool
        self._device = config.device
        self.backend, self.backend_reason = select_backend(
            config.attention_backend,
            config.device,
            kv_dtype=config.kv_dtype,
            page_size=config.page_size,
        )
        dims = mla_dims(model.config)
        context_rows = min(config.workspace_tokens, config.kv_tokens)
        self.workspace = Workspace(
            dims,
            context_rows=context_rows,
            step_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            pad_heads=self.backend.caps.pad_heads,
            dtype=DTYPES[config.dtype],
            device=config.device,
        )
        forced = None if config.attention_form == "auto" else config.attention_form
        self._forms = FormChooser(dims, context_rows, CPU_RATES, forced)

    @property
    def workspace_bytes(self) -> int:
        return self.workspace.num_bytes

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs the step. Blocks until the logits are there; rows of all its tokens are stored."""
        begin = time.perf_counter()
        self.pool.copy(plan.copies)
        batch = RaggedBatch.of(plan.chunks, self.pool.page_size)
        attention = plan_attention(batch, self._forms, self._device)
        self.backend.plan(attention.mha, attention.absorbed.work if attention.absorbed else None)
        ctx = ForwardContext(
            positions=torch.from_numpy(batch.positions).to(self._device),
            slots=torch.from_numpy(batch.slots).to(self._device),
            plan=attention,
            pool=self.pool,
            workspace=self.workspace,
            backend=self.backend,
            first_slot=int(batch.slots[0]) if _is_run(batch.slots) else None,
        )
        tokens = np.concatenate([chunk.tokens for chunk in plan.chunks]).astype(np.int64)
        hidden = self._model(torch.from_numpy(tokens).to(self._device), ctx)  # [T, D]
        logits, asked = self._logits(plan.chunks, batch, hidden)
        finite = self._finite(ctx.slots, hidden, logits, batch, asked)
        return StepResult(
            logits=logits,
            rows_finite=finite,
            paths=attention.paths,
            num_context_chunks=attention.num_context_chunks,
            forward_s=time.perf_counter() - begin,
        )

    def warm_up(self) -> None:
        """One prefill and one decode into the dummy page: allocates, starts threads, loads code."""
        page = np.array([self.pool.dummy_page], dtype=np.int32)
        rows = min(self.pool.page_size, self.workspace.step_tokens)
        prompt = Chunk(np.zeros(rows, dtype=np.int32), 0, page, 1, is_decode=False)
        decode = Chunk(np.zeros(1, dtype=np.int32), rows - 1, page, 1, is_decode=True)
        for chunk in (prompt, decode):
            self.execute(StepPlan(step_id=0, chunks=[chunk], copies=[]))

    def _logits(
        self, chunks: list[Chunk], batch: RaggedBatch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, np.ndarray]:
        """(logits [N, vocab] of each chunk's last num_logits tokens, N counts by chunk [B])."""
        asked = np.array([chunk.num_logits for chunk in chunks], dtype=np.int64)
        first = batch.cu_q[1:] - asked
        index = np.repeat(first - (np.cumsum(asked) - asked), asked) + np.arange(asked.sum())
        if len(index) < hidden.shape[0]:
            hidden = hidden[torch.from_numpy(index).to(hidden.device)]
        return self._model.compute_logits(hidden), asked

    def _finite(
        self,
        slots: torch.Tensor,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        batch: RaggedBatch,
        asked: np.ndarray,
    ) -> np.ndarray:
        """bool [B]: whether a chunk's rows, hidden states and logits are all finite.

        A token attends to its own row, so a bad row of any layer reaches its final hidden state,
        but for the last layer's own rounding to the KV dtype: these rows are read back.
        """
        last = self.pool.layer(self.pool.num_layers - 1)[slots]
        total = hidden.float().sum(dim=-1) + last.float().sum(dim=-1)  # [T], NaN or inf if any is
        bad = ~torch.isfinite(total).cpu().numpy()
        finite = ~np.logical_or.reduceat(bad, batch.cu_q[:-1])
        if len(logits):
            bad_logits = ~torch.isfinite(logits.sum(dim=-1)).cpu().numpy()
            owner = np.repeat(np.arange(len(asked)), asked)
            finite[owner[bad_logits]] = False
        return finite


def _is_run(slots: np.ndarray) -> bool:
    """Whether int64 [T] slots follow one another; T > 0."""
    return len(slots) == 1 or bool((np.diff(slots) == 1).all())
