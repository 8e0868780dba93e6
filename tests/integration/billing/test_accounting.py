"""The journal of a billing entity: CSV and DATEV, compared with the ledger and the invoices of the month."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from billing.accounting import journal
from billing.accounting.exports import export_journal
from billing.invoicing.corrections import do_issue_credit_note, do_void, do_write_off
from billing.invoicing.purchases import do_sell_credit
from billing.invoicing.setup import do_add_entity, do_add_exchange_rate, do_assign_entity, do_set_profile
from billing.ledger.credits import do_grant_credit
from billing.models import (
    Account,
    BillingEntity,
    ChartOfAccounts,
    CreditGrant,
    ExchangeRate,
    Invoice,
    LedgerEntry,
    TaxRule,
)
from billing.payments.recording import Received, do_record_payment
from billing.periods import default_entity
from tenants.actions import ActionRefused, Conflict, do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant, User
from tests.support.billing.books import OCTOBER, invoiced, price, use
from tests.support.billing.charts import CHART, read_datev, set_chart
from tests.support.billing.euros import bill_in_euros
from tests.support.billing.prepaid_credit import CENT
from tests.support.downloads import read_download
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_person, by_role

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6
NOW = datetime.now(UTC)
BOOKED = f"{NOW:%Y-%m}"  # the month of everything that is booked now
ISSUED = "2026-11"  # October's invoices are issued when it ends
MONTHS = sorted({ISSUED, BOOKED})


@pytest.fixture
def entity(acme: Tenant) -> BillingEntity:
    """A German entity with 19 % of VAT in Germany and reverse charge in France."""
    with all_tenants_scope(BypassReason.BILLING):
        row = default_entity()
        row.name, row.country, row.vat_id, row.tax_currency = "Mühle “Süd” GmbH", "DE", "DE136695976", "EUR"
        row.max_rate_age_days = 1000
        row.save()
        TaxRule.objects.create(entity=row, country="DE", category="S", rate_ppm=190_000, starts_on=date(2026, 1, 1))
        TaxRule.objects.create(entity=row, country="FR", category="AE", starts_on=date(2026, 1, 1))
    do_add_exchange_rate(currency="EUR", on=date(2026, 1, 1), micro_per_usd=800_000)
    return row


@pytest.fixture
def busy(acme: Tenant, entity: BillingEntity) -> list[Tenant]:
    """Three tenants with invoices, a note, payments, a write-off, a void, prepaid and promotional credit."""
    french, euros = do_create_tenant("petit", "Petit SARL"), do_create_tenant("klein", "Klein & Söhne")
    do_set_profile(acme, country="DE")
    do_set_profile(french, country="FR", vat_id="FR40303265045")
    do_set_profile(euros, country="DE")
    bill_in_euros(euros)
    do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 100 * CENT + 5, starts_at=OCTOBER, priority=1)
    pay("p-credit", 5000, tenant="acme")
    do_sell_credit(acme, 5000 * CENT, starts_at=OCTOBER)
    use(acme, OCTOBER, (price("100", model="a"), MILLION))
    use(french, OCTOBER, (price("70", model="b"), MILLION))
    use(euros, OCTOBER, (price("33.33", model="c", book="eur"), MILLION))
    first, second, third = (invoiced(tenant, OCTOBER) for tenant in (acme, french, euros))
    assert (first.taxable, first.total, first.prepaid) == (9900, 11781, 5000)
    pay("p-1", 2000, invoice=first.number)
    do_issue_credit_note(first, [("SLA", 1000)], "SLA")
    do_write_off(first, "insolvent")
    pay("p-2", 7000, invoice=second.number)
    do_void(third, "wrong address")
    pay("=p-3", 1000, tenant="klein")
    return [acme, french, euros]


def pay(reference: str, cents: int, **fields: Any) -> None:
    do_record_payment(Received("manual", reference, cents, NOW, **fields))


def export(entity: BillingEntity, month: str, file_format: str = "csv") -> bytes:
    with all_tenants_scope(BypassReason.OPERATOR):
        file = export_journal(entity, month, file_format)
    with file.content:
        content = file.content.read()
    assert len(content) == file.size
    return content


def journal_rows(entity: BillingEntity) -> list[dict[str, str]]:
    """Return the rows of the CSV files of the months in which the tests book."""
    texts = [export(entity, month).decode() for month in MONTHS]
    return [row for text in texts for row in csv.DictReader(io.StringIO(text))]


def datev_rows(entity: BillingEntity) -> list[dict[str, str]]:
    return [row for month in MONTHS for row in read_datev(export(entity, month, "datev"))[1]]


def signed(row: dict[str, str]) -> Decimal:
    return Decimal(row["debit"] or 0) - Decimal(row["credit"] or 0)


def number(text: str) -> Decimal:
    return Decimal(text.replace(",", "."))


def sum_by(rows: list[dict[str, str]], *columns: str) -> dict[tuple[str, ...], Decimal]:
    sums: dict[tuple[str, ...], Decimal] = defaultdict(Decimal)
    for row in rows:
        sums[tuple(row[column] for column in columns)] += signed(row)
    return dict(sums)


def test_the_journal_has_each_entry_of_the_ledger_once(busy, entity):
    rows = journal_rows(entity)
    entries = list(unscoped(LedgerEntry).select_related("transaction", "tenant"))
    expected: dict[tuple[str, ...], Decimal] = defaultdict(Decimal)
    for entry in entries:
        key = (entry.transaction.key, entry.tenant.slug, entry.account, entry.transaction.currency)
        expected[key] += Decimal(entry.nano).scaleb(-9)
    assert sum_by(rows, "booking", "tenant", "account", "currency") == expected
    assert {row["tenant"] for row in rows} == {"acme", "petit", "klein"}
    assert {row["account"] for row in rows} == set(Account.values) - {"breakage", "commitments"}
    assert set(sum_by(rows, "booking").values()) == {0}  # debits equal credits in each posting
    assert sum_by(rows, "currency") == {("USD",): 0, ("EUR",): 0}


def test_the_journal_equals_the_documents_of_the_month(busy, entity):
    rows = journal_rows(entity)
    documents = [row for row in unscoped(Invoice).select_related("refers_to") if row.number]
    types = Counter(row.invoice_type for row in documents)
    assert types == {"invoice": 3, "purchase": 1, "credit_note": 1, "cancellation": 1}
    for row in documents:
        found = sum_by([line for line in rows if line["booking"] == f"invoice:{row.pk}"], "account", "tax_category")
        sign = 1 if row.is_credit_note else -1
        charged = "credits" if row.sells_credit else "revenue"
        (tax,) = row.taxes
        assert found[charged, tax["category"]] == sign * Decimal(tax["base"]).scaleb(-2)
        assert found.get(("tax", tax["category"]), 0) == sign * Decimal(tax["tax"]).scaleb(-2)
        if not row.is_credit_note:
            assert found.get((charged, ""), 0) == -Decimal(row.subtotal - row.taxable).scaleb(-2)
            assert found.get(("receivable", ""), 0) == Decimal(
                row.total - (0 if row.sells_credit else row.prepaid)
            ).scaleb(-2)
        assert {line["document"] for line in rows if line["booking"] == f"invoice:{row.pk}"} == {row.number}
    texts = {row["text"] for row in rows if row["booking"].startswith("payment:")}
    assert texts == {"Acme p-credit", "Acme p-1", "Petit SARL p-2", "Klein & Söhne =p-3"}


def test_the_sums_of_the_page_are_those_of_the_file(busy, entity):
    with all_tenants_scope(BypassReason.OPERATOR):
        sums = [row for month in MONTHS for row in journal.sum_accounts(entity, month)]
    found: dict[tuple[str, ...], list[Decimal]] = defaultdict(lambda: [Decimal(0), Decimal(0)])
    expected: dict[tuple[str, ...], list[Decimal]] = defaultdict(lambda: [Decimal(0), Decimal(0)])
    for row in sums:
        found[row.currency, row.account][0] += Decimal(row.debit).scaleb(-9)
        found[row.currency, row.account][1] += Decimal(row.credit).scaleb(-9)
    for line in journal_rows(entity):
        expected[line["currency"], line["account"]][0] += Decimal(line["debit"] or 0)
        expected[line["currency"], line["account"]][1] += Decimal(line["credit"] or 0)
    assert found == expected


def test_a_datev_file_balances_and_equals_the_journal(busy, entity):
    set_chart(entity)
    by_number: dict[tuple[str, str], Decimal] = defaultdict(Decimal)
    for row in datev_rows(entity):
        sign = 1 if row["Soll/Haben-Kennzeichen"] == "S" else -1
        amount = sign * number(row["Umsatz (ohne Soll/Haben-Kz)"])
        assert number(row["Umsatz (ohne Soll/Haben-Kz)"]) > 0
        by_number[row["WKZ Umsatz"], row["Konto"]] += amount
        by_number[row["WKZ Umsatz"], row["Gegenkonto (ohne BU-Schlüssel)"]] -= amount
    numbers = {"receivable": "10000", "cash": "1200", "deposits": "1718", "credits": "1710", "promotions": "4600"}
    expected: dict[tuple[str, str], Decimal] = defaultdict(Decimal)
    for row in journal_rows(entity):
        # The tax of the account 8400 is in its amounts. The tax of a written-off invoice has no amount of that account.
        tax = "8400" if row["booking"].startswith("invoice:") else "1776"
        revenue = {"S": "8400", "AE": "8336", "": "8200"}.get(row["tax_category"], "")
        name = {"revenue": revenue, "bad_debt": "2400", "tax": tax}.get(row["account"])
        expected[row["currency"], name or numbers[row["account"]]] += signed(row)
    cents = {key: amount.quantize(Decimal("0.01")) for key, amount in expected.items()}
    assert {key: amount for key, amount in by_number.items() if amount} == {
        key: amount for key, amount in cents.items() if amount
    }


def test_datev_computes_the_tax_of_each_document(busy, entity):
    set_chart(entity)
    rows = datev_rows(entity)
    for document in unscoped(Invoice).filter(number__isnull=False):
        (tax,) = document.taxes
        taxed = [
            row
            for row in rows
            if row["Zusatzinformation- Inhalt 2"] == f"invoice:{document.pk}"
            and row["Gegenkonto (ohne BU-Schlüssel)"] == "8400"
        ]
        assert len(taxed) == (tax["category"] == "S")
        for row in taxed:
            gross = number(row["Umsatz (ohne Soll/Haben-Kz)"])
            assert gross == Decimal(tax["base"] + tax["tax"]).scaleb(-2)
            assert (gross * 19 / 119).quantize(Decimal("0.01")) == Decimal(tax["tax"]).scaleb(-2)


def test_the_lines_of_a_datev_file(busy, entity):
    set_chart(entity, first_month=7, account_digits=4)
    header, rows = read_datev(export(entity, ISSUED, "datev"))
    assert len(header) == 31
    assert header[:5] == ["EXTF", "700", "21", "Buchungsstapel", "13"]
    assert header[10:17] == ["1001", "7", "20260701", "4", "20261101", "20261130", "Mühle “Süd” GmbH 2026-11"]
    assert header[18:22] == ["1", "0", "0", "EUR"]
    (line,) = [row for row in rows if row["Gegenkonto (ohne BU-Schlüssel)"] == "8336"]
    (french,) = [row for row in unscoped(Invoice).all() if row.total == 7000 and row.invoice_type == "invoice"]
    assert {name: value for name, value in line.items() if value} == {
        "Umsatz (ohne Soll/Haben-Kz)": "70,00",
        "Soll/Haben-Kennzeichen": "S",
        "WKZ Umsatz": "USD",
        "Kurs": "1,250000",
        "Basis-Umsatz": "56,00",
        "WKZ Basis-Umsatz": "EUR",
        "Konto": "10000",
        "Gegenkonto (ohne BU-Schlüssel)": "8336",
        "Belegdatum": "0111",
        "Belegfeld 1": french.number,
        "Buchungstext": "Petit SARL",
        "EU-Land u. UStID (Bestimmung)": "FR40303265045",
        "Zusatzinformation - Art 1": "Tenant",
        "Zusatzinformation- Inhalt 1": "petit",
        "Zusatzinformation - Art 2": "Ledger",
        "Zusatzinformation- Inhalt 2": f"invoice:{french.pk}",
        "Festschreibung": "0",
    }


def test_a_datev_file_names_the_country_and_the_rate_of_a_consumer_in_another_eu_country(acme, entity):
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.create(entity=entity, country="GR", category="S", rate_ppm=240_000, starts_on=date(2026, 1, 1))
    do_set_profile(acme, country="GR")
    use(acme, OCTOBER, (price("100", model="a"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    do_issue_credit_note(invoice, [("SLA", 1000)], "SLA")
    do_write_off(invoice, "insolvent")
    pay("p-1", 124, tenant="acme")
    set_chart(entity, CHART + "revenue,S,24,8331,,yes\nbad_debt,S,24,2401,,yes\ntax,S,24,1767,,\n")
    eu, rate = "EU-Land u. UStID (Bestimmung)", "EU-Steuersatz (Bestimmung)"
    found = [(row["Gegenkonto (ohne BU-Schlüssel)"], row[eu], row[rate]) for row in datev_rows(entity)]
    assert {cells for cells in found if cells[0] in ("8331", "2401")} == {
        ("8331", "EL", "24,00"),
        ("2401", "EL", "24,00"),
    }
    others = [cells[1:] for cells in found if cells[0] not in ("8331", "2401")]
    assert others
    assert set(others) == {("", "")}


def test_tax_is_a_line_of_its_own_if_the_account_does_not_compute_it(busy, entity):
    set_chart(entity, CHART.replace("revenue,S,19,8400,,yes", "revenue,S,19,8400,40,no"))
    rows = [row for row in datev_rows(entity) if row["Buchungstext"].startswith("Acme")]
    invoice = next(row for row in unscoped(Invoice).all() if row.total == 11781)
    lines = {
        row["Gegenkonto (ohne BU-Schlüssel)"]: (row["Umsatz (ohne Soll/Haben-Kz)"], row["BU-Schlüssel"])
        for row in rows
        if row["Zusatzinformation- Inhalt 2"] == f"invoice:{invoice.pk}"
    }
    assert lines == {"8400": ("99,00", "40"), "8200": ("1,00", ""), "1776": ("18,81", "40"), "1710": ("51,00", "")}


def test_fractions_of_a_cent_are_carried_to_the_next_line(acme, entity):
    set_chart(entity)
    for _ in range(3):
        do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, CENT // 2)
    amounts = [row["Umsatz (ohne Soll/Haben-Kz)"] for row in read_datev(export(entity, BOOKED, "datev"))[1]]
    assert amounts == ["0,01", "0,01"]  # 0.015 as 0.02


def test_an_account_that_the_chart_does_not_have_stops_the_export(acme, entity):
    """No part of the file is returned. The tax needs no line, since it is in the amounts of the revenue."""
    do_set_profile(acme, country="DE")
    do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 100 * CENT, starts_at=OCTOBER)
    use(acme, OCTOBER, (price("100"), MILLION))
    invoiced(acme, OCTOBER)
    without_tax = CHART.replace("revenue,,,8200,,\n", "").replace("tax,S,19,1776,40,", "tax,E,,1776,,")
    set_chart(entity, without_tax)
    with pytest.raises(Conflict, match=r"accounts\.csv has no account number for revenue with the tax –"):
        export(entity, ISSUED, "datev")
    set_chart(entity, without_tax.replace("revenue,AE", "revenue,,,8200,,\nrevenue,AE"))
    assert export(entity, ISSUED, "datev")
    set_chart(entity, CHART.replace("tax,S,19,1776,40,", "tax,E,,1776,,").replace("8400,,yes", "8400,,no"))
    with pytest.raises(Conflict, match=r"accounts\.csv has no account number for tax with the tax S 19 %"):
        export(entity, ISSUED, "datev")


def test_an_entity_without_a_chart_exports_csv_only(busy, entity):
    with pytest.raises(Conflict, match="default has no chart of accounts"):
        export(entity, ISSUED, "datev")
    assert export(entity, ISSUED).startswith(b"date,booking,tenant")


def test_a_missing_exchange_rate_stops_the_export(busy, entity):
    set_chart(entity)
    with all_tenants_scope(BypassReason.BILLING):
        ExchangeRate.objects.all().delete()
    with pytest.raises(Conflict, match="no exchange rate between EUR and USD for 2026-11-01"):
        export(entity, ISSUED, "datev")


def test_chunks_do_not_change_the_file(busy, entity, monkeypatch):
    whole = [export(entity, month) for month in MONTHS]
    monkeypatch.setattr(journal, "CHUNK", 1)
    assert [export(entity, month) for month in MONTHS] == whole


def test_a_long_month_is_read_in_chunks(busy, entity, monkeypatch, django_assert_max_num_queries):
    """The first posting needs a number of queries that does not depend on the length of the month."""
    monkeypatch.setattr(journal, "CHUNK", 1)
    with all_tenants_scope(BypassReason.OPERATOR), django_assert_max_num_queries(4):
        postings = journal.read_postings(entity, ISSUED)
        assert next(postings).entries
    with all_tenants_scope(BypassReason.OPERATOR):
        assert sum(len(list(journal.read_postings(entity, month))) for month in MONTHS) > 10


def test_the_tenants_of_another_entity_are_not_in_the_journal(busy, entity):
    other = do_add_entity(slug="japan", name="Mill KK", country="JP", time_zone="Asia/Tokyo")
    tenant = do_create_tenant("tokyo", "Tokyo")
    do_assign_entity(tenant, other)
    do_grant_credit(tenant, CreditGrant.GrantType.PROMOTIONAL, CENT)
    assert "tokyo" not in {row["tenant"] for row in journal_rows(entity)}
    local = f"{datetime.now(ZoneInfo('Asia/Tokyo')):%Y-%m}"
    rows = list(csv.DictReader(io.StringIO(export(other, local).decode())))
    assert {row["tenant"] for row in rows} == {"tokyo"}


def test_a_document_is_booked_on_its_day_in_the_time_zone_of_the_entity(acme):
    """October ends in Tokyo when it is 31 October, 15:00, by UTC."""
    with all_tenants_scope(BypassReason.BILLING):
        default_entity()
        BillingEntity.objects.update(time_zone="Asia/Tokyo")
        tokyo = default_entity()
    use(acme, OCTOBER, (price("1"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    assert invoice.issued_at == datetime(2026, 10, 31, 15, tzinfo=UTC)
    rows = list(csv.DictReader(io.StringIO(export(tokyo, "2026-11").decode())))
    assert [row["date"] for row in rows if row["document"] == invoice.number] == ["2026-11-01"] * 2
    assert export(tokyo, "2026-10").count(b"\n") == 1


def chart_of(entity: BillingEntity) -> ChartOfAccounts:
    with all_tenants_scope(BypassReason.BILLING):
        return ChartOfAccounts.objects.get(entity=entity)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cash,,,1200,,", "cash,,,,,", "accounts.csv, line 3: The account number of cash is missing"),
        ("cash,,,1200,,\n", "", "accounts.csv: There is no line for cash"),
        ("cash,,,1200,,", "cash,,,12OO,,", "line 3: '12OO' is not an account number. Use 4 digits"),
        ("cash,,,1200,,", "cash,,,123,,", "line 3: '123' is not an account number"),
        ("cash,,,1200,,", "cash,,,123456,,", "line 3: '123456' is not an account number"),
        ("cash,,,1200,,", "bank,,,1200,,", "line 3: Unknown account 'bank'"),
        ("cash,,,1200,,", "cash,,19,1200,,", "line 3: A tax_rate needs a tax_category"),
        ("cash,,,1200,,", "cash,,,1200,,\ncash,,,1201,,", "line 4: Line 3 has the same account and tax"),
        ("cash,,,1200,,", "cash,,,1200", "line 3: The line has another number of cells"),
        ("cash,,,1200,,", "cash,,,1200,,,", "line 3: The line has another number of cells"),
        ("cash,,,1200,,", '"cash,,,1200,,', "The CSV is malformed"),
        ("revenue,S,19", "revenue,VAT,19", "line 9: Unknown tax category 'VAT'"),
        ("revenue,S,19,", "revenue,S,19%,", "line 9: '19%' is not a tax rate"),
        ("revenue,S,19,", "revenue,S,101,", "line 9: '101' is not a tax rate"),
        ("8400,,yes", "8400,12345,yes", "line 9: '12345' is not a tax key"),
        ("8400,,yes", "8400,,maybe", "line 9: with_tax is 'maybe'"),
        ("1776,40,", "1776,40,yes", "line 11: with_tax needs a tax_category, and an account other than tax"),
        ("tax_key,", "key,", "line 1: Unknown columns: key"),
    ],
)
def test_a_chart_with_a_wrong_line_is_refused_and_nothing_is_stored(acme, entity, old, new, message):
    set_chart(entity)
    stored, audited = chart_of(entity), unscoped(AuditEntry).count()
    assert CHART.count(old) == 1
    with pytest.raises(ActionRefused) as caught:
        set_chart(entity, CHART.replace(old, new), client=8)
    assert message in str(caught.value)
    after = chart_of(entity)
    assert (after.lines, after.client, after.changed_at) == (stored.lines, 7, stored.changed_at)
    assert unscoped(AuditEntry).count() == audited


def test_the_api_is_for_operators(busy, entity):
    operator, member = by_person(User.objects.create_superuser("op@example.com")), by_role(busy[0], "owner")
    url = f"/api/operator/entities/{entity.pk}"
    for path in (f"{url}/chart", f"{url}/journal?month={ISSUED}"):
        assert member.get(path).status_code == 404
    assert operator.get(f"{url}/chart").status_code == 404
    assert operator.get(f"{url}/journal", {"month": ISSUED, "format": "datev"}).status_code == 409
    body = {"file_name": "accounts.csv", "content": CHART, "consultant": 1001, "client": 7}
    wrong = operator.put(f"{url}/chart", body | {"content": CHART.replace("1200", "")})
    assert (wrong.status_code, wrong.json()["errors"]["content"][0][:20]) == (400, "accounts.csv, line 3")
    assert operator.get(f"{url}/chart").status_code == 404
    stored = operator.put(f"{url}/chart", body)
    assert (stored.status_code, len(stored.json()["lines"]), stored.json()["first_month"]) == (200, 12, 1)
    assert operator.get(f"{url}/chart").json() == stored.json()
    response = operator.get(f"{url}/journal", {"month": ISSUED, "format": "datev"})
    assert response.headers["Content-Disposition"] == 'attachment; filename="EXTF_Buchungsstapel_default_2026-11.csv"'
    content = read_download(response)
    assert len(content) == int(response.headers["Content-Length"])
    assert len(read_datev(content)[1]) > 3
    assert read_download(operator.get(f"{url}/journal", {"month": ISSUED})) == export(entity, ISSUED)
    for query in (
        {},
        {"month": "2026-13"},
        {"month": "0000-11"},
        {"month": "٢٠٢٦-11"},
        {"month": ISSUED, "format": "xml"},
    ):
        assert operator.get(f"{url}/journal", query).status_code == 400
    assert operator.get("/api/operator/entities/99999/journal", {"month": ISSUED}).status_code == 404
