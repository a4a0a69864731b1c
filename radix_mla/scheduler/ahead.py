"""The step after one that still runs: the same sequences, each a token on.

    step n        A  B  C  D      D takes the last token that it may: it does not go on
    step n + 1    A  B  C         planned and queued while n runs; its input is what n draws
    then          n is booked: B ended with its token, so what n + 1 gives for B is dropped

Steps run in the order in which they are queued. So a row that n + 1 writes for a sequence that has
ended is written before its page can be another's: whoever gets the page is planned later. It lies
behind the rows that the sequence committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radix_mla.engine.step import Chunk, StepPlan
from radix_mla.errors import NoSpace
from radix_mla.scheduler.batch import Scheduled, Work

if TYPE_CHECKING:
    from radix_mla.cache.prefix_cache import PrefixCache

_UNKNOWN = np.zeros(1, dtype=np.int32)


def plan_ahead(
    running: Scheduled, step_id: int, cache: PrefixCache, page_size: int
) -> Scheduled | None:
    """None where a sequence is not in plain decode, or no page is there without retracting one.

    Grows leases by a token; that is no harm where the step does not come about.
    """
    chunks: list[Chunk] = []
    work: list[Work] = []
    rows: list[int] = []
    for row, item in enumerate(running.work):
        seq = item.sequence
        if not item.is_decode:
            return None  # a prefill's commit may still move its last page
        if not seq.is_running or seq.num_tokens + 1 >= seq.max_num_tokens:
            continue
        assert seq.lease is not None
        num_rows = seq.num_tokens + 1
        try:
            copies = cache.grow(seq.lease, num_rows)
        except NoSpace:
            return None
        assert not copies, "a decoding sequence has made its copy"
        num_pages = -(-num_rows // page_size)
        pages = seq.lease.page_table[:num_pages]
        chunks.append(Chunk(_UNKNOWN, num_rows - 1, pages, num_logits=1, is_decode=True))
        work.append(Work(seq, 1, True, True, len(work), 1))
        rows.append(row)
    if not work:
        return None
    drawn = np.array(rows, dtype=np.int64)
    return Scheduled(StepPlan(step_id, chunks, [], drawn), work)
