"""The output of /metrics, parsed with Prometheus' own parser."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from inference_worker.contract import metric_families as families
from inference_worker.contract.messages import Heartbeat, encode
from inference_worker.contract.metric_families import HistogramSnapshot, MetricsSnapshot
from millrace.gateway.core.cors import CrossOrigin
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.dispatch.replicas import ReplicaRegistry
from millrace.gateway.http.endpoints.health import MetricsEndpoint
from tenants.outbox.totals import read_totals
from tests.support.engine.fakes import fake_engine, request, run


def engine_snapshot(max_tokens: int = 4) -> MetricsSnapshot:
    engine, _ = fake_engine(20)
    for name in ("a", "b"):
        engine.add_request(request(name, 32, max_tokens=max_tokens))
        run(engine)
    return engine.metrics.snapshot()


def board_of(**replicas: Heartbeat) -> ReplicaRegistry:
    """Return a replica table with these live replicas, whose heartbeats came through the broker."""
    board = ReplicaRegistry(lambda: 0.0)
    for beat in (1, 2):
        payloads = {name.encode(): encode(heartbeat_with(heartbeat, beat)) for name, heartbeat in replicas.items()}
        board.update(payloads)
    return board


def heartbeat_with(like: Heartbeat, beat: int) -> Heartbeat:
    return Heartbeat(beat, *(getattr(like, name) for name in Heartbeat.__struct_fields__[1:]))


def heartbeat(metrics: MetricsSnapshot | None, model: str = "m") -> Heartbeat:
    return Heartbeat(0, model, True, False, 3, 2, 8, 10, 4, metrics)


def scrape(board: ReplicaRegistry, **snapshots: MetricsSnapshot) -> dict[str, Metric]:
    """Return the metrics of /metrics. `snapshots` are those that replicas have written beside their heartbeats."""
    metrics = GatewayMetrics(board)
    metrics.replicas.update(snapshots)
    parsed = list(text_string_to_metric_families(asyncio.run(metrics.render()).decode()))
    assert len({metric.name for metric in parsed}) == len(parsed)
    return {metric.name: metric for metric in parsed}


def values(metric: Metric, sample: str, *labels: str) -> dict[tuple[str, ...], float]:
    return {tuple(s.labels[label] for label in labels): s.value for s in metric.samples if s.name == sample}


def test_counters_are_totals_by_model_and_replica() -> None:
    board = board_of(one=heartbeat(None), two=heartbeat(None, model="other"))
    scraped = scrape(board, one=engine_snapshot(), two=engine_snapshot(2))
    tokens = scraped["vllm:generation_tokens"]
    assert tokens.type == "counter"
    assert values(tokens, "vllm:generation_tokens_total", "model_name", "engine") == {
        ("m", "one"): 8, ("other", "two"): 4
    }  # fmt: skip
    ended = values(scraped["vllm:request_success"], "vllm:request_success_total", "engine", "finished_reason")
    assert (ended["one", "length"], ended["one", "stop"]) == (2, 0)
    classes = values(
        scraped["millrace_engine_tokens"], "millrace_engine_tokens_total", "model", "replica", "token_class"
    )
    assert (classes["m", "one", "uncached"], classes["m", "one", "cache_read"]) == (32, 32)


def test_histograms_are_cumulative_and_add_up() -> None:
    scraped = scrape(board_of(one=heartbeat(None)), one=engine_snapshot())
    steps = scraped["vllm:iteration_tokens_total"]
    assert steps.type == "histogram"
    # Two prompts, of 32 tokens and then of the 16 that were not cached, and three decodes each.
    buckets = values(steps, "vllm:iteration_tokens_total_bucket", "le")
    assert (buckets[("1.0",)], buckets[("8.0",)], buckets[("16.0",)], buckets[("32.0",)]) == (6, 6, 7, 8)
    assert buckets[("+Inf",)] == 8
    assert values(steps, "vllm:iteration_tokens_total_count", "engine") == {("one",): 8}
    assert values(steps, "vllm:iteration_tokens_total_sum", "engine") == {("one",): 32 + 16 + 6}
    for family in families.HISTOGRAMS:
        counts = list(values(scraped[family.name], f"{family.name}_bucket", "le").values())
        assert counts == sorted(counts)
        assert [counts[-1]] == list(values(scraped[family.name], f"{family.name}_count").values())


def test_gauges_are_the_heartbeats() -> None:
    scraped = scrape(board_of(one=heartbeat(None)), one=engine_snapshot())
    assert values(scraped["vllm:num_requests_running"], "vllm:num_requests_running", "engine") == {("one",): 3}
    assert values(scraped["vllm:num_requests_waiting"], "vllm:num_requests_waiting", "engine") == {("one",): 2}
    assert values(scraped["vllm:kv_cache_usage_perc"], "vllm:kv_cache_usage_perc", "engine") == {("one",): 0.4}
    assert values(scraped["millrace_mfu_ratio"], "millrace_mfu_ratio", "replica") == {("one",): 0}


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        MetricsSnapshot({"vllm:something_new": {"": 1}}, {}, {families.TTFT: HistogramSnapshot([1, 2], 3.0)}),
    ],
)
def test_a_worker_of_another_version_hides_no_other_metrics(metrics: MetricsSnapshot | None) -> None:
    scraped = scrape(board_of(one=heartbeat(engine_snapshot()), strange=heartbeat(metrics)))
    assert values(scraped[families.TTFT], f"{families.TTFT}_count", "engine") == {("one",): 2}
    assert values(scraped["vllm:num_requests_running"], "vllm:num_requests_running", "engine") == {
        ("one",): 3, ("strange",): 3
    }  # fmt: skip


def test_workers_of_an_earlier_release_send_metrics_with_each_heartbeat() -> None:
    scraped = scrape(board_of(old=heartbeat(engine_snapshot()), new=heartbeat(None)), new=engine_snapshot(2))
    tokens = values(scraped["vllm:generation_tokens"], "vllm:generation_tokens_total", "engine")
    assert tokens == {("old",): 8, ("new",): 4}


def test_lost_replicas_have_no_metrics() -> None:
    board = board_of(one=heartbeat(None))
    board.update({})
    scraped = scrape(board, one=engine_snapshot())
    assert not [metric.name for metric in scraped.values() if metric.name.startswith("vllm:") and metric.samples]


def test_attempts_of_the_outboxes_are_counters() -> None:
    metrics = GatewayMetrics(board_of())
    metrics.outboxes.totals = tuple(read_totals({b"webhook:failed": b"1", b"email:sent": b"2"}))
    parsed = {metric.name: metric for metric in text_string_to_metric_families(asyncio.run(metrics.render()).decode())}
    attempts = values(parsed["millrace_outbox_attempts"], "millrace_outbox_attempts_total", "outbox", "outcome")
    assert attempts == {("email", "sent"): 2, ("webhook", "failed"): 1}


async def fetched(monkeypatch: pytest.MonkeyPatch, token: str, client: str, sent: str = "") -> tuple[int, bytes]:
    """Return status and body of GET /metrics from this address."""

    async def nothing() -> None: ...

    settings = SimpleNamespace(metrics_token=token, max_request_body_bytes=10)
    gateway = SimpleNamespace(
        settings=settings,
        metrics=GatewayMetrics(board_of()),
        read_metrics=nothing,
        cross_origin=CrossOrigin((), None),  # type: ignore[arg-type]  # no database: no request is a preflight
    )
    monkeypatch.setattr("millrace.gateway.http.consumer.running_gateway", lambda: gateway)
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/metrics", "client": (client, 1)}
    scope |= {"headers": [(b"authorization", sent.encode())], "url_route": {"kwargs": {}}}
    waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    waiting.put_nowait({"type": "http.request", "body": b""})
    answer: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        answer.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            waiting.put_nowait({"type": "http.disconnect"})

    await MetricsEndpoint.as_asgi()(scope, waiting.get, send)
    return answer[0]["status"], b"".join(message.get("body", b"") for message in answer[1:])


@pytest.mark.parametrize(
    ("token", "client", "sent", "status"),
    [
        ("", "127.0.0.1", "", 200),
        ("", "::1", "", 200),
        ("", "::ffff:127.0.0.1", "", 200),
        ("", "192.0.2.7", "", 403),
        ("", "192.0.2.7", "Bearer ", 403),
        ("secret", "192.0.2.7", "Bearer secret", 200),
        ("secret", "192.0.2.7", "Bearer secre", 401),
        ("secret", "127.0.0.1", "", 401),
    ],
)
async def test_metrics_require_localhost_or_the_token(
    monkeypatch: pytest.MonkeyPatch, token: str, client: str, sent: str, status: int
) -> None:
    got, body = await fetched(monkeypatch, token, client, sent)
    assert got == status
    assert (b"millrace_requests_total" in body) == (status == 200)
