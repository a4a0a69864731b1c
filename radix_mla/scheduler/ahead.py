"""The step after one that still runs, planned as if that had ended well.

    step n        A  B  C  D      B reads the last of its prompt; D takes the last token that it may
    step n + 1    A  B  C  E      planned and queued while n runs: A, B and C go on from tokens that
                                  n draws, D does not go on, E is new
    then          n is booked: C ended with its token, so what n + 1 gives for C is dropped

Steps run in the order in which they are queued. So a row that n + 1 writes for a sequence that has
ended is written before its page can be another's: whoever gets the page is planned later. It lies
behind the rows that the sequence committed. And a page that a commit finds in the tree already is
read by n + 1 in the copy that it was planned with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix_mla.scheduler.batch import Batch, Progress, Scheduled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from radix_mla.cache.prefix_cache import PrefixCache
    from radix_mla.scheduler.sequence import Sequence

# What is queued delays whoever comes next, so it has to be short; a long step hides the host's part
# of the next one less, but that is a smaller share of it.
MAX_AHEAD_TOKENS = 2048


def progress_after(running: Scheduled) -> dict[Sequence, Progress | None]:
    """Where the sequences of the step in flight will stand; None: it is their last one."""
    found: dict[Sequence, Progress | None] = {}
    num_drawn = 0
    for item in running.work:
        seq = item.sequence
        num_computed = seq.num_computed + item.num_tokens
        if not item.samples:
            found[seq] = Progress(num_computed, seq.num_tokens)
            continue
        is_last = seq.num_tokens + 1 >= seq.max_num_tokens
        found[seq] = None if is_last else Progress(num_computed, seq.num_tokens + 1, num_drawn)
        num_drawn += 1
    return found


def plan_ahead(
    batch: Batch, sequences: Iterable[Sequence], running: Scheduled, cache: PrefixCache
) -> bool:
    """Adds what `sequences` need next to the batch; False: it has no room, or no page is there
    without retracting one. Grows leases; that is no harm where the step does not come about.
    """
    after = progress_after(running)
    decodes: list[tuple[Sequence, Progress]] = []
    prefills: list[tuple[Sequence, Progress]] = []
    for seq in sequences:
        progress = after[seq] if seq in after else Progress(seq.num_computed, seq.num_tokens)
        if progress is None:
            continue
        is_decode = progress.num_computed >= seq.prefill_target
        (decodes if is_decode else prefills).append((seq, progress))
    prefills.sort(key=lambda entry: (entry[0].effective_priority, entry[0].order))
    for seq, progress in [*decodes, *prefills]:
        num = progress.num_tokens - progress.num_computed
        if num > batch.room(seq):
            return False
        assert seq.lease is not None
        try:
            copies = cache.grow(seq.lease, progress.num_computed + num)
        except Exception:  # no page, or a failure: the ordinary plan meets it again and books it
            return False
        batch.add(seq, num, copies, progress)
    return True
