"""In-flight sharing: a request whose prefix is being computed waits and attaches to it.

Nothing links a waiter to its leader but the waiter's own note of it, which is checked each step: a
leader may leave in any way at any moment, and the waiters are then looked at afresh, in the
policy's order. The first of them is admitted and is the leader that the others find.
"""

from __future__ import annotations

from collections.abc import Iterable

from radix_mla.cache.token_run import common_prefix
from radix_mla.scheduler.sequence import Sequence


def num_committed(leader: Sequence) -> int:
    return leader.lease.num_committed if leader.lease is not None else 0


def is_leader(seq: Sequence) -> bool:
    """RUNNING, storing (not flushed away), and with rows of its prefill still to commit."""
    lease = seq.lease
    return (
        lease is not None
        and lease.num_committed < seq.prefill_target
        and not lease.node.namespace.detached
    )


def find_leader(
    seq: Sequence, matched: int, leaders: Iterable[Sequence]
) -> tuple[Sequence | None, int]:
    """The leader that computes the most tokens of `seq` beyond `matched`, and the common length.

    matched: tokens that `seq` would hit now. (None, matched) when nobody computes any.
    """
    best, best_common = None, matched
    limit = seq.lookup_limit
    tokens = seq.tokens
    for leader in leaders:
        end = min(limit, leader.prefill_target)
        if leader.namespace != seq.namespace or end <= max(best_common, num_committed(leader)):
            continue
        if tokens[best_common] != leader.tokens[best_common]:
            continue  # cannot be longer than the best so far
        common = common_prefix(tokens[:end], leader.tokens[:end])
        if common > max(best_common, num_committed(leader)):
            best, best_common = leader, common
    return best, best_common


def still_waits(seq: Sequence, now: float, max_wait_s: float) -> bool:
    """Whether the leader that `seq` noted is still worth waiting for."""
    leader = seq.leader
    if leader is None or not is_leader(leader):
        return False
    if num_committed(leader) >= seq.num_in_common:
        return False
    return not has_waited_long(seq, now, max_wait_s)


def has_waited_long(seq: Sequence, now: float, max_wait_s: float) -> bool:
    """The age bound, over all leaders that a sequence has waited for."""
    waited_s = 0.0 if seq.sibling_since_s is None else now - seq.sibling_since_s
    return waited_s >= max_wait_s


def wait_for(seq: Sequence, leader: Sequence, num_in_common: int, now: float) -> None:
    """Notes the leader, which inherits the waiter's priority if that is better."""
    seq.leader, seq.num_in_common = leader, num_in_common
    if seq.sibling_since_s is None:
        seq.sibling_since_s = now
    leader.effective_priority = min(leader.effective_priority, seq.effective_priority)
