"""One-off lines that repeat each month until a last one."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace

import pytest

from billing.invoicing.corrections import do_void
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.one_off_lines import (
    do_add_one_off_line,
    do_count_due_lines,
    do_end_one_off_line,
    do_remove_one_off_line,
)
from billing.invoicing.prepayment import available_nano
from billing.invoicing.preview import preview
from billing.invoicing.setup import do_set_prepaid
from billing.ledger.credits import do_grant_credit
from billing.models import BillingProfile, Budget, CreditGrant, Invoice, InvoiceLine, OneOffLine
from tenants.actions import ActionRefused, Conflict, do_delete_tenant, do_restore_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant, User
from tests.support.billing.books import DECEMBER, NOVEMBER, OCTOBER, over, period, price, use
from tests.support.billing.deletions import at_time
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6


def repeat(tenant: Tenant, month: str = "2026-10", last_month: str = "2026-11") -> OneOffLine:
    return do_add_one_off_line(tenant, month=month, last_month=last_month, description="Support", cents=700)


def draft(tenant: Tenant, at: datetime) -> list[Invoice]:
    month = period(at)
    do_close_period(month, now=over(month))
    return do_draft(month, tenant)


def totals(tenant: Tenant, *months: datetime) -> list[int]:
    """Draft each month twice and issue it. Return the total of its invoice, or 0 without one, as previewed."""
    found = []
    for at in months:
        shown = preview(tenant, at)
        draft(tenant, at)
        drafts = draft(tenant, at)
        assert shown is None or [row.total for row in drafts] == [shown[0].total] * len(drafts)
        issued = [do_finalize(do_finalize(row)) for row in drafts]
        found.append(sum(row.total for row in issued))
    return found


def test_a_line_is_charged_once_in_each_month_until_its_end(acme):
    repeat(acme)
    assert totals(acme, OCTOBER, NOVEMBER, DECEMBER) == [700, 700, 0]
    assert [(row.line_type, row.description) for row in unscoped(InvoiceLine).all()] == [("recurring", "Support")] * 2


@pytest.mark.parametrize(("months", "last"), [(1, "2026-11"), (2, "2026-12"), (3, "2027-01"), (120, "2036-10")])
def test_the_end_is_given_as_a_number_of_months(acme, months, last):
    row = do_add_one_off_line(acme, month="2026-11", months=months, description="Support", cents=1)
    assert row.last_month == last


def test_a_voided_month_is_charged_again(acme):
    repeat(acme)
    (row,) = draft(acme, OCTOBER)
    do_void(do_finalize(row), "Wrong address")
    assert totals(acme, OCTOBER, NOVEMBER, DECEMBER) == [700, 700, 0]


def test_a_line_is_ended_early(acme):
    row = repeat(acme, last_month="2027-06")
    assert totals(acme, OCTOBER, NOVEMBER) == [700, 700]
    with pytest.raises(Conflict, match=r"2026-11 is invoiced with Support\. Choose 2026-11 or later"):
        do_end_one_off_line(row, "2026-10")
    with pytest.raises(ActionRefused, match="Choose the first month or a later one"):
        do_end_one_off_line(row, "2026-09")
    assert do_end_one_off_line(row, "2026-11").last_month == "2026-11"
    with pytest.raises(Conflict, match="already ends after 2026-11"):
        do_end_one_off_line(row, "2026-12")
    assert totals(acme, DECEMBER) == [0]
    assert [entry.after for entry in unscoped(AuditEntry).filter(action="one_off_line.ended")] == [
        {"last_month": "2026-11"}
    ]


def test_a_draft_follows_the_end(acme):
    row = repeat(acme)
    use(acme, NOVEMBER, (price("2"), MILLION))
    totals(acme, OCTOBER)
    month = period(NOVEMBER)
    assert [each.subtotal for each in do_draft(month, acme)] == [900]
    do_end_one_off_line(row, "2026-10")
    assert totals(acme, NOVEMBER) == [200]


def test_a_line_is_removed_before_its_first_month(acme):
    row, other = repeat(acme), repeat(acme, "2026-11")
    totals(acme, OCTOBER)
    with pytest.raises(Conflict, match=r"2026-10 is invoiced with this line\. End it instead"):
        do_remove_one_off_line(row)
    do_remove_one_off_line(other)
    assert totals(acme, NOVEMBER) == [700]


def test_wrong_months_are_refused(acme):
    for wrong in ({"last_month": "2026-09"}, {"months": 0}, {"months": 121}, {"months": 2, "last_month": "2026-12"}):
        with pytest.raises(ActionRefused):
            do_add_one_off_line(acme, month="2026-10", description="Support", cents=1, **wrong)
    once = do_add_one_off_line(acme, month="2026-10", description="Setup", cents=1)
    with pytest.raises(Conflict, match="This line does not repeat"):
        do_end_one_off_line(once, "2026-12")
    totals(acme, OCTOBER)
    with pytest.raises(Conflict, match=r"^month: 2026-10 is invoiced or about to be"):
        repeat(acme)


def test_a_deleted_tenant_is_not_charged(acme):
    repeat(acme, last_month="2026-12")
    with at_time(OCTOBER):
        do_delete_tenant(acme)
    with at_time(DECEMBER):
        do_restore_tenant(acme)
    assert totals(acme, OCTOBER, NOVEMBER, DECEMBER) == [700, 0, 700]


def test_the_balance_counts_each_month_once(acme):
    repeat(acme)
    with all_tenants_scope(BypassReason.BILLING):
        profile = BillingProfile(tenant=acme, entity=period(OCTOBER).entity, is_prepaid=True)
        for at in (OCTOBER, NOVEMBER, DECEMBER):
            period(at)
        found = [available_nano(acme, profile, at) for at in (OCTOBER, NOVEMBER, DECEMBER)]
    assert found == [-7 * 10**9, -14 * 10**9, -14 * 10**9]


def test_the_gate_follows_each_month(acme, monkeypatch):
    def limit_at(at: datetime) -> int:
        monkeypatch.setattr("billing.invoicing.prepayment.datetime", SimpleNamespace(now=lambda _zone: at))
        do_count_due_lines(at)
        return unscoped(Budget).get(is_balance=True).amount

    do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 10**10, starts_at=OCTOBER.replace(day=1))
    repeat(acme)
    do_set_prepaid(acme, is_prepaid=True)
    before = limit_at(OCTOBER)
    assert limit_at(NOVEMBER) == max(0, before - 7 * 10**9)
    assert limit_at(DECEMBER) == limit_at(NOVEMBER)


def test_the_api(acme):
    client = by_person(User.objects.create_superuser("one@op.example"))
    url = f"/api/operator/tenants/{acme.pk}/one-off-lines"
    body = {"month": "2026-10", "description": "Support", "cents": 700}
    made = client.post(url, body | {"months": 3}).json()
    assert (made["month"], made["last_month"], made["invoice"]) == ("2026-10", "2026-12", None)
    assert client.post(url, body | {"last_month": "2026-12"}).json()["last_month"] == "2026-12"
    assert client.post(url, body).json()["last_month"] == ""
    for wrong in ({"months": 0}, {"months": 121}, {"months": 2, "last_month": "2026-12"}, {"last_month": "2026-09"}):
        assert client.post(url, body | wrong).status_code == 400, wrong
    end = f"/api/operator/one-off-lines/{made['id']}/end"
    assert client.post(end, {"last_month": "2026-11"}).json()["last_month"] == "2026-11"
    assert client.post(end, {"last_month": "2026-12"}).status_code == 409
    assert client.post(end, {}).status_code == 400
    assert client.delete(f"/api/operator/one-off-lines/{made['id']}").status_code == 204
    assert len(client.get(url).json()["results"]) == 2
