"""T03: stop strings over token borders; nothing of them is sent, whatever the pieces are."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_mla.text.stops import StopChecker


def _run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    checker = StopChecker(stops, include_stop=include)
    text = ""
    for piece in pieces:
        text += checker.push(piece)
        if checker.matched is not None:
            return text, checker.matched
    return text + checker.flush(), None


def test_t03_a_stop_over_two_tokens() -> None:
    assert _run(["END"], ["abE", "ND", "more"]) == ("ab", "END")


def test_t03_a_stop_inside_one_token() -> None:
    assert _run(["END"], ["ab END cd"]) == ("ab ", "END")


def test_t03_shared_beginnings_and_restarts() -> None:
    assert _run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")
    assert _run(["abc", "abd"], ["xab", "d"]) == ("x", "abd")
    assert _run(["abcd", "bc"], ["a", "b", "c", "d"]) == ("a", "bc")


def test_t03_the_longest_of_those_that_end_together() -> None:
    assert _run(["b", "ab"], ["ab"]) == ("", "ab")


def test_t03_multibyte() -> None:
    assert _run(["。終"], ["話", "。", "終", "x"]) == ("話", "。終")


def test_t03_held_back_is_only_what_may_become_a_stop() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert checker.push("Hello\n") == "Hello"
    assert checker.push("\nUs") == ""
    assert checker.push("ual") == "\n\nUsual"
    assert checker.push("x\n") == "x"
    assert checker.flush() == "\n"


def test_include_stop_keeps_it() -> None:
    assert _run(["END"], ["abE", "NDx"], include=True) == ("abEND", "END")


def test_skip_releases_what_was_held_and_looks_for_nothing() -> None:
    checker = StopChecker(["ab"])
    assert checker.push("a") == ""
    assert checker.skip("b") == "ab"
    assert checker.matched is None
    assert checker.push("ab") == ""
    assert checker.matched == "ab"


def test_without_stops_everything_passes() -> None:
    assert _run([], ["a", "b"]) == ("ab", None)


_TEXT = st.text(alphabet="ab", max_size=30)


@given(
    text=_TEXT,
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_t03_streamed_equals_whole_and_the_naive_answer(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[i:j] for i, j in pairwise(borders)]
    expected: tuple[str, str | None] = (text, None)
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            expected = (text[: end - len(longest)], longest)
            break
    assert _run(stops, pieces) == _run(stops, list(text)) == expected


@pytest.mark.parametrize("stop", ["a" * 1000 + "b"])
def test_a_long_stop_on_hostile_text_is_linear(stop: str) -> None:
    text, matched = _run([stop], ["a" * 20_000])
    assert matched is None
    assert len(text) == 20_000
