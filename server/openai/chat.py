"""POST /v1/chat/completions: messages through the model's chat template."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.choice import Choice, Delta
from server.docs import OF_A_GENERATION, describe
from server.generation import Generation
from server.openai.answers import ChatAnswer
from server.openai.chat_plan import plan_chat
from server.openai.common import answer, parse, service_of
from server.openai.frame import Frame
from server.openai.logprobs import TokenNames, chat_logprobs
from server.openai.message import MessageShape, ReasoningField
from server.openai.schemas import ChatRequest
from server.openai.stream import sse

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **describe(ChatAnswer, body=ChatRequest, stream=True, errors=OF_A_GENERATION),
)
async def chat_completions(http: Request) -> Response:
    """Answers a conversation."""
    service = service_of(http)
    parsed = await parse(http, ChatRequest)
    plan = await plan_chat(service, parsed)
    frame = Frame(
        service,
        parsed,
        prefix="chatcmpl",
        whole="chat.completion",
        chunk="chat.completion.chunk",
    )
    renderer = ChatRenderer(
        frame,
        parsed.fields,
        plan.prompt,
        TokenNames(service.tokenizer, as_ids=parsed.fields.return_tokens_as_token_ids),
        reasoning_field=service.settings.reasoning_field,
    )
    return answer(service, parsed, plan.job, renderer, frame.id)


class ChatRenderer:
    """`chat.completion` objects and their chunks."""

    def __init__(
        self,
        frame: Frame,
        fields: ChatRequest,
        prompt: list[int],
        names: TokenNames,
        *,
        reasoning_field: ReasoningField = "reasoning_content",
    ) -> None:
        self._frame = frame
        self._fields = fields
        self._message = MessageShape(reasoning_field)
        self._prompt = prompt
        self._names = names
        self.end = frame.end
        self.collect = frame.collect

    def events(self, deltas: list[Delta], generation: Generation) -> bytes:
        return b"".join(sse(chunk) for delta in deltas for chunk in self._chunks(delta, generation))

    def body(self, generation: Generation) -> dict[str, Any]:
        choices = [self._whole(choice) for choice in generation.choices]
        body = self._frame.whole(choices, generation)
        if self._fields.return_token_ids:
            body["prompt_token_ids"] = self._prompt
        return body

    def _whole(self, choice: Choice) -> dict[str, Any]:
        parts = self._frame.collected(choice.index)
        whole: dict[str, Any] = {
            "index": choice.index,
            "message": self._message.whole(event for part in parts for event in part.parts),
            "logprobs": self._logprobs(parts),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._fields.return_token_ids:
            whole["token_ids"] = [token_id for part in parts for token_id in part.token_ids]
        return whole

    def _chunks(self, delta: Delta, generation: Generation) -> list[dict[str, Any]]:
        """First the role, then content, at the end the reason with an empty delta."""
        chunks: list[dict[str, Any]] = []
        if self._frame.begin(delta.choice):
            chunk = self._chunk(delta.choice, {"role": "assistant", "content": ""}, generation)
            if self._fields.return_token_ids:
                chunk["prompt_token_ids"] = self._prompt
            chunks.append(chunk)
        contents = [self._message.delta(event) for event in delta.parts]
        if not contents and (self._fields.logprobs or self._fields.return_token_ids):
            contents = [{"content": ""}]  # tokens whose text is held back
        for place, content in enumerate(contents):
            chunk = self._chunk(delta.choice, content, generation)
            if place == 0:
                chunk["choices"][0]["logprobs"] = self._logprobs([delta])
                if self._fields.return_token_ids:
                    chunk["choices"][0]["token_ids"] = delta.token_ids
            chunks.append(chunk)
        if delta.finish_reason is not None:
            chunk = self._chunk(delta.choice, {}, generation)
            chunk["choices"][0]["finish_reason"] = delta.finish_reason
            chunk["choices"][0]["stop_reason"] = generation.choices[delta.choice].stop_reason
            chunks.append(chunk)
        return chunks

    def _chunk(self, index: int, delta: dict[str, Any], generation: Generation) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._frame.chunk(choice, generation)

    def _logprobs(self, parts: list[Delta]) -> dict[str, Any] | None:
        if not self._fields.logprobs:
            return None
        return chat_logprobs((entry for part in parts for entry in part.entries), self._names)
