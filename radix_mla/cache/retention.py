"""Retention: what a request asks for so that its rows are evicted later. A bias, never a lock.

Each use of a node by such a request leaves a `Keep` there. The node's rank is the greatest of those
that still hold, so it falls step by step as they end; leaves of a lower rank are evicted first. A
use leaves it where it ended only: ancestors are no leaves, and take it over when their child goes.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from radix_mla.errors import InvalidRequest

MAX_RANK = 10
MAX_TTL_S = 86_400.0
DEFAULT_TTL_S = 3_600.0


class Keep(NamedTuple):
    """The rank that a node has until then."""

    rank: int
    until_s: float


# Ranks fall and times rise strictly, so at most MAX_RANK of them; the first one that holds counts.
Keeps: TypeAlias = tuple[Keep, ...]
NO_KEEPS: Keeps = ()


class Retention(NamedTuple):
    """What one request asks for; rank 0 is nothing."""

    rank: int = 0
    ttl_s: float = 0.0

    @classmethod
    def of(cls, priority: int, ttl_s: float) -> Retention:
        """A time alone is rank 1; a priority alone holds for an hour."""
        if not priority and not ttl_s:
            return NO_RETENTION
        return cls(priority or 1, ttl_s or DEFAULT_TTL_S)

    def keeps(self, now_s: float) -> Keeps:
        """What a use at this time leaves on a node."""
        return (Keep(self.rank, now_s + self.ttl_s),) if self.rank else NO_KEEPS


NO_RETENTION = Retention()


def check_retention(priority: int, ttl_s: float | None) -> None:
    """Raises InvalidRequest for values of another type or out of range. (The server's schemas
    refuse them too.)
    """
    if type(priority) is not int or not 0 <= priority <= MAX_RANK:
        raise InvalidRequest(
            f"cache_priority is {priority!r}, not an integer in 0 to {MAX_RANK}",
            param="cache_priority",
        )
    is_time = ttl_s is None or (type(ttl_s) in (int, float) and 0 < ttl_s <= MAX_TTL_S)
    if not is_time:
        raise InvalidRequest(
            f"cache_ttl is {ttl_s!r}, not above 0 and up to {MAX_TTL_S:.0f} seconds",
            param="cache_ttl",
        )


def merged(keeps: Keeps, more: Keeps, now_s: float) -> Keeps:
    """Both, without those that are over and those that another one outranks for longer."""
    best: list[Keep] = []
    for keep in sorted((*keeps, *more), reverse=True):
        if keep.until_s > now_s and (not best or keep.until_s > best[-1].until_s):
            best.append(keep)
    return tuple(best)


def current(keeps: Keeps, now_s: float) -> Keep | None:
    """The one that counts now."""
    return next((keep for keep in keeps if keep.until_s > now_s), None)
