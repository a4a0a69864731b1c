"""Ghost: a bounded memory of prefixes that were committed, to say why a token was missed.

A prefix that was here and does not hit now was evicted; one that only another namespace committed
is that namespace's; any other is new. Diagnostic only: hits compare tokens.

The hash of a prefix is the sum of (token + 1) * weight[position] modulo 2**64 with random weights,
so it is computed for all block borders at once and goes on from where an earlier commit stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from radix_mla.cache.token_run import Int32Array

UInt64Array: TypeAlias = NDArray[np.uint64]
BoolArray: TypeAlias = NDArray[np.bool_]

_FIRST_WEIGHTS = 4096


@dataclass(slots=True)
class Trace:
    """How far a sequence has been remembered: its hash at the last block border."""

    num_tokens: int = 0
    prefix_hash: int = 0


class HashTable:
    """A fixed number of slots of 64-bit hashes and their owners; the newest displaces the older."""

    def __init__(self, log2_slots: int, multiplier: int) -> None:
        self._shift = np.uint64(64 - log2_slots)
        self._multiplier = np.uint64(multiplier | 1)
        self._hashes = np.zeros(1 << log2_slots, dtype=np.uint64)
        self._owners = np.zeros(1 << log2_slots, dtype=np.uint64)

    @property
    def num_bytes(self) -> int:
        return self._hashes.nbytes + self._owners.nbytes

    def store(self, hashes: UInt64Array, owner: np.uint64) -> None:
        slots = self._slots(hashes)
        self._hashes[slots] = hashes
        self._owners[slots] = owner

    def owners(self, hashes: UInt64Array) -> UInt64Array:
        """Who stored each hash last; 0 where it is not known."""
        slots = self._slots(hashes)
        return np.where(self._hashes[slots] == hashes, self._owners[slots], np.uint64(0))

    def _slots(self, hashes: UInt64Array) -> UInt64Array:
        return (hashes * self._multiplier) >> self._shift


class Ghost:
    """Remembers the block borders and the ends of committed sequences.

    Each has two entries, one of the tokens alone and one mixed with the namespace: of the former,
    only the last namespace to store it is known. Memory: 16 bytes a slot, 8 bytes a position of
    the longest sequence. Time: vectorised, a few ns a token.
    """

    def __init__(self, *, seed: int, log2_slots: int = 16, block: int = 128) -> None:
        self.block = block
        self._random = np.random.default_rng(seed)
        self._seed = seed.to_bytes(32, "little")
        self._table = HashTable(log2_slots, int(self._draw(1)[0]))
        self._weights = self._draw(_FIRST_WEIGHTS)

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes + self._weights.nbytes

    def remember(
        self, tokens: Int32Array, namespace: str, trace: Trace, *, num_known: int = 0
    ) -> None:
        """Records a committed sequence; `tokens` begin at trace.num_tokens, and `trace` moves.

        Borders within the first `num_known` tokens of the sequence are taken as recorded.
        """
        borders = self._borders(tokens, trace)
        first_new = max(0, num_known - trace.num_tokens) // self.block
        num_whole = len(borders) * self.block
        if num_whole:
            trace.num_tokens += num_whole
            trace.prefix_hash = int(borders[-1])
        hashes = np.append(borders[first_new:], self._ends(tokens[num_whole:], trace)[-1:])
        salt = self._salt(namespace)
        self._table.store(np.concatenate((hashes, hashes ^ salt)), salt)

    def classify(self, tokens: Int32Array, namespace: str, num_matched: int) -> dict[str, int]:
        """Splits the tokens behind the first `num_matched` into new, evicted and namespace."""
        num_missed = max(0, len(tokens) - num_matched)
        evicted = elsewhere = 0
        if num_missed:
            own, anyone = self._known_lengths(tokens, self._salt(namespace))
            evicted = max(0, own - num_matched)
            elsewhere = max(0, anyone - max(own, num_matched))
        return {
            "new": num_missed - evicted - elsewhere,
            "evicted": evicted,
            "namespace": elsewhere,
        }

    def _known_lengths(self, tokens: Int32Array, salt: np.uint64) -> tuple[int, int]:
        """The longest prefix that this namespace stored, and the longest that any did.

        To the last block border first, then to the last end within the block behind it.
        """
        borders = self._borders(tokens, Trace())
        own_blocks, any_blocks = self._last_known(borders, salt)
        own = anyone = self._last_known_behind(tokens, borders, own_blocks, salt)
        if any_blocks != own_blocks:
            anyone = self._last_known_behind(tokens, borders, any_blocks, salt)
        return own_blocks * self.block + own[0], any_blocks * self.block + anyone[1]

    def _last_known_behind(
        self, tokens: Int32Array, borders: UInt64Array, num_blocks: int, salt: np.uint64
    ) -> tuple[int, int]:
        """How far the block behind `num_blocks` is known to this namespace, and to any."""
        start = num_blocks * self.block
        reached = Trace(start, int(borders[num_blocks - 1]) if num_blocks else 0)
        ends = self._ends(tokens[start : start + self.block], reached)
        own, anyone = self._last_known(ends, salt)
        return max(0, own - 1), max(0, anyone - 1)

    def _last_known(self, hashes: UInt64Array, salt: np.uint64) -> tuple[int, int]:
        """How many hashes there are up to the last one of this namespace, and of any."""
        plain = self._table.owners(hashes)
        own = (self._table.owners(hashes ^ salt) == salt) | (plain == salt)
        return _up_to_last(own), _up_to_last(plain != 0)

    def _borders(self, tokens: Int32Array, trace: Trace) -> UInt64Array:
        """Prefix hashes at the block borders in `tokens`, which continue `trace`."""
        num_blocks = len(tokens) // self.block
        terms = self._values(tokens[: num_blocks * self.block], trace.num_tokens)
        weights = self._weights[trace.num_tokens :][: len(terms)]
        shape = (num_blocks, self.block)
        sums = np.einsum("ij,ij->i", terms.reshape(shape), weights.reshape(shape))
        return np.cumsum(sums, dtype=np.uint64) + np.uint64(trace.prefix_hash)

    def _ends(self, tokens: Int32Array, trace: Trace) -> UInt64Array:
        """Prefix hashes after no token, the first, ... and the last of less than two blocks."""
        terms = np.empty(len(tokens) + 1, dtype=np.uint64)
        terms[0] = trace.prefix_hash
        stop = trace.num_tokens + len(tokens)
        values = self._values(tokens, trace.num_tokens)
        np.multiply(values, self._weights[trace.num_tokens : stop], out=terms[1:])
        return np.cumsum(terms, dtype=np.uint64)

    def _values(self, tokens: Int32Array, start: int) -> UInt64Array:
        """Tokens + 1, after making sure of weights for them from position `start` on."""
        stop = start + len(tokens)
        if stop > len(self._weights):
            missing = max(stop, 2 * len(self._weights)) - len(self._weights)
            self._weights = np.append(self._weights, self._draw(missing))
        values = tokens.astype(np.uint64)
        values += np.uint64(1)
        return values

    def _draw(self, count: int) -> UInt64Array:
        return self._random.integers(0, 1 << 64, size=count, dtype=np.uint64)

    def _salt(self, namespace: str) -> np.uint64:
        digest = blake2b(namespace.encode(), digest_size=8, key=self._seed).digest()
        return np.uint64(int.from_bytes(digest, "little") | 1)


def _up_to_last(marks: BoolArray) -> int:
    """Number of marks up to and including the last true one."""
    return len(marks) - int(marks[::-1].argmax()) if marks.any() else 0
