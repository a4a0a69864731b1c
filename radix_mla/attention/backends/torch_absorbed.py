"""Absorbed attention of one sequence by matmul, over rows that stay where they are.

Sq queries of H heads are M = Sq·H rows of one matrix; W = L + R. Rows are counted from the start of
the sequence: query i sees rows [0, context + i].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.kv_gather import kv_gather
from kernels.merge_lse import merge_lse_
from radix_mla.attention.backends.row_pieces import Piece

_MAX_SCORES = 1 << 22  # elements of a block of scores: 16 MB in fp32
_FEW_QUERIES = 8
_MANY_ROWS = 256
_PART_ROWS = 256

Span = tuple[int, torch.Tensor]  # first row, rows [n, W]


def attend_pieces(
    q: torch.Tensor,
    pool: torch.Tensor,
    pieces: list[Piece],
    scratch: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    causal: bool = True,
) -> None:
    """Fills out [Sq, H, L] and lse [Sq, H]; q [Sq, H, W] contiguous, pool [S, W], scratch [W', W].

    Causal: the queries are the last tokens of `pieces`. Rows that do not fit the scratch at once
    take several passes, merged by LSE.
    """
    num_q, heads = q.shape[:2]
    context = sum(piece.num_rows for piece in pieces) - (num_q if causal else 0)
    gathered = sum(piece.num_rows for piece in pieces if not _in_place(piece, pool, scratch))
    if gathered > len(scratch) and lse is None:
        lse = torch.empty(num_q, heads, device=q.device)
    for number, spans in enumerate(_passes(pool, pieces, scratch)):
        if number == 0:
            _attend_spans(q, spans, context, scale, out, lse)
            continue
        assert lse is not None
        part, part_lse = torch.empty_like(out), torch.empty_like(lse)
        _attend_spans(q, spans, context, scale, part, part_lse)
        merge_lse_(out, lse, part, part_lse)


def _in_place(piece: Piece, pool: torch.Tensor, scratch: torch.Tensor) -> bool:
    """Whether the rows are one run, in the dtype to compute in."""
    return piece.slots is None and pool.dtype == scratch.dtype


def _passes(pool: torch.Tensor, pieces: list[Piece], scratch: torch.Tensor) -> Iterator[list[Span]]:
    """The sequence's rows in q's dtype, as many at once as the scratch holds."""
    spans: list[Span] = []
    first = used = 0
    for piece in pieces:
        num_rows, slot, slots = piece
        if _in_place(piece, pool, scratch):
            spans.append((first, pool[slot : slot + num_rows]))
            first += num_rows
            continue
        start = 0
        while start < num_rows:
            if used == len(scratch):
                yield spans
                spans, used = [], 0
            take = min(num_rows - start, len(scratch) - used)
            rows = scratch[used : used + take]
            if slots is None:
                rows.copy_(pool[slot + start : slot + start + take])
            else:
                kv_gather(pool, slots[start : start + take], rows)
            spans.append((first + start, rows))
            used += take
            start += take
        first += num_rows
    yield spans


def _attend_spans(
    q: torch.Tensor,
    spans: list[Span],
    context: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attention to the rows of `spans` alone, in blocks of queries."""
    num_q, heads, width = q.shape
    if num_q == 1:  # sees every row
        rows = [rows for _, rows in spans]
        scores = _scores(q[0], rows, scale)
        if lse is not None:
            lse[0] = torch.logsumexp(scores, dim=-1)
        _weigh(_softmax(scores, q.dtype), rows, out[0])
        return
    num_rows = sum(len(rows) for _, rows in spans)
    step = max(1, min(num_q, _MAX_SCORES // (heads * num_rows)))
    for start in range(0, num_q, step):
        stop = min(start + step, num_q)
        seen = context + stop
        visible = [(first, rows[: seen - first]) for first, rows in spans if first < seen]
        if not visible:
            assert lse is not None, "the only pass has rows for every query"
            lse[start:stop] = float("-inf")
            continue
        scores = _scores(q[start:stop].view(-1, width), [rows for _, rows in visible], scale)
        _hide_later_rows(scores.view(stop - start, heads, -1), visible, context + start)
        if lse is not None:
            lse[start:stop] = torch.logsumexp(scores, dim=-1).view(-1, heads)
        weights = _softmax(scores, q.dtype)
        _weigh(weights, [rows for _, rows in visible], out[start:stop].view(-1, out.shape[-1]))


def attend_padded(
    q: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    scratch: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Fills out [B, H, L] for B sequences of one query each, q [B, H, W], in one batch.

    slots int64 [B · n]: the rows of each, padded to n with any that are written; mask fp32
    [B, 1, n]: -inf at the padding, else 0.
    """
    batch, _, num_rows = mask.shape
    if len(slots) > len(scratch):
        scratch = torch.empty(len(slots), q.shape[2], dtype=q.dtype, device=q.device)
    rows = kv_gather(pool, slots, scratch[: len(slots)]).view(batch, num_rows, -1)
    mask = mask if q.dtype == torch.float32 else mask.to(q.dtype)
    scores = torch.baddbmm(mask, q, rows.transpose(1, 2), alpha=scale)  # [B, H, n]
    torch.bmm(_softmax(scores, q.dtype), rows[..., : out.shape[-1]], out=out)


def _softmax(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return weights if dtype == torch.float32 else weights.to(dtype)


def _scores(q: torch.Tensor, rows: list[torch.Tensor], scale: float) -> torch.Tensor:
    """fp32 [M, n] = scale · q [M, W] · rowsᵀ, columns of the row blocks side by side."""
    q = q * scale
    parts = [_times_rows(q, block) for block in rows]
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return scores if scores.dtype == torch.float32 else scores.float()


def _times_rows(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[M, n] = q [M, W] · rowsᵀ."""
    if _long_side_first(len(q), len(rows)):
        return torch.mm(rows, q.transpose(0, 1)).transpose(0, 1).contiguous()
    return torch.mm(q, rows.transpose(0, 1))


def _long_side_first(queries: int, rows: int) -> bool:
    """Whether the CPU's GEMM is faster with the rows on its left.

    By measurement (MKL, AVX2, fp32, two threads): 4 queries on 2,000 rows take 0.20 ms against
    0.57; from 256 queries on, and for 9 to 15, there is no gain.
    """
    return rows >= _MANY_ROWS and (queries <= _FEW_QUERIES or 16 <= queries <= 128)


def _hide_later_rows(scores: torch.Tensor, visible: list[Span], position: int) -> None:
    """-inf where a row comes after the query; scores [Sq, H, n], query i stands at position + i."""
    column = 0
    for first, rows in visible:
        stop = first + len(rows)
        if stop - 1 > position:
            start = max(first, position + 1)  # rows before it are seen by every query
            row = torch.arange(start, stop, device=scores.device)
            query = torch.arange(position, position + scores.shape[0], device=scores.device)
            part = scores[:, :, column + start - first : column + len(rows)]
            part.masked_fill_((row > query[:, None])[:, None, :], float("-inf"))
        column += len(rows)


def _weigh(weights: torch.Tensor, rows: list[torch.Tensor], out: torch.Tensor) -> None:
    """out [M, L] = weights [M, n] · the first L values of the rows."""
    latent, first = out.shape[1], 0
    for block in rows:
        part = weights if len(rows) == 1 else weights[:, first : first + len(block)]
        values = block[:, :latent]
        if not _long_side_first(len(weights), len(block)):
            torch.addmm(out, part, values, beta=float(first > 0), out=out)
        else:
            few = len(weights) <= _FEW_QUERIES
            product = _weigh_in_parts(part, values) if few else _weigh_transposed(part, values)
            if first == 0:
                out.copy_(product)
            else:
                out += product
        first += len(block)


def _weigh_in_parts(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [M, n] · values [n, L] as many short products: both threads then have work."""
    num_rows = weights.shape[1]
    parts = num_rows // _PART_ROWS
    whole = parts * _PART_ROWS
    products = torch.bmm(
        weights[:, :whole].view(-1, parts, _PART_ROWS).transpose(0, 1),
        values[:whole].view(parts, _PART_ROWS, -1),
    )  # [parts, M, L]
    total = products.sum(dim=0)
    if whole < num_rows:
        total.addmm_(weights[:, whole:], values[whole:])
    return total


def _weigh_transposed(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [M, n] · values [n, L], the long side first."""
    return torch.mm(values.transpose(0, 1), weights.transpose(0, 1)).transpose(0, 1)
