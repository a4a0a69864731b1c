from __future__ import annotations

import json
from pathlib import Path

import pytest

from radix_mla.engine.vocabulary import num_token_ids


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 3}]}, 8),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 12}]}, 13),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}, 2),
        ({"model": {}}, None),
        ([], None),
    ],
)
def test_the_highest_id_plus_one(tmp_path: Path, content: object, expected: int | None) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert num_token_ids(tmp_path) == expected


def test_without_a_readable_tokenizer_nothing_is_known(tmp_path: Path) -> None:
    assert num_token_ids(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{not json")
    assert num_token_ids(tmp_path) is None
