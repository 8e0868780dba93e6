"""Voids: the cancellation of an invoice, its tax by month, its formats, and the invoice that replaces it."""

from __future__ import annotations

from datetime import UTC, datetime
from xml.etree.ElementTree import fromstring
from zoneinfo import ZoneInfo

import facturx
import pytest
from django.core import mail
from django.db import IntegrityError, transaction

from billing.invoicing import checks, emails
from billing.invoicing.corrections import do_issue_debit_note, do_void
from billing.invoicing.document import in_words
from billing.invoicing.drafts import do_draft
from billing.invoicing.exports import html
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.one_off_lines import do_add_one_off_line
from billing.invoicing.purchases import do_sell_credit
from billing.ledger.credits import do_grant_credit
from billing.ledger.ledger import balance
from billing.models import Account, CreditGrant, Invoice, InvoiceEmail, InvoiceLine, LedgerEntry, LedgerTransaction
from billing.payments.recording import Received, do_record_payment
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, period, price, use
from tests.support.billing.invoice_forms import attached, document_of, failed_rules, furnish
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
CENT = 10**7
NOW = datetime(2026, 12, 7, 12, tzinfo=UTC)


@pytest.fixture
def original(acme: Tenant) -> Invoice:
    """An invoice of 119.00 with 19.00 of VAT, issued on the first of November."""
    furnish(acme, "S", 190_000)
    use(acme, OCTOBER, (price("100"), 10**6))
    invoice = invoiced(acme, OCTOBER)
    assert (invoice.total, invoice.taxes[0]["tax"]) == (11_900, 1_900)
    return invoice


def cancellation() -> Invoice:
    return unscoped(Invoice).get(invoice_type="cancellation")


def tax_by_month(tenant: Tenant) -> dict[str, int]:
    """Return the cents of VAT by the month of issue of each document, in the entity's time zone."""
    found: dict[str, int] = {}
    for row in unscoped(Invoice).filter(tenant_id=tenant.pk, number__isnull=False):
        month = f"{row.issued_at.astimezone(ZoneInfo('UTC')):%Y-%m}"
        sign = -1 if row.is_credit_note else 1
        found[month] = found.get(month, 0) + sign * sum(tax["tax"] for tax in row.taxes)
    return found


def check_document(row: Invoice) -> None:
    """The document is recomputed byte for byte, agrees with the ledger, and is valid by EN 16931."""
    with all_tenants_scope(BypassReason.BILLING):
        rows = Invoice.objects.all_tenants().select_related("entity", "period", "refers_to__period")
        found = checks.check(rows.get(pk=row.pk))
    assert (found.ledger_difference, found.same_data, found.same_pdf) == (0, True, True), row
    _, xml = attached(row)
    assert facturx.xml_check_xsd(xml, flavor="factur-x", level="en16931")
    assert failed_rules(xml) == []


def xml_texts(row: Invoice, name: str) -> list[str]:
    _, xml = attached(row)
    nodes = fromstring(xml).iter()  # noqa: S314  (the platform's own document)
    return ["".join(node.itertext()).strip() for node in nodes if node.tag.endswith(f"}}{name}")]


def on(account: Account, tenant: Tenant) -> int:
    with all_tenants_scope(BypassReason.BILLING):
        return balance(tenant.pk, account) // CENT


def test_a_void_issues_a_cancellation_whose_tax_counts_in_its_own_month(acme, original):
    do_void(original, "Wrong address", NOW)
    voided, note = unscoped(Invoice).get(pk=original.pk), cancellation()
    assert (voided.state, voided.number, voided.sha256) == ("void", original.number, original.sha256)
    assert (note.number, note.state, note.refers_to_id) == ("CN-2026-000001", "paid", original.pk)
    assert (note.issued_at, note.due_on, note.reason) == (NOW, None, "Wrong address")
    assert (note.subtotal, note.taxes, note.total) == (
        original.subtotal,
        original.taxes,
        original.total,
    )
    assert tax_by_month(acme) == {"2026-11": 1_900, "2026-12": -1_900}
    booked = unscoped(LedgerEntry).filter(transaction__key=f"invoice:{note.pk}")
    assert {(row.account, row.nano // CENT, row.invoice_id) for row in booked} == {
        *(("receivable", -11_900, original.pk), ("revenue", 10_000, note.pk), ("tax", 1_900, note.pk)),
    }
    assert all(on(account, acme) == 0 for account in (Account.RECEIVABLE, Account.REVENUE, Account.TAX))
    for row in (original, note):
        check_document(row)


def test_the_formats_of_a_cancellation_name_its_invoice(acme, original):
    do_void(original, "Wrong address", NOW)
    note, shown = cancellation(), document_of(cancellation())
    assert (shown["invoice_type"], shown["refers_to"]) == ("cancellation", original.number)
    assert [(line["line_type"], line["cents"]) for line in shown["lines"]] == [("usage", 10_000)]
    words = in_words(shown)
    assert (words["title"], words["refers_label"], words["due_label"]) == ("Cancellation", "Cancels", "Amount credited")
    assert f"<dt>Cancels</dt><dd>{original.number}</dd>" in html(shown)
    assert xml_texts(note, "TypeCode")[0] == "381"
    assert xml_texts(note, "InvoiceReferencedDocument") == [original.number]
    assert xml_texts(note, "DuePayableAmount") == ["119.00"]


def test_the_next_invoice_refers_to_the_cancelled_one(acme, original):
    do_void(original, "Wrong address", NOW)
    for _ in range(2):  # a draft that is written again keeps the reference
        (draft,) = do_draft(period(OCTOBER), acme)
    invoice = do_finalize(draft, NOW)
    assert (invoice.replaces_id, invoice.refers_to_id, invoice.revision) == (original.pk, None, 2)
    shown = document_of(invoice)
    assert (shown["replaces"], shown["refers_to"]) == (original.number, None)
    assert f"<dt>Replaces</dt><dd>{original.number}</dd>" in html(shown)
    assert xml_texts(invoice, "InvoiceReferencedDocument") == [original.number]
    assert xml_texts(invoice, "TypeCode")[0] == "380"
    assert tax_by_month(acme) == {"2026-11": 1_900, "2026-12": 0}  # the buyer deducts the VAT of one invoice
    check_document(invoice)


def test_documents_of_other_types_have_no_new_field(acme, original):
    assert "replaces" not in document_of(original)


def test_an_invoice_voided_by_an_earlier_release_is_not_referred_to(acme, original):
    with all_tenants_scope(BypassReason.BILLING):
        Invoice.objects.all_tenants().filter(pk=original.pk).update(state="void")
    (draft,) = do_draft(period(OCTOBER), acme)
    invoice = do_finalize(draft, NOW)
    assert invoice.replaces_id is None
    assert "replaces" not in document_of(invoice)


def test_a_cancellation_is_emailed(acme, original):
    emails.send_all()
    mail.outbox.clear()
    do_void(original, "Wrong address", NOW)
    note = cancellation()
    assert [row.email_type for row in unscoped(InvoiceEmail).filter(invoice_id=note.pk)] == ["issued"]
    emails.send_all()
    (sent_mail,) = mail.outbox
    assert sent_mail.subject == f"Cancellation {note.number} from Northgate Inference B.V."
    assert f"It cancels {original.number}." in sent_mail.body
    assert [name for name, *_ in sent_mail.attachments] == [f"{note.number}.pdf"]


def test_credit_of_both_types_returns_to_its_grants(acme):
    """Promotional credit is deducted before tax and prepaid credit pays the total: both are on the cancellation."""
    furnish(acme, "S", 190_000)
    do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 2_000 * CENT, starts_at=OCTOBER)
    do_record_payment(Received("manual", "p1", 5_000, OCTOBER, tenant="acme"))
    do_sell_credit(acme, 5_000 * CENT, starts_at=OCTOBER)
    use(acme, OCTOBER, (price("100"), 10**6))
    invoice = invoiced(acme, OCTOBER)
    assert (invoice.taxable, invoice.total, invoice.prepaid) == (8_000, 9_520, 5_000)
    do_void(invoice, "Wrong address", NOW)
    note = cancellation()
    assert (note.credits, note.taxable, note.total, note.prepaid) == (invoice.credits, 8_000, 9_520, 5_000)
    assert in_words(document_of(note))["total"] == "$45.20"
    assert (on(Account.CREDITS, acme), on(Account.TAX, acme), on(Account.REVENUE, acme)) == (-7_000, 0, 0)
    check_document(note)


def test_a_debit_note_is_cancelled_at_the_tax_of_its_invoice(acme, original):
    debit = do_issue_debit_note(original, [("Support", 5_000)], "Support")
    do_void(debit, "Not agreed", NOW)
    note = cancellation()
    assert (note.refers_to_id, note.total, note.taxes) == (debit.pk, 5_950, debit.taxes)
    assert (on(Account.RECEIVABLE, acme), on(Account.TAX, acme)) == (11_900, -1_900)
    check_document(note)


def test_carried_rounding_and_one_off_lines_are_billed_once(acme):
    furnish(acme, "S", 190_000)
    do_add_one_off_line(acme, month="2026-10", description="Setup", cents=700)
    for number in range(3):
        use(acme, OCTOBER, (price("0.006", model=f"m{number}"), 10**6))
    invoice = invoiced(acme, OCTOBER)
    do_void(invoice, "Wrong address", NOW)
    check_document(cancellation())
    (draft,) = do_draft(period(OCTOBER), acme)
    second = do_finalize(draft, NOW)
    assert (second.subtotal, second.rounding_femto) == (invoice.subtotal, invoice.rounding_femto) == (703, 12 * 10**12)
    use(acme, NOVEMBER, (price("1", model="n", number=2), 10**6))
    third = invoiced(acme, NOVEMBER)
    assert [row.cents for row in unscoped(InvoiceLine).filter(invoice_id=third.pk)] == [100, -1]


def test_a_draft_and_a_void_invoice_are_refused(acme, original):
    do_void(original, "Wrong address", NOW)
    with pytest.raises(Conflict, match="Only open invoices"):
        do_void(original, "again", NOW)
    (draft,) = do_draft(period(OCTOBER), acme)
    for row in (draft, cancellation()):
        with pytest.raises(Conflict, match="Only open invoices"):
            do_void(row, "again", NOW)
    assert len(unscoped(Invoice).filter(invoice_type="cancellation")) == 1


def test_the_database_accepts_one_cancellation_of_a_document(acme, original):
    do_void(original, "Wrong address", NOW)
    note = cancellation()
    note.pk, note.number, note.revision = None, "CN-2026-000002", 2
    error = pytest.raises(IntegrityError, match="invoice_cancelled_once")
    with all_tenants_scope(BypassReason.BILLING), error, transaction.atomic():
        note.save(force_insert=True)


def test_the_audit_log_and_the_ledger_name_the_cancellation(acme, original):
    do_void(original, "Wrong address", NOW)
    actions = [row.action for row in unscoped(AuditEntry).order_by("pk")][-2:]
    assert actions == ["invoice.finalized", "invoice.voided"]
    assert unscoped(LedgerTransaction).filter(key__startswith="void:") == []
