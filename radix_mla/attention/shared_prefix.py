"""Which sequences of a step read the same pages, so that they can read them in one pass.

    A  |== 1 ==|== 2 ==|-- tail --|       pass 1: A, B, C      pass 2: A, B
    B  |== 1 ==|== 2 ==|- tail -|
    C  |== 1 ==|------ tail ------|       tails apart; partial results merged by LSE

Equal page ids are equal rows: the prefix cache stores a shared prefix once. Only full pages of
context are shared, so every query of a member sees every row of the pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from radix_mla.attention.backend import MQAWork

_MIN_SAVED_ROWS = 1024  # a pass costs calls and a merge; reading this many rows costs more


class SharedPass(NamedTuple):
    """Pages [first, last) of the members' page tables, equal in all of them."""

    members: tuple[int, ...]
    first: int
    last: int


class SharedPrefixes(NamedTuple):
    """`tails` [B]: the first page of each sequence that is not in a pass."""

    passes: list[SharedPass]
    tails: list[int]


def shared_in(work: MQAWork) -> SharedPrefixes:
    """Of `work`; what was found before is not looked for again."""
    if work.shared is not None:
        return work.shared
    return find_shared(work.page_tables, work.kv_lens - np.diff(work.cu_q), work.page_size)


def find_shared(
    page_tables: tuple[np.ndarray, ...], num_context: np.ndarray, page_size: int
) -> SharedPrefixes:
    """page_tables int32 of B sequences, num_context [B] rows that exist before the step.

    O(pages of sequences that share their first page).
    """
    full = (num_context // page_size).tolist()
    found = SharedPrefixes([], [0] * len(page_tables))
    _descend(list(range(len(page_tables))), 0, page_tables, full, page_size, found)
    return found


def _descend(
    members: list[int],
    first: int,
    page_tables: tuple[np.ndarray, ...],
    full: list[int],
    page_size: int,
    found: SharedPrefixes,
) -> None:
    """`members` share pages [0, first); groups them by what follows."""
    groups: dict[int, list[int]] = {}
    for member in members:
        if full[member] > first:
            groups.setdefault(int(page_tables[member][first]), []).append(member)
    for group in groups.values():
        if len(group) < 2:
            continue
        last = _common_end(group, first, page_tables, full)
        if (last - first) * page_size * (len(group) - 1) < _MIN_SAVED_ROWS:
            continue
        found.passes.append(SharedPass(tuple(group), first, last))
        for member in group:
            found.tails[member] = last
        _descend(group, last, page_tables, full, page_size, found)


def _common_end(
    group: list[int], first: int, page_tables: tuple[np.ndarray, ...], full: list[int]
) -> int:
    """The first page, after `first`, that is not the same full page in all of the group."""
    end = min(full[member] for member in group)
    reference = page_tables[group[0]]
    for member in group[1:]:
        differs = page_tables[member][first:end] != reference[first:end]
        if differs.any():
            end = first + int(differs.argmax())
    return end
