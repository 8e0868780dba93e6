"""Fees and minimums whose first month is charged by days: on invoices, previews, notes and checks."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

import pytest

from billing.invoicing import checks
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.preview import preview
from billing.invoicing.price_terms import do_add_price_term
from billing.ledger.credits import do_commit
from billing.models import CreditGrant, Invoice, InvoiceLine, UsageEvent
from billing.rates.terms import TermRule, TermType
from tenants.actions import ActionRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.books import NOVEMBER, OCTOBER, over, period, price, take_back, use
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION, DOLLAR = 10**6, 10**9
DAY = date(2026, 10, 20)  # the first of 12 charged days


def commit(tenant: Tenant, **fields: Any) -> None:
    do_commit(tenant, "Base", fee=5_000, included_nano=31 * DOLLAR, first_month="2026-10", **fields)


def add_minimum(tenant: Tenant, **fields: Any) -> None:
    rule = TermRule(TermType.MINIMUM, cents=5_000)
    do_add_price_term(tenant, rule, **{"description": "Minimum", "first_month": "2026-10"} | fields)


def invoice_month(tenant: Tenant, at: datetime) -> tuple[Invoice, list[tuple[str, int]]]:
    """Close a month and issue its invoice, which equals the preview before. Return it with its fixed lines."""
    month = period(at)
    do_close_period(month, now=over(month))
    shown = preview(tenant, at)
    assert shown is not None
    (draft,) = [row for row in do_draft(month, tenant) if row.invoice_type == Invoice.InvoiceType.INVOICE]
    assert (draft.total, draft.credits) == (shown[0].total, shown[0].credits)
    issued = do_finalize(draft, now=month.ends_at)
    lines = unscoped(InvoiceLine).filter(invoice=issued, price_id=None)  # in the order of their positions
    return issued, [(line.description, line.cents) for line in lines]


def assert_recomputed() -> None:
    """Check each final document by the function that drafts it."""
    with all_tenants_scope(BypassReason.BILLING):
        rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").exclude(number=None)
        for row in rows:
            found = checks.check(row)
            assert (found.same_data, found.ledger_difference, found.month_difference) == (True, 0, 0), row


def test_a_fee_is_charged_from_its_first_day(acme):
    commit(acme, starts_on=DAY)
    october, lines = invoice_month(acme, OCTOBER)
    assert lines == [("Base (12 of 31 days)", 1_935)]
    assert invoice_month(acme, NOVEMBER)[1] == [("Base", 5_000)]
    grants = unscoped(CreditGrant).order_by("period__label")
    assert [row.nano for row in grants] == [12 * DOLLAR, 31 * DOLLAR]
    assert october.subtotal == 1_935
    assert_recomputed()


def test_included_usage_of_less_than_a_unit_grants_nothing(acme):
    do_commit(acme, "Base", fee=5_000, included_nano=1, first_month="2026-10", starts_on=date(2026, 10, 31))
    assert invoice_month(acme, OCTOBER)[1] == [("Base (1 of 31 days)", 161)]
    assert not unscoped(CreditGrant).exists()


def test_a_minimum_counts_from_its_first_day(acme):
    add_minimum(acme, starts_on=DAY)
    use(acme, OCTOBER, (price("3"), MILLION))
    assert invoice_month(acme, OCTOBER)[1] == [("Minimum (12 of 31 days)", 1_935 - 300)]
    assert invoice_month(acme, NOVEMBER)[1] == [("Minimum", 5_000)]
    assert_recomputed()


def test_a_note_returns_nothing_below_the_prorated_minimum(acme):
    add_minimum(acme, starts_on=DAY)
    use(acme, OCTOBER, (price("20"), MILLION))
    issued, lines = invoice_month(acme, OCTOBER)
    assert (issued.subtotal, lines) == (2_000, [])
    take_back(unscoped(UsageEvent).get(), NOVEMBER)
    do_close_period(period(NOVEMBER), now=over(period(NOVEMBER)))
    notes = [do_finalize(row) for row in do_draft(period(NOVEMBER), acme) if row.refers_to_id]
    assert [note.subtotal for note in notes] == [2_000 - 1_935]
    assert_recomputed()


@pytest.mark.parametrize("add", [commit, add_minimum])
def test_by_default_the_whole_first_month_is_charged(acme, add):
    add(acme)
    assert [cents for _, cents in invoice_month(acme, OCTOBER)[1]] == [5_000]


@pytest.mark.parametrize("add", [commit, add_minimum])
def test_the_first_day_is_in_the_first_month(acme, add):
    with pytest.raises(ActionRefused, match=r"^starts_on: Choose a day of the first month, 2026-10\.$"):
        add(acme, starts_on=date(2026, 11, 1))


def test_wrong_terms_are_refused(acme):
    discount = TermRule(TermType.DISCOUNT, ppm=1)
    with pytest.raises(ActionRefused, match=r"^starts_on: Only a minimum"):
        do_add_price_term(acme, discount, description="Half", first_month="2026-10", starts_on=DAY)
    with pytest.raises(ActionRefused, match=r"^description: Use fewer characters"):
        add_minimum(acme, description="x" * 190, starts_on=DAY)
    add_minimum(acme, description="x" * 184, starts_on=DAY)
    assert len(invoice_month(acme, OCTOBER)[1][0][0]) == 200


def test_the_api(acme):
    client = by_person(User.objects.create_superuser("one@op.example"))
    months = {"first_month": "2026-10", "starts_on": "2026-10-20"}
    url = f"/api/operator/tenants/{acme.pk}"
    made = client.post(f"{url}/commitments", {"name": "Base", "fee": 5_000, "included_nano": 1, **months})
    assert (made.status_code, made.json()["starts_on"]) == (201, "2026-10-20")
    term = {"term_type": "minimum", "description": "Minimum", "cents": 500}
    assert client.post(f"{url}/price-terms", term | months).json()["starts_on"] == "2026-10-20"
    assert client.post(f"{url}/price-terms", term | {"first_month": "2026-10"}).json()["starts_on"] is None
    assert client.post(f"{url}/price-terms", term | months | {"starts_on": "2026-11-20"}).status_code == 400
