"""`AttentionPlan`: which sequences take which form, and in which pieces; made once a step.

All of it is host arithmetic on lengths and page tables, and index tensors for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from radix_mla.attention.backend import MHAWork, MQAWork
from radix_mla.attention.chunk_plan import ContextChunk, pack_whole, plan_chunks
from radix_mla.attention.metadata import cumulative
from radix_mla.cache.kv_pool import slots_of
from radix_mla.upload import to_device

if TYPE_CHECKING:
    from radix_mla.attention.forms import FormChooser
    from radix_mla.attention.metadata import RaggedBatch

TokenSet = slice | torch.Tensor  # which of the step's T tokens: a range, or int64 indices


@dataclass(frozen=True, slots=True)
class AbsorbedPlan:
    tokens: TokenSet
    work: MQAWork


@dataclass(frozen=True, slots=True)
class ContextPass:
    """One context chunk: the rows to gather (int64 slots) and the queries [first, last) they meet,
    counted within the plan's tokens.
    """

    slots: torch.Tensor
    first: int
    last: int
    work: MHAWork


@dataclass(frozen=True, slots=True)
class TwoStagePlan:
    """Stage (a) over all the plan's tokens, then `passes`; sequences with context come first."""

    tokens: TokenSet
    new: MHAWork
    passes: tuple[ContextPass, ...]


@dataclass(frozen=True, slots=True)
class OneShotPass:
    """Whole sequences, prefix and new rows, in one filling of the workspace."""

    tokens: TokenSet
    slots: torch.Tensor
    work: MHAWork


@dataclass(frozen=True, slots=True)
class OneShotPlan:
    passes: tuple[OneShotPass, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`paths` counts the step's tokens by form."""

    absorbed: AbsorbedPlan | None
    non_absorbed: TwoStagePlan | None
    one_shot: OneShotPlan | None
    paths: dict[str, int]

    @property
    def num_context_chunks(self) -> int:
        """Fillings of the workspace in which context is decompressed."""
        chunked = len(self.non_absorbed.passes) if self.non_absorbed else 0
        whole = self.one_shot.passes if self.one_shot else ()
        return chunked + sum(len(part.slots) > part.work.num_queries for part in whole)

    @property
    def mha(self) -> list[MHAWork]:
        works: list[MHAWork] = []
        if self.non_absorbed is not None:
            works += [self.non_absorbed.new, *(p.work for p in self.non_absorbed.passes)]
        if self.one_shot is not None:
            works += [p.work for p in self.one_shot.passes]
        return works


def plan_attention(
    batch: RaggedBatch, chooser: FormChooser, device: torch.device | str
) -> AttentionPlan:
    """Chooses forms and lays out their work. O(tokens of context that is decompressed + pages)."""
    by_form: dict[str, list[int]] = {"absorbed": [], "non_absorbed": [], "one_shot": []}
    sizes = zip(
        batch.num_new.tolist(), batch.num_context.tolist(), batch.is_decode.tolist(), strict=True
    )
    for i, (num_new, num_context, is_decode) in enumerate(sizes):
        by_form[chooser.choose(num_new, num_context, is_decode=is_decode)].append(i)
    # Sequences with context first: a chunk's queries are then one range.
    by_form["non_absorbed"].sort(key=lambda i: batch.num_context[i] == 0)
    rows = chooser.max_rows
    absorbed, chunked, whole = (by_form[form] for form in ("absorbed", "non_absorbed", "one_shot"))
    return AttentionPlan(
        absorbed=_absorbed(batch, absorbed, device) if absorbed else None,
        non_absorbed=_two_stage(batch, chunked, rows, device) if chunked else None,
        one_shot=_one_shot(batch, whole, rows, device) if whole else None,
        paths={form: int(batch.num_new[ids].sum()) for form, ids in by_form.items() if ids},
    )


def _absorbed(batch: RaggedBatch, ids: list[int], device: torch.device | str) -> AbsorbedPlan:
    work = MQAWork(
        cu_q=cumulative(batch.num_new[ids]),
        kv_lens=batch.num_context[ids] + batch.num_new[ids],
        page_tables=tuple(batch.page_tables[i] for i in ids),
        page_size=batch.page_size,
    )
    return AbsorbedPlan(_token_set(batch, ids, device), work)


def _two_stage(
    batch: RaggedBatch, ids: list[int], max_rows: int, device: torch.device | str
) -> TwoStagePlan:
    cu_q = cumulative(batch.num_new[ids])
    chunks = plan_chunks(batch.num_context[ids].tolist(), max_rows)
    passes = tuple(_context_pass(batch, ids, cu_q, chunk, device) for chunk in chunks)
    return TwoStagePlan(_token_set(batch, ids, device), MHAWork(cu_q, cu_q, causal=True), passes)


def _context_pass(
    batch: RaggedBatch,
    ids: list[int],
    cu_q: np.ndarray,
    chunk: ContextChunk,
    device: torch.device | str,
) -> ContextPass:
    first, last = chunk.segments[0].request, chunk.segments[-1].request + 1
    slots = [
        slots_of(batch.page_tables[ids[s.request]], s.start, s.start + s.length, batch.page_size)
        for s in chunk.segments
    ]
    return ContextPass(
        slots=to_device(np.concatenate(slots), device),
        first=int(cu_q[first]),
        last=int(cu_q[last]),
        work=MHAWork(
            cu_q=cu_q[first : last + 1] - cu_q[first],
            cu_k=cumulative(np.array([s.length for s in chunk.segments])),
            causal=False,
        ),
    )


def _one_shot(
    batch: RaggedBatch, ids: list[int], max_rows: int, device: torch.device | str
) -> OneShotPlan:
    lengths = batch.num_context[ids] + batch.num_new[ids]
    passes = []
    for group in pack_whole(lengths.tolist(), max_rows):
        members = [ids[g] for g in group]
        slots = [
            slots_of(batch.page_tables[i], 0, int(lengths[g]), batch.page_size)
            for g, i in zip(group, members, strict=True)
        ]
        passes.append(
            OneShotPass(
                tokens=_token_set(batch, members, device),
                slots=to_device(np.concatenate(slots), device),
                work=MHAWork(cumulative(batch.num_new[members]), cumulative(lengths[group]), True),
            )
        )
    return OneShotPlan(tuple(passes))


def _token_set(batch: RaggedBatch, ids: list[int], device: torch.device | str) -> TokenSet:
    """The tokens of sequences `ids`, in that order; a slice when they are one range."""
    if ids == list(range(ids[0], ids[0] + len(ids))):
        return slice(int(batch.cu_q[ids[0]]), int(batch.cu_q[ids[-1] + 1]))
    index = [np.arange(batch.cu_q[i], batch.cu_q[i + 1]) for i in ids]
    return to_device(np.concatenate(index), device)
