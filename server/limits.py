"""Limits against overload: the queue's, and those on headers that httptools itself lacks."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from radix_mla.errors import Overloaded
from server.metrics import Metrics

MAX_HEADERS = 128
MAX_HEADER_BYTES = 65_536
HEADER_TIMEOUT_S = 60.0
MAX_PIPELINED = 16
_RETRY_AFTER_S = 2


def check_queue(
    metrics: Metrics, *, num_requests: int, num_tokens: int, max_requests: int, max_tokens: int
) -> None:
    """Raises Overloaded (429) when the queue has no room; 0 is no limit.

    A request is never refused for its own size alone: an empty queue takes any one.
    """
    waiting = metrics.num_waiting
    if max_requests and waiting and waiting + num_requests > max_requests:
        metrics.rejections.add(1, ("queue_requests",))
        raise _full(f"{waiting} requests wait, the limit is {max_requests}", "requests")
    if max_tokens and waiting and metrics.waiting_tokens + num_tokens > max_tokens:
        metrics.rejections.add(1, ("queue_tokens",))
        raise _full(
            f"prompts of {metrics.waiting_tokens} in all wait, the limit is {max_tokens}", "tokens"
        )


def _full(what: str, knob: str) -> Overloaded:
    return Overloaded(
        f"The queue is full: {what} (--max-queued-{knob}). Try again later.",
        retry_after_s=_RETRY_AFTER_S,
        status=429,
    )


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with bounds on header count, header bytes and header time.

    Also tells the request that runs that its client is gone when others wait behind it on the
    connection: uvicorn stops reading then, and would tell only the newest.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._in_headers = True
        self._header_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers and self.parser is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(f"The headers are larger than {MAX_HEADER_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} headers")  # the parser answers 400

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # a closed connection is seen by reading only

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """As the parser's own refusal, in the error shape of everything else."""
        self._write_error(400, "Bad Request", msg)

    def _refuse(self, message: str) -> None:
        self._write_error(431, "Request Header Fields Too Large", message)

    def _write_error(self, status: int, phrase: str, message: str) -> None:
        if self.transport.is_closing():
            return
        error = {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_http",
        }
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _close_if_silent(self) -> None:
        self._header_timer = None
        if self._in_headers and not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
