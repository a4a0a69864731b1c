"""Admission: which waiting sequences start in this step.

A sequence starts when its whole length, room to grow, and what the running ones are known to need
can be had at once. Only its first chunk is allocated then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix_mla.request import FinishReason
from radix_mla.scheduler.batch import Batch
from radix_mla.scheduler.budget import GrowthReserve, Limits
from radix_mla.scheduler.inflight import (
    find_leader,
    has_waited_long,
    is_leader,
    still_waits,
    wait_for,
)
from radix_mla.scheduler.lifecycle import Lifecycle
from radix_mla.scheduler.policy import SchedulePolicy
from radix_mla.scheduler.sequence import Sequence, WaitReason

if TYPE_CHECKING:
    from radix_mla.cache.lease import Lease
    from radix_mla.cache.prefix_cache import PrefixCache

_MAX_BLOCKED = 32  # sequences that do not fit, looked at in one step
_MAX_LOOKED = 64  # sequences looked at for a leader when none can start


class Admission:
    """The scan of the queue. `num_siblings` and `blocked_by` say how the last scan ended."""

    def __init__(
        self,
        cache: PrefixCache,
        limits: Limits,
        policy: SchedulePolicy,
        reserve: GrowthReserve,
        life: Lifecycle,
    ) -> None:
        self.num_siblings = 0
        self.blocked_by = WaitReason.BUDGET
        self._cache = cache
        self._limits = limits
        self._policy = policy
        self._reserve = reserve
        self._life = life
        self._reserved_pages = 0

    def scan(self, batch: Batch, now: float) -> None:
        """Admits what fits, in the policy's order, and adds it to the batch.

        One that does not fit lets at most `max_skips` later ones pass it, then it blocks the queue.
        """
        life = self._life
        self.num_siblings = 0
        if life.num_waiting == life.num_compiling:
            return
        leaders = [seq for seq in life.running if is_leader(seq)]
        self._reserved_pages = self._reserve.pages(life.running)
        is_open = self._is_open(batch)
        if not is_open and not leaders:
            return
        blocked: list[Sequence] = []
        for num_looked, seq in enumerate(self._policy.order(life.waiting, self._peek, now)):
            # The first ones are looked at even so: a leader is to know who waits for it.
            if not is_open and (not leaders or num_looked >= _MAX_LOOKED):
                break
            if seq.awaits_grammar:
                continue
            waits, in_flight = self._look_in_flight(seq, leaders, now)
            if waits:
                self.num_siblings += 1
            elif is_open and self._try_start(seq, batch, in_flight, now):
                leaders.append(seq)
                for passed in blocked:
                    passed.num_skips += 1
            elif is_open and seq.is_waiting:
                blocked.append(seq)
            # One that waits for a longer step gets the next one: nobody takes its slot or pages.
            is_open = is_open and not batch.deferred
            is_open = is_open and self._is_open(batch) and not self._is_blocked(blocked)

    def _is_open(self, batch: Batch) -> bool:
        """Whether one more sequence could start at all; notes why not."""
        if len(self._life.running) >= self._limits.max_num_seqs:
            self.blocked_by = WaitReason.SLOTS
            return False
        self.blocked_by = WaitReason.BUDGET
        if batch.tokens_left <= 0:
            return False
        # Each one needs a page at least.
        return not self._life.running or self._reserved_pages < self._cache.available_pages()

    def _is_blocked(self, blocked: list[Sequence]) -> bool:
        if len(blocked) >= _MAX_BLOCKED:
            return True
        return any(seq.num_skips >= self._limits.max_skips for seq in blocked)

    def _peek(self, seq: Sequence) -> int:
        """Tokens of `seq` that are cached. A failure here shows again when it is admitted."""
        try:
            return self._cache.peek(seq.tokens[: seq.lookup_limit], seq.namespace)
        except Exception:
            return 0

    def _look_in_flight(
        self, seq: Sequence, leaders: list[Sequence], now: float
    ) -> tuple[bool, int]:
        """(whether `seq` waits for another, where the tokens end that are cached or in flight)."""
        limits = self._limits
        if still_waits(seq, now, limits.max_sibling_wait_s):
            return True, 0
        seq.leader = None
        first = self._life.first_choice(seq)
        if first is not seq and first.is_waiting and not first.was_admitted:
            return True, 0
        if not leaders:
            return False, 0
        matched = self._peek(seq)
        leader, common = find_leader(seq, matched, leaders)
        if leader is None:
            return False, 0
        worth = 1 if leader.request_id == seq.request_id else limits.min_in_common
        if common - matched < worth or has_waited_long(seq, now, limits.max_sibling_wait_s):
            return False, common
        wait_for(seq, leader, common, now)
        return True, 0

    def _try_start(self, seq: Sequence, batch: Batch, in_flight: int, now: float) -> bool:
        """Admits `seq` if it fits. False leaves it waiting, or ended by a failure of its own."""
        num_room = batch.room(seq)
        if batch.ahead and num_room < seq.num_tokens:  # it may still be cached for the most part
            batch.deferred = seq.num_tokens - self._peek(seq) > num_room
            if batch.deferred:
                return False
        if num_room <= 0:
            return False
        lease: Lease | None = None
        try:
            lease = self._acquire(seq)
            if lease is None:
                if not self._life.running:
                    # Alone, and the pool cannot hold it: it has outgrown the pool.
                    self._life.end(seq, FinishReason.LENGTH)
                return False
            num = min(num_room, seq.num_tokens - lease.num_cached)
            missed = {} if seq.was_admitted else self._missed(seq, lease, in_flight)
            copies = self._cache.grow(lease, lease.num_cached + num)
        except Exception as error:
            if lease is not None:
                self._cache.release(lease)
            self._life.fail(seq, error)
            return False
        self._life.start(seq, lease, missed, now)
        batch.add(seq, num, copies)
        self._reserved_pages += self._reserve.pages([seq])
        return True

    def _acquire(self, seq: Sequence) -> Lease | None:
        """A lease with which `seq` fits, else None.

        A partial page's source stays locked until the first commit. Where that is what does not
        fit, the hit ends at the page border before it.
        """
        limit = seq.lookup_limit
        while True:
            lease = self._cache.acquire(
                seq.tokens, seq.namespace, limit=limit, retention=seq.retention
            )
            if self._fits(seq, lease):
                return lease
            limit = lease.num_cached - lease.num_cached % self._limits.page_size
            has_partial = limit < lease.num_cached
            self._cache.release(lease)
            if not has_partial:
                return None

    def _fits(self, seq: Sequence, lease: Lease) -> bool:
        """Whether `seq` can start beside the running ones; alone, whether it can start at all."""
        cache, limits, running = self._cache, self._limits, self._life.running
        if not running:
            return cache.pages_needed(lease, seq.num_tokens) <= cache.available_pages()
        needed = cache.pages_needed(lease, self._reserve.target(seq))
        if needed + self._reserved_pages > cache.available_pages():
            return False
        # One that may not be retracted again starts only where nothing can ever make it: all
        # worst cases fit together. The same then holds for who starts beside it.
        if max(seq.num_retractions, *(s.num_retractions for s in running)) < limits.max_retractions:
            return True
        worst = sum(limits.worst_case_pages(s) for s in running) + limits.worst_case_pages(seq)
        return worst <= limits.num_pages

    def _missed(self, seq: Sequence, lease: Lease, in_flight: int) -> dict[str, int]:
        """Why each prompt token that is not reused is not; the sum is exact."""
        num_prompt, cached = seq.num_prompt_tokens, lease.num_cached
        if not self._limits.enable_prefix_cache:
            return {"disabled": num_prompt - cached}
        if not seq.request.store:
            return {"not_stored": num_prompt - cached}
        known = cached
        missed: dict[str, int] = {}
        if cached == seq.lookup_limit:
            known = self._cache.peek(seq.tokens, seq.namespace)
            if known == num_prompt:
                missed["last_token"] = 1
            missed["disabled"] = known - cached - missed.get("last_token", 0)
        missed["in_flight"] = max(0, in_flight - known)
        known += missed["in_flight"]
        if known < num_prompt:
            missed |= self._cache.classify_miss(seq.tokens, seq.namespace, known)
        return {reason: num for reason, num in missed.items() if num}
