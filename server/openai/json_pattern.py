"""Regular expressions inside JSON schemas: what in them cannot be enforced in a JSON string."""

from __future__ import annotations


def unsupported_in_pattern(pattern: str) -> str | None:
    """What in a regular expression cannot be enforced inside a JSON string; None: nothing.

    Inside a character class the compiler leaves out by itself what JSON cannot hold.
    """
    in_class = False
    place = 0
    while place < len(pattern):
        char = pattern[place]
        step = 1
        if char == "\\":
            step, value = _escape(pattern, place)
            if pattern[place + 1 : place + 2] in ("A", "Z", "z", "G"):
                return pattern[place : place + 2]
            if not in_class and value is not None and _needs_escape(value):
                return "a quote, backslash or control character"
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "(" and pattern[place + 1 : place + 2] == "?":
            if pattern[place + 2 : place + 3] != ":":
                return "a group with ?, but for (?:"
        elif _needs_escape(char):
            return "a quote, backslash or control character"
        place += step
    return None


def _needs_escape(char: str) -> bool:
    return char in '"\\' or char < " "


_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4}


def _escape(pattern: str, place: int) -> tuple[int, str | None]:
    """(length of the escape at `place`, the character that it stands for, a class has none)."""
    name = pattern[place + 1 : place + 2]
    if name in _HEX_DIGITS and name:
        digits = pattern[place + 2 : place + 2 + _HEX_DIGITS[name]]
        try:
            return 2 + len(digits), chr(int(digits, 16))
        except ValueError:
            return 2, None
    if name in "dDwWsSbB" or not name:
        return 2, None
    return 2, _CONTROL.get(name, name)
