"""Health, readiness, version, facts, load and /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from server.answers import Loads, ModelInfo, ServerInfo, Status, Version
from server.docs import describe
from server.errors import Problem, respond
from server.openai.common import service_of
from server.service import Service
from server.version import VERSION

router = APIRouter()


@router.get("/health", **describe(Status, errors=(503,)))
@router.head("/health", include_in_schema=False)
async def health(http: Request) -> Response:
    """200 while the engine lives, also while draining."""
    return _engine_problem(service_of(http)) or _ok("ok")


@router.get("/ready", **describe(Status, errors=(503,)))
@router.head("/ready", include_in_schema=False)
async def ready(http: Request) -> Response:
    """200 when new requests are taken: for load balancers."""
    service = service_of(http)
    problem = _engine_problem(service)
    if problem is not None:
        return problem
    if service.lifecycle.draining:
        retry = {"retry-after": str(max(1, int(service.lifecycle.drain_left_s)))}
        text = "The server is shutting down."
        return respond(Problem(503, text, "service_unavailable_error", None, "draining", retry))
    return _ok("ready")


@router.get("/version", **describe(Version))
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": VERSION}


@router.get("/server_info", **describe(ServerInfo))
@router.get("/get_server_info", include_in_schema=False)
async def server_info(http: Request) -> dict[str, Any]:
    """The resolved configuration with its reasons; no keys."""
    service = service_of(http)
    return {
        "version": VERSION,
        "served_model_names": list(service.model.names),
        "kv_tokens": service.model.kv_tokens,
        "page_size": service.model.page_size,
        "max_model_len": service.model.max_model_len,
        "engine": service.engine.info,
        "settings": service.settings.public(),
        "has_tokenizer": service.tokenizer is not None,
        "has_chat_template": service.has_chat_template,
        **(service.formats.info() if service.formats is not None else {}),
    }


@router.get("/model_info", **describe(ModelInfo))
@router.get("/get_model_info", include_in_schema=False)
async def model_info(http: Request) -> dict[str, Any]:
    """Dimensions of the model; `model_path` and `is_generation` are what SGLang's routers read."""
    service = service_of(http)
    model = service.model
    return {
        "model_path": model.path,
        "tokenizer_path": model.path if service.tokenizer is not None else None,
        "is_generation": True,
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
        **model.dims,
    }


@router.get("/v1/loads", **describe(Loads))
async def loads(http: Request) -> dict[str, Any]:
    """Load of this server, one entry, in the shape that smg reads."""
    service = service_of(http)
    metrics, slots = service.metrics, service.engine.stats.kv_slots
    used = sum(slots.get(state, 0) for state in ("protected", "private", "pinned"))
    load = {
        "dp_rank": 0,
        "num_running_reqs": metrics.num_running,
        "num_waiting_reqs": metrics.num_waiting,
        "num_total_reqs": metrics.num_running + metrics.num_waiting,
        "num_waiting_tokens": metrics.waiting_tokens,
        "num_used_tokens": used,
        "max_total_num_tokens": service.model.kv_tokens,
        "token_usage": used / max(1, service.model.kv_tokens),
    }
    return {"version": VERSION, "dp_rank_count": 1, "loads": [load]}


@router.get("/metrics", **describe(None, text=CONTENT_TYPE_LATEST))
async def metrics(http: Request) -> Response:
    """Prometheus text format."""
    text = generate_latest(http.app.state.registry)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def _ok(status: str) -> Response:
    return Response(f'{{"status":"{status}"}}', media_type="application/json")


def _engine_problem(service: Service) -> Response | None:
    problem = service.engine.problem
    if problem is None:
        return None
    return respond(Problem(503, problem, "server_error", None, "engine_dead"))
