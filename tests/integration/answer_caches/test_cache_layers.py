"""Requests, tokens and savings by cache layer."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from millrace.apps.answer_caches import tasks as cache_tasks
from millrace.apps.answer_caches.answer_keys import answer_key, index_key
from millrace.apps.answer_caches.cache_layers import CacheLayers, LayerUsage, cache_layers
from millrace.apps.answer_caches.models import SemanticEntry, SemanticEvidence
from millrace.apps.request_log.models import CacheLayer
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant
from tests.support.request_log.records import END, NOW, START, record, settle
from tests.support.tenants.management_api import by_key

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]


def layers_of(tenant: Tenant) -> CacheLayers:
    with tenant_scope(tenant):
        return cache_layers(tenant.pk, START, END)


def make_requests(tenant: Tenant) -> None:
    rows: tuple[tuple[str, str, int, int, dict[str, int]], ...] = (
        ("computed", "", 900, 0, {"uncached": 100, "cache_write_5m": 10, "output": 20}),
        ("prefix", "", 800, 70, {"uncached": 30, "cache_read": 70, "output": 5}),
        ("exact", "req_000", 40, 500, {"answer_hit_input": 100, "answer_hit_output": 20}),
        ("exact", "req_gone", 30, 500, {"answer_hit_input": 8, "answer_hit_output": 2}),
        ("single_flight", "req_000", 850, 300, {"answer_hit_input": 100, "answer_hit_output": 20}),
        ("semantic", "req_000", 100, 400, {"answer_hit_input": 90, "answer_hit_output": 20}),
    )
    for number, (layer, source, total_ms, saved, tokens) in enumerate(rows):
        record(tenant, number, cache_layer=layer, cache_source=source, total_ms=total_ms)
        settle(tenant, f"req_{number:03}", saved, **tokens)


def test_each_layer_has_its_requests_tokens_and_savings(acme: Tenant) -> None:
    make_requests(acme)
    record(acme, 10, outcome="failed")  # its layer is not known
    record(acme, 11, cache_layer="computed", started_at=START - timedelta(minutes=1))
    record(acme, 12, cache_layer="computed", started_at=END)
    record(acme, 13, cache_layer="prefix")
    settle(acme, "req_013", 200, host_tokens=64, uncached=10, cache_read=200, output=1)
    settle(acme, "req_000.1", 1, uncached=7, output=3)  # another prompt of the first request
    found = layers_of(acme)
    assert found.layers == (
        LayerUsage(CacheLayer.EXACT, 2, 108, 22, 1000, 860),  # 900 - 40 ms; the other source is not known
        LayerUsage(CacheLayer.SINGLE_FLIGHT, 1, 100, 20, 300, 0),
        LayerUsage(CacheLayer.SEMANTIC, 1, 90, 20, 400, 800),
        LayerUsage(CacheLayer.PREFIX, 1, 70 + 200 - 64, 0, 70, 0),
        LayerUsage(CacheLayer.HOST_MEMORY, 1, 64, 0, 200, 0),
        LayerUsage(CacheLayer.COMPUTED, 1, 157, 29, 1, 0),
    )
    assert (found.requests, found.hits, found.hit_rate) == (7, 4, 4 / 7)
    assert (found.saved_femto, found.saved_ms) == (1971, 1660)


def test_usage_of_a_request_without_a_settled_event_is_zero(acme: Tenant) -> None:
    record(acme, 0, cache_layer="exact", cache_source="req_x")
    assert layers_of(acme).layers[0] == LayerUsage(CacheLayer.EXACT, requests=1)


def test_other_tenants_are_not_counted(acme: Tenant) -> None:
    other = actions.do_create_tenant("other", "Other")
    make_requests(acme)
    record(other, 0, cache_layer="exact", cache_source="req_000")  # the source is another tenant's
    found = layers_of(other)
    assert (found.requests, found.saved_ms, found.saved_femto) == (1, 0, 0)
    with tenant_scope(other):  # also by row-level security
        assert cache_layers(acme.pk, START, END).requests == 0


def test_api(acme: Tenant) -> None:
    make_requests(acme)
    client = by_key(acme)
    times: dict[str, Any] = {"from": START.isoformat(), "to": END.isoformat()}
    response = client.get("/api/requests/cache-layers", times)
    assert response.status_code == 200
    found = response.json()
    assert [row["layer"] for row in found["layers"]] == CacheLayer.values
    assert found["layers"][0] == {
        "layer": "exact",
        "requests": 2,
        "input_tokens": 108,
        "output_tokens": 22,
        "saved_usd": "0.000000000001",
        "saved_ms": 860,
    }
    assert (found["requests"], found["hits"], found["hit_rate"]) == (6, 4, 4 / 6)
    assert found["semantic"]["max_error_percent"] == 0
    assert found["misses"] == []
    assert client.get("/api/requests/cache-layers?from=2020-01-01&to=2026-01-01").status_code == 400
    story = client.get("/api/requests/req_002").json()["record"]
    assert (story["cache_layer"], story["cache_source"]) == ("exact", "req_000")


def test_the_error_estimate_of_the_semantic_cache_has_its_bound(acme: Tenant) -> None:
    actions.do_set_answer_cache(acme, semantic_max_error_percent=5)
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        for band, correct, wrong in ((3, 400, 2), (2, 10, 5)):
            SemanticEvidence.objects.all_tenants().create(
                tenant_id=acme.pk, embedding="e", band=band, correct=correct, wrong=wrong, updated_at=NOW
            )
        SemanticEvidence.objects.all_tenants().create(  # of an earlier embedding deployment
            tenant_id=acme.pk, embedding="old", band=3, correct=0, wrong=50, updated_at=NOW - timedelta(days=1)
        )
    record(acme, 0, route={"answer_cache": {"miss": "not_cached", "semantic": {"miss": "margin"}}})
    record(acme, 1, route={"answer_cache": {"miss": "not_cached"}})
    record(acme, 2, route={"answer_cache": {"layer": "exact"}})
    times: dict[str, Any] = {"from": START.isoformat(), "to": END.isoformat()}
    found = by_key(acme).get("/api/requests/cache-layers", times).json()
    semantic = found["semantic"]
    assert [band["is_served"] for band in semantic["bands"]] == [False, False, False, True]
    assert semantic["error_rate"] == pytest.approx(2 / 402)
    assert 2 / 402 < semantic["upper_bound"] <= 0.05
    assert (semantic["missing_checks"], semantic["questions"]) == (0, 0)
    assert found["misses"] == [{"reason": "not_cached", "requests": 1}, {"reason": "semantic_margin", "requests": 1}]


def delete_and_restore(tenant: Tenant) -> None:
    actions.do_delete_tenant(tenant)
    actions.do_restore_tenant(tenant)


def delete_and_purge(tenant: Tenant) -> None:
    actions.do_delete_tenant(tenant)
    assert actions.do_purge_tenant(tenant, now=datetime.now(UTC) + timedelta(days=400))


@pytest.mark.parametrize(
    ("change", "keeps"),
    [
        (lambda tenant: None, True),
        (actions.do_suspend_tenant, True),
        (delete_and_restore, True),
        (actions.do_delete_tenant, False),
        (delete_and_purge, False),
        (lambda tenant: actions.do_set_answer_cache(tenant, seconds=0), False),
    ],
    ids=["nothing", "suspended", "restored", "deleted", "purged", "cache off"],
)
def test_the_next_job_deletes_the_answers_of_a_tenant_that_is_deleted(
    acme: Tenant, broker: redis.Redis, monkeypatch: pytest.MonkeyPatch, change: Any, keeps: bool
) -> None:
    monkeypatch.setattr(cache_tasks, "DELETE_BATCH_SIZE", 2)
    kept = actions.do_create_tenant("kept", "Kept")
    for tenant in (acme, kept):
        actions.do_set_answer_cache(tenant, seconds=3600, semantic_max_error_percent=5)
        actions.do_set_content_retention(tenant, 1)
        store_question(tenant, b"current")
        for number in range(5):
            name = answer_key(tenant.pk, f"{number:064}")
            broker.set(name, b"sealed", ex=3600)
            broker.zadd(index_key(tenant.pk), {name: time.time() + 3600})
    change(acme)
    assert cache_tasks.purge_answers() == (0 if keeps else 1)
    left = {tenant.pk: len(broker.keys(answer_key(tenant.pk, "*"))) for tenant in (acme, kept)}
    assert left == {acme.pk: 5 if keeps else 0, kept.pk: 5}
    assert broker.exists(index_key(acme.pk)) == keeps
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        assert SemanticEntry.objects.all_tenants().filter(tenant_id=acme.pk).exists() is keeps
        assert SemanticEntry.objects.all_tenants().filter(tenant_id=kept.pk).exists()


def store_question(tenant: Tenant, name: bytes, lifetime: timedelta = timedelta(hours=1)) -> None:
    digests = dict.fromkeys(("vector", "answer_digest", "answer_vector", "question", "answer"), b"x")
    now = datetime.now(UTC)
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        SemanticEntry.objects.all_tenants().create(
            tenant_id=tenant.pk,
            scope=b"s",
            question_digest=name,
            answer_group=1,
            request_id="req_1",
            created_at=now - timedelta(minutes=1),
            expires_at=now + lifetime,
            **digests,
        )


def test_questions_are_deleted_with_the_consent_of_the_tenant(acme: Tenant) -> None:
    kept = actions.do_create_tenant("kept", "Kept")

    def count() -> int:
        cache_tasks.purge_answers()
        with all_tenants_scope(BypassReason.HOUSEKEEPING):
            return int(SemanticEntry.objects.all_tenants().count())

    for tenant in (acme, kept):
        actions.do_set_answer_cache(tenant, seconds=3600, semantic_max_error_percent=5)
        actions.do_set_content_retention(tenant, 1)
        store_question(tenant, b"current")
        store_question(tenant, b"expired", timedelta(seconds=-1))
    assert count() == 2
    actions.do_set_content_retention(acme, 0)
    assert count() == 1
    actions.do_set_answer_cache(kept, semantic_max_error_percent=0)
    assert count() == 0
