"""Costs of settled executions: worked examples, the usage API and CSV."""

from __future__ import annotations

import csv
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import StringIO

import pytest
from django.db import connection
from rest_framework.test import APIClient

from billing.invoicing import checks, document
from billing.metering.ingest import UsageMessage, settle
from billing.models import Invoice, InvoiceLine, Price, UsageEvent, UsageQuarantine
from billing.rates.pricing import COMPONENTS, Tier
from inference_worker.contract.messages import encode
from tenants.actions import do_create_api_key
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tests.support.billing.books import invoiced
from tests.support.billing.published_prices import A, publish, usd
from tests.support.rows import only_project, unscoped

pytestmark = pytest.mark.django_db
HIT = {"answer_hit_input": "0.30", "answer_hit_output": "1.50"}
NOW = datetime.now(UTC)


def settled(*events) -> list[UsageEvent]:
    settle([UsageMessage(f"{n}-0", encode(each)) for n, each in enumerate(events)])
    return [unscoped(UsageEvent).get(request_id=each.billing_context.request_id) for each in events]


@pytest.fixture
def client(acme) -> APIClient:
    _, secret = do_create_api_key(only_project(acme), "k", scopes=("manage",))
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return client


def rated_lines(tenant: int) -> list[tuple[str, int, int, int]]:
    with tenant_scope(tenant), connection.cursor() as cursor:
        cursor.execute(
            "SELECT component, price_id, tokens, femto FROM billing_rated_line ORDER BY admitted_at, price_id"
        )
        return [(component, price, tokens, int(femto)) for component, price, tokens, femto in cursor.fetchall()]


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        ({"uncached": 3, "cache_read": 0, "cache_write_5m": 12_304, "output": 550}, "0.054399"),
        (
            {"uncached": 1000, "cache_write_5m": 2048, "cache_write_1h": 4096, "cache_read": 100_000, "output": 500},
            "0.072756",
        ),
    ],
)
def test_worked_examples_1_and_2_after_settlement(event, usage, cost):
    (row,) = settled(event(model="m", price_version=publish(A), **usage))
    assert usd(row.cost_femto) == Decimal(cost)
    lines = rated_lines(1)
    assert sum(femto for *_, femto in lines) == row.cost_femto
    assert {component: tokens for component, _, tokens, _ in lines} == {name: n for name, n in usage.items() if n}


def test_searches_are_invoiced_like_tokens(acme, client, event):
    version = publish({"uncached": "0.05", "searches": "2000"})
    used = {"tenant_id": acme.pk, "uncached": 1000, "cache_read": 0, "output": 0, "at": NOW, "price_version": version}
    rows = settled(*(event(model="m", searches=searches, **used) for searches in (3, 2)))
    assert [usd(row.cost_femto) for row in rows] == [Decimal("0.00605"), Decimal("0.00405")]
    assert sorted((component, tokens) for component, _, tokens, _ in rated_lines(acme.pk)) == [
        ("searches", 2),
        ("searches", 3),
        ("uncached", 1000),
        ("uncached", 1000),
    ]
    assert client.get("/api/usage").json()["total"]["searches"] == 5
    found = client.get("/api/usage/events").json()["results"]
    assert {row["searches"] for row in found} == {2, 3}
    assert {line["component"] for line in found[0]["lines"]} == {"uncached", "searches"}
    invoice = invoiced(acme, NOW)
    lines = {line.component: line for line in unscoped(InvoiceLine).filter(invoice_id=invoice.pk)}
    assert (lines["searches"].tokens, lines["searches"].events, lines["searches"].cents) == (5, 2, 1)
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get(pk=invoice.pk)
        result = checks.check(row)
    assert (result.unrated, result.same_data, result.same_pdf) == (0, True, True)
    texts = document.in_words(document.describe_invoice(row, [lines["uncached"], lines["searches"]]))
    assert texts["groups"][0]["lines"][1]["what"] == "Searches"


def test_worked_example_5_batch_at_half(event):
    version = publish({name: str(Decimal(each) / 2) for name, each in A.items()}, Tier.BATCH)
    (row,) = settled(event(model="m", price_version=version, uncached=10_000, cache_read=0, output=2_000))
    assert usd(row.cost_femto) == Decimal("0.03")


def test_the_price_pinned_at_admission_is_used_and_its_tier_is_on_the_invoice(acme, event):
    standard, half = publish(A), publish({name: str(Decimal(each) / 2) for name, each in A.items()}, Tier.BATCH)
    used = {"tenant_id": acme.pk, "uncached": 10_000, "cache_read": 0, "output": 2000, "at": NOW}
    dear, cheap = settled(event(price_version=standard, **used), event(price_version=half, **used))
    assert (usd(dear.cost_femto), usd(cheap.cost_femto)) == (Decimal("0.06"), Decimal("0.03"))
    invoice = invoiced(acme, NOW)
    lines = unscoped(InvoiceLine).filter(invoice_id=invoice.pk)
    found = {(line.tier, line.component): line.cents for line in lines if line.component}
    assert found == {
        ("standard", "uncached"): 3,
        ("standard", "output"): 3,
        ("batch", "uncached"): 2,  # 1.5 cents, half up
        ("batch", "output"): 2,
    }


def test_worked_example_11_a_price_change_makes_two_lines(event):
    old = publish(A, at=NOW - timedelta(hours=1))
    new = publish(A | {"uncached": "2.5"})
    of_m = {"model": "m", "uncached": 1_000_000, "cache_read": 0, "output": 0}
    rows = settled(event(price_version=old, **of_m), event(price_version=new, **of_m))
    assert [usd(row.cost_femto) for row in rows] == [3, Decimal("2.5")]
    assert len({price for _, price, *_ in rated_lines(1)}) == 2


def test_the_pinned_version_is_used_for_late_settlements(event):
    old = publish(A)
    publish(A | {"output": "99"})
    (row,) = settled(event(model="m", price_version=old, uncached=0, cache_read=0, output=1_000_000))
    assert usd(row.cost_femto) == 15


def test_a_failed_execution_costs_nothing(event):
    (row,) = settled(event(model="m", price_version=publish(A), outcome="failed"))
    assert (row.cost_femto, row.price_ids, rated_lines(1)) == (0, None, [])


@pytest.mark.parametrize("version", ["unknown", "lacks output"])
def test_an_event_without_a_price_is_quarantined(event, version):
    pinned = publish({"uncached": "1", "cache_read": "1"}) + (1000 if version == "unknown" else 0)
    outcome = settle([UsageMessage("1-0", encode(event(model="m", price_version=pinned)))])
    assert (outcome.settled, outcome.quarantined) == (0, 1)
    assert "price" in unscoped(UsageQuarantine).get().detail


def test_the_cost_is_independent_of_order_and_repetition(event):
    version = publish(A | HIT)
    chance = random.Random(3)
    events = [
        event(model="m", price_version=version, answer_hit_input=chance.randrange(9), output=chance.randrange(500))
        for _ in range(50)
    ]
    again = events * 3
    chance.shuffle(again)
    for start in range(0, len(again), 17):
        settle([UsageMessage(f"{start}-{n}", encode(each)) for n, each in enumerate(again[start : start + 17])])
    with all_tenants_scope(BypassReason.COMMAND):
        prices = Price.objects.in_bulk()
    total = 0
    for row in unscoped(UsageEvent).all():
        counts = {name: getattr(row, name) for name in COMPONENTS}
        total += sum(
            counts[name] * prices[price].nano_per_million
            for name, price in zip(COMPONENTS, row.price_ids, strict=True)
            if price
        )
    assert total == sum(row.cost_femto for row in unscoped(UsageEvent).all())
    assert total == sum(femto for *_, femto in rated_lines(1))
    assert len(unscoped(UsageEvent).all()) == 50


def test_usage_contains_costs_savings_and_miss_reasons(acme, client, event):
    version = publish(A | HIT)
    of_acme = {"tenant_id": acme.pk, "model": "m", "price_version": version}
    settled(
        event(uncached=0, cache_read=1_000_000, output=0, **of_acme),
        event(uncached=1000, cache_read=0, output=100, miss_reason="prefix_changed", changed_at=77, **of_acme),
        event(uncached=0, cache_read=0, output=0, answer_hit_output=1_000_000, unpinned_tokens=64, **of_acme),
    )
    answer = client.get("/api/usage", {"group_by": "miss_reason,tier"}).json()
    hits, missed = answer["rows"]
    assert (hits["miss_reason"], hits["tier"]) == ("", "standard")
    assert hits["cost"] == {"usd": "1.80", "saved_usd": "16.20"}
    assert hits["answer_hits"] == {"input": 0, "output": 1_000_000}
    assert hits["unpinned_tokens"] == 64
    assert missed["miss_reason"] == "prefix_changed"
    assert missed["cost"] == {"usd": "0.0045", "saved_usd": "0.00"}
    assert answer["total"]["cost"] == {"usd": "1.8045", "saved_usd": "16.20"}


def test_an_event_contains_its_priced_components(acme, client, event):
    settled(
        event(
            **{"tenant_id": acme.pk, "model": "m", "price_version": publish(A), "miss_reason": "prefix_changed"},
            **{"uncached": 1000, "cache_read": 9000, "output": 500, "changed_at": 77},
        )
    )
    (found,) = client.get("/api/usage/events").json()["results"]
    assert found["cost"] == {"usd": "0.0132", "saved_usd": "0.0243"}
    shown = [(line["component"], line["tokens"], line["usd_per_million"], line["usd"]) for line in found["lines"]]
    assert shown == [
        ("uncached", 1000, "3.00", "0.003"),
        ("cache_read", 9000, "0.30", "0.0027"),
        ("output", 500, "15.00", "0.0075"),
    ]
    assert (found["miss_reason"], found["changed_at"]) == ("prefix_changed", 77)


def test_usage_and_events_as_csv(acme, client, event):
    of_acme = {"tenant_id": acme.pk, "model": "m", "price_version": publish(A)}
    settled(event(uncached=1000, cache_read=0, output=0, **of_acme), event(tenant_id=acme.pk, outcome="failed"))
    response = client.get("/api/usage", {"format": "csv", "bucket": "day"})
    assert response["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(StringIO(response.content.decode())))
    assert [(row["model"], row["cost_usd"], row["requests_failed"]) for row in rows] == [
        ("m", "0.003", "0"),
        ("smollm2-135m", "0.00", "1"),
    ]
    events = list(csv.DictReader(StringIO(client.get("/api/usage/events", {"format": "csv"}).content.decode())))
    assert sorted(row["tokens_uncached"] for row in events) == ["10", "1000"]
    refused = client.get("/api/usage", {"format": "csv", "bucket": "minute"})
    assert (refused.status_code, list(refused.json()["errors"])) == (400, ["bucket"])
