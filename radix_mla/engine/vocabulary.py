"""How many ids a folder's tokenizer has, without loading the tokenizer.

A model's vocabulary is often padded above it; the ids between are never sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def num_token_ids(folder: Path) -> int | None:
    """The highest id of `folder`/tokenizer.json plus one; None where that file says nothing."""
    file = folder / "tokenizer.json"
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
        vocab = raw["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
        ids += [token["id"] for token in raw.get("added_tokens", [])]
        return max(int(token_id) for token_id in ids) + 1
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the tokenizer's own loader reports what is wrong with it
