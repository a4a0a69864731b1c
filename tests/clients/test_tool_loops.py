"""30 turns of each client from 25k tokens on: every cached token is accounted for.

cached(turn n + 1) = longest common token prefix of its prompt with (prompt + answer of turn n),
minus at most the last sampled token, which has no row.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.client_loop import CLIENTS, Answer, conversation
from support.demo_app import demo_tokenizer
from support.loss import explain
from support.server_process import ServerProcess

pytestmark = [pytest.mark.e2e]
_TURNS = 30
_SYSTEM_TOKENS = 25_000
_DEFAULT = "claude_code"


def _system(client: str) -> str:
    """Instructions of about 25k tokens, other ones for each client."""
    draw = random.Random(client)
    words = (
        "the brave fox runs over a hill and finds an old house near the river "
        "file test tool call answer line path value error result name list"
    )
    lines: list[str] = []
    num_tokens = 0
    while num_tokens < _SYSTEM_TOKENS:
        line = f"{len(lines)}. " + " ".join(draw.choice(words.split()) for _ in range(60))
        num_tokens += len(demo_tokenizer().encode(line + ".\n", add_special_tokens=False))
        lines.append(line + ".\n")
    return "".join(lines)


def _common(left: list[int], right: list[int]) -> int:
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return min(len(left), len(right))


def _place(before: Answer, after: Answer, common: int) -> str:
    """Both texts around the first difference, for a failure's message."""
    whole = before.prompt_ids + before.token_ids
    decode = demo_tokenizer().decode
    said = decode(whole[common - 5 : common + 30], skip_special_tokens=False)
    shown = decode(after.prompt_ids[common - 5 : common + 30], skip_special_tokens=False)
    return f"said {said!r}, shown {shown!r}; the answer: {before.calls} {before.text!r}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "splice", [pytest.param(False, marks=pytest.mark.slow), True], ids=["text", "token_ids"]
)
@pytest.mark.parametrize(
    "client",
    [
        client if client == _DEFAULT else pytest.param(client, marks=pytest.mark.slow)
        for client in CLIENTS
    ],
)
def test_every_cached_token_is_accounted_for(
    one_layer_server: ServerProcess, client: str, splice: bool
) -> None:
    # The runs share the instructions, but not what follows, or one would find the other's answers.
    system = f"{_system(client)}Answers come back as {'ids' if splice else 'text'}.\n"
    talk = conversation(client, system, splice=splice)
    before: Answer | None = None
    calls = lost = 0
    reasons: Counter[str] = Counter()
    for turn in range(_TURNS):
        answer = talk.ask(one_layer_server.url)
        assert answer.prompt_tokens == len(answer.prompt_ids)
        assert answer.token_ids
        if before is None:
            assert answer.prompt_tokens >= _SYSTEM_TOKENS
        else:
            whole = before.prompt_ids + before.token_ids
            common = _common(answer.prompt_ids, whole)
            reason = explain(demo_tokenizer(), before, answer, common)
            assert reason is not None, f"turn {turn}: {_place(before, answer, common)}"
            reasons[reason] += 1
            lost += len(whole) - common
            # The last sampled token has a row only if the engine went on before it was stopped.
            with_rows = min(common, len(whole) - 1)
            assert with_rows <= answer.cached_tokens <= common, (turn, common, len(whole))
            assert common >= len(before.prompt_ids), f"turn {turn}: lost before the answer"
            if splice:
                assert answer.cached_tokens >= 0.99 * len(whole)
                assert common >= len(whole) - 1  # an end-of-turn that the template writes itself
        calls += len(answer.calls)
        before = answer
        talk.go_on(answer)
    if client != "cline":  # its calls are text
        assert calls >= _TURNS / 2
    assert one_layer_server.get("/v1/cache/audit")["ok"] is True
    form = "token_ids" if splice else "text"
    print(f"{client} {form}: {lost} answer tokens lost in {_TURNS} turns", dict(reasons))
