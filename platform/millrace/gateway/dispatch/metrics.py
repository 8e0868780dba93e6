"""Prometheus metrics of this gateway, of the replicas, of the settler and of the outboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from billing.metering import status
from millrace.gateway.connections.guard import process_guard
from millrace.gateway.dispatch.replica_metrics import ReplicaMetrics
from millrace.gateway.dispatch.replicas import ReplicaRegistry
from tenants.keys.process_throttle import process_throttle

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class GatewayMetrics:
    """The metrics of one gateway process, in separate registries: its own, and those of the replicas."""

    def __init__(self, replicas: ReplicaRegistry, settler: _SettlerStatus | None = None) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "millrace_requests", "answered requests", ["endpoint", "status"], registry=self.registry
        )
        self.in_flight = Gauge("millrace_requests_in_flight", "running executions", registry=self.registry)
        self.time_to_first_token = Histogram(
            "millrace_time_to_first_token_seconds",
            "from a request's arrival at the gateway to its first token",
            ["model"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "millrace_tokens", "tokens served, by billing class", ["model", "token_class"], registry=self.registry
        )
        self.answers = Counter(
            "millrace_answers",
            "answers by the layer that served them: exact, single_flight, prefix (a part of the prompt) or computed",
            ["model", "layer"],
            registry=self.registry,
        )
        self.shadows = Counter(
            "millrace_shadows",
            "requests that a policy selected for a shadow, by the shadow's model and by the code of the reason if it"
            " has not answered",
            ["model", "code"],
            registry=self.registry,
        )
        self.records_lost = Counter(
            "millrace_request_records_lost",
            "request records that were not written, because too many were waiting for the database or it rejected them:"
            " record, content if prompts and completions are stored, or shadow",
            ["record_type"],
            registry=self.registry,
        )
        self.stage_failures = Counter(
            "millrace_stage_failures",
            "internal errors of the stages of requests, such as the answer cache or shadows, by their hook. The request"
            " continues without the stage, or fails if the stage protects something",
            ["stage", "hook"],
            registry=self.registry,
        )
        self.registry.register(process_guard())
        self.registry.register(_WrongKeys())
        self.replicas = ReplicaMetrics(replicas)
        self._replica_registry = CollectorRegistry()
        self._replica_registry.register(self.replicas)
        self.settler = settler or _SettlerStatus()
        self.registry.register(self.settler)
        self.outboxes = _OutboxTotals()
        self.registry.register(self.outboxes)

    async def render(self) -> bytes:
        """Return the metrics in the text format. A thread renders those of the replicas, which may be thousands."""
        return generate_latest(self.registry) + await asyncio.to_thread(generate_latest, self._replica_registry)


class _WrongKeys:
    """The number of wrong API keys that this process received, including those for the management API."""

    def collect(self) -> Iterable[Metric]:
        throttle = process_throttle()
        family = CounterMetricFamily(
            "millrace_wrong_api_keys",
            "wrong API keys at the gateway and its management API: rejected with a 401, throttled with a 429",
            labels=["outcome"],
        )
        family.add_metric(["rejected"], throttle.rejected)
        family.add_metric(["throttled"], throttle.throttled)
        yield family


class _OutboxTotals:
    """The attempts of web jobs to send emails and webhooks, read from Valkey at each scrape."""

    def __init__(self) -> None:
        self.totals: tuple[tuple[str, str, int], ...] = ()  # outbox, outcome, number of attempts

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "millrace_outbox_attempts",
            "attempts to send a message of an outbox (email, invoice_email, webhook): sent, retried (another attempt"
            " follows) or failed (it was the last attempt)",
            labels=["outbox", "outcome"],
        )
        for outbox, outcome, count in self.totals:
            family.add_metric([outbox, outcome], count)
        yield family


class _SettlerStatus:
    """The settler's last status (see billing.metering.settler), read from Valkey at each scrape."""

    def __init__(self) -> None:
        self.status: status.SettlerStatus | None = None

    def collect(self) -> Iterable[Metric]:
        if self.status is None:
            return
        settled, backlog, lag = self.status.settled, self.status.backlog, self.status.lag_ms / 1000
        yield CounterMetricFamily("millrace_usage_events_settled", "usage events settled", value=settled)
        quarantined = self.status.quarantined
        yield CounterMetricFamily(
            "millrace_usage_events_quarantined",
            "quarantined usage messages: unreadable, rejected, for a month without a partition, contradictory",
            value=quarantined,
        )
        yield GaugeMetricFamily("millrace_settlement_backlog", "usage events not settled yet", value=backlog)
        yield GaugeMetricFamily(
            "millrace_settlement_lag_seconds", "age of the oldest usage event not settled yet", value=lag
        )
