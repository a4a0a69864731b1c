"""The Prometheus collector: the API process's instruments and the engine's newest statistics."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from server.version import VERSION

if TYPE_CHECKING:
    from server.service import Service

PREFIX = "radix_mla_"
KV_STATES = ("free", "evictable", "protected", "private", "pinned")
WAIT_REASONS = ("slots", "budget", "sibling", "restore", "grammar")
_IN_USE = ("protected", "private", "pinned")


class ServiceCollector(Collector):
    """Reads everything at scrape time; holds nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        model = self._service.model.name
        for instrument in self._service.metrics.instruments:
            yield instrument.family(PREFIX + instrument.name, model)
        yield from self._gauges()
        yield from self._engine_counters()
        yield from self._infos()
        if self._service.settings.metrics_aliases == "vllm":
            yield from self._vllm_aliases()

    def kv_slots(self) -> dict[str, int]:
        """Slots by state; they add up to the pool, before the first step too."""
        stats = self._service.engine.stats
        slots = {state: stats.kv_slots.get(state, 0) for state in KV_STATES}
        if not any(slots.values()):
            slots["free"] = self._service.model.kv_tokens
        return slots

    def waiting_by_reason(self) -> dict[str, int]:
        """Waiting requests by reason.

        The sum is counted here, exactly; the engine's newest report says why (it counts
        sequences, and may be a step older), what it does not cover waits for the step's budget.
        """
        left = self._service.metrics.num_waiting
        reported = self._service.engine.stats.num_waiting
        counts = dict.fromkeys(WAIT_REASONS, 0)
        for reason in WAIT_REASONS:
            counts[reason] = min(left, reported.get(reason, 0))
            left -= counts[reason]
        counts["budget"] += left
        return counts

    def _gauges(self) -> Iterator[Metric]:
        service, metrics = self._service, self._service.metrics
        slots = self.kv_slots()
        yield self._by_label("kv_cache_tokens", "Slots of the KV pool by state.", "state", slots)
        in_use = sum(slots[state] for state in _IN_USE) / max(1, sum(slots.values()))
        yield self._gauge("kv_cache_usage_ratio", "Share of the pool that is locked.", in_use)
        yield self._gauge(
            "requests_running", "Requests admitted and not ended.", metrics.num_running
        )
        yield self._by_label(
            "requests_waiting",
            "Requests not admitted yet, by reason.",
            "reason",
            self.waiting_by_reason(),
        )
        yield self._gauge(
            "waiting_tokens", "Prompt tokens of waiting requests.", metrics.waiting_tokens
        )
        yield self._gauge(
            "engine_heartbeat_age_seconds",
            "Since the engine's last sign of life, idle or busy.",
            service.engine.heartbeat_age_s,
        )
        yield self._gauge(
            "api_loop_lag_seconds",
            "Worst lateness of the event loop in the last ten seconds.",
            service.loop_lag.worst_s,
        )

    def _engine_counters(self) -> Iterator[Metric]:
        stats = self._service.engine.stats
        yield self._counters(
            "prefill_tokens",
            "Prompt tokens by where their rows came from.",
            "source",
            {"computed": 0, "recomputed": 0, "device": 0} | stats.prefill_tokens,
        )
        yield self._counters(
            "evicted_tokens", "Rows evicted, by reason.", "reason", stats.evicted_tokens
        )
        yield self._counters(
            "aborted_tokens", "Rows of aborted requests.", "phase", stats.aborted_tokens
        )
        yield self._counters(
            "attention_path_tokens",
            "Tokens by the form of attention they took.",
            "path",
            stats.attention_path_tokens,
        )
        for name, text, value in (
            ("prefill_context_chunks", "Context chunks of prefill.", stats.prefill_context_chunks),
            ("retractions", "Requests that gave their pages back.", stats.retractions),
            ("nonfinite_requests", "Requests ended by NaN or inf.", stats.nonfinite_requests),
            ("audit_failures", "Audits that found a fault.", stats.audit_failures),
        ):
            yield self._counters(name, text, None, {"": value})
        for name, text, total in (
            ("step_seconds", "Duration of engine steps.", stats.step_s),
            ("step_host_seconds", "Share of it outside the forward pass.", stats.step_host_s),
        ):
            summary = SummaryMetricFamily(PREFIX + name, text, labels=["model_name"])
            summary.add_metric([self._service.model.name], stats.num_steps, total)
            yield summary

    def _infos(self) -> Iterator[Metric]:
        build = {"version": VERSION, "python": platform.python_version()}
        yield self._info("build_info", "Version of the server.", build)
        yield self._info("cache_config_info", "The cache's settings.", self._cache_config())

    def _cache_config(self) -> dict[str, str]:
        model, settings = self._service.model, self._service.settings
        return {
            "page_size": str(model.page_size),
            "kv_tokens": str(model.kv_tokens),
            "kv_dtype": str(model.dims.get("kv_dtype", settings.kv_dtype)),
            "eviction_policy": settings.eviction_policy,
            "cache_scope": settings.cache_scope,
            "enable_prefix_cache": str(not settings.disable_prefix_cache),
        }

    def _vllm_aliases(self) -> Iterator[Metric]:
        """Names that llm-d, smg and dashboards for vLLM look for."""
        metrics, model = self._service.metrics, self._service.model
        slots = self.kv_slots()
        in_use = sum(slots[state] for state in _IN_USE) / max(1, sum(slots.values()))
        for name, text, value in (
            ("vllm:num_requests_running", "As requests_running.", metrics.num_running),
            ("vllm:num_requests_waiting", "As requests_waiting.", metrics.num_waiting),
            ("vllm:kv_cache_usage_perc", "As kv_cache_usage_ratio.", in_use),
        ):
            yield self._gauge(name, text, value, prefix="")
        for counter in (metrics.queries, metrics.hits, metrics.prompt_tokens):
            yield counter.family(f"vllm:{counter.name}", model.name, merged=True)
        yield metrics.generation_tokens.family("vllm:generation_tokens", model.name, merged=True)
        for histogram in (metrics.ttft, metrics.itl, metrics.e2e):
            yield histogram.family(f"vllm:{histogram.name}", model.name, merged=True)
        config = {
            "block_size": str(model.page_size),
            "num_gpu_blocks": str(model.kv_tokens // max(1, model.page_size)),
            "enable_prefix_caching": str(not self._service.settings.disable_prefix_cache),
        }
        yield self._info("vllm:cache_config_info", "As cache_config_info.", config, prefix="")

    def _gauge(
        self, name: str, text: str, value: float, *, prefix: str = PREFIX
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(prefix + name, text, labels=["model_name"])
        family.add_metric([self._service.model.name], value)
        return family

    def _by_label(
        self, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._service.model.name, key], value)
        return family

    def _counters(
        self, name: str, text: str, label: str | None, values: Mapping[str, float]
    ) -> CounterMetricFamily:
        labels = ["model_name"] if label is None else ["model_name", label]
        family = CounterMetricFamily(PREFIX + name, text, labels=labels)
        for key, value in values.items():
            row = [self._service.model.name] if label is None else [self._service.model.name, key]
            family.add_metric(row, value)
        return family

    def _info(
        self, name: str, text: str, labels: Mapping[str, str], *, prefix: str = PREFIX
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(prefix + name, text, labels=["model_name", *labels])
        family.add_metric([self._service.model.name, *labels.values()], 1)
        return family


def make_registry(service: Service) -> CollectorRegistry:
    """A registry of its own: nothing global, no process metrics of other packages."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service))
    return registry
