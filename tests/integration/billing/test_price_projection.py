"""A past month at proposed prices, computed by the function of what a month costs."""

from __future__ import annotations

from typing import Any

import pytest

from billing.invoicing import price_projection
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.price_projection import Projection, month_before, project_month
from billing.invoicing.price_terms import do_add_price_term
from billing.metering import rollups
from billing.models import PeriodUsage, PriceBook
from billing.pricing.prices import do_assign_book, do_propose_prices
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from billing.rates.terms import TermRule, TermType, VolumeTier
from tenants.actions import do_create_tenant
from tenants.models import User
from tests.support.billing.books import OCTOBER, dollars, over, period, price, use
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_key, by_person

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6
C = Component


def new(usd: str, component: Component = C.UNCACHED, *, tier: Tier = Tier.STANDARD, **fields: Any) -> NewPrice:
    return NewPrice("alpha", tier, component, dollars(usd), **fields)


def project(*prices: NewPrice, book: str = "list", tenant_id: int | None = None, **fields: Any) -> Projection:
    return project_month(Proposal(prices, **fields), unscoped(PriceBook).get(name=book), tenant_id, "2026-10")


def test_the_month_before_is_complete():
    assert month_before(OCTOBER) == "2026-09"
    assert month_before(OCTOBER.replace(month=1)) == "2025-12"


def test_the_month_is_charged_at_the_proposed_prices(acme):
    use(acme, OCTOBER, (price("3"), 2 * MILLION), (price("15", "output"), MILLION))
    use(acme, OCTOBER, (price("7", model="beta"), MILLION))
    found = project(new("4"), new("12", C.OUTPUT))
    assert [(row.tenant.pk, row.was, row.would_be) for row in found.tenants] == [(acme.pk, 2800, 2700)]
    assert (found.change, found.currency, found.others, found.covered) == (-100, "USD", 0, 1.0)


def test_it_equals_the_invoice_of_a_month_with_those_prices(acme):
    """What was charged is what the invoice has, also after it is final."""
    use(acme, OCTOBER, (price("3.333333333"), 1_234_567), (price("15", "output"), 7), settled_at=OCTOBER)
    first = project(new("3.333333333"), new("15", C.OUTPUT))
    assert first.change == 0
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    (draft,) = do_draft(month)
    assert first.was == draft.subtotal == project(new("1"), new("1", C.OUTPUT)).was


def test_price_terms_count(acme):
    use(acme, OCTOBER, (price("3"), 10 * MILLION), (price("15", "output"), MILLION))
    for rule in (
        TermRule(
            TermType.GRADUATED,
            model="alpha",
            component=C.OUTPUT,
            tiers=(VolumeTier(0, 0), VolumeTier(500_000, dollars("9"))),
        ),
        TermRule(TermType.DISCOUNT, ppm=100_000),
        TermRule(TermType.MINIMUM, cents=4000),
    ):
        do_add_price_term(acme, rule, description="term", first_month="2026-09")
    found = project(new("5"), new("99", C.OUTPUT))
    # Output costs 0.5M x $9 by its tiers, whatever its price is: ($30 + $4.50) less a tenth is below the minimum.
    assert [(row.was, row.would_be) for row in found.tenants] == [(4000, 4905)]


def test_own_prices_and_other_books_are_left_as_they_are(acme):
    other = do_create_tenant("other", "Other")
    partner = do_create_tenant("partner", "Partner")
    own = price("1", tenant_id=acme.pk, number=2)
    listed, output = price("3"), price("15", "output")
    use(acme, OCTOBER, (own, MILLION), (output, MILLION))
    use(other, OCTOBER, (listed, MILLION))
    use(partner, OCTOBER, (price("2", book="partners"), MILLION))
    do_assign_book(partner, "partners")
    found = project(new("6"), new("15", C.OUTPUT))
    assert {row.tenant.slug: (row.was, row.would_be) for row in found.tenants} == {
        "acme": (1600, 1600),
        "other": (300, 600),
    }
    found = project(new("6"), tenant_id=acme.pk)
    assert [(row.tenant.slug, row.was, row.would_be) for row in found.tenants] == [("acme", 1600, 2100)]
    assert found.kept == MILLION, "its output has the price of the book"
    found = project(new("8"), book="partners")
    assert [(row.tenant.slug, row.change) for row in found.tenants] == [("partner", 600)]


def test_bands_and_hours(acme):
    short, long = price("3", until_tokens=1000), price("6", from_tokens=1000)
    use(acme, OCTOBER, (short, MILLION))
    use(acme, OCTOBER, (long, MILLION))
    found = project(new("4", until_tokens=1000), new("9", from_tokens=1000))
    assert [(row.was, row.would_be) for row in found.tenants] == [(900, 1300)]
    assert project(new("4")).would_be == 800
    found = project(new("4", until_tokens=500), new("9", from_tokens=500))
    assert (found.would_be, found.kept) == (300 + 900, MILLION), "the first band is split, so its price is kept"
    night = project(new("4", until_minute=600), new("9", from_minute=600))
    assert (night.change, night.kept) == (0, 2 * MILLION)


def test_usage_without_a_price_is_in_neither_sum(acme):
    use(acme, OCTOBER, (price("3"), MILLION), (price("15", "output"), 2 * MILLION))
    found = project(new("4"))
    assert (found.was, found.would_be, found.unpriced) == (300, 400, 2 * MILLION)
    found = project(withdrawn=(("alpha", Tier.STANDARD),))
    assert (found.was, found.would_be, found.unpriced) == (0, 0, 3 * MILLION)


def test_of_many_tenants_those_with_the_most_usage_are_computed(acme, monkeypatch):
    monkeypatch.setattr(price_projection, "MAX_TENANTS", 2)
    listed = price("1")
    for number in range(4):
        tenant = do_create_tenant(f"t{number}", f"T{number}")
        use(tenant, OCTOBER, (listed, (number + 1) * MILLION), settled_at=OCTOBER)
    rollups.build()
    found = project(new("2"))
    assert [(row.tenant.slug, row.change) for row in found.tenants] == [("t3", 400), ("t2", 300)]
    assert (found.others, found.covered) == (2, 0.7)


def test_the_sums_of_a_month_are_stored(acme):
    use(acme, OCTOBER, (price("3"), MILLION), settled_at=OCTOBER)
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    assert project(new("4")).change == 100
    assert len(unscoped(PeriodUsage).filter(period_id=month.pk)) == 1
    assert project(new("5")).change == 200


def test_the_api_returns_the_month_of_a_draft(acme):
    use(acme, OCTOBER, (price("3"), MILLION))
    version = do_propose_prices(Proposal((new("4"),)))
    client = by_person(User.objects.create_superuser("op@example.com"))
    url = f"/api/operator/prices/{version.pk}/projection"
    assert client.get(url, {"month": "2026-10"}).json() == {
        **{"month": "2026-10", "currency": "USD", "was_cents": 300, "would_be_cents": 400},
        "tenants": [{"tenant_id": acme.pk, "slug": "acme", "was_cents": 300, "would_be_cents": 400}],
        **{"other_tenants": 0, "unpriced_tokens": 0, "kept_tokens": 0},
    }
    assert client.get(url, {"month": "2026-8"}).status_code == 400
    assert client.get("/api/operator/prices/999999/projection").status_code == 404
    assert by_key(acme).get(url).status_code in (403, 404)
