"""What every route works with: the engine, the tokenizer, the settings, the model's facts.

One `Service` per app, made at start and handed over explicitly (`app.state.service`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np
from fastapi import Request as HttpRequest

from radix_mla.cache.retention import Retention
from radix_mla.errors import EngineDead, InvalidRequest, ModelNotFound, Overloaded
from radix_mla.request import Request, SamplingParams
from radix_mla.text.chat_template import ChatTemplate
from radix_mla.text.tokenizer import Tokenizer
from server.auth import namespace_of
from server.choice import Choice, OutputOptions
from server.engine_client import EngineClient
from server.generation import Generation
from server.lifecycle import Lifecycle, LoopLag
from server.limits import check_queue
from server.metrics import Metrics, RequestRecord
from server.openai.fields import SeenOnce
from server.openai.model_formats import ModelFormats
from server.openai.prompts import TokenIds
from server.openai.sampling import SamplingDefaults
from server.rendering import PromptRenderer
from server.settings import Settings

logger = logging.getLogger("radix_mla.server")
Result = TypeVar("Result")

_SESSION_HEADERS = ("x-session-affinity", "session_id", "session-id", "x-openwebui-chat-id")
_NUM_TOKENIZER_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The served model as the API shows it. `dims` is shown in /model_info as it is."""

    names: tuple[str, ...]
    path: str
    vocab_size: int
    max_model_len: int
    kv_tokens: int
    page_size: int
    dims: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: the tenant of the API key, the session if there is one, when."""

    tenant: str
    session: str | None
    address: str
    arrival_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, ready for the engine. `max_tokens` has one entry a prompt, already cut."""

    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]
    params: SamplingParams
    options: OutputOptions
    n: int
    cache_salt: str
    store: bool
    priority: int
    retention: Retention


class Service:
    """See the module's docstring."""

    def __init__(
        self,
        engine: EngineClient,
        settings: Settings,
        model: ModelFacts,
        *,
        tokenizer: Tokenizer | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.model = model
        self.tokenizer = tokenizer
        self.defaults = defaults or SamplingDefaults()
        self.metrics = Metrics()
        self.generations: set[Generation] = set()
        self.lifecycle = Lifecycle(settings.drain_timeout)
        self.loop_lag = LoopLag()
        self.token_ids = TokenIds(model.vocab_size)
        self.ignored_fields = SeenOnce(log=_log_ignored)
        self._pool = ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._template: ChatTemplate | None = None
        self.formats: ModelFormats | None = None
        if tokenizer is not None and tokenizer.chat_template is not None:
            self._template = ChatTemplate(tokenizer)
            self.formats = ModelFormats(self._template, tokenizer)

    async def in_pool(self, work: Callable[[], Result]) -> Result:
        """Runs CPU work (tokenising, rendering) off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def check_model(self, name: str | None) -> str:
        """The name to answer with; absent means the first. Raises ModelNotFound."""
        if name is None or name == "":
            return self.model.name
        if name not in self.model.names and not self._is_alias(name):
            raise ModelNotFound(name, list(self.model.names))
        return name

    def _is_alias(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.settings.model_alias)

    def need_tokenizer(self) -> Tokenizer:
        """Raises InvalidRequest for a model folder without tokenizer files."""
        if self.tokenizer is None:
            raise InvalidRequest(
                "This model has no tokenizer: send prompts as token ids to /v1/completions "
                "and ask for ids with return_token_ids.",
                param="prompt",
                code="no_tokenizer",
            )
        return self.tokenizer

    def need_template(self) -> ChatTemplate:
        """Raises InvalidRequest when there is no chat template."""
        self.need_tokenizer()
        if self._template is None:
            raise InvalidRequest(
                "This model's tokenizer has no chat template: use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        return self._template

    def need_renderer(self) -> PromptRenderer:
        """Raises InvalidRequest when there is no chat template."""
        template = self.need_template()
        return PromptRenderer(
            template,
            self.need_tokenizer(),
            self.token_ids,
            normalise=self.settings.prompt_normalise == "auto",
        )

    def need_formats(self) -> ModelFormats:
        """Raises InvalidRequest when there is no chat template."""
        self.need_template()
        assert self.formats is not None  # made with the template
        return self.formats

    def caller(self, http: HttpRequest, session: str | None) -> Caller:
        """`session`: the request's prompt_cache_key; headers of known clients stand in for it."""
        for name in _SESSION_HEADERS:
            session = session or http.headers.get(name)
        tenant = http.scope.get("radix_tenant", "")
        return Caller(
            tenant=tenant,
            session=f"{tenant}/{session}" if session else None,
            address=http.client.host if http.client else "",
            arrival_s=http.scope.get("radix_arrival_s") or time.monotonic(),
        )

    def start(self, job: Job, caller: Caller) -> Generation:
        """Submits a job. Raises Overloaded (draining, queue full) or EngineDead."""
        self._check_room(job)
        namespace = namespace_of(
            caller.tenant, job.cache_salt, cache_scope=self.settings.cache_scope
        )
        turn = self.metrics.turn(caller.session)
        requests, records = [], []
        for prompt, max_tokens in zip(job.prompts, job.max_tokens, strict=True):
            request_id = secrets.token_hex(12)
            limit = max(1, max_tokens)
            params = replace(
                job.params, max_tokens=limit, min_tokens=min(job.params.min_tokens, limit)
            )
            requests.append(
                Request(
                    request_id=request_id,
                    prompt=np.asarray(prompt, dtype="<i4").tobytes(),
                    params=params,
                    n=job.n,
                    namespace=namespace,
                    priority=job.priority,
                    store=job.store,
                    cache_ttl_s=job.retention.ttl_s,
                    cache_priority=job.retention.rank,
                    arrival_s=caller.arrival_s,
                )
            )
            records.append(
                RequestRecord(request_id, len(prompt), job.n, caller.arrival_s, turn=turn)
            )
        choices = [
            Choice(index, self.tokenizer, job.options) for index in range(len(records) * job.n)
        ]
        generation = Generation(
            self.engine,
            self.metrics,
            requests,
            records,
            choices,
            on_close=self.generations.discard,
        )
        self.generations.add(generation)
        return generation

    def expire_generations(self) -> None:
        """Ends what still runs when the drain's time is over; clients get a 503 or its event."""
        error = Overloaded("The server is shutting down. Try again later.", retry_after_s=5)
        for generation in list(self.generations):
            generation.expire(error)

    def check_accepting(self) -> None:
        """Raises Overloaded (503) while draining."""
        if self.lifecycle.draining:
            self.metrics.rejections.add(1, ("draining",))
        self.lifecycle.check_accepting()

    def _check_room(self, job: Job) -> None:
        self.check_accepting()
        if self.engine.problem is not None:
            self.metrics.rejections.add(1, ("engine_dead",))
            raise EngineDead(self.engine.problem)
        check_queue(
            self.metrics,
            num_requests=len(job.prompts),
            num_tokens=sum(len(prompt) for prompt in job.prompts),
            max_requests=self.settings.max_queued_requests,
            max_tokens=self.settings.max_queued_tokens,
        )


def _log_ignored(client: str, name: str) -> None:
    logger.info("unknown request field %r from %s is ignored", name, client)
