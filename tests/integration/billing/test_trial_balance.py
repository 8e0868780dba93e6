"""The trial balance and the roll-forward of credit, compared with the journal, the ledger and the grants."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.db.models import Sum

from billing.accounting.exports import export_journal
from billing.accounting.prepaid_credit import CreditRollForwardRow, roll_forward_credit
from billing.accounting.trial_balance import TrialBalanceRow, compute_trial_balance
from billing.invoicing.corrections import do_issue_credit_note, do_void
from billing.invoicing.setup import do_add_entity, do_assign_entity
from billing.ledger.credits import do_commit, do_expire_credits, do_grant_credit
from billing.models import BillingEntity, CreditApplication, CreditGrant
from billing.periods import default_entity
from tenants.actions import do_create_tenant
from tenants.actions.common import FieldRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.books import DECEMBER, NOVEMBER, OCTOBER, invoiced, price, use
from tests.support.billing.clocks import at
from tests.support.billing.euros import bill_in_euros
from tests.support.billing.prepaid_credit import CENT, MILLION, pay
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person, by_role

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MONTHS = ("2026-09", "2026-10", "2026-11", "2026-12")
PROMOTIONAL = CreditGrant.GrantType.PROMOTIONAL
ZERO = "0.00"


@pytest.fixture
def entity(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> BillingEntity:
    """An entity whose tenants bought, used, returned and lost credit, until December."""
    euros = do_create_tenant("klein", "Klein & Söhne")
    bill_in_euros(euros)
    with at(monkeypatch, OCTOBER):
        pay(5_000, "p1", as_credit=True)
        pay(3_000, "p2", tenant="klein", as_credit=True)
        end = datetime(2026, 11, 1, tzinfo=UTC)
        do_grant_credit(acme, PROMOTIONAL, 2_000 * CENT + 5, starts_at=OCTOBER, expires_at=end)
        do_commit(acme, "Committed use", fee=100, included_nano=300 * CENT, first_month="2026-10", last_month="2026-10")
    use(acme, OCTOBER, (price("33", model="a"), MILLION))
    use(euros, OCTOBER, (price("20", model="b", book="eur"), MILLION))
    with at(monkeypatch, datetime(2026, 11, 1, 1, tzinfo=UTC)):  # invoices of October are issued on 1 November
        first, second = invoiced(acme, OCTOBER), invoiced(euros, OCTOBER)
    with at(monkeypatch, NOVEMBER):
        do_issue_credit_note(first, [("SLA", 1_300)], "SLA")
        pay(-1_000, "r1", tenant="", refund_of="p1")
        assert do_expire_credits(NOVEMBER) == 1
    with at(monkeypatch, DECEMBER):
        do_void(second, "Wrong address")
    with all_tenants_scope(BypassReason.BILLING):
        return default_entity()


def find_balance(entity: BillingEntity, month: str) -> list[TrialBalanceRow]:
    with all_tenants_scope(BypassReason.OPERATOR):
        return compute_trial_balance(entity, month)


def find_credit(entity: BillingEntity, month: str, **options: bool) -> list[CreditRollForwardRow]:
    with all_tenants_scope(BypassReason.OPERATOR):
        return roll_forward_credit(entity, month, **options)


@pytest.fixture
def _in_december(monkeypatch: pytest.MonkeyPatch) -> Any:
    with at(monkeypatch, DECEMBER):
        yield


@pytest.mark.usefixtures("_in_december")
def test_the_trial_balance_equals_the_journal(entity):
    for month in MONTHS:
        with all_tenants_scope(BypassReason.OPERATOR):
            file = export_journal(entity, month, "csv")
        with file.content:
            lines = csv.DictReader(io.StringIO(file.content.read().decode()))
            expected: dict[Any, list[Decimal]] = defaultdict(lambda: [Decimal(0), Decimal(0)])
            for line in lines:
                sums = expected[line["account"], line["currency"]]
                sums[0] += Decimal(line["debit"] or 0)
                sums[1] += Decimal(line["credit"] or 0)
        rows = find_balance(entity, month)
        turnover = {(row.account, row.currency): [Decimal(row.debit), Decimal(row.credit)] for row in rows}
        assert {key: sums for key, sums in turnover.items() if any(sums)} == expected, month
        assert [row.currency for row in rows] == sorted(row.currency for row in rows)
    assert {row.currency for row in rows} == {"EUR", "USD"}


@pytest.mark.usefixtures("_in_december")
def test_the_trial_balance_balances_and_continues(entity):
    before: dict[Any, Decimal] = {}
    for month in MONTHS:
        rows = find_balance(entity, month)
        for currency in {row.currency for row in rows}:
            amounts = [[Decimal(text) for text in row[2:]] for row in rows if row.currency == currency]
            opening, debit, credit, closing = (sum(column) for column in zip(*amounts, strict=True))
            assert (opening, debit, closing) == (0, credit, 0)
        for row in rows:
            assert Decimal(row.closing) == Decimal(row.opening) + Decimal(row.debit) - Decimal(row.credit)
        opened = {(row.account, row.currency): Decimal(row.opening) for row in rows}
        assert {key: amount for key, amount in opened.items() if amount} == before
        before = {(row.account, row.currency): Decimal(row.closing) for row in rows if Decimal(row.closing)}
    assert find_balance(entity, "2026-09") == []
    assert TrialBalanceRow("cash", "USD", "50.00", ZERO, "10.00", "40.00") in find_balance(entity, "2026-11")


@pytest.mark.usefixtures("_in_december")
def test_the_roll_forward_of_each_type_of_credit(entity):
    def rows(month: str) -> list[tuple[str, ...]]:
        return [row[1:] for row in find_credit(entity, month)]

    # The order of the amounts: opening, bought, granted, used, expired, refunded, closing.
    assert rows("2026-10") == [
        ("prepaid", "EUR", ZERO, "30.00", ZERO, ZERO, ZERO, ZERO, "30.00"),
        ("prepaid", "USD", ZERO, "50.00", ZERO, ZERO, ZERO, ZERO, "50.00"),
        ("promotional", "USD", ZERO, ZERO, "20.000000005", ZERO, ZERO, ZERO, "20.000000005"),
    ]
    november = {row[:2]: row[2:] for row in rows("2026-11")}
    assert november == {
        ("commitment", "USD"): (ZERO, ZERO, "3.00", "3.00", ZERO, ZERO, ZERO),
        ("prepaid", "EUR"): ("30.00", ZERO, ZERO, "20.00", ZERO, ZERO, "10.00"),
        ("prepaid", "USD"): ("50.00", ZERO, "11.00", "11.00", ZERO, "10.00", "40.00"),
        ("promotional", "USD"): ("20.000000005", ZERO, "2.00", "20.00", "0.000000005", ZERO, "2.00"),
    }
    december = {row[:2]: row[2:] for row in rows("2026-12")}
    assert december["prepaid", "EUR"] == ("10.00", ZERO, ZERO, "-20.00", ZERO, ZERO, "30.00")


@pytest.mark.usefixtures("_in_december")
def test_the_roll_forward_equals_the_ledger_and_the_grants(entity):
    before: dict[tuple[str, ...], str] = {}
    for month in MONTHS:
        rows, closed = find_credit(entity, month), defaultdict(Decimal)
        for row in rows:
            assert row.opening == before.get(row[:3], ZERO)
            closed[row.currency] += Decimal(row.closing)
        before = {row[:3]: row.closing for row in rows}
        booked = {row.currency: row for row in find_balance(entity, month) if row.account == "credits"}
        assert closed == {currency: -Decimal(row.closing) for currency, row in booked.items()}
        by_tenant: dict[tuple[str, ...], Decimal] = defaultdict(Decimal)
        for row in find_credit(entity, month, by_tenant=True):
            assert row.tenant == ("klein" if row.currency == "EUR" else "acme")
            by_tenant[row[1:3]] += Decimal(row.closing)
        assert by_tenant == {row[1:3]: Decimal(row.closing) for row in rows}
    granted = unscoped(CreditGrant).aggregate(sum=Sum("nano"))["sum"]
    used = unscoped(CreditApplication).aggregate(sum=Sum("nano"))["sum"]
    assert sum(closed.values()) == Decimal(int(granted - used)).scaleb(-9)


@pytest.mark.usefixtures("_in_december")
def test_other_entities_have_reports_of_their_own(entity):
    other = do_add_entity(slug="japan", name="Mill KK", country="JP", time_zone="Asia/Tokyo")
    tenant = do_create_tenant("tokyo", "Tokyo")
    do_assign_entity(tenant, other)
    assert (find_balance(other, "2026-12"), find_credit(other, "2026-12")) == ([], [])
    before = find_credit(entity, "2026-12")
    do_grant_credit(tenant, PROMOTIONAL, CENT)
    assert find_credit(entity, "2026-12") == before
    assert [row.account for row in find_balance(other, "2026-12")] == ["credits", "promotions"]
    assert [row.closing for row in find_credit(other, "2026-12")] == ["0.01"]


def test_a_month_begins_by_the_clocks_of_the_entity(acme, monkeypatch):
    """December begins in Tokyo when it is 30 November, 15:00, by UTC."""
    with all_tenants_scope(BypassReason.BILLING):
        row = default_entity()
        row.time_zone = "Asia/Tokyo"
    with at(monkeypatch, datetime(2026, 11, 30, 15, tzinfo=UTC)):
        assert find_balance(row, "2026-12") == []
    with at(monkeypatch, datetime(2026, 11, 30, 14, tzinfo=UTC)), pytest.raises(FieldRefused, match="2026-12"):
        find_balance(row, "2026-12")


def test_operators_read_the_reports_as_json_and_csv(entity, acme):
    operator, owner = by_person(User.objects.create_superuser("op@example.com")), by_role(acme, "owner")
    url, now = f"/api/operator/entities/{entity.pk}", datetime.now(UTC)
    for name in ("trial-balance", "prepaid-credit"):
        found = operator.get(f"{url}/{name}", {"month": "2026-11"})
        assert found.status_code == 200
        table = operator.get(f"{url}/{name}", {"month": "2026-11", "format": "csv"})
        assert table["content-type"].startswith("text/csv")
        assert table["content-disposition"] == f'attachment; filename="{name}-default-2026-11.csv"'
        assert list(csv.DictReader(io.StringIO(table.content.decode()))) == found.json() != []
        wrong: tuple[dict[str, str], ...] = (
            *({}, {"month": ""}, {"month": "2026-13"}, {"month": "2026-Q4"}, {"month": "٢٠٢٦-11"}),
            *({"month": f"{now.year + 1}-02"}, {"month": "2026-11", "format": "xml"}),
            {"month": "2026-11", "group_by": "model"},
        )
        for query in wrong:
            answer = operator.get(f"{url}/{name}", query)
            assert (answer.status_code, bool(answer.json()["errors"])) == (400, True), query
        assert operator.get(f"/api/operator/entities/0/{name}", {"month": "2026-11"}).status_code == 404
        assert owner.get(f"{url}/{name}", {"month": "2026-11"}).status_code == 404
    rows = operator.get(f"{url}/prepaid-credit", {"month": "2026-11", "group_by": "tenant"}).json()
    assert {row["tenant"] for row in rows} == {"acme", "klein"}
    future = operator.get(f"{url}/trial-balance", {"month": f"{now.year + 1}-02"}).json()
    assert (future["code"], list(future["errors"])) == ("future_month", ["month"])
