"""Stop strings, matched over token borders.

One Knuth-Morris-Pratt automaton per stop string walks over the text character by character, so the
result does not depend on how the text was cut into pieces: the stop that is complete first wins,
and of several that are complete at the same character the longest one.

    text:  |---- released ----|-- held: longest beginning of a stop --|
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Feeds on text pieces of one sequence. `matched` is the stop string that was found."""

    __slots__ = ("_automata", "_held", "_include", "_states", "matched")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`stops` are not empty strings; `include_stop` keeps the stop in the text."""
        self._automata = [(stop, _failure(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """The text that can be sent now. After a match nothing more is to be pushed."""
        if not self._automata:
            return piece
        text = self._held + piece
        for position, char in enumerate(piece):
            found = self._step(char)
            if found is not None:
                self.matched = found
                end = len(self._held) + position + 1
                self._held = ""
                return text[:end] if self._include else text[: end - len(found)]
        num_held = max(self._states)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def skip(self, piece: str) -> str:
        """Text in which stops are not looked for (below min_tokens); it is sent whole."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._states)
        return held + piece

    def flush(self) -> str:
        """What is held when the sequence ends without a match."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        found: str | None = None
        states = self._states
        for index, (stop, failure) in enumerate(self._automata):
            state = states[index]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                state = failure[state - 1]
            states[index] = state
        return found


def _failure(pattern: str) -> list[int]:
    """failure[i]: length of the longest proper border of pattern[: i + 1]."""
    failure = [0] * len(pattern)
    border = 0
    for index in range(1, len(pattern)):
        while border and pattern[index] != pattern[border]:
            border = failure[border - 1]
        if pattern[index] == pattern[border]:
            border += 1
        failure[index] = border
    return failure
