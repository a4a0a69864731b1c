"""Counter-based uniform draws: a pure function of (seed, choice, position).

Nothing else goes in, so a draw does not depend on batching, chunking or retraction.
The mixer is splitmix64's finaliser (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1), 53 bits. `position` is the index of the token that is drawn."""
    stream = _mix((_mix(seed & _MASK) + (choice + 1) * _GOLDEN) & _MASK)
    bits = _mix((stream + (position + 1) * _GOLDEN) & _MASK)
    return (bits >> 11) * 2.0**-53
