"""Price terms on invoices: tiers, included tokens, discounts and minimums, with corrections and re-ratings of usage."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from billing.invoicing import checks
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.price_terms import do_add_price_term, do_end_price_term
from billing.invoicing.reratings import continue_reratings, do_apply_rerating, do_propose_rerating
from billing.ledger import credits
from billing.models import CreditGrant, Invoice, InvoiceLine, PriceTerm, UsageEvent
from billing.rates.price_book import NewPrice, Proposal
from billing.rates.pricing import Component, Tier
from billing.rates.terms import TermRule, TermType, VolumeTier
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import (
    DECEMBER,
    NOVEMBER,
    OCTOBER,
    invoiced,
    over,
    period,
    price,
    take_back,
)
from tests.support.billing.books import use as settle
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6
DOLLAR = 10**9  # nano-USD
INCLUDED = TermRule(
    TermType.GRADUATED,
    "alpha",
    component=Component.UNCACHED,
    tiers=(VolumeTier(0, 0), VolumeTier(2 * MILLION, 5 * DOLLAR)),
)


def add(tenant: Tenant, rule: TermRule, description: str = "Plan") -> None:
    do_add_price_term(tenant, rule, description=description, first_month="2026-10")


def lines(invoice: Invoice) -> list[tuple[str, str, int]]:
    rows = sorted(unscoped(InvoiceLine).filter(invoice_id=invoice.pk), key=lambda row: row.position)
    return [(row.line_type, row.description, row.cents) for row in rows]


def assert_recomputed(*invoices: Invoice) -> None:
    for invoice in invoices:
        with all_tenants_scope(BypassReason.BILLING):
            rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to__period")
            result = checks.check(rows.get(pk=invoice.pk))
        assert (result.ledger_difference, result.same_data, result.same_pdf) == (0, True, True)


def test_included_tokens_a_discount_and_a_minimum(acme):
    """3M tokens at $10, 2M included, $5 above: $5, less 10%. Credit pays the rest. An empty month has the minimum."""
    add(acme, INCLUDED, "2M tokens included")
    add(acme, TermRule(TermType.DISCOUNT, ppm=100_000), "Partner discount 10%")
    add(acme, TermRule(TermType.MINIMUM, cents=400), "Minimum")
    credits.do_grant_credit(
        acme,
        CreditGrant.GrantType.PROMOTIONAL,
        100 * 10**7,
        starts_at=OCTOBER,
        expires_at=OCTOBER + timedelta(days=14),
        note="Trial",
    )
    settle(acme, OCTOBER, (price("10"), MILLION), times=3)
    october = invoiced(acme, OCTOBER)
    assert lines(october) == [
        ("usage", "", 3000),
        ("term", "2M tokens included", -2500),
        ("term", "Partner discount 10%", -50),
    ]
    assert (october.subtotal, october.total, october.credits) == (450, 350, [{"label": "Trial", "cents": 100}])
    november = invoiced(acme, NOVEMBER)
    assert lines(november) == [("term", "Minimum", 400)]
    assert credits.do_expire_credits(DECEMBER) == 0  # the trial credit was used
    assert_recomputed(october, november)
    with pytest.raises(Conflict, match="first_month: 2026-11"):
        add(acme, INCLUDED)
    with pytest.raises(ActionRefused, match="tiers"):
        add(acme, TermRule(TermType.VOLUME, "alpha", component=Component.UNCACHED))
    (term,) = [row for row in unscoped(PriceTerm).all() if row.description == "Minimum"]
    with pytest.raises(Conflict, match="last_month"):
        do_end_price_term(term, "2026-10")
    do_end_price_term(term, "2026-11")
    month = period(DECEMBER)
    do_close_period(month, now=over(month))
    assert do_draft(month, acme) == []


def test_reversed_usage_is_credited_as_the_terms_charged_it(acme):
    """One of 3M tokens is reversed: only the overage of $5 was charged for it. The next one was included."""
    add(acme, INCLUDED)
    old = price("10")
    settle(acme, OCTOBER, (old, MILLION), times=3)
    october = invoiced(acme, OCTOBER)
    one, other, _ = unscoped(UsageEvent).all()
    notes = []
    for event, at in ((one, NOVEMBER), (other, DECEMBER)):
        take_back(event, at)
        do_close_period(period(at), now=over(period(at)))
        notes += [do_finalize(row) for row in do_draft(period(at), acme)]
    assert [note.subtotal for note in notes] == [500]  # a note of 0.00 is not issued
    assert_recomputed(october, *notes)


def test_a_corrected_price_changes_nothing_where_tiers_replace_it(acme):
    add(acme, INCLUDED)
    settle(acme, OCTOBER, (price("10"), 3 * MILLION), (price("1", "output"), MILLION))
    october = invoiced(acme, OCTOBER)
    start, end = datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)
    new = [NewPrice("alpha", Tier.STANDARD, Component(name), 7 * DOLLAR) for name in ("uncached", "output")]
    row = do_propose_rerating(Proposal(tuple(new)), start, end, reason="Wrong price")
    do_apply_rerating(row, by=None)
    (number,) = continue_reratings().issued
    (note,) = unscoped(Invoice).filter(number=number)
    assert (note.invoice_type, note.subtotal) == ("debit_note", 600)
    assert_recomputed(october, note)
