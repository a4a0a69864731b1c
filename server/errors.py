"""One error shape for everything that is refused or fails: {"error": {message, type, param, code}}.

RequestError → 400 (ModelNotFound 404)      Overloaded → its status, with Retry-After
HttpError    → its status                   EngineDead → 503, RequestFailed and bugs → 500
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from radix_mla.errors import (
    ConfigError,
    ContextOverflow,
    EngineDead,
    EngineError,
    ModelNotFound,
    Overloaded,
    RequestError,
    RequestFailed,
)
from server.metrics import Metrics

logger = logging.getLogger("radix_mla.server")
GENERATION_PATHS = frozenset(
    ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
)
ANTHROPIC_PREFIX = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class HttpError(Exception):
    """A refusal that HTTP has a status for and the engine no exception (401, 413, 415 ...)."""

    def __init__(
        self, status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Problem:
    """What a client is told: status, the four fields, headers."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    anthropic_message: str | None = None  # where Anthropic's clients parse another text

    @property
    def body(self) -> bytes:
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def anthropic_body(self, request_id: str | None = None) -> bytes:
        """Anthropic's shape: {"type": "error", "error": {"type", "message"}, "request_id"}."""
        fallback = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status, fallback)
        message = self.message if self.anthropic_message is None else self.anthropic_message
        return msgspec.json.encode(
            {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
        )


def describe(error: BaseException) -> Problem:
    """The client's view of an exception. Texts of our own faults stay in the log."""
    match error:
        case ModelNotFound():
            return Problem(404, error.message, "invalid_request_error", error.param, error.code)
        case ContextOverflow():
            return Problem(
                400,
                error.message,
                "invalid_request_error",
                error.param,
                error.code,
                anthropic_message=f"prompt is too long: {error.prompt} tokens > "
                f"{error.limit} maximum",
            )
        case RequestError():
            return Problem(400, error.message, "invalid_request_error", error.param, error.code)
        case Overloaded():
            kind = "rate_limit_error" if error.status == 429 else "service_unavailable_error"
            retry = {"retry-after": str(error.retry_after_s)}
            return Problem(error.status, error.message, kind, None, "overloaded", retry)
        case HttpError():
            return Problem(
                error.status,
                error.message,
                _type_of(error.status),
                None,
                error.code,
                error.headers,
            )
        case HTTPException():
            return _of_starlette(error)
        case RequestValidationError():
            return Problem(400, "The request is not valid.", "invalid_request_error")
        case EngineDead():
            text = "The engine is gone or does not answer; GET /health says which."
            return Problem(503, text, "server_error", None, "engine_dead")
        case RequestFailed():
            return Problem(500, str(error), "server_error", None, "request_failed")
        case EngineError() | ConfigError():
            return Problem(500, "The engine failed.", "server_error", None, "engine_error")
        case _:
            text = "Internal server error. The cause is in the server's log."
            return Problem(500, text, "server_error", None, "internal_error")


def respond(problem: Problem, path: str = "") -> Response:
    """The problem as a JSON response, in the shape of the API that `path` belongs to.

    It has an id of its own: nothing of what is refused got one before.
    """
    request_id = secrets.token_hex(12)
    is_anthropic = path.startswith(ANTHROPIC_PREFIX)
    return Response(
        problem.anthropic_body(request_id) if is_anthropic else problem.body,
        status_code=problem.status,
        media_type="application/json",
        headers={"x-request-id": request_id, **problem.headers},
    )


def install(app: FastAPI, metrics: Metrics, routes: Sequence[BaseRoute]) -> None:
    """One handler for everything; bugs (plain Exception) are logged with their trace by the server.

    Refusals on generation routes are counted by reason. `routes`: all, for the 405s.
    """

    async def handle(request: Request, error: Exception) -> Response:
        problem = describe(error)
        if problem.status == 405:
            problem = replace(problem, headers={"allow": _allowed(routes, request)})
        if problem.status >= 500 and not isinstance(error, Overloaded):
            logger.error("request failed: %s: %s", type(error).__name__, error)
        reason = _rejection(error)
        if reason is not None and request.url.path in GENERATION_PATHS:
            metrics.rejections.add(1, (reason,))
        return respond(problem, request.url.path)

    for kind in (
        RequestError,
        Overloaded,
        EngineError,
        HttpError,
        HTTPException,
        RequestValidationError,
        Exception,
    ):
        app.add_exception_handler(kind, handle)


def _allowed(routes: Sequence[BaseRoute], request: Request) -> str:
    """The methods of every route with this path; Starlette names those of the first one only."""
    methods: set[str] = set()
    for route in routes:
        matches, _ = route.matches(request.scope)
        if matches is not Match.NONE:
            methods |= set(getattr(route, "methods", None) or ())
    return ", ".join(sorted(methods))


def _rejection(error: Exception) -> str | None:
    """The label of rejections_total; what the queue refuses is counted where it is refused."""
    match error:
        case ModelNotFound():
            return "model_not_found"
        case ContextOverflow():
            return "context_length"
        case RequestError():
            return "invalid_request"
        case HttpError():
            return "request_too_large" if error.status == 413 else "invalid_request"
        case _:
            return None


def _of_starlette(error: HTTPException) -> Problem:
    texts = {
        404: ("This path does not exist. See /docs for those that do.", "not_found"),
        405: ("This method is not allowed on this path.", "method_not_allowed"),
        413: ("The request body is too large.", "request_too_large"),
    }
    message, code = texts.get(error.status_code, (str(error.detail), "http_error"))
    kind = _type_of(error.status_code)
    return Problem(error.status_code, message, kind, None, code, error.headers or {})


def _type_of(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "authentication_error" if status in (401, 403) else "invalid_request_error"
