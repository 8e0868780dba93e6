"""Metered usage: cache storage and machine-hours, recorded once, priced at its start and invoiced."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from billing.currencies.amounts import FEMTO_A_CENT
from billing.invoicing import checks
from billing.metering.metered import do_record_metered_usage
from billing.models import Invoice, InvoiceLine, MeteredUsage
from billing.pricing.prices import do_propose_prices, do_publish_prices
from billing.rates.metered import metered_cost, metered_units
from billing.rates.price_files import read_csv
from billing.rates.pricing import Component
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, period
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
CSV = """model,tier,component,usd_per_million
alpha,standard,cache_storage,4.5
box,standard,machine_hours,1990000
"""


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    start = datetime(2026, 9, 1, tzinfo=UTC)
    do_publish_prices(do_propose_prices(read_csv(CSV.splitlines()), effective_from=start), by=None)
    return acme


def record(tenant: Tenant, component: Component, amount: int, hours: float, reference: str, at=OCTOBER, **fields):
    model = fields.get("model", "alpha")
    return do_record_metered_usage(
        tenant, component, model, amount, at, at + timedelta(hours=hours), reference=reference
    )


def test_published_examples():
    """100,000 tokens for 1.5 hours at $4.50 per million token-hours cost $0.675."""
    units = metered_units(Component.CACHE_STORAGE, 100_000, OCTOBER, OCTOBER + timedelta(hours=1.5))
    assert metered_cost(Component.CACHE_STORAGE, units, 4_500_000_000) == 675 * 10**12
    second = metered_units(Component.MACHINE_HOURS, 1, OCTOBER, OCTOBER + timedelta(seconds=1))
    assert metered_cost(Component.MACHINE_HOURS, second, 10**15) == 277_777_777_778  # $1 an hour, rounded half up


def test_it_is_recorded_once_and_invoiced(acme):
    assert record(acme, Component.CACHE_STORAGE, 100_000, 1.5, "c1")[1]
    assert not record(acme, Component.CACHE_STORAGE, 100_000, 1.5, "c1")[1]
    with pytest.raises(Conflict, match="reference"):
        record(acme, Component.CACHE_STORAGE, 100_001, 1.5, "c1")
    record(acme, Component.CACHE_STORAGE, 100_000, 1.5, "c2")
    record(acme, Component.MACHINE_HOURS, 2, 0.25, "m1", model="box")
    october = invoiced(acme, OCTOBER)
    rows = sorted(unscoped(InvoiceLine).filter(invoice_id=october.pk), key=lambda row: row.position)
    assert [(row.description, int(row.femto), row.cents) for row in rows] == [
        ("Cache storage: 300000 token-hours at $4.50 per million", 135 * FEMTO_A_CENT, 135),
        ("Machine time: 0.5 machine-hours at $1990000.00 per million", 995 * FEMTO_A_CENT // 10, 100),
    ]
    record(acme, Component.CACHE_STORAGE, 100_000, 2, "late")
    november = invoiced(acme, NOVEMBER)
    assert november.subtotal == 90  # $0.90 of October, recorded after its month was closed
    for invoice in (october, november):
        with all_tenants_scope(BypassReason.BILLING):
            related = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to")
            result = checks.check(related.get(pk=invoice.pk))
        assert (result.ledger_difference, result.same_data, result.same_pdf) == (0, True, True)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"component": Component.OUTPUT}, "component"),
        ({"component": Component.SEARCHES}, "component"),
        ({"amount": 0}, "amount"),
        ({"hours": 0}, "ended_at"),
        ({"hours": 24 * 32}, "ended_at"),
        ({"model": "unknown"}, "model"),
    ],
)
def test_wrong_usage_is_refused_with_the_name_of_the_field(acme, fields, name):
    given = {"component": Component.CACHE_STORAGE, "amount": 5, "hours": 1, "reference": "x"} | fields
    with pytest.raises(ActionRefused, match=name):
        record(acme, **given)
    assert unscoped(MeteredUsage).all() == []


def test_searches_that_an_earlier_release_recorded_are_invoiced(acme):
    month = period(OCTOBER)
    with all_tenants_scope(BypassReason.COMMAND):
        MeteredUsage.objects.all_tenants().bulk_create(
            [
                MeteredUsage(
                    tenant=acme,
                    reference="s1",
                    component="searches",
                    model="alpha",
                    amount=30,
                    started_at=OCTOBER,
                    ended_at=OCTOBER,
                    price_id=1,
                    nano_per_million=2 * 10**12,
                    cost_femto=6 * FEMTO_A_CENT,
                    invoice_period=month.pk,
                )
            ]
        )
    (row,) = unscoped(InvoiceLine).filter(invoice_id=invoiced(acme, OCTOBER).pk)
    assert (row.description, row.cents) == ("Searches: 30 searches at $2000.00 per million", 6)


def test_api(acme):
    client = by_person(User.objects.create_superuser("one@op.example"))
    url = f"/api/operator/tenants/{acme.pk}/metered-usage"
    body = {
        "component": "cache_storage",
        "model": "alpha",
        "amount": 100_000,
        "started_at": "2026-10-02T10:00:00Z",
        "ended_at": "2026-10-02T11:30:00Z",
        "reference": "c1",
    }
    made = client.post(url, body)
    assert (made.status_code, made.json()["cost_usd"], made.json()["usd_per_million"]) == (201, "0.675", "4.50")
    assert client.post(url, body).json()["id"] == made.json()["id"]
    assert client.post(url, body | {"amount": 1}).status_code == 409
    assert client.post(url, body | {"component": "output"}).status_code == 400
    assert len(client.get(url).json()["results"]) == 1
    reverse = f"/api/operator/metered-usage/{made.json()['id']}/reverse"
    reversal = client.post(reverse)
    found = reversal.json()
    assert (reversal.status_code, found["amount"], found["cost_usd"]) == (200, -100_000, "-0.675")
    assert (found["reverses_id"], client.post(reverse).json()["id"]) == (made.json()["id"], found["id"])
    again = client.post(f"/api/operator/metered-usage/{found['id']}/reverse")
    assert (again.status_code, client.post("/api/operator/metered-usage/0/reverse").status_code) == (409, 404)
