"""The fleet's history: a row per minute, and aggregates of a time range."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta

import pytest
import redis

from billing.invoicing.setup import do_add_exchange_rate
from billing.metering import rollups
from billing.models import PriceBook, PriceBookAssignment
from inference_worker.contract import metric_families as families
from inference_worker.contract.messages import encode, metrics_key
from millrace.apps.deployments.fleet_status import read_fleet_status
from millrace.apps.health import history
from millrace.apps.health.costs import costs, do_set_machine_cost
from millrace.apps.health.models import ReplicaSample
from tenants.actions import ActionRefused, do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry
from tests.support.billing.books import rate_card
from tests.support.deployments.heartbeats import metrics
from tests.support.frontend.console import meter
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def counted(**counts: float) -> dict[str, float]:
    return {getattr(families, name): value for name, value in counts.items()}


def test_a_row_is_written_per_minute(speak: Callable[..., None]) -> None:
    for minute in range(3):
        counts = counted(
            PROMPT_TOKENS=1000 * minute,
            GENERATION_TOKENS=500 * minute,
            CACHE_QUERIES=1000 * minute,
            CACHE_HITS=250 * minute,
            PREEMPTIONS=minute,
            FORWARD_SECONDS=30 * minute,
        )
        speak("m-0.aa", metrics=metrics(counts), cpu_seconds=120.0 * minute, waiting=minute)
        assert history.sample(read_fleet_status(), NOON + minute * MINUTE) == 1
        assert history.sample(read_fleet_status(), NOON + minute * MINUTE + timedelta(seconds=20)) == 0
    with all_tenants_scope(BypassReason.OPERATOR):
        first, second, third = history.span(NOON, NOON + 3 * MINUTE, MINUTE)
        (whole,) = history.span(NOON, NOON + 3 * MINUTE, timedelta(hours=1))
    assert (first.tokens, first.forward, first.hits) == (0, None, None)  # no earlier value
    assert (second.tokens, second.forward, second.cpu, second.hits) == (1500, 5000, 5000, 2500)
    assert (third.waiting, third.kv_used, third.preemptions, third.mfu) == (2, 2500, 1, 2500)
    assert (whole.tokens, whole.preemptions, whole.minutes, whole.waiting) == (3000, 2, 3, 2)


def test_metrics_are_read_beside_the_heartbeats(broker: redis.Redis, speak: Callable[..., None]) -> None:
    speak("m-0.aa", metrics=None)
    assert history.sample(read_fleet_status(), NOON) == 0, "the metrics of a loaded replica are not known"
    broker.set(metrics_key("m-0.aa"), encode(metrics(counted(PROMPT_TOKENS=900), ttft={4: 100})))
    board = read_fleet_status()
    assert history.sample(board, NOON) == 1
    assert unscoped(ReplicaSample).get().prompt_tokens == 900
    with all_tenants_scope(BypassReason.OPERATOR):
        assert history.ttft_p95(board.replicas, NOON + MINUTE) == {"m-0.aa": 195_000}
    speak("m-1.bb", metrics=None, machine=None)
    assert history.sample(read_fleet_status(), NOON + MINUTE) == 2, "a replica that is not loaded has a sample"


def test_a_restarted_workers_counters_start_at_zero(speak: Callable[..., None]) -> None:
    speak("m-0.aa", metrics=metrics(counted(PROMPT_TOKENS=900)))
    history.sample(read_fleet_status(), NOON)
    speak("m-0.aa", age_ms=10_000, metrics=metrics(counted(PROMPT_TOKENS=900)))  # it is dead, so it has no row
    for minute in (1, 2):
        speak("m-0.bb", metrics=metrics(counted(PROMPT_TOKENS=100 * minute)))
        history.sample(read_fleet_status(), NOON + minute * MINUTE)
    with all_tenants_scope(BypassReason.OPERATOR):
        points = history.span(NOON, NOON + 3 * MINUTE, MINUTE)
    assert [(point.worker, point.tokens) for point in points] == [("m-0", 0), ("m-0", 0), ("m-0", 100)]


def test_p95_is_computed_for_the_requested_time(speak: Callable[..., None]) -> None:
    speak("m-0.aa", metrics=metrics(ttft={20: 1000}))  # the start was slow
    history.sample(read_fleet_status(), NOON)
    speak("m-0.aa", metrics=metrics(ttft={20: 1000, 4: 90, 5: 10}))
    speak("m-1.bb", metrics=metrics(ttft={4: 100}))
    speak("m-2.cc")
    board = read_fleet_status()
    with all_tenants_scope(BypassReason.OPERATOR):
        found = history.ttft_p95(board.replicas, NOON - MINUTE)
    # Buckets 4 and 5 end at 200 and 300 ms: 90 of 100 are in the first, half of the ten others are below the 95th.
    assert found == {"m-0.aa": 250_000, "m-1.bb": 195_000}


def test_old_rows_are_deleted(speak: Callable[..., None]) -> None:
    speak("m-0.aa")
    history.sample(read_fleet_status(), NOON)
    history.sample(read_fleet_status(), NOON + history.RETENTION)
    assert history.purge_expired(NOON + history.RETENTION + MINUTE) == 1
    assert [row.sampled_at for row in unscoped(ReplicaSample).all()] == [NOON + history.RETENTION]


def test_the_models_of_one_worker_are_separate_and_versions_are_not(speak: Callable[..., None]) -> None:
    for minute in range(3):
        for replica, model in (("w-0.aa-1", "m"), ("w-0.aa-2", "m"), ("w-0.aa-3", "n")):
            speak(replica, metrics=metrics(counted(PROMPT_TOKENS=100 * minute)), model=model)
        history.sample(read_fleet_status(), NOON + minute * MINUTE)
    with all_tenants_scope(BypassReason.OPERATOR):
        points = history.span(NOON, NOON + 3 * MINUTE, timedelta(hours=1))
        found = costs(NOON, NOON + timedelta(hours=1))
    assert [(point.worker, point.model, point.tokens, point.minutes) for point in points] == [
        ("w-0", "m", 400, 3),
        ("w-0", "n", 200, 3),
    ]
    assert [(cost.model, cost.served, cost.machine_minutes) for cost in found] == [("m", 400, 3), ("n", 200, 3)]


def test_running_workers_of_one_name_are_separate_and_each_machine_has_its_cost(speak: Callable[..., None]) -> None:
    for minute in range(3):
        speak("m-0.aa-1", metrics=metrics(counted(PROMPT_TOKENS=100 * minute)), model="m")
        speak("m-0.bb-1", metrics=metrics(counted(PROMPT_TOKENS=10 * minute)), model="m")
        history.sample(read_fleet_status(), NOON + minute * MINUTE)
    with all_tenants_scope(BypassReason.OPERATOR):
        (both,) = history.span(NOON, NOON + 3 * MINUTE, timedelta(hours=1))
        apart = history.span(NOON, NOON + 3 * MINUTE, timedelta(hours=1), ["m-0.aa", "m-0.bb"])
        first = history.span(NOON, NOON + 3 * MINUTE, timedelta(hours=1), ["m-0.aa"])
        (found,) = costs(NOON, NOON + timedelta(hours=1))
    assert (both.worker, both.process, both.tokens, both.minutes) == ("m-0", "", 220, 6)
    assert [(point.process, point.tokens, point.minutes) for point in apart] == [("m-0.aa", 200, 3), ("m-0.bb", 20, 3)]
    assert [(point.process, point.tokens) for point in first] == [("", 20), ("m-0.aa", 200)]
    assert (found.served, found.machine_minutes) == (220, 6)


def test_revenue_in_other_currencies_is_converted_to_dollars(
    speak: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    speak("m-0.aa", metrics=metrics(counted(PROMPT_TOKENS=100)), model="m")
    history.sample(read_fleet_status(), NOON)
    euros, dollars, other = (do_create_tenant(name, name) for name in ("euros", "dollars", "other"))
    with all_tenants_scope(BypassReason.PRICES):
        for tenant, currency in ((euros, "EUR"), (other, "SEK")):
            book = PriceBook.objects.create(name=currency.lower(), currency=currency)
            PriceBookAssignment.objects.create(tenant=tenant, book=book)
    do_add_exchange_rate(currency="EUR", on=date(2020, 1, 1), micro_per_usd=500_000)
    version = rate_card("m")
    for tenant in (euros, dollars, other):
        meter(tenant, at=NOON, model="m", uncached=10**6, price_version=version)  # costs 3
    monkeypatch.setattr(rollups, "MARGIN", timedelta(seconds=-5))
    rollups.build()
    with all_tenants_scope(BypassReason.OPERATOR):
        (found,) = costs(NOON, NOON + timedelta(hours=1))
    assert (found.revenue, found.billed) == (9 * 10**15, 2 * 10**6)  # there is no rate of SEK


def test_the_cost_of_tokens_follows_the_machine_cost(speak: Callable[..., None]) -> None:
    for minute in range(60):
        for worker in ("m-0.aa", "m-1.bb"):
            speak(worker, metrics=metrics(counted(PROMPT_TOKENS=100_000 * minute)), model="m")
        history.sample(read_fleet_status(), NOON + minute * MINUTE)
    with all_tenants_scope(BypassReason.OPERATOR):
        (before,) = costs(NOON, NOON + timedelta(hours=1))
    assert (before.cost, before.cost_per_million, before.price_per_million) == (None, None, None)
    do_set_machine_cost("m", 590_000_000)
    with all_tenants_scope(BypassReason.OPERATOR):
        (after,) = costs(NOON + 30 * MINUTE, NOON + timedelta(hours=1))
    assert (after.machine_minutes, after.served) == (120, 2 * 59 * 100_000)
    assert after.cost == 2 * 590_000_000 * 10**6
    assert after.cost_per_million == 10**14  # ten cents
    do_set_machine_cost("m", 1)
    entries = unscoped(AuditEntry).order_by("id")
    assert [(entry.action, entry.before, entry.after) for entry in entries] == [
        ("machine_cost.updated", None, {"model": "m", "nano_per_hour": 590_000_000}),
        ("machine_cost.updated", {"nano_per_hour": 590_000_000}, {"nano_per_hour": 1}),
    ]
    with pytest.raises(ActionRefused):
        do_set_machine_cost("m", -1)
