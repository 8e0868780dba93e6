"""The aging of receivables on a day, compared with the accounts of the ledger's journal."""

from __future__ import annotations

import csv
import io
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from django.test import Client
from rest_framework.test import APIClient

from billing.accounting.aging import AgingRow, report_aging
from billing.accounting.journal import read_postings
from billing.invoicing.corrections import do_issue_credit_note, do_issue_debit_note, do_void, do_write_off
from billing.invoicing.setup import do_add_entity
from billing.models import Account, BillingEntity, Invoice
from billing.payments.recording import Received, do_record_payment
from billing.periods import default_entity
from tenants.actions import do_create_tenant
from tenants.actions.common import FieldRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.booking_times import booked_at
from tests.support.billing.books import OCTOBER, invoiced, price, use
from tests.support.billing.clocks import REQUESTED_AT
from tests.support.billing.euros import bill_in_euros
from tests.support.billing.prepaid_credit import change_entity
from tests.support.tenants.management_api import by_person, by_role

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6
MONTHS = ["2026-10", "2026-11", "2026-12", *(f"2027-0{month}" for month in range(1, 7))]
DUE = date(2026, 11, 15)  # of October's invoices, which are issued on 1 November


@pytest.fixture
def entity(acme: Tenant) -> BillingEntity:
    with all_tenants_scope(BypassReason.BILLING):
        return default_entity()


def use_in_october(tenant: Tenant, dollars: str, **book: object) -> None:
    use(tenant, OCTOBER, (price(dollars, model=f"m-{tenant.slug}", **book), MILLION))


def bill(tenant: Tenant, dollars: str) -> Invoice:
    use_in_october(tenant, dollars)
    return invoiced(tenant, OCTOBER)


def pay(reference: str, cents: int, **fields: str) -> None:
    do_record_payment(Received("manual", reference, cents, REQUESTED_AT, **fields))


def rows_on(entity: BillingEntity, on: date) -> list[AgingRow]:
    with all_tenants_scope(BypassReason.BILLING):
        return report_aging(entity, on, REQUESTED_AT)


def total_on(entity: BillingEntity, on: date, currency: str = "USD") -> str:
    """Return the total of a currency, or an empty text without open amounts."""
    return "".join(row.total for row in rows_on(entity, on) if row.currency == currency and not row.tenant)


def journal_receivables(entity: BillingEntity, on: date) -> dict[str, Decimal]:
    """Return the account of receivables at the end of a day by currency, from the journal's postings."""
    found: Counter[str] = Counter()
    with all_tenants_scope(BypassReason.BILLING):
        for month in MONTHS:
            for posting in read_postings(entity, month):
                if posting.on <= on:
                    amounts = (entry.nano for entry in posting.entries if entry.account == Account.RECEIVABLE)
                    found[posting.currency] += sum(amounts)
    return {currency: Decimal(nano).scaleb(-9) for currency, nano in found.items() if nano}


@pytest.mark.parametrize(
    ("late", "column"),
    [
        (-14, "not_due"),
        (0, "not_due"),
        (1, "days_1_30"),
        (30, "days_1_30"),
        (31, "days_31_60"),
        (60, "days_31_60"),
        (61, "days_61_90"),
        (90, "days_61_90"),
        (91, "over_90_days"),
        (190, "over_90_days"),
    ],
)
def test_an_open_amount_is_in_the_class_of_its_days_past_due(acme, entity, late, column):
    bill(acme, "70")
    row, total = rows_on(entity, DUE + timedelta(days=late))
    expected = dict.fromkeys(AgingRow._fields[3:8], "0.00") | {column: "70.00", "total": "70.00"}
    assert row._asdict() == {"currency": "USD", "tenant": "acme", "name": acme.name, **expected}
    assert total._asdict() == {"currency": "USD", "tenant": "", "name": "", **expected}


@pytest.fixture
def busy(acme: Tenant, entity: BillingEntity, monkeypatch: pytest.MonkeyPatch) -> BillingEntity:
    """Tenants in two currencies whose invoices are paid, credited, debited, voided, written off and recovered."""
    petit, klein = do_create_tenant("petit", "Petit"), do_create_tenant("klein", "Klein")
    bill_in_euros(klein)
    use_in_october(acme, "100")
    use_in_october(petit, "70")
    use_in_october(klein, "33", book="eur")
    first, second, third = (invoiced(tenant, OCTOBER) for tenant in (acme, petit, klein))

    def on(month: int, day: int, hour: int = 12) -> datetime:
        return datetime(2026, month, day, hour, tzinfo=UTC)

    with booked_at(monkeypatch, on(11, 20)):
        pay("p-1", 2_000, invoice=str(first.number))
    with booked_at(monkeypatch, on(11, 25)):
        do_issue_credit_note(first, [("SLA", 1_000)], "SLA")
        do_issue_debit_note(second, [("Support", 500)], "Support")
    with booked_at(monkeypatch, on(12, 1)):
        do_void(third, "Wrong address", on(12, 1))
    with booked_at(monkeypatch, on(12, 10)):
        do_write_off(first, "Insolvent")
    with booked_at(monkeypatch, on(12, 20)):
        pay("p-2", 3_000, invoice=str(first.number))
    with booked_at(monkeypatch, on(12, 28)):
        pay("p-3", 9_000, invoice=str(second.number))
        pay("p-4", -4_000, invoice=str(second.number))
    return entity


def test_bookings_count_from_their_own_day(busy):
    """After day: acme and petit in dollars."""
    days = {
        date(2026, 11, 1): "170.00",
        date(2026, 11, 19): "170.00",
        date(2026, 11, 20): "150.00",  # a payment of 20
        date(2026, 11, 25): "145.00",  # a credit note of 10 and a debit note of 5
        date(2026, 12, 9): "145.00",
        date(2026, 12, 10): "75.00",  # 70 are written off
        date(2026, 12, 27): "75.00",  # a payment of what was written off changes nothing
    }
    assert {day: total_on(busy, day) for day in days} == days
    assert [total_on(busy, date(2026, month, day), "EUR") for month, day in ((11, 30), (12, 1))] == ["33.00", ""]


def test_the_sums_equal_the_receivables_of_the_journal_on_every_day(busy):
    checked = 0
    for day in range(70):
        on = date(2026, 11, 1) + timedelta(days=day)
        rows = rows_on(busy, on)
        totals = {row.currency: Decimal(row.total) for row in rows if not row.tenant}
        assert totals == journal_receivables(busy, on), on
        for row in rows:
            assert sum(map(Decimal, row[3:8])) == Decimal(row.total)
            parts = [Decimal(other.total) for other in rows if other.tenant and other.currency == row.currency]
            assert row.tenant or sum(parts) == Decimal(row.total)
        checked += len(rows)
    assert checked > 100


def test_days_are_those_of_the_entity(acme, monkeypatch):
    """In Tokyo, 20 November at 15:00 UTC is the next day."""
    change_entity(time_zone="Asia/Tokyo")
    with all_tenants_scope(BypassReason.BILLING):
        entity = default_entity()
    invoice = bill(acme, "70")
    with booked_at(monkeypatch, datetime(2026, 11, 20, 15, tzinfo=UTC)):
        pay("p-1", 7_000, invoice=str(invoice.number))
    assert [total_on(entity, date(2026, 11, day)) for day in (20, 21)] == ["70.00", ""]


def test_other_entities_have_an_aging_of_their_own(busy):
    other = do_add_entity(slug="other", name="Other", country="DE")
    assert rows_on(other, date(2026, 12, 31)) == []


def test_days_without_documents_and_in_the_future_are_refused(acme, entity):
    assert rows_on(entity, date(2026, 1, 1)) == []  # there is no document at all
    bill(acme, "70")
    for on, code in ((date(2026, 10, 31), "before_documents"), (date(2027, 6, 2), "future")):
        with pytest.raises(FieldRefused) as refused:
            rows_on(entity, on)
        assert (refused.value.field, refused.value.code) == ("date", code)
    assert total_on(entity, date(2027, 6, 1)) == "70.00"


@pytest.fixture
def operator(db: None) -> APIClient:
    return by_person(User.objects.create_superuser("op@example.com"))


@pytest.fixture
def url(busy: BillingEntity, today: None) -> str:
    return f"/api/operator/entities/{busy.pk}/aging"


def test_operators_read_the_aging_as_json_and_csv(operator, busy, url, acme):
    found = operator.get(url, {"date": "2026-11-30"})
    assert (found.status_code, len(found.json())) == (200, 5)
    assert found.json() == [row._asdict() for row in rows_on(busy, date(2026, 11, 30))]
    assert operator.get(url).json() == [row._asdict() for row in rows_on(busy, REQUESTED_AT.date())]
    table = operator.get(url, {"date": "2026-11-30", "format": "csv"})
    assert table["content-disposition"] == f'attachment; filename="aging-{busy.slug}-2026-11-30.csv"'
    assert list(csv.DictReader(io.StringIO(table.content.decode()))) == found.json()
    for wrong in ("2026-10-31", "2027-06-02", "2026-13-01", "0001-01-01", "9999-12-31", "today"):
        problem = operator.get(url, {"date": wrong})
        assert problem.status_code == 400 and "date" in problem.json()["errors"], wrong
    assert operator.get("/api/operator/entities/0/aging").status_code == 404
    assert by_role(acme, "owner").get(url).status_code == 404
    assert operator.get(url, {"day": "2026-11-30"}).status_code == 400


def test_the_page_shows_the_aging_of_a_day(busy, acme, today):
    browser, path = Client(), "/operator/receivables/"
    browser.force_login(User.objects.create_superuser("op@example.com"))
    bill_day = f"{path}?entity={busy.slug}&date=2026-11-30"
    page = browser.get(bill_day).content.decode()
    assert "Total, EUR" in page and f"/operator/billing/tenants/{acme.slug}/statement" in page
    assert "Enter the date" in browser.get(f"{path}?date=soon").content.decode()
    assert "The first document is of 2026-11-01" in browser.get(f"{path}?date=2020-01-01").content.decode()
    table = browser.get(f"{path}file?date=2026-11-30")
    assert table["content-type"].startswith("text/csv") and len(table.content.splitlines()) == 6
    assert browser.get(f"{path}file?date=soon").status_code == 303
    browser.force_login(User.objects.create_user("user@example.com"))
    assert [browser.get(path).status_code, browser.get(f"{path}file").status_code] == [404, 404]
