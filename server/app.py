"""The ASGI app: routes over one `Service`, behind a thin edge (keys, body size, clock).

`create_app` takes any `EngineClient`, so tests run the real app on a fake engine without sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from radix_mla.text.tokenizer import Tokenizer
from server import admin, cache_api, errors
from server.anthropic import messages
from server.auth import OPEN_PATHS, Keyring
from server.docs import DocumentedApp
from server.engine_client import EngineClient
from server.errors import HttpError
from server.exposition import make_registry
from server.openai import chat, completions, models
from server.openai.sampling import SamplingDefaults
from server.responses import responses
from server.service import ModelFacts, Service
from server.settings import Settings
from server.version import VERSION


def create_app(
    engine: EngineClient,
    settings: Settings,
    model: ModelFacts,
    *,
    tokenizer: Tokenizer | None = None,
    defaults: SamplingDefaults | None = None,
) -> FastAPI:
    """The app, ready to be served; the engine stays the caller's to start and close."""
    service = Service(engine, settings, model, tokenizer=tokenizer, defaults=defaults)
    app = DocumentedApp(
        title="radix-mla", version=VERSION, lifespan=_lifespan, redirect_slashes=False
    )
    app.state.service = service
    app.state.registry = make_registry(service)
    modules = (completions, chat, responses, messages, models, admin, cache_api)
    routers = [module.router for module in modules]
    own = [route for router in routers for route in router.routes]
    errors.install(app, service.metrics, [*app.routes, *own])
    for router in routers:
        app.include_router(router)
    keyring = Keyring(
        [key.get_secret_value() for key in settings.api_key],
        [key.get_secret_value() for key in settings.admin_api_key],
    )
    app.with_keys = keyring.required
    app.add_middleware(Edge, keyring=keyring, service=service)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    watch = asyncio.create_task(service.loop_lag.watch(), name="loop-lag")
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        service.close()


class Edge:
    """Pure ASGI: stamps the arrival, checks the key; everything else passes through."""

    def __init__(self, app: ASGIApp, keyring: Keyring, service: Service) -> None:
        self._app = app
        self._keyring = keyring
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["radix_arrival_s"] = time.monotonic()
        if scope["path"] not in OPEN_PATHS:
            try:
                scope["radix_tenant"], scope["radix_admin"] = self._keyring.identify(scope)
            except HttpError as error:
                self._service.metrics.rejections.add(1, ("unauthorized",))
                await errors.respond(errors.describe(error), scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)
