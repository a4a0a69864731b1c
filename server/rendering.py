"""A conversation to the token ids of its prompt, so that a later turn extends an earlier one.

    rendered   ... <User> hi <Assistant> | answer of turn 1 | <eos> <User> more <Assistant>
    pieces     text ─ encoded            ids, or text         text ─ encoded

An assistant message with `token_ids` is spliced in as it was generated, behind the generation
prompt that it was generated from. Other text is cut where generation began, because tokens were
cut there too when that turn was the prompt: merging across would change ids before the answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radix_mla.errors import InvalidRequest
from radix_mla.text.chat_template import ChatTemplate
from radix_mla.text.tokenizer import Tokenizer
from server.normalise import normalised
from server.openai.prompts import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the chat template gets. `messages` are in OpenAI's chat form."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class PromptRenderer:
    """Renders for one model. Safe to share between threads."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, ids: TokenIds, *, normalise: bool
    ) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._ids = ids
        self._normalise = normalise

    def encode(self, conversation: Conversation) -> list[int]:
        """The prompt's ids. Raises InvalidRequest for what the template cannot render."""
        return _Rendering(self, conversation).encode()

    def prepare(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[int, list[int]]]:
        """(messages as the template gets them, place → ids to splice in).

        Raises InvalidRequest.
        """
        prepared: Sequence[dict[str, Any] | None] = self.template.prepare(messages)
        if self._normalise:
            prepared = normalised([message for message in prepared if message], self.template)
        kept: list[dict[str, Any]] = []
        splices: dict[int, list[int]] = {}
        for index, (message, given) in enumerate(zip(prepared, messages, strict=True)):
            if message is None:
                continue
            ids = given.get("token_ids") if message["role"] == "assistant" else None
            if ids is not None and self._ids.check(ids, f"messages[{index}].token_ids"):
                splices[len(kept)] = ids
            kept.append(message)
        return kept, splices

    def encode_pieces(self, pieces: Sequence[str | list[int]]) -> list[int]:
        """Ids of the pieces one after the other; a BOS in front where the tokenizer has one."""
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            if not isinstance(piece, str):
                ids += piece
            elif place == 0:
                ids += self.template.encode(piece)
            elif piece:
                ids += self.template.encode_part(piece)
        return ids

    @property
    def cuts_answers(self) -> bool:
        """True when text behind a generation prompt may merge with its last token."""
        if not self._normalise or not self._tokenizer.is_byte_level:
            return False
        prompt = self.template.generation_prompt
        ids = self._tokenizer.encode(prompt, add_special_tokens=False) if prompt else []
        return bool(ids) and ids[-1] not in self._tokenizer.added_ids

    def closing_text(self, token_id: int) -> str | None:
        """The spelling of an answer's last token, if it may be the one that ends turns.

        The template writes it behind the answer; the answer has it already.
        """
        if token_id in self._tokenizer.added_ids:
            return self._tokenizer.id_to_token(token_id)
        return None


class _Rendering:
    """One conversation on its way."""

    def __init__(self, renderer: PromptRenderer, conversation: Conversation) -> None:
        self._renderer = renderer
        self._conversation = conversation
        self._messages, self._splices = renderer.prepare(conversation.messages)
        self._nonce = secrets.token_hex(8)
        self._generation_prompts: dict[str, str | None] = {}
        for place in self._splices:
            self._messages[place] = {"role": "assistant", "content": self._mark(place)}

    def encode(self) -> list[int]:
        text = self._render(self._messages, whole=True)
        marked = self._with_cut_marks(text)
        pieces: list[str | list[int]] = []
        rest, done = marked, ""
        closing: str | None = None
        for place in range(len(self._messages)):
            before, mark, after = rest.partition(self._mark(place))
            if not mark:
                if place in self._splices:
                    raise InvalidRequest(
                        "The chat template does not show an assistant message that has token_ids.",
                        param="messages",
                        code="invalid_messages",
                    )
                continue
            done += before
            text = before.removeprefix(closing or "")
            closing = None
            if place in self._splices:
                ids = self._splices[place]
                pieces += [self._behind_generation_prompt(text, done, place), ids]
                closing = self._renderer.closing_text(ids[-1])
            else:
                pieces.append(text)
            done, rest = done + mark, after
        return self._renderer.encode_pieces([*pieces, rest.removeprefix(closing or "")])

    def _render(self, messages: Sequence[Mapping[str, Any]], *, whole: bool) -> str:
        """`whole`: as asked for; else only the messages."""
        wanted = self._conversation
        return self._renderer.template.render_prepared(
            messages,
            tools=wanted.tools,
            add_generation_prompt=whole
            and wanted.add_generation_prompt
            and not wanted.continue_final_message,
            continue_final_message=whole and wanted.continue_final_message,
            variables=wanted.variables,
        )

    def _mark(self, place: int) -> str:
        return f"[splice {self._nonce} {place}]"

    def _with_cut_marks(self, text: str) -> str:
        """`text` with a mark before each answer; as it is when the template minds marks."""
        if not self._renderer.cuts_answers:
            return text
        places = [
            place
            for place, message in enumerate(self._messages)
            if message["role"] == "assistant"
            and isinstance(message["content"], str)
            and place not in self._splices
        ]
        messages = [dict(message) for message in self._messages]
        for place in places:
            messages[place]["content"] = self._mark(place) + messages[place]["content"]
        marked = plain = self._render(messages, whole=True) if places else text
        for place in places:
            plain = plain.replace(self._mark(place), "")
        return marked if plain == text else text

    def _behind_generation_prompt(self, before: str, done: str, place: int) -> str:
        """`before` (the end of `done`) with the header that the answer was generated behind."""
        prompt = self._generation_prompt(place)
        if prompt is None or before.endswith(prompt):
            return before
        base = self._render(self._messages[:place], whole=False)
        if not done.startswith(base) or len(done) - len(base) > len(before):
            return before
        return before[: len(before) - (len(done) - len(base))] + prompt

    def _generation_prompt(self, place: int) -> str | None:
        """What the template writes to start an answer after the message before `place`."""
        role = self._messages[place - 1]["role"] if place else ""
        if role not in self._generation_prompts:
            base = self._render(self._messages[:place], whole=False)
            wanted = self._conversation
            longer = self._renderer.template.render_prepared(
                self._messages[:place], tools=wanted.tools, variables=wanted.variables
            )
            self._generation_prompts[role] = (
                longer[len(base) :] if longer.startswith(base) else None
            )
        return self._generation_prompts[role]
