"""The life cycle of recurring charges: commitments and price terms begin, end, and stop with the tenant's deletion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest

from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.preview import preview
from billing.invoicing.price_terms import do_add_price_term, do_end_price_term
from billing.ledger.credits import do_commit, do_end_commitment
from billing.models import Commitment, CreditGrant, Invoice, PriceTerm
from billing.rates.terms import TermRule, TermType
from tenants.actions import ActionRefused, Conflict, do_delete_tenant, do_purge_tenant, do_restore_tenant
from tenants.models import AuditEntry, Tenant
from tests.support.billing.books import DECEMBER, NOVEMBER, OCTOBER, invoiced, over, period, price, use
from tests.support.billing.deletions import at_time
from tests.support.billing.invoice_forms import furnish
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION, DOLLAR = 10**6, 10**9
SEPTEMBER = OCTOBER.replace(month=9)


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    furnish(acme, "S", 190_000)
    return acme


def commit(tenant: Tenant, first_month: str = "2026-10", last_month: str = "") -> Commitment:
    months = {"first_month": first_month, "last_month": last_month}
    return do_commit(tenant, "Base", fee=5_000, included_nano=10 * DOLLAR, **months)


def add_minimum(tenant: Tenant, first_month: str = "2026-10", last_month: str = "") -> PriceTerm:
    months = {"first_month": first_month, "last_month": last_month}
    return do_add_price_term(tenant, TermRule(TermType.MINIMUM, cents=5_000), description="Minimum", **months)


def totals(tenant: Tenant, *months: datetime) -> list[int]:
    """Close each month. Return the total of its invoice, or 0 without one; each draft equals the preview before it."""
    found = []
    for at in months:
        month = period(at)
        do_close_period(month, now=over(month))
        shown = preview(tenant, at)
        assert shown is not None
        drafts = do_draft(month, tenant)
        assert [draft.total for draft in drafts] == [shown[0].total] * len(drafts)
        found.append(sum(do_finalize(draft, now=month.ends_at).total for draft in drafts))
    return found


CHARGES = pytest.mark.parametrize("add", [commit, add_minimum])


@CHARGES
@pytest.mark.parametrize("is_purged", [False, True])
def test_a_deleted_tenant_has_no_charge_after_the_month_of_the_deletion(acme, add, is_purged):
    add(acme)
    with at_time(OCTOBER):
        do_delete_tenant(acme)
    if is_purged:
        do_purge_tenant(acme, now=datetime.now(UTC) + timedelta(days=10_000))
        with _refused(Conflict, "This tenant no longer exists."):
            add(acme, "2026-11")
    assert totals(acme, OCTOBER, NOVEMBER, DECEMBER) == [5_950, 0, 0]
    assert unscoped(Invoice).count() == 1


@CHARGES
def test_a_restored_tenant_is_charged_from_the_month_of_its_restoration(acme, add):
    """A month between the two is not charged later, also not when the tenant was restored before its draft."""
    add(acme, "2026-09")
    with at_time(SEPTEMBER):
        do_delete_tenant(acme)
    with at_time(NOVEMBER):
        do_restore_tenant(acme)
    assert totals(acme, SEPTEMBER, OCTOBER, NOVEMBER) == [5_950, 0, 5_950]
    with at_time(NOVEMBER + timedelta(hours=1)):
        do_delete_tenant(acme)
    assert totals(acme, DECEMBER) == [0]


def test_late_usage_of_a_deleted_tenant_has_its_discount_and_no_minimum(acme):
    add_minimum(acme)
    do_add_price_term(acme, TermRule(TermType.DISCOUNT, ppm=500_000), description="Half", first_month="2026-10")
    with at_time(OCTOBER):
        do_delete_tenant(acme)
    assert totals(acme, OCTOBER) == [5_950]
    use(acme, OCTOBER, (price("20"), MILLION))
    assert totals(acme, NOVEMBER) == [1_190]


@CHARGES
def test_a_charge_does_not_begin_in_a_closed_month(acme, add):
    """The month may have an invoice, a draft or nothing of the tenant: its charge would not be billed."""
    assert totals(acme, OCTOBER) == [0]
    for last_month in ("", "2026-10"):
        with _refused(Conflict, "first_month: 2026-10 is invoiced or about to be. Choose a later month."):
            add(acme, "2026-10", last_month)
    use(acme, NOVEMBER, (price("20"), MILLION))
    november = period(NOVEMBER)
    do_draft(november, acme)
    kept = add(acme, "2026-11")  # the draft is drafted again when the month is closed
    do_close_period(november, now=over(november))
    (draft,) = do_draft(november, acme)
    assert draft.subtotal == (7_000 if isinstance(kept, Commitment) else 5_000)
    with _refused(Conflict, "first_month: 2026-11"):  # between draft and finalization
        add(acme, "2026-11", "2026-11")
    do_finalize(draft)
    with _refused(Conflict, "first_month: 2026-11"):
        add(acme, "2026-10")
    with _refused(ActionRefused, "last_month: Choose the first month or a later one."):
        add(acme, "2026-12", "2026-11")
    assert add(acme, "2026-12").first_month == "2026-12"


@contextmanager
def _refused(error: type[Exception], text: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    assert str(caught.value).startswith(text)


def test_the_name_of_a_commitment_is_one_line(acme):
    for name in ("Base\x07", "Base\n50"):
        with pytest.raises(ActionRefused, match="Remove line breaks and control characters"):
            do_commit(acme, name, fee=1, included_nano=1, first_month="2026-10")
    assert unscoped(Commitment).count() == 0


def test_a_commitment_ends_after_a_month_that_is_not_before_an_invoiced_one(acme):
    row = commit(acme)
    invoiced(acme, OCTOBER)
    invoiced(acme, NOVEMBER)
    with _refused(Conflict, "last_month: 2026-11 is invoiced with Base. Choose 2026-11 or later."):
        do_end_commitment(row, "2026-10")
    with _refused(ActionRefused, "last_month: Choose the first month or a later one."):
        do_end_commitment(row, "2026-09")
    assert do_end_commitment(row, "2026-12").last_month == "2026-12"
    assert do_end_commitment(row, "2026-11").last_month == "2026-11"
    with _refused(Conflict, "last_month: Base already ends after 2026-11."):
        do_end_commitment(row, "2026-12")
    assert totals(acme, DECEMBER) == [0]
    entries = unscoped(AuditEntry).filter(action="commitment.ended")
    assert [entry.after for entry in entries] == [{"last_month": "2026-11"}, {"last_month": "2026-12"}]


def test_a_commitment_does_not_end_before_a_month_whose_credit_is_granted(acme):
    """The draft of an open month grants its credit. Without this rule the credit would remain without the fee."""
    row = commit(acme)
    do_draft(period(NOVEMBER), acme)
    assert unscoped(CreditGrant).count() == 1
    with _refused(Conflict, "last_month: 2026-11 is invoiced with Base."):
        do_end_commitment(row, "2026-10")


def test_a_price_term_ends_by_the_same_rules(acme):
    row = add_minimum(acme)
    invoiced(acme, OCTOBER)
    with _refused(ActionRefused, "last_month"):
        do_end_price_term(row, "2026-09")
    assert do_end_price_term(row, "2026-10").last_month == "2026-10"
    with _refused(Conflict, "last_month: Minimum already ends after 2026-10."):
        do_end_price_term(row, "2026-10")
    assert totals(acme, NOVEMBER) == [0]
