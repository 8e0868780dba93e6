"""Write-offs: bad debt without tax, the claim that some laws want first, and the tax of amounts that are paid later."""

from __future__ import annotations

from datetime import date

import pytest

from billing.invoicing.corrections import do_claim_tax_relief, do_issue_credit_note, do_write_off
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.setup import do_change_entity
from billing.ledger.bad_debts import relieved_tax, written_off
from billing.ledger.ledger import balance
from billing.ledger.matching import sum_outstanding
from billing.models import Account, ExchangeRate, Invoice, LedgerEntry, LedgerTransaction, TaxRule, UsageEvent
from billing.payments.recording import Received, do_record_payment
from billing.periods import default_entity
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, over, period, price, take_back, use
from tests.support.rows import unscoped
from tests.support.tenants.concurrency import at_once

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
CENT = 10**7


def tax_of(percent: int = 19) -> None:
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.create(
            entity=default_entity(), category="S", rate_ppm=percent * 10_000, starts_on=date(2026, 1, 1)
        )


def bill(tenant: Tenant, usd: str = "100") -> Invoice:
    use(tenant, OCTOBER, (price(usd), 10**6))
    return invoiced(tenant, OCTOBER)


def pay(cents: int, reference: str = "p1") -> None:
    do_record_payment(Received("manual", reference, cents, NOVEMBER, tenant="acme"))


def change_entity(**fields: object) -> None:
    with all_tenants_scope(BypassReason.BILLING):
        do_change_entity(default_entity(), **fields)


def booked(tenant: Tenant, invoice: Invoice) -> tuple[int, int, int]:
    """Return the cents of bad debt, of output tax that is owed, and of the receivable. The ledger sums to zero."""
    with all_tenants_scope(BypassReason.BILLING):
        found = [balance(tenant.pk, account) for account in (Account.BAD_DEBT, Account.TAX, Account.RECEIVABLE)]
        assert sum(row.nano for row in LedgerEntry.objects.for_tenant(tenant)) == 0
    assert all(nano % CENT == 0 for nano in found)
    return found[0] // CENT, -found[1] // CENT, found[2] // CENT


def state(invoice: Invoice) -> tuple[str, int, int]:
    """Return the state, and the cents that are outstanding and written off."""
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().get(pk=invoice.pk)
        return row.state, sum_outstanding(row), written_off(row) // CENT


def test_a_write_off_is_bad_debt_without_tax(acme):
    tax_of()
    invoice = bill(acme)
    assert booked(acme, invoice) == (0, 1_900, 11_900)
    do_write_off(invoice, "Insolvent")
    assert (booked(acme, invoice), state(invoice)) == ((10_000, 0, 0), ("uncollectible", 0, 11_900))
    (entry,) = unscoped(AuditEntry).filter(action="invoice.written_off")
    assert entry.after["tax_relief_cents"] == 1_900


def test_payments_restore_both_parts_in_proportion(acme):
    """Each part is rounded to the cent, and together they are exact."""
    tax_of()
    invoice = bill(acme)
    do_write_off(invoice, "Insolvent")
    expected = {1: (9_999, 0, 0), 3_332: (7_199, 532, 0), 8_566: (1, 1_900, 0)}
    for cents, sums in expected.items():
        pay(cents, f"p{cents}")
        assert booked(acme, invoice) == sums
    pay(1, "last")
    assert (booked(acme, invoice), state(invoice)) == ((0, 1_900, 0), ("paid", 0, 0))


def test_a_refund_of_a_recovered_amount_is_bad_debt_again(acme):
    tax_of()
    invoice = bill(acme)
    do_write_off(invoice, "Insolvent")
    pay(5_950)
    assert booked(acme, invoice) == (5_000, 950, 0)
    pay(-5_950, "r1")
    assert (booked(acme, invoice), state(invoice)) == ((10_000, 0, 0), ("uncollectible", 0, 11_900))


def test_the_tax_of_the_paid_part_is_owed(acme):
    tax_of()
    invoice = bill(acme)
    pay(3_333)  # leaves 85.67, with 13.68 of tax
    do_write_off(invoice, "Insolvent")
    assert (booked(acme, invoice), state(invoice)) == ((7_199, 532, 0), ("uncollectible", 0, 8_567))


def test_an_entity_that_has_to_claim_first_owes_the_tax_until_then(acme):
    tax_of()
    change_entity(relief_after_claim=True)
    invoice = bill(acme)
    with pytest.raises(Conflict, match="Write off the invoice first"):
        do_claim_tax_relief(invoice, "Claim 1")
    do_write_off(invoice, "Insolvent")
    assert booked(acme, invoice) == (11_900, 1_900, 0)
    pay(1_190)  # no tax was relieved, so none is restored
    assert booked(acme, invoice) == (10_710, 1_900, 0)
    do_claim_tax_relief(invoice, "Claim 1")
    assert (booked(acme, invoice), state(invoice)) == ((9_000, 190, 0), ("uncollectible", 0, 10_710))
    with pytest.raises(Conflict, match="relieved already"):
        do_claim_tax_relief(invoice, "Claim 1")
    pay(10_710, "p2")
    assert (booked(acme, invoice), state(invoice)) == ((0, 1_900, 0), ("paid", 0, 0))
    (entry,) = unscoped(AuditEntry).filter(action="invoice.tax_relief_claimed")
    assert (entry.after["reason"], entry.after["tax_relief_cents"]) == ("Claim 1", 1_710)


def test_a_second_write_off_has_a_claim_of_its_own(acme):
    tax_of()
    invoice = bill(acme)
    do_write_off(invoice, "Insolvent")
    pay(11_900)
    pay(-1_190, "r1")
    change_entity(relief_after_claim=True)
    do_write_off(invoice, "Insolvent again")
    assert booked(acme, invoice) == (1_190, 1_900, 0)
    do_claim_tax_relief(invoice, "Claim 2")
    assert booked(acme, invoice) == (1_000, 1_710, 0)


def test_an_invoice_without_tax_has_no_relief(acme):
    invoice = bill(acme)
    do_write_off(invoice, "Insolvent")
    assert booked(acme, invoice) == (10_000, 0, 0)
    with pytest.raises(Conflict, match="has no tax"):
        do_claim_tax_relief(invoice, "Claim")
    assert unscoped(LedgerTransaction).filter(key__startswith="tax-relief:") == []


def test_a_write_off_of_an_earlier_release_keeps_its_tax_until_the_claim(acme, monkeypatch):
    """It booked the whole amount as bad debt. Its recovery does not restore tax that was never relieved."""
    tax_of()
    invoice = bill(acme)
    with monkeypatch.context() as earlier:
        earlier.setattr("billing.invoicing.corrections._has_tax", lambda _: False)
        do_write_off(invoice, "Insolvent")
    assert booked(acme, invoice) == (11_900, 1_900, 0)
    pay(5_950)
    assert booked(acme, invoice) == (5_950, 1_900, 0)
    do_claim_tax_relief(invoice, "Late")
    assert booked(acme, invoice) == (5_000, 950, 0)


@pytest.mark.parametrize("paid", [0, 4_000])
def test_a_credit_note_on_a_written_off_invoice_takes_its_tax_once(acme, paid):
    """A correction reduces the loss with its tax. What it exceeds the loss by becomes a deposit."""
    tax_of()
    invoice = bill(acme)
    if paid:
        pay(paid)
    do_write_off(invoice, "Insolvent")
    take_back(unscoped(UsageEvent).all()[0], NOVEMBER)
    (note,) = [row for row in _correct(acme) if row.refers_to_id == invoice.pk]
    assert note.total == 11_900
    assert (booked(acme, invoice), state(invoice)) == ((0, 0, 0), ("paid", 0, 0))
    with all_tenants_scope(BypassReason.BILLING):
        assert (balance(acme.pk, Account.DEPOSITS), relieved_tax(invoice)) == (-paid * CENT, 0)


def _correct(tenant: Tenant) -> list[Invoice]:
    month = period(NOVEMBER)
    do_close_period(month, now=over(month))
    return [do_finalize(draft, now=month.ends_at) for draft in do_draft(month, tenant)]


def test_credit_notes_before_a_write_off_leave_their_tax_out(acme):
    tax_of()
    invoice = bill(acme)
    do_issue_credit_note(invoice, [("SLA", 3_333)], "SLA")
    tax = booked(acme, invoice)[1]
    do_write_off(invoice, "Insolvent")
    assert booked(acme, invoice) == (6_667, 0, 0)
    assert tax == 1_900 - 633


def test_the_relief_is_also_in_the_tax_currency(acme):
    tax_of()
    change_entity(tax_currency="EUR", max_rate_age_days=60)
    with all_tenants_scope(BypassReason.BILLING):
        ExchangeRate.objects.create(currency="EUR", on=date(2026, 10, 30), micro_per_usd=900_000)
    invoice = bill(acme)
    assert invoice.converted_tax == 1_710
    pay(5_950)
    do_write_off(invoice, "Insolvent")
    (entry,) = unscoped(AuditEntry).filter(action="invoice.written_off")
    assert (entry.after["tax_relief_cents"], entry.after["tax_relief"]) == (950, "EUR 8.55")


def test_two_claims_at_once_relieve_the_tax_once(table, acme):
    tax_of()
    change_entity(relief_after_claim=True)
    invoice = bill(acme)
    do_write_off(invoice, "Insolvent")
    answers = at_once(*[lambda: do_claim_tax_relief(invoice, "Claim")] * 4)
    assert sorted(type(answer).__name__ for answer in answers) == ["Conflict"] * 3 + ["Invoice"]
    assert booked(acme, invoice) == (10_000, 0, 0)


class Killed(Exception):
    """An error that simulates the end of a process."""


def test_a_killed_write_off_leaves_no_trace(acme, monkeypatch):
    tax_of()
    invoice = bill(acme)

    def end(*args: object) -> None:
        raise Killed

    for step in ("book_relief", "_end", "emit_written_off"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(f"billing.invoicing.corrections.{step}", end)
            do_write_off(invoice, "Insolvent")
        assert (booked(acme, invoice), state(invoice)) == ((0, 1_900, 11_900), ("open", 11_900, 0))
