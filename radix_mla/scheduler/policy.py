"""Policies: in which order waiting sequences are offered for admission.

A policy orders; it never decides whether something fits. `load_policy` takes a name or
`module:Class` of a class without arguments that has the one method of `SchedulePolicy`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from importlib import import_module
from typing import Protocol

from radix_mla.errors import ConfigError
from radix_mla.scheduler.sequence import Sequence


class SchedulePolicy(Protocol):
    """`waiting` comes in order of arrival; `peek` gives a sequence's cached tokens (costly)."""

    def order(
        self, waiting: Items[Sequence], peek: Callable[[Sequence], int], now: float
    ) -> Items[Sequence]: ...


class FirstComeFirstServed:
    """By arrival."""

    def order(
        self, waiting: Items[Sequence], peek: Callable[[Sequence], int], now: float
    ) -> Items[Sequence]:
        return waiting


class LongestPrefixMatch:
    """By arrival, where each cached token counts as having come `_TOKEN_S` earlier.

    The bonus is bounded, so nobody is passed by a request that came `MAX_BONUS_S` later or more,
    however long the hits are; and it never turns into plain fcfs under overload, as an age limit
    would. Only the oldest `_WINDOW` are looked up.
    """

    MAX_BONUS_S = 10.0
    _TOKEN_S = 0.002
    _WINDOW = 128

    def order(
        self, waiting: Items[Sequence], peek: Callable[[Sequence], int], now: float
    ) -> Items[Sequence]:
        if len(waiting) == 1:
            return waiting
        window = waiting[: self._WINDOW]
        keys = {
            seq: seq.request.arrival_s - min(self.MAX_BONUS_S, peek(seq) * self._TOKEN_S)
            for seq in window
        }
        return [*sorted(window, key=lambda seq: (keys[seq], seq.order)), *waiting[self._WINDOW :]]


class Priority:
    """By priority (lower first), then arrival. A sequence inherits its waiters' best priority."""

    def order(
        self, waiting: Items[Sequence], peek: Callable[[Sequence], int], now: float
    ) -> Items[Sequence]:
        return sorted(waiting, key=lambda seq: (seq.effective_priority, seq.order))


_POLICIES: dict[str, Callable[[], SchedulePolicy]] = {
    "fcfs": FirstComeFirstServed,
    "lpm": LongestPrefixMatch,
    "priority": Priority,
}


def load_policy(name: str) -> SchedulePolicy:
    """A policy by name or `module:Class`. Raises ConfigError that names the knob."""
    if name in _POLICIES:
        return _POLICIES[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(sorted(_POLICIES))
        raise ConfigError(f"schedule_policy {name!r} is not one of {known}, nor module:Class")
    try:
        policy = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"schedule_policy {name!r}: {error}") from error
    if not callable(getattr(policy, "order", None)):
        raise ConfigError(f"schedule_policy {name!r} has no method `order`")
    loaded: SchedulePolicy = policy
    return loaded
