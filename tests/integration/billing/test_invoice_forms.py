"""Formats of invoices: JSON, HTML, CSV and PDF with Factur-X; emails; and the command."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from datetime import date, datetime, timedelta
from smtplib import SMTPServerDisconnected

import facturx
import pikepdf
import pytest
from django.core import mail
from django.core.management import CommandError, call_command
from hypothesis import given
from hypothesis import strategies as st

from billing.currencies.amounts import cents, decimal, dollars, half_up, tax
from billing.invoicing import checks, document, emails, pdf
from billing.invoicing.corrections import do_issue_credit_note, do_issue_debit_note, do_void
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.exports import as_csv, html
from billing.invoicing.facturx import xml as facturx_xml
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.one_off_lines import do_add_one_off_line
from billing.invoicing.price_terms import do_add_price_term
from billing.invoicing.reratings import continue_reratings, do_apply_rerating, do_propose_rerating
from billing.invoicing.ubl import xml as ubl_xml
from billing.ledger import credits
from billing.models import (
    BillingEntity,
    BillingProfile,
    CreditGrant,
    Invoice,
    InvoiceEmail,
    NumberSeries,
    TaxCategory,
    TaxRule,
    UsageEvent,
)
from billing.payments.recording import Received, do_record_payment
from billing.periods import default_entity
from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.pricing import Component, Tier
from billing.rates.terms import TermRule, TermType
from billing.taxes import taxes
from billing.taxes.taxes import NoTaxRule, require_vat_ids
from tenants.actions import Conflict, do_add_member
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, over, period, price, take_back, use
from tests.support.billing.invoice_forms import (
    attached,
    document_of,
    failed_rules,
    failed_ubl_rules,
    failed_xrechnung_rules,
    furnish,
    furnish_xrechnung,
)
from tests.support.billing.prepaid_credit import change_entity
from tests.support.emails import check_email
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6


def month(tenant: Tenant) -> Invoice:
    names = ("uncached", "cache_read", "output")
    ids = [price(usd, name, model="llama") for usd, name in zip(("0.62", "0.155", "1.15"), names, strict=True)]
    use(tenant, OCTOBER, *((pk, 2_914_408) for pk in ids), times=3)
    use(tenant, OCTOBER, (price("0.000000001", model="=qwen"), 7))
    return invoiced(tenant, OCTOBER)


@pytest.mark.parametrize("is_xrechnung", [False, True])
@pytest.mark.parametrize(("category", "rate"), [("AE", 0), ("S", 210_000), ("G", 0), ("E", 0), ("Z", 0), ("O", 0)])
def test_the_xml_is_valid_against_schema_and_schematron(acme, category, rate, is_xrechnung):
    furnish(acme, category, rate)
    if is_xrechnung:
        furnish_xrechnung(acme)
    credits.do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 12 * 10**7, starts_at=OCTOBER, note="Welcome")
    invoice = month(acme)
    note = do_issue_credit_note(invoice, [("SLA credit", 55)], "SLA credit, 20 October")
    debit = do_issue_debit_note(invoice, [("Support", 110)], "Support in October")
    for row, code in ((invoice, 380), (note, 381), (debit, 380 if is_xrechnung else 383)):
        _, xml = attached(row)
        other = ubl_xml(document_of(row))
        assert f"<ram:TypeCode>{code}</ram:TypeCode>".encode() in xml
        assert facturx.xml_check_xsd(xml, flavor="factur-x", level="en16931")
        assert (failed_rules(xml), failed_ubl_rules(other)) == ([], [])
        assert (b"xrechnung_3.0" in xml, b"xrechnung_3.0" in other) == (is_xrechnung, is_xrechnung)
        if is_xrechnung:
            assert (failed_xrechnung_rules(xml), failed_xrechnung_rules(other)) == ([], [])
        with all_tenants_scope(BypassReason.BILLING):
            rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to__period")
            result = checks.check(rows.get(pk=row.pk))
        assert (result.same_data, result.same_pdf) == (True, True)


def test_each_type_of_document_is_an_xrechnung(acme):
    """A voided invoice and its cancellation, a new one with fees and a discount, notes, a correction and a purchase."""
    furnish(acme, "S", 210_000)
    furnish_xrechnung(acme)
    months = {"first_month": "2026-10", "last_month": "2026-10"}
    credits.do_commit(acme, "Base", fee=3100, included_nano=10**9, starts_on=date(2026, 10, 12), **months)
    do_add_price_term(acme, TermRule(TermType.DISCOUNT, ppm=100_000), description="Discount 10%", **months)
    do_add_one_off_line(acme, month="2026-10", description="Setup", cents=5000)
    do_void(month(acme), "wrong address")
    (draft,) = do_draft(period(OCTOBER), acme)
    invoice = do_finalize(draft)
    do_issue_credit_note(invoice, [("SLA credit", 55)], "SLA credit")
    do_issue_debit_note(invoice, [("Support", 110)], "Support in October")
    do_record_payment(Received("manual", "p-1", 5000, OCTOBER, tenant="acme", as_credit=True))
    november = period(NOVEMBER)
    take_back(unscoped(UsageEvent).order_by("-cost_femto")[0], NOVEMBER)
    use(acme, NOVEMBER, (price("2", model="llama", number=2), 10**6))
    do_close_period(november, now=over(november))
    for draft in do_draft(november, acme):
        do_finalize(draft, now=november.ends_at)
    rows = list(unscoped(Invoice).order_by("pk"))
    assert {row.invoice_type for row in rows} == set(Invoice.InvoiceType.values)
    for row in rows:
        described = document_of(row)
        cii, ubl = facturx_xml(described), ubl_xml(described)
        assert b"xrechnung_3.0" in cii
        assert (failed_xrechnung_rules(cii), failed_xrechnung_rules(ubl)) == ([], []), row.invoice_type
        assert (failed_rules(cii), failed_ubl_rules(ubl)) == ([], []), row.invoice_type


def test_a_document_of_the_first_format_keeps_its_bytes(acme, monkeypatch):
    """It was issued before the page had the bank account and the XML had payment instructions of notes."""
    furnish(acme, "O")
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(iban="NL91ABNA0417164300", bic="ABNANL2A")
    with monkeypatch.context() as earlier:
        earlier.setattr(document, "FORMAT_VERSION", 1)
        invoice = month(acme)
        note = do_issue_credit_note(invoice, [("SLA credit", 55)], "SLA credit")
    for row in (invoice, note):
        shown = document_of(row)
        assert "format_version" not in shown
        assert b"RateApplicablePercent" not in facturx_xml(shown)
        assert hashlib.sha256(document.encode_document(shown)).hexdigest() == row.sha256
    assert b"PaymentMeans" not in facturx_xml(document_of(note))
    assert "IBAN" not in html(document_of(invoice))
    current = do_issue_credit_note(invoice, [("SLA credit", 45)], "SLA credit")
    assert document_of(current)["format_version"] == document.FORMAT_VERSION
    assert b"<ram:TypeCode>97</ram:TypeCode>" in attached(current)[1]


def test_the_page_has_the_bank_account_and_the_buyer_reference(acme):
    furnish(acme)
    furnish_xrechnung(acme)
    page = html(document_of(month(acme)))
    assert "Bank account: IBAN NL91 ABNA 0417 1643 00, BIC ABNANL2A. Reference: INV-" in page
    assert "<dt>Buyer reference</dt><dd>04011000-12345-34</dd>" in page


@pytest.mark.parametrize(("category", "rate"), [("S", 210_000), ("Z", 0), ("G", 0), ("E", 0)])
def test_an_eu_seller_without_a_vat_id_takes_no_number(acme, category, rate):
    """The XML would not be valid: EN 16931 requires the seller's VAT ID on invoices of these categories."""
    furnish(acme, category, rate)
    with all_tenants_scope(BypassReason.BILLING):
        vat_id = default_entity().vat_id
        BillingEntity.objects.update(vat_id="")
    with pytest.raises(Conflict, match=f"category {category} .* requires a valid VAT ID of the billing entity"):
        month(acme)
    draft = unscoped(Invoice).get()
    assert (draft.state, draft.number, unscoped(NumberSeries).count()) == (Invoice.State.DRAFT, None, 0)
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(vat_id=vat_id)
    invoice = do_finalize(draft)
    assert invoice.number.endswith("1")
    assert failed_rules(attached(invoice)[1]) == []


@pytest.mark.parametrize(("country", "category"), [("US", "S"), ("US", "E"), ("NL", "O")])
def test_other_sellers_need_no_vat_id(acme, country, category):
    furnish(acme, category, 88_750 if category == "S" else 0)
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(country=country, vat_id="")
    assert month(acme).number


@pytest.mark.parametrize("category", ["AE", "S", "Z", "G", "E", "O"])
def test_the_required_vat_ids_are_those_of_the_schematron(acme, category):
    """An invoice is refused if, and only if, the XML would break a rule of its category."""
    furnish(acme, category, 210_000 if category == "S" else 0)
    invoice = document_of(month(acme))
    for without in ((), ("seller",), ("buyer",), ("seller", "buyer")):
        described = invoice | {name: {**invoice[name], "vat_id": ""} for name in without}
        failed = failed_rules(facturx_xml(described))
        try:
            require_vat_ids(TaxCategory(category), described["seller"], described["buyer"])
        except NoTaxRule:
            assert any(f"[BR-{category}-02]" in rule for rule in failed), without
        else:
            assert failed == [], without


@pytest.mark.parametrize("category", ["AE", "S", "E"])
def test_a_note_has_the_vat_ids_of_its_invoice(acme, category):
    """They may have changed or been removed since. The rest of the addresses is current."""
    furnish(acme, category, 210_000 if category == "S" else 0)
    invoice = month(acme)
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(vat_id="", country="FR", street="Rue 1")
        BillingProfile.objects.all_tenants().update(vat_id="", country="AT")
    notes = [do_issue_credit_note(invoice, [("SLA", 55)], "SLA"), do_issue_debit_note(invoice, [("Help", 9)], "Help")]
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(vat_id="FR40303265045")
    notes.append(do_issue_credit_note(invoice, [("SLA", 45)], "SLA"))
    for note in notes:
        assert (note.seller["vat_id"], note.seller["street"]) == ("NL123456789B13", "Rue 1")
        assert (note.buyer["vat_id"], note.buyer["country"]) == ("DE136695976", "AT")
        assert failed_rules(attached(note)[1]) == []


def test_a_note_that_would_not_be_valid_takes_no_number(acme, monkeypatch):
    """Its invoice is from before the VAT IDs were checked."""
    furnish(acme, "E")
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(vat_id="")
    with monkeypatch.context() as earlier:
        earlier.setattr(taxes, "require_vat_ids", lambda *_: None)
        invoice = month(acme)
    for issue in (do_issue_credit_note, do_issue_debit_note):
        with pytest.raises(Conflict, match=r"category E \(Exempt\) requires a valid VAT ID of the billing entity"):
            issue(invoice, [("SLA", 55)], "SLA")
    assert unscoped(Invoice).count() == 1
    assert {row.last for row in unscoped(NumberSeries).all()} == {1}
    with all_tenants_scope(BypassReason.BILLING):
        BillingEntity.objects.update(vat_id="NL123456789B13")
    note = do_issue_credit_note(invoice, [("SLA", 55)], "SLA")
    assert note.number.endswith("1")
    assert failed_rules(attached(note)[1]) == []


def test_a_negative_line_of_carried_rounding_is_valid(acme):
    furnish(acme, "S", 210_000)
    for number in range(3):
        use(acme, OCTOBER, (price("0.006", model=f"m{number}"), 10**6))
    invoiced(acme, OCTOBER)
    use(acme, NOVEMBER, (price("1", model="n", number=2), 10**6))
    _, xml = attached(invoiced(acme, NOVEMBER))
    assert b">-0.01<" in xml
    assert facturx.xml_check_xsd(xml, flavor="factur-x", level="en16931")
    assert failed_rules(xml) == []


def test_the_notes_of_a_re_rating_are_valid(acme):
    """One price falls and another one rises; price terms add a line to each."""
    furnish(acme, "S", 210_000)
    do_add_price_term(acme, TermRule(TermType.DISCOUNT, ppm=100_000), description="Discount 10%", first_month="2026-10")
    invoice = month(acme)
    for cheap, costly in (("0.1", "2"), ("0.1", "0.2")):
        new = (("uncached", cheap), ("output", costly))
        prices = tuple(NewPrice("llama", Tier.STANDARD, Component(name), nano_per_million(usd)) for name, usd in new)
        row = do_propose_rerating(Proposal(prices), OCTOBER.replace(day=1), NOVEMBER.replace(day=1), reason="Wrong")
        do_apply_rerating(row, by=None)
        assert continue_reratings().left == []
    notes = sorted(unscoped(Invoice).filter(refers_to_id=invoice.pk), key=lambda row: row.pk)
    assert [row.invoice_type for row in notes] == ["debit_note", "credit_note"]
    for row in (invoice, *notes):
        _, xml = attached(row)
        assert facturx.xml_check_xsd(xml, flavor="factur-x", level="en16931")
        assert failed_rules(xml) == []


def test_a_tenant_without_a_profile_is_billed_too(acme):
    invoice = month(acme)
    _, xml = attached(invoice)
    assert facturx.xml_check_xsd(xml, flavor="factur-x", level="en16931")
    assert failed_rules(xml) == []


def test_the_pdf_is_pdf_a_with_the_xml(acme):
    furnish(acme)
    file, xml = attached(month(acme))
    xmp = file.Root.Metadata.read_bytes().decode()
    assert "<pdfaid:part>3</pdfaid:part><pdfaid:conformance>B</pdfaid:conformance>" in xmp
    assert facturx.get_facturx_xml_from_pdf(_bytes(file), check_xsd=True) == ("factur-x.xml", xml)
    for name, value in (("ConformanceLevel", "EN 16931"), ("DocumentFileName", "factur-x.xml"), ("Version", "1.0")):
        assert f"<fx:{name}>{value}</fx:{name}>" in xmp
        assert f"<pdfaProperty:name>{name}</pdfaProperty:name>" in xmp
    assert file.Root.AF[0].AFRelationship == "/Alternative"


def _bytes(file: pikepdf.Pdf) -> bytes:
    out = io.BytesIO()
    file.save(out)
    return out.getvalue()


def test_a_recomputed_invoice_is_equal_to_the_byte(acme):
    furnish(acme)
    invoice = month(acme)
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get(pk=invoice.pk)
        found = checks.check(row)
        assert found == checks.InvoiceCheckResult(4, 0, 0, True, True, invoice.sha256, 0)
    use(acme, OCTOBER, (price("1", model="late"), MILLION))  # closed, so it belongs to the next month
    with all_tenants_scope(BypassReason.BILLING):
        assert checks.check(row) == found


def test_the_check_detects_differences(acme, monkeypatch):
    invoice = month(acme)
    monkeypatch.setattr("billing.invoicing.lines.cents", lambda femto, currency: 1)
    with all_tenants_scope(BypassReason.BILLING):
        row = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").get(pk=invoice.pk)
        found = checks.check(row)
    assert (found.same_data, found.same_pdf) == (False, False)


def test_characters_that_the_fonts_lack_are_replaced(acme):
    furnish(acme)
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.all_tenants().update(name="བོད་སྐད་ Acme", city="กรุงเทพฯ")
    file, xml = attached(month(acme))
    assert "བོད་སྐད་ Acme" in xml.decode()
    assert len(file.pages) == 1


def test_html_is_escaped_and_complete(acme):
    furnish(acme)
    page = html(document_of(month(acme)))
    assert "Łąka &amp; Söhne GmbH &lt;#emph&gt;" in page
    for text in ("1 – 31 October 2026", "8,743,224", "$0.62 / M", "$5.42", "reverse charge 0 %", "4500-88213"):
        assert text in page
    assert "style=" not in page  # the console's content security policy


def test_csv_has_exact_amounts_and_no_formulas(acme):
    rows = list(csv.DictReader(io.StringIO(as_csv(document_of(month(acme))))))
    assert [row["model"] for row in rows] == ["'=qwen", "llama", "llama", "llama"]
    assert (rows[0]["usd_exact"], rows[0]["usd"]) == ("0.000000000000007", "0.00")
    assert (rows[1]["tokens"], rows[1]["usd_per_million"]) == ("8743224", "0.62")
    assert rows[1]["usd_exact"] == "5.42079888"


def test_json_is_byte_identical(acme):
    shown = document_of(month(acme))
    once = document.encode_document(shown)
    assert document.encode_document(json.loads(once)) == once
    assert pdf.render_pdf(json.loads(once)) == pdf.render_pdf(shown)


@pytest.mark.parametrize(
    ("amount", "digits", "least", "text"),
    [(620_000_000, 9, 2, "0.62"), (3 * 10**9, 9, 2, "3.00"), (155_000_000, 9, 2, "0.155"), (1, 9, 2, "0.000000001"),
     (-5, 2, 2, "-0.05"), (0, 2, 0, "0"), (190_000, 4, 0, "19")],
)  # fmt: skip
def test_decimals(amount, digits, least, text):
    assert decimal(amount, digits, least) == text


def test_dollars():
    assert [dollars(amount) for amount in (0, 5, 123_456, -50)] == ["$0.00", "$0.05", "$1,234.56", "−$0.50"]


@given(st.lists(st.integers(0, 10**30), max_size=50))
def test_a_total_is_the_sum_of_lines_and_rounding_is_at_most_half_a_cent_per_line(amounts):
    """Invariant 9."""
    rounded = [cents(femto, "USD") for femto in amounts]
    residue = sum(rounded) * 10**13 - sum(amounts)
    assert abs(residue) * 2 <= len(amounts) * 10**13


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**15))
def test_half_up_is_nearest_and_symmetric(amount, unit):
    rounded = half_up(amount, unit)
    assert abs(rounded * unit - amount) * 2 <= unit
    assert half_up(-amount, unit) == -rounded
    if abs(rounded * unit - amount) * 2 == unit:
        assert abs(rounded * unit) > abs(amount)


@given(st.integers(0, 10**12), st.integers(0, 10**6))
def test_tax_rounding_is_less_than_half_a_cent(base, rate):
    assert abs(tax(base, rate) * 10**6 - base * rate) * 2 <= 10**6


# Emails


def test_an_invoice_is_emailed_once(acme):
    furnish(acme)
    invoice = month(acme)
    assert emails.send_all() == 1
    assert emails.send_all() == 0
    (sent,) = mail.outbox
    assert (sent.to, sent.subject) == (
        *(["bills@acme.example"], f"Invoice {invoice.number} from Northgate Inference B.V."),
    )
    due = f"for October 2026 is attached. It is due on {invoice.due_on:%-d %B %Y}."
    check_email(sent, invoice.number, due, f"/t/acme/invoices/{invoice.pk}")
    name, body, kind = sent.attachments[0]
    assert (name, kind, body[:5]) == (f"{invoice.number}.pdf", "application/pdf", b"%PDF-")
    assert unscoped(InvoiceEmail).get().sent_to == ["bills@acme.example"]


def test_emails_have_the_text_of_the_billing_entity_for_their_type(acme):
    furnish(acme)
    change_entity(issued_email_text="Thank you.\nAccounting", reminder_email_text="Please pay now.")
    invoice = month(acme)
    assert emails.send_all() == 1
    assert emails.remind(invoice.issued_at + timedelta(days=20)) == 1
    assert emails.send_all() == 1
    issued, reminder = (sent.body for sent in mail.outbox)
    assert "Thank you.\nAccounting" in issued and "Please pay now." not in issued
    assert "Please pay now." in reminder and "Thank you." not in reminder


def test_without_addresses_owners_and_billing_members_receive_the_email(acme):
    for name, role in (("owner", "owner"), ("billing", "billing"), ("dev", "developer")):
        do_add_member(acme, User.objects.create_user(f"{name}@acme.example"), role)
    month(acme)
    assert emails.send_all() == 1
    assert mail.outbox[0].to == ["billing@acme.example", "owner@acme.example"]


def test_a_failed_email_is_sent_later(acme, monkeypatch):
    furnish(acme)
    month(acme)
    with monkeypatch.context() as patch:

        def fail(self: object) -> None:
            raise SMTPServerDisconnected

        patch.setattr("django.core.mail.EmailMessage.send", fail)
        assert emails.send_all() == 0
    row = unscoped(InvoiceEmail).get()
    assert (row.state, row.attempt_count, row.error) == ("queued", 1, "The mail server could not be reached.")
    assert timedelta(minutes=3) < row.next_attempt_at - row.created_at < timedelta(minutes=20)
    assert emails.send_all(row.next_attempt_at - timedelta(minutes=1)) == 0
    assert emails.send_all(row.next_attempt_at + timedelta(minutes=1)) == 1
    assert (unscoped(InvoiceEmail).get().state, unscoped(InvoiceEmail).get().error) == ("sent", "")


def test_reminders_of_overdue_invoices(acme):
    furnish(acme)
    invoice = month(acme)
    emails.send_all()
    due = datetime.combine(invoice.due_on, datetime.min.time(), NOVEMBER.tzinfo)
    found = [emails.remind(due + timedelta(days=days)) for days in (0, 1, 1, 2, 8, 9, 40, 50)]
    assert found == [0, 1, 0, 0, 1, 0, 1, 0]
    assert emails.send_all() == 3
    assert mail.outbox[-1].subject.startswith("Reminder: Invoice")
    check_email(mail.outbox[-1], "is unpaid", invoice.number)
    do_record_payment(Received("manual", "p", invoice.total, NOVEMBER, tenant="acme"))
    assert emails.remind(due + timedelta(days=90)) == 0


# Command


def test_the_command_creates_invoices(acme, capsys):
    use(acme, OCTOBER, (price("3"), MILLION))
    call_command("generate_invoices", "--month", "2026-10", "--draft", "--tenant", "acme")
    assert "acme: invoice of $3.00, draft" in capsys.readouterr().out
    call_command("generate_invoices", "--month", "2026-10")
    assert "INV-" in capsys.readouterr().out
    call_command("generate_invoices", "--month", "2026-10")
    assert capsys.readouterr().out == ""
    for wrong in (["--month", "2026-13"], ["--draft"], ["--tenant", "unknown"]):
        with pytest.raises(CommandError):
            call_command("generate_invoices", *wrong)


def test_the_command_lists_what_it_skipped(acme):
    furnish(acme)
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.update(country="NL")
    use(acme, OCTOBER, (price("3"), MILLION))
    with pytest.raises(CommandError, match="acme 2026-10: No tax rule"):
        call_command("generate_invoices", "--month", "2026-10")
