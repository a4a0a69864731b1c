"""`ModelRunner`: one forward pass of a `StepPlan`, from token ids to logits.

    copies ─► ragged batch ─► attention plan ─► layers (write rows, attend) ─► logits asked for

It holds the model, the pool and the workspace; it knows no requests and frees no pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from radix_mla.attention.context import ForwardContext
from radix_mla.attention.forms import FormChooser, rates_of
from radix_mla.attention.metadata import RaggedBatch
from radix_mla.attention.mla import mla_dims
from radix_mla.attention.plan import plan_attention
from radix_mla.attention.select import choose_backends, make_backend, setting_of
from radix_mla.attention.workspace import Workspace
from radix_mla.cache.kv_layout import KVLayout
from radix_mla.cache.kv_pool import KVPool
from radix_mla.engine.captured import MAX_TOKENS, CapturedSteps, StepOutputs
from radix_mla.engine.step import Chunk, StepPlan, StepResult
from radix_mla.engine.step_tokens import StepTokens
from radix_mla.upload import Readback, to_device

if TYPE_CHECKING:
    from radix_mla.attention.plan import AttentionPlan
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
        dims = mla_dims(model.config)
        setting = setting_of(config, dims)
        self.backend = make_backend(choose_backends(config.attention_backend, setting), setting)
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
        self._forms = FormChooser(dims, context_rows, rates_of(config.device), forced)
        self._max_num_seqs = config.max_num_seqs
        self._captured: CapturedSteps | None = None

    @property
    def workspace_bytes(self) -> int:
        return self.workspace.num_bytes

    @torch.inference_mode()
    def execute(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> StepResult:
        """Runs the step; on a GPU it is queued, and reading the result's parts waits for them.

        drawn: int64, on the device, what the step before draws; for a plan made ahead of that.
        """
        clock = self._clock()
        self.pool.copy(plan.copies)
        batch = RaggedBatch.of(plan.chunks, self.pool.page_size)
        tokens = StepTokens.of(plan, drawn)
        asked = np.array([chunk.num_logits for chunk in plan.chunks], dtype=np.int64)
        rows = _logit_rows(batch.cu_q, asked)
        outputs, paths, num_context_chunks = None, {"absorbed": plan.num_tokens}, 0
        if self._captured is not None and self._forms.all_absorbed(batch):
            outputs = self._captured.run(batch, tokens, rows)
        if outputs is None:
            attention = plan_attention(batch, self._forms, self._device)
            outputs = self._run_eager(batch, attention, tokens, rows)
            paths, num_context_chunks = attention.paths, attention.num_context_chunks
        return StepResult(
            logits=outputs.logits,
            rows_finite=_chunks_finite(outputs, batch.cu_q, asked),
            paths=paths,
            num_context_chunks=num_context_chunks,
            forward_s=clock.stop(),
        )

    def _run_eager(
        self,
        batch: RaggedBatch,
        attention: AttentionPlan,
        tokens: StepTokens,
        rows: np.ndarray,
    ) -> StepOutputs:
        absorbed = attention.absorbed.work if attention.absorbed else None
        self.backend.plan(attention.mha, absorbed)
        ctx = ForwardContext(
            positions=to_device(batch.positions, self._device),
            slots=to_device(batch.slots, self._device),
            plan=attention,
            pool=self.pool,
            workspace=self.workspace,
            backend=self.backend,
            first_slot=int(batch.slots[0]) if _is_run(batch.slots) else None,
        )
        every = len(rows) == len(tokens.known)  # then they are in order
        of = None if every else to_device(rows, self._device)
        ids = to_device(tokens.known, self._device)
        tokens.draw_into(ids)
        return self._forward(ids, ctx, of, None)

    def _forward(
        self,
        tokens: torch.Tensor,
        ctx: ForwardContext,
        rows: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> StepOutputs:
        """tokens int64 [T]; rows int64 [M] of the hidden states that need logits, None: all.

        A token attends to its own row, so a bad row of any layer reaches its final hidden state,
        but for the last layer's own rounding to the KV dtype: these rows are read back.
        """
        hidden = self._model(tokens, ctx)  # [T, D]
        chosen = hidden if rows is None else hidden.index_select(0, rows)
        logits = self._model.compute_logits(chosen)
        if out is not None:
            logits = out.copy_(logits)
        last = self.pool.layer(self.pool.num_layers - 1)[ctx.slots]
        total = hidden.float().sum(dim=-1) + last.float().sum(dim=-1)  # [T], NaN or inf if any is
        return StepOutputs(logits, torch.isfinite(total), torch.isfinite(logits.sum(dim=-1)))

    @torch.inference_mode()
    def warm_up(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Prefills and decodes into the dummy page: allocates, starts threads, loads and compiles
        code. On a GPU it then captures small steps; `report` hears how many of them are done.
        """
        page = np.array([self.pool.dummy_page], dtype=np.int32)
        rows = min(self.pool.page_size, self.workspace.step_tokens)
        prompt = Chunk(np.zeros(rows, dtype=np.int32), 0, page, 1, is_decode=False)
        decode = Chunk(np.zeros(1, dtype=np.int32), rows - 1, page, 1, is_decode=True)
        for chunk in (prompt, decode):
            self.execute(StepPlan(step_id=0, chunks=[chunk], copies=[]))
        if self._device.startswith("cuda") and getattr(self.backend, "static_mqa", None):
            captured = CapturedSteps(
                self._forward,
                self.backend,
                self.pool,
                self.workspace,
                max_tokens=self.workspace.step_tokens,
                max_logits=min(MAX_TOKENS, self._max_num_seqs),
                vocab_size=self._model.config.vocab_size,
            )
            captured.capture(report)
            self._captured = captured

    def _clock(self) -> _HostClock | _DeviceClock:
        return _DeviceClock() if self._device.startswith("cuda") else _HostClock()


class _HostClock:
    """The host is the device: the time between `__init__` and `stop`."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._begin


class _DeviceClock:
    """By events in the stream."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begin.record()

    def stop(self) -> Callable[[], float]:
        """Seconds, once the work queued in between is done; asking waits for it."""
        self._end.record()
        return self._elapsed_s

    def _elapsed_s(self) -> float:
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


def _logit_rows(cu_q: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """int64 [M]: the last asked[i] tokens of each chunk i."""
    first = cu_q[1:] - asked
    return np.repeat(first - (np.cumsum(asked) - asked), asked) + np.arange(asked.sum())


def _chunks_finite(
    outputs: StepOutputs, cu_q: np.ndarray, asked: np.ndarray
) -> np.ndarray | Callable[[], np.ndarray]:
    """bool [B]: whether a chunk's rows, hidden states and logits are all finite; deferred where
    the device still works on it.
    """

    # A captured step's outputs are overwritten by the next one: what they are now is what counts.
    flags = Readback(torch.cat((outputs.tokens_finite, outputs.logits_finite)))

    def read() -> np.ndarray:
        known = flags.wait().numpy()
        tokens, logits = known[: cu_q[-1]], known[cu_q[-1] :]
        finite = np.logical_and.reduceat(tokens, cu_q[:-1])
        owner = np.repeat(np.arange(len(asked)), asked)
        finite[owner[~logits]] = False
        return finite

    return read if outputs.tokens_finite.device.type == "cuda" else read()


def _is_run(slots: np.ndarray) -> bool:
    """Whether int64 [T] slots follow one another; T > 0."""
    return len(slots) == 1 or bool((np.diff(slots) == 1).all())
