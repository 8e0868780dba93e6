"""Invoices of rated usage: lines, rounding, late usage, taxes, credits, corrections and immutability."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest
from django.db import DatabaseError, connection, transaction

from billing.invoicing import checks, document, pdf
from billing.invoicing.corrections import do_issue_credit_note, do_void, do_write_off
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.lines import lines_of
from billing.ledger import credits
from billing.ledger.ledger import balance
from billing.ledger.matching import sum_outstanding
from billing.models import (
    Account,
    BillingProfile,
    CreditGrant,
    ExchangeRate,
    Invoice,
    InvoiceLine,
    LedgerEntry,
    TaxRule,
    UsageEvent,
)
from billing.payments.recording import Received, do_record_payment
from billing.periods import SETTLING, default_entity
from billing.taxes.taxes import NoTaxRule, tax_for
from millrace.environment.configuration import platform_settings
from tenants.actions import Conflict, do_delete_tenant, do_purge_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import (
    DECEMBER,
    NOVEMBER,
    OCTOBER,
    invoiced,
    over,
    pdf_of,
    period,
    price,
    take_back,
    use,
)
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6
CENT = 10**7  # nano-USD


def lines(invoice: Invoice) -> list[InvoiceLine]:
    return sorted(unscoped(InvoiceLine).filter(invoice_id=invoice.pk), key=lambda line: line.position)


def owed(invoice: Invoice) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        return sum_outstanding(invoice)


def booked(tenant: Tenant, account: Account) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        return balance(tenant.pk, account)


def paid(tenant: Tenant, cents: int, reference: str = "p1", **fields):
    return do_record_payment(Received("manual", reference, cents, NOVEMBER, tenant=tenant.slug, **fields))


def test_lines_that_end_in_half_a_cent_are_rounded_up(acme):
    """Worked example 10."""
    for number, amount in enumerate(("0.005", "0.015", "0.025")):
        use(acme, OCTOBER, (price(amount, model=f"m{number}"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    assert [line.cents for line in lines(invoice)] == [1, 2, 3]
    assert (invoice.subtotal, invoice.total) == (6, 6)
    assert invoice.rounding_femto == 6 * 10**13 - 45 * 10**12


def test_rounding_is_carried_to_the_next_invoice(acme):
    """A hundred lines of 0.49 cents are billed, one month later."""
    for number in range(100):
        use(acme, OCTOBER, (price("0.0049", model=f"m{number}"), MILLION))
    assert invoiced(acme, OCTOBER).total == 0
    use(acme, NOVEMBER, (price("1.006", model="n", number=2), MILLION))  # rounded up by 0.4 cents
    november = invoiced(acme, NOVEMBER)
    last = lines(november)[-1]
    assert (last.line_type, last.cents, int(last.femto)) == ("rounding", 49, 0)
    assert (november.subtotal, november.total) == (101 + 49, 150)
    use(acme, DECEMBER, (price("0.006", model="d", number=3), MILLION))  # 0.6 cents: 0.8 too much so far
    assert [line.cents for line in lines(invoiced(acme, DECEMBER))] == [1]


def test_too_much_billed_by_rounding_is_returned(acme):
    for number in range(3):
        use(acme, OCTOBER, (price("0.006", model=f"m{number}"), MILLION))
    assert invoiced(acme, OCTOBER).total == 3  # for 1.8 cents
    furnish_tax()
    use(acme, NOVEMBER, (price("1", model="n", number=2), MILLION))
    november = invoiced(acme, NOVEMBER)
    assert [(line.line_type, line.cents) for line in lines(november)] == [("usage", 100), ("rounding", -1)]
    assert (november.subtotal, november.total) == (99, 119)
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get(pk=november.pk)
        found = checks.check(row)
    assert (found.ledger_difference, found.same_data, found.same_pdf) == (0, True, True)


def test_concurrent_drafts_bill_rounding_once(acme):
    """Both drafts show the carried cents. Only the invoice that is finalized first bills them."""
    for number in range(3):
        use(acme, OCTOBER, (price("0.004", model=f"m{number}"), MILLION))
    invoiced(acme, OCTOBER)
    for month in (NOVEMBER, DECEMBER):
        use(acme, month, (price("1", model=f"n{month.month}"), MILLION))
    drafts = []
    for month in map(period, (NOVEMBER, DECEMBER)):
        do_close_period(month, now=over(month))
        drafts += do_draft(month)
    assert [draft.subtotal for draft in drafts] == [101, 101]
    assert [do_finalize(draft).subtotal for draft in drafts] == [101, 100]


def test_the_last_invoice_bills_its_own_rounding(acme):
    for number in range(3):
        use(acme, OCTOBER, (price("0.004", model=f"m{number}"), MILLION))
    do_delete_tenant(acme)
    assert invoiced(acme, OCTOBER).total == 1


def furnish_tax() -> None:
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.create(entity=default_entity(), category="S", rate_ppm=200_000, starts_on=date(2026, 1, 1))


def test_a_price_change_makes_two_lines(acme):
    """Worked example 11, first half."""
    use(acme, OCTOBER, (price("3", number=9), MILLION))
    use(acme, OCTOBER, (price("2.5", number=10), MILLION))
    invoice = invoiced(acme, OCTOBER)
    assert [(line.price_version, line.cents) for line in lines(invoice)] == [(9, 300), (10, 250)]
    assert invoice.total == 550


def test_late_usage_is_on_the_next_invoice_and_the_last_is_unchanged(acme):
    """Worked example 11, second half."""
    cheap = price("1")
    use(acme, NOVEMBER, (cheap, 2 * MILLION))
    november = invoiced(acme, NOVEMBER)
    before = pdf_of(november)
    use(acme, NOVEMBER, (cheap, MILLION))  # settled on 5 December
    use(acme, DECEMBER, (cheap, 3 * MILLION))
    do_draft(period(NOVEMBER))
    december = invoiced(acme, DECEMBER)
    assert [(line.usage_month, line.cents) for line in lines(december)] == [("", 300), ("2026-11", 100)]
    after = unscoped(Invoice).get(pk=november.pk)
    assert (after.total, after.sha256) == (200, november.sha256)
    assert recomputed(after) == before


def recomputed(invoice: Invoice) -> bytes:
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get(pk=invoice.pk)
        return pdf.render_pdf(document.describe_invoice(row, lines_of(row)))


def corrected(tenant: Tenant) -> tuple[Invoice, Invoice]:
    """Create October's invoice of 4 dollars and November's correction by 1."""
    one = price("1")
    use(tenant, OCTOBER, (one, MILLION), times=4)
    october = invoiced(tenant, OCTOBER)
    take_back(unscoped(UsageEvent).all()[0], NOVEMBER)
    use(tenant, NOVEMBER, (price("1", number=2), MILLION))
    month = period(NOVEMBER)
    do_close_period(month, now=over(month))
    invoice, note = do_draft(month)
    assert do_finalize(invoice, now=month.ends_at).total == 100
    return october, do_finalize(note, now=month.ends_at)


def test_usage_reversed_after_its_invoice_is_a_credit_note(acme):
    october, note = corrected(acme)
    assert (note.invoice_type, note.total, note.refers_to_id) == ("correction", 100, october.pk)
    assert [(line.usage_month, line.tokens, line.cents) for line in lines(note)] == [("2026-10", MILLION, 100)]
    assert owed(october) == 300
    for row in (october, note):
        with all_tenants_scope(BypassReason.BILLING):
            whole = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get(pk=row.pk)
            found = checks.check(whole)
        assert (found.ledger_difference, found.same_data, found.same_pdf) == (0, True, True)


def test_a_correction_returns_applied_credit(acme):
    credits.do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 350 * CENT, starts_at=OCTOBER, expires_at=NOVEMBER)
    october, note = corrected(acme)
    assert (note.subtotal, note.credits, note.total) == (*(100, [{"label": "Returned as credit", "cents": 50}], 50),)
    assert owed(october) == 0
    assert -booked(acme, Account.CREDITS) == 50 * CENT


def test_without_usage_there_is_no_draft(acme):
    assert do_draft(period(OCTOBER)) == []


def test_drafting_and_finalizing_again_change_nothing(acme):
    use(acme, OCTOBER, (price("3"), MILLION), times=3)
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    (first,), (second,) = do_draft(month), do_draft(month)
    assert first.pk == second.pk
    assert (second.events, len(lines(second))) == (3, 1)
    done = do_finalize(second)
    assert done.number == f"INV-{datetime.now(UTC).year}-000001"
    assert do_finalize(second).number == done.number
    assert do_draft(month) == []
    assert len(unscoped(Invoice).all()) == 1


def test_a_draft_of_an_open_period_cannot_be_finalized(acme):
    use(acme, OCTOBER, (price("3"), MILLION))
    (draft,) = do_draft(period(OCTOBER))
    assert draft.total == 300
    with pytest.raises(Conflict, match="Close the period"):
        do_finalize(draft)


def test_a_period_that_is_not_over_stays_open():
    month = period(datetime.now(UTC))
    with pytest.raises(Conflict, match="not over"):
        do_close_period(month)


def test_a_period_is_closed_only_once_no_request_admitted_in_it_can_run(acme):
    """This includes requests without a budget, which have no reservation in the database."""
    month = period(OCTOBER)
    latest = month.ends_at + timedelta(seconds=platform_settings().request_timeout_seconds)
    with pytest.raises(Conflict, match="may still run"):
        do_close_period(month, now=latest)
    assert do_close_period(month, now=latest + SETTLING)


def test_credits_are_applied_by_priority_expiry_and_age_before_tax(acme):
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.create(entity=default_entity(), category="S", rate_ppm=200_000, starts_on=date(2026, 1, 1))
    promo, start = CreditGrant.GrantType.PROMOTIONAL, OCTOBER - timedelta(days=5)

    def grant(note, cents, **fields):
        credits.do_grant_credit(acme, promo, cents * CENT, **{"starts_at": start, "note": note} | fields)

    grant("late", 100)
    grant("old", 100, expires_at=OCTOBER + timedelta(days=90))
    grant("soon", 100, expires_at=OCTOBER + timedelta(days=30))
    grant("first", 100, priority=1)
    grant("gone", 500, starts_at=start - timedelta(days=30), expires_at=datetime(2026, 10, 1, tzinfo=UTC))
    use(acme, OCTOBER, (price("3.5"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    assert [(item["label"], item["cents"]) for item in invoice.credits] == [
        *(("first", 100), ("soon", 100), ("old", 100), ("late", 50))
    ]
    assert (invoice.subtotal, invoice.taxable, invoice.total) == (350, 0, 0)
    assert unscoped(Invoice).get(pk=invoice.pk).state == "paid"
    use(acme, NOVEMBER, (price("1", model="b"), MILLION))
    second = invoiced(acme, NOVEMBER)
    assert (second.taxable, second.taxes[0]["tax"], second.total) == (50, 10, 60)


def test_credit_below_a_cent_is_carried_forward(acme):
    credits.do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 5 * CENT - 1, starts_at=OCTOBER)
    use(acme, OCTOBER, (price("1"), MILLION))
    assert invoiced(acme, OCTOBER).total == 96
    assert -booked(acme, Account.CREDITS) == CENT - 1


def test_a_commitment_is_billed_and_applied_each_month(acme):
    credits.do_commit(acme, "Committed use", fee=400, included_nano=500 * CENT, first_month="2026-10")
    use(acme, OCTOBER, (price("7"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    assert [(line.line_type, line.cents) for line in lines(invoice)] == [("usage", 700), ("commitment", 400)]
    assert (invoice.subtotal, invoice.credits, invoice.total) == (
        *(1100, [{"label": "Committed use", "cents": 500}], 600),
    )
    november = invoiced(acme, NOVEMBER)  # there was no usage
    assert (november.total, november.credits) == (400, [])
    assert credits.do_expire_credits(DECEMBER) == 1
    assert credits.do_expire_credits(DECEMBER) == 0
    assert booked(acme, Account.CREDITS) == 0


def test_credit_expires_only_when_no_invoice_can_use_it(acme):
    credits.do_grant_credit(
        acme, CreditGrant.GrantType.PROMOTIONAL, CENT, starts_at=OCTOBER, expires_at=OCTOBER + timedelta(days=1)
    )
    month = period(OCTOBER)
    assert credits.do_expire_credits(OCTOBER + timedelta(days=2)) == 0
    do_close_period(month, now=over(month))
    assert credits.do_expire_credits(OCTOBER + timedelta(days=2)) == 1


def profile(tenant: Tenant, **fields) -> BillingProfile:
    with all_tenants_scope(BypassReason.BILLING):
        given = {"name": "Acme GmbH", "country": "DE", "vat_id": "DE136695976"} | fields
        return BillingProfile.objects.create(tenant=tenant, entity=default_entity(), **given)


def test_the_most_specific_tax_rule_is_used():
    with all_tenants_scope(BypassReason.BILLING):
        entity = default_entity()
        start = date(2026, 1, 1)
        for country, buyer, category, rate in (
            *(
                ("", "", "G", 0),
                ("NL", "", "S", 210_000),
                ("DE", "consumer", "S", 190_000),
                ("DE", "business", "AE", 0),
            ),
        ):
            TaxRule.objects.create(entity=entity, country=country, buyer=buyer, category=category, rate_ppm=rate,
                                   starts_on=start)  # fmt: skip
        valid = {"NL": "NL123456789B13", "DE": "DE136695976", "JP": "7000012050002"}
        seller = {"country": "IE", "vat_id": "IE0000000W"}

        def rule(country: str, vat_id: str, seller=seller, on=date(2026, 10, 31)):
            return tax_for(entity.pk, seller, {"country": country, "region": "", "vat_id": vat_id}, on)

        for country, consumer, business in (("NL", "S", "S"), ("DE", "S", "AE"), ("JP", "G", "G")):
            assert rule(country, "")["category"] == consumer
            assert rule(country, "x")["category"] == consumer  # stored before VAT IDs were validated
            assert rule(country, valid[country])["category"] == business
        assert "Reverse charge" in rule("DE", valid["DE"])["note"]
        with pytest.raises(NoTaxRule):
            rule("NL", "", on=date(2025, 1, 1))
        with pytest.raises(NoTaxRule, match="VAT ID of the billing entity"):
            rule("DE", valid["DE"], seller={"country": "IE", "vat_id": ""})


def test_tax_is_rounded_once_on_its_base(acme):
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.create(entity=default_entity(), category="S", rate_ppm=88_750, starts_on=date(2026, 1, 1))
    for number in range(3):
        use(acme, OCTOBER, (price("0.33", model=f"m{number}"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    assert (invoice.subtotal, invoice.taxes[0]["tax"], invoice.total) == (99, 9, 108)  # 8.78625, and not three times 3


def test_without_a_matching_tax_rule_a_draft_is_not_finalized(acme):
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.create(
            entity=default_entity(), country="NL", category="S", rate_ppm=210_000, starts_on=date(2026, 1, 1)
        )
    use(acme, OCTOBER, (price("3"), MILLION))
    with pytest.raises(Conflict, match="No tax rule"):
        invoiced(acme, OCTOBER)
    assert unscoped(Invoice).get().number is None


def test_another_currency_is_shown_at_a_pinned_rate(acme):
    profile(acme, currency="EUR")
    with all_tenants_scope(BypassReason.BILLING):
        for day, rate in ((1, 900_000), (31, 920_000)):
            ExchangeRate.objects.create(currency="EUR", on=date(2026, 10, day), micro_per_usd=rate)
    use(acme, OCTOBER, (price("10"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    with all_tenants_scope(BypassReason.BILLING):
        ExchangeRate.objects.filter(on=date(2026, 10, 31)).update(micro_per_usd=1)
    row = unscoped(Invoice).get(pk=invoice.pk)
    assert (row.total, row.display_currency, row.display_rate) == (1000, "EUR", 920_000)


def test_a_credit_note_returns_the_tax_too(acme):
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.create(entity=default_entity(), category="S", rate_ppm=190_000, starts_on=date(2026, 1, 1))
    use(acme, OCTOBER, (price("1.03"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    assert invoice.total == 103 + 20
    for number in range(1, 4):
        note = do_issue_credit_note(invoice, [("SLA credit", 33)], "SLA")
        assert (note.number, note.total, owed(invoice)) == (
            *(f"CN-{datetime.now(UTC).year}-{number:06}", 39, 123 - 39 * number),
        )
    with pytest.raises(Conflict, match=r"Only \$0\.04"):
        do_issue_credit_note(invoice, [("SLA credit", 5)], "SLA")
    last = do_issue_credit_note(invoice, [("SLA credit", 4)], "SLA")
    assert (last.total, owed(invoice)) == (6, 0)  # 4 and the remaining tax
    assert unscoped(Invoice).get(pk=invoice.pk).state == "paid"
    assert booked(acme, Account.REVENUE) == booked(acme, Account.TAX) == 0


def test_a_credit_note_on_a_paid_invoice_pays_the_next(acme):
    use(acme, OCTOBER, (price("2"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    paid(acme, 200)
    do_issue_credit_note(invoice, [("SLA credit", 50)], "SLA")
    assert -booked(acme, Account.DEPOSITS) == 50 * CENT
    use(acme, NOVEMBER, (price("2", number=2), MILLION))
    assert owed(invoiced(acme, NOVEMBER)) == 150


def test_voiding_returns_credit_and_allows_a_new_invoice(acme):
    credits.do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 50 * CENT, starts_at=OCTOBER)
    use(acme, OCTOBER, (price("2"), MILLION))
    first = invoiced(acme, OCTOBER)
    do_void(first, "wrong address")
    assert -booked(acme, Account.CREDITS) == 50 * CENT
    assert booked(acme, Account.REVENUE) == booked(acme, Account.RECEIVABLE) == 0
    (draft,) = do_draft(period(OCTOBER))
    second = do_finalize(draft)
    assert (second.revision, second.total) == (2, 150)
    assert int(second.number[-6:]) == int(first.number[-6:]) + (first.number[:8] == second.number[:8])
    paid(acme, 1)
    with pytest.raises(Conflict, match="credit note"):
        do_void(second, "too late")
    do_write_off(second, "insolvent")
    assert booked(acme, Account.BAD_DEBT) == 149 * CENT
    assert owed(second) == 0


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE billing_invoice SET total = 1",
        "UPDATE billing_invoice SET state = 'draft', number = NULL, issued_at = NULL",
        "UPDATE billing_invoice SET buyer = '{}'",
        "DELETE FROM billing_invoice",
        "TRUNCATE billing_invoice CASCADE",
        "UPDATE billing_invoiceline SET cents = 1",
        "DELETE FROM billing_invoiceline",
        "TRUNCATE billing_invoiceline",
        "INSERT INTO billing_invoiceline (invoice_id, tenant_id, position, line_type, description, model, tier,"
        ' component, prompt_length_band, "window", usage_month, events, tokens, femto, cents)'
        " SELECT id, tenant_id, 99, 'usage', '', '', '', '', 0, '', '', 0, 0, 0, 0 FROM billing_invoice",
        "UPDATE billing_invoicefile SET pdf = ''",
        "DELETE FROM billing_invoicefile",
        "UPDATE billing_ledgerentry SET nano = 1",
        "DELETE FROM billing_ledgertransaction",
        "UPDATE billing_period SET closed_at = NULL",
        "UPDATE billing_period SET ends_at = ends_at + interval '1 day'",
    ],
)
@pytest.mark.parametrize("role", ["system", "owner"])
def test_final_invoices_never_change(acme, as_owner, sql, role):
    use(acme, OCTOBER, (price("3"), MILLION))
    pdf_of(invoiced(acme, OCTOBER))

    def run():
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
            if role == "owner":
                cursor.execute("SET LOCAL ROLE NONE")
                tables = ("invoice", "invoiceline", "invoicefile", "ledgerentry", "ledgertransaction", "period")
                for table in tables:  # so that triggers apply even to an owner that sees every row
                    cursor.execute(f"ALTER TABLE billing_{table} NO FORCE ROW LEVEL SECURITY")
                    cursor.execute(f"ALTER TABLE billing_{table} ENABLE TRIGGER USER")
            else:
                cursor.execute("SET LOCAL ROLE millrace_system")
            cursor.execute(sql)
            assert cursor.rowcount != 0, "it met no row"

    with pytest.raises(DatabaseError, match=r"final|append-only|fixed|permission denied|invoice_numbered"):
        run()


def test_the_books_balance(acme):
    use(acme, OCTOBER, (price("2"), MILLION))
    invoiced(acme, OCTOBER)
    assert sum(entry.nano for entry in unscoped(LedgerEntry).all()) == 0


def test_the_last_invoice_of_a_purged_tenant_has_its_name(acme):
    use(acme, OCTOBER, (price("2"), MILLION))
    do_delete_tenant(acme)
    assert do_purge_tenant(acme, now=datetime.now(UTC) + timedelta(days=400))
    assert invoiced(acme, OCTOBER).buyer["name"] == "Acme"


@pytest.mark.parametrize("is_purged", [False, True])
def test_the_remainder_of_a_deleted_tenant_without_usage_is_billed(acme, is_purged):
    for number in range(100):
        use(acme, OCTOBER, (price("0.0049", model=f"m{number}"), MILLION))
    assert invoiced(acme, OCTOBER).total == 0
    do_delete_tenant(acme)
    if is_purged:
        do_purge_tenant(acme, now=datetime.now(UTC) + timedelta(days=400))
    last = invoiced(acme, NOVEMBER)
    assert [(line.line_type, line.cents) for line in lines(last)] == [("rounding", 49)]
    month = period(DECEMBER)
    do_close_period(month, now=over(month))
    assert do_draft(month) == []
