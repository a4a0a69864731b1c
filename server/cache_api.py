"""Cache routes: flush, audit, statistics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.answers import Audit, CacheStats, Flushed
from server.auth import namespace_of
from server.docs import describe
from server.errors import HttpError
from server.exposition import ServiceCollector
from server.openai.common import service_of

router = APIRouter()


@router.delete("/v1/cache", **describe(Flushed, errors=(403, 503)))
async def flush(http: Request, namespace: str | None = None) -> dict[str, Any]:
    """Drops the cache, or what was stored under one `cache_salt` (`?namespace=`); works while busy.

    Under `--cache-scope key` a caller drops its own salts only; all of it takes an admin key.
    """
    service = service_of(http)
    scope = service.settings.cache_scope
    if namespace is None and scope == "key" and not http.scope.get("radix_admin", False):
        raise HttpError(
            403,
            "Flushing the whole cache takes an admin key (--admin-api-key); "
            "`?namespace=` drops what this key stored under that cache_salt.",
            code="admin_key_required",
        )
    target = namespace
    if namespace is not None:
        target = namespace_of(http.scope.get("radix_tenant", ""), namespace, cache_scope=scope)
    return {"flushed_tokens": await service.engine.flush(target)}


@router.get("/v1/cache/audit", **describe(Audit, errors=(503,)))
async def audit(http: Request) -> dict[str, Any]:
    """Checks that every slot is in exactly one place; counts in slots."""
    return await service_of(http).engine.audit()


@router.get("/v1/cache/stats", **describe(CacheStats))
async def stats(http: Request) -> dict[str, Any]:
    """Hit counters since the start and the pool by state, as in /metrics."""
    service = service_of(http)
    metrics, engine = service.metrics, service.engine.stats
    queries, hits = metrics.queries.total, metrics.hits.total
    return {
        "queried_tokens": int(queries),
        "hit_tokens": int(hits),
        "hit_rate": hits / queries if queries else 0.0,
        "evicted_tokens": dict(engine.evicted_tokens),
        "kv_tokens": ServiceCollector(service).kv_slots(),
        "page_size": service.model.page_size,
        "retractions": engine.retractions,
    }
