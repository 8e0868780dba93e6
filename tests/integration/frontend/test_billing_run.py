"""The console's billing run: drafts, finalization, payments and corrections, compared with the ledger."""

from __future__ import annotations

import hashlib
import re
from datetime import date
from decimal import Decimal
from html import unescape
from typing import Any

import pytest
from django.test import Client

from billing.invoicing.one_off_lines import do_add_one_off_line
from billing.invoicing.preview import preview
from billing.ledger.credits import do_grant_credit
from billing.ledger.ledger import balance
from billing.models import (
    Account,
    BillingEntity,
    CreditGrant,
    Invoice,
    InvoiceLine,
    Payment,
    PriceBookAssignment,
    TaxRule,
    UsageEvent,
)
from billing.periods import default_entity
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant, User
from tests.support.billing.euros import bill_in_euros
from tests.support.frontend.billing_run import last_month, month, only, today, use_last_month
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.rows import unscoped

pytestmark = pytest.mark.acme(roles=["owner"], password=PASSWORD)


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    return use_last_month(acme)


@pytest.fixture
def operator(client: Client, acme: Tenant) -> Client:
    client.force_login(User.objects.get(email="op@example.com"))
    remembered(client.session)
    return client


def send(client: Client, path: str, status: int = 303, **fields: Any) -> str:
    response = client.post(path, fields)
    page = unescape(response.content.decode())
    assert response.status_code == status, re.findall(r'class="(?:field-error|alert)".*?</', page)
    return page


def drafted(client: Client) -> Invoice:
    period = month()
    send(client, f"/operator/billing/months/{period.pk}/draft", typed=period.label)
    return only()


def final(client: Client) -> Invoice:
    draft = drafted(client)
    send(client, f"/operator/billing/{draft.pk}/finalize", typed="acme")
    return only()


@pytest.mark.django_db
def test_actions_require_the_name_and_reauthentication(operator: Client, acme: Tenant) -> None:
    draft = drafted(operator)
    assert "This does not match acme" in send(operator, f"/operator/billing/{draft.pk}/finalize", 422, typed="other")
    stale = Client()
    stale.force_login(User.objects.get(email="op@example.com"))
    answer = stale.post(f"/operator/billing/{draft.pk}/finalize", {"typed": "acme"})
    assert answer.status_code == 302 and "/account/" in answer.url
    assert only().state == "draft"
    owner = Client()
    owner.force_login(User.objects.get(email="owner@example.com"))
    for path in ("", f"{draft.pk}", f"{draft.pk}/finalize", f"months/{draft.period_id}/draft", "tenants/acme/credit"):
        assert owner.get(f"/operator/billing/{path}").status_code == 404


@pytest.mark.django_db
def test_all_drafts_are_finalized_and_failing_ones_are_named(
    operator: Client, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    period = month()
    draft = drafted(operator)
    page = unescape(operator.get(f"/operator/billing/months/{period.pk}/finalize").content.decode())
    assert f"1 invoice of {period.label} (total ${draft.total / 100:,.2f})" in page
    from frontend.operator.billing import services

    def refuse(invoice: Invoice) -> None:
        raise actions.Conflict("No tax rule fits.")

    with monkeypatch.context() as patch:
        patch.setattr(services, "do_finalize", refuse)
        send(operator, f"/operator/billing/months/{period.pk}/finalize", typed=period.label)
    assert "acme: No tax rule fits." in unescape(operator.get("/operator/billing/").content.decode())
    send(operator, f"/operator/billing/months/{period.pk}/finalize", typed=period.label)
    assert only().state == "open"
    with monkeypatch.context() as patch:
        patch.setattr(services, "MAX_SECONDS", -1.0)
        assert services.finalize_all(period) == services.Finalized(0, 0, ())


@pytest.mark.django_db
def test_a_payment_is_recorded_once_for_its_reference(operator: Client, acme: Tenant) -> None:
    bill = final(operator)
    fields = {"amount": "1.50", "reference": "b-1", "received_on": today(), "typed": bill.number}
    for _ in range(2):
        send(operator, f"/operator/billing/{bill.pk}/payment", **fields)
    (paid,) = unscoped(Payment).filter()
    assert (paid.cents, only().state) == (150, "open")
    page = operator.get(f"/operator/billing/{bill.pk}").content.decode()
    assert "Balance due" in page and f"${(bill.total - 150) / 100:,.2f}" in page
    for wrong in (
        {"amount": "0"},
        {"amount": "-1"},
        {"amount": "1.005"},
        {"received_on": "2199-01-01"},
        {"amount": "x"},
    ):
        send(operator, f"/operator/billing/{bill.pk}/payment", 422, **{**fields, "reference": "b-2", **wrong})
    assert len(unscoped(Payment).filter()) == 1


@pytest.mark.django_db
def test_a_form_sent_twice_creates_one_credit_note_and_one_credit(operator: Client, acme: Tenant) -> None:
    bill = final(operator)
    note = {"amount": "2", "description": "Slow", "reason": "SLA", "seen": "0", "typed": bill.number}
    send(operator, f"/operator/billing/{bill.pk}/credit-note", **note)
    assert "Another note was issued" in send(operator, f"/operator/billing/{bill.pk}/credit-note", 422, **note)
    (given,) = unscoped(Invoice).filter(invoice_type=Invoice.InvoiceType.CREDIT_NOTE)
    assert given.subtotal == 200
    page = operator.get(f"/operator/billing/{bill.pk}").content.decode()
    assert f"Credit note {given.number}" in page
    credit = {"kind": "promotional", "amount": "5", "note": "Sorry", "seen": "0", "currency": "USD"}
    send(operator, "/operator/billing/tenants/acme/credit", **credit)
    assert "Another credit was added" in send(operator, "/operator/billing/tenants/acme/credit", 422, **credit)
    (grant,) = unscoped(CreditGrant).filter()
    assert (grant.nano, grant.note) == (5 * 10**9, "Sorry")
    assert "advance payments are too low" in send(
        operator, "/operator/billing/tenants/acme/credit", 422, **{**credit, "kind": "prepaid", "seen": "1"}
    )


@pytest.fixture
def globex(acme: Tenant) -> Tenant:
    """A tenant that is billed in EUR, with a support fee in the previous month."""
    tenant = actions.do_create_tenant("globex", "Globex")
    bill_in_euros(tenant)
    do_add_one_off_line(tenant, month=f"{last_month():%Y-%m}", description="Support", cents=100_000)
    return tenant


@pytest.mark.django_db
def test_forms_and_sums_are_in_the_currency_of_the_tenant(operator: Client, globex: Tenant) -> None:
    def page(path: str) -> str:
        return unescape(operator.get(f"/operator/billing/{path}").content.decode())

    drafted(operator)
    period = month()
    (euros,) = unscoped(Invoice).filter(tenant=globex)
    assert (euros.currency, euros.total) == ("EUR", 100_000)
    assert f"2 invoices of {period.label} (total €1,000.00 and $" in page(f"months/{period.pk}/finalize")
    assert "for Globex, €1,000.00, is numbered" in page(f"{euros.pk}/finalize")
    send(operator, f"/operator/billing/{euros.pk}/finalize", typed="globex")
    (euros,) = unscoped(Invoice).filter(tenant=globex)
    payment = page(f"{euros.pk}/payment")
    assert "Amount, EUR" in payment and "Balance due: €1,000.00." in payment
    assert "Amount before tax, EUR" in page(f"{euros.pk}/credit-note")
    assert "The €1,000.00 that Globex owes" in page(f"{euros.pk}/write-off")
    assert "Amount, EUR" in page("tenants/globex/credit")
    assert "USD" not in payment + page(f"{euros.pk}/credit-note") + page("tenants/globex/credit")
    credit = {"kind": "promotional", "amount": "5", "note": "Sorry", "seen": "0", "typed": "globex"}
    path = "/operator/billing/tenants/globex/credit"
    assert "not billed in USD any more" in send(operator, path, 422, **credit, currency="USD")
    send(operator, path, **credit, currency="EUR")
    assert "€5.00 credit added for Globex." in unescape(operator.get("/operator/billing/").content.decode())
    assert unscoped(CreditGrant).get().nano == 5 * 10**9


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("currency", "amount", "cents", "refused"), [("JPY", "1500", 1500, "1500.5"), ("KWD", "1.205", 1205, "1.2055")]
)
def test_forms_accept_the_decimals_of_the_currency(operator: Client, acme: Tenant, currency, amount, cents, refused):
    """The form of a payment starts with the balance due, 2,000 minor units."""
    tenant = actions.do_create_tenant("globex", "Globex")
    bill_in_euros(tenant, currency)
    do_add_one_off_line(tenant, month=f"{last_month():%Y-%m}", description="Support", cents=2000)
    drafted(operator)
    (bill,) = unscoped(Invoice).filter(tenant=tenant)
    send(operator, f"/operator/billing/{bill.pk}/finalize", typed="globex")
    (bill,) = unscoped(Invoice).filter(tenant=tenant)
    url = f"/operator/billing/{bill.pk}"
    owed = {"JPY": 'value="2000"', "KWD": 'value="2.000"'}
    assert owed[currency] in operator.get(f"{url}/payment").content.decode()
    fields = {"amount": refused, "reference": "b-1", "received_on": today(), "typed": bill.number}
    assert "decimal" in send(operator, f"{url}/payment", 422, **fields)
    send(operator, f"{url}/payment", **fields | {"amount": amount})
    assert unscoped(Payment).get().cents == cents
    note = {"amount": amount, "description": "Slow", "reason": "SLA", "seen": "0", "typed": bill.number}
    send(operator, f"{url}/credit-note", **note)
    assert unscoped(Invoice).get(invoice_type="credit_note").subtotal == cents
    page = unescape(operator.get(url).content.decode())
    assert {"JPY": "JPY 2,000", "KWD": "KWD 2"}[currency] in page and "20.00" not in page
    credit = {"kind": "promotional", "amount": amount, "note": "Sorry", "seen": "0", "typed": "globex"}
    send(operator, "/operator/billing/tenants/globex/credit", **credit, currency=currency)
    assert unscoped(CreditGrant).get().nano == cents * {"JPY": 10**9, "KWD": 10**6}[currency]


@pytest.mark.django_db
def test_a_payment_is_refused_if_the_tenant_has_another_currency(operator: Client, globex: Tenant) -> None:
    """An invoice in another currency than the tenant's cannot exist, so the check is that the currency is passed."""
    drafted(operator)
    (euros,) = unscoped(Invoice).filter(tenant=globex)
    send(operator, f"/operator/billing/{euros.pk}/finalize", typed="globex")
    (euros,) = unscoped(Invoice).filter(tenant=globex)
    with all_tenants_scope(BypassReason.PRICES):
        PriceBookAssignment.objects.for_tenant(globex).delete()
    fields = {"amount": "1.50", "reference": "b-1", "received_on": today(), "typed": euros.number}
    assert "is in EUR, but globex is billed in USD" in send(
        operator, f"/operator/billing/{euros.pk}/payment", 422, **fields
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("deed", "state", "verb"),
    [("void", "void", "invoice.voided"), ("write-off", "uncollectible", "invoice.written_off")],
)
def test_an_invoice_is_voided_or_written_off(operator: Client, acme: Tenant, deed: str, state: str, verb: str) -> None:
    bill = final(operator)
    send(operator, f"/operator/billing/{bill.pk}/{deed}", 422, typed=bill.number)  # without a reason
    send(operator, f"/operator/billing/{bill.pk}/{deed}", typed=bill.number, reason="Wrong tenant")
    assert unscoped(Invoice).get(pk=bill.pk).state == state
    with all_tenants_scope(BypassReason.BILLING):
        assert balance(acme.pk, Account.RECEIVABLE) == 0
    (entry,) = unscoped(AuditEntry).filter(action=verb)
    assert (entry.after["reason"], entry.actor) == ("Wrong tenant", "op@example.com")
    send(operator, f"/operator/billing/{bill.pk}/{deed}", 422, typed=bill.number, reason="Again")


@pytest.mark.django_db
def test_a_form_sent_twice_creates_one_debit_note(operator: Client, acme: Tenant) -> None:
    bill = final(operator)
    url = f"/operator/billing/{bill.pk}/debit-note"
    assert url in operator.get(f"/operator/billing/{bill.pk}").content.decode()
    note = {"amount": "2", "description": "Setup", "reason": "Forgotten", "seen": "0", "typed": bill.number}
    send(operator, url, **note)
    assert "Another note was issued" in send(operator, url, 422, **note)
    (given,) = unscoped(Invoice).filter(invoice_type=Invoice.InvoiceType.DEBIT_NOTE)
    assert (given.subtotal, given.refers_to_id) == (200, bill.pk)
    assert "debit-note" not in operator.get(f"/operator/billing/{given.pk}").content.decode()


@pytest.mark.django_db
def test_an_invoice_that_credit_paid_can_be_voided(operator: Client, acme: Tenant) -> None:
    do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 1000 * 10**9, starts_at=last_month())
    bill = final(operator)
    assert bill.state == Invoice.State.PAID
    page, void = f"/operator/billing/{bill.pk}", f"/operator/billing/{bill.pk}/void"
    assert void in operator.get(page).content.decode()
    send(operator, void, typed=bill.number, reason="Wrong tenant")
    assert unscoped(Invoice).get(pk=bill.pk).state == Invoice.State.VOID
    assert void not in operator.get(page).content.decode()


@pytest.mark.django_db
def test_a_draft_shows_why_it_cannot_be_finalized(operator: Client, acme: Tenant) -> None:
    bill = drafted(operator)
    url = f"/operator/billing/{bill.pk}"
    assert "no exchange rate" not in operator.get(url).content.decode()
    with all_tenants_scope(BypassReason.BILLING):
        entity = default_entity()
        BillingEntity.objects.filter(pk=entity.pk).update(tax_currency="EUR")
        TaxRule.objects.create(entity=entity, category="S", rate_ppm=100_000, starts_on=date(2026, 1, 1))
    assert "There is no exchange rate of EUR, the tax currency." in operator.get(url).content.decode()


@pytest.mark.django_db
def test_voided_cancellation_and_replacement_link_each_other(operator: Client, acme: Tenant) -> None:
    bill = final(operator)
    send(operator, f"/operator/billing/{bill.pk}/void", typed=bill.number, reason="Wrong address")
    note = unscoped(Invoice).get(invoice_type="cancellation")
    send(operator, f"/operator/billing/months/{bill.period_id}/draft", typed=month().label)
    (again,) = unscoped(Invoice).filter(state="draft")
    send(operator, f"/operator/billing/{again.pk}/finalize", typed="acme")
    link = '<dt>{}</dt><dd><a class="link" href="/operator/billing/{}">'
    voided = operator.get(f"/operator/billing/{bill.pk}").content.decode()
    assert link.format("Cancelled by", note.pk) in voided
    assert link.format("Replaced by", again.pk) in voided
    assert link.format("Replaces", bill.pk) in operator.get(f"/operator/billing/{again.pk}").content.decode()
    page = operator.get(f"/operator/billing/{note.pk}").content.decode()
    assert f"Cancellation {note.number}" in page
    assert f'on invoice <a class="link" href="/operator/billing/{bill.pk}">' in page


@pytest.mark.django_db
def test_the_claim_for_tax_relief_is_recorded_once(operator: Client, acme: Tenant) -> None:
    with all_tenants_scope(BypassReason.BILLING):
        entity = default_entity()
        BillingEntity.objects.filter(pk=entity.pk).update(relief_after_claim=True)
        TaxRule.objects.create(entity=entity, category="S", rate_ppm=100_000, starts_on=date(2026, 1, 1))
    bill = final(operator)
    url = f"/operator/billing/{bill.pk}"
    assert "claim-tax-relief" not in operator.get(url).content.decode()
    send(operator, f"{url}/write-off", typed=bill.number, reason="Insolvent")
    assert "claim-tax-relief" in operator.get(url).content.decode()
    send(operator, f"{url}/claim-tax-relief", typed=bill.number, reason="Claim 7")
    with all_tenants_scope(BypassReason.BILLING):
        assert balance(acme.pk, Account.TAX) == 0
    assert "claim-tax-relief" not in operator.get(url).content.decode()
    send(operator, f"{url}/claim-tax-relief", 422, typed=bill.number, reason="Claim 7")


@pytest.mark.django_db
def test_a_line_is_the_sum_of_its_linked_events(
    operator: Client, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.tenant.invoices.tracing.PAGE_SIZE", 2)
    bill = final(operator)
    operator.force_login(User.objects.get(email="owner@example.com"))
    for line in unscoped(InvoiceLine).filter(invoice_id=bill.pk):
        url, tokens, cost, names = f"/t/acme/invoices/{bill.pk}/lines/{line.position}", 0, Decimal(0), []
        while url:
            page = unescape(operator.get(url).content.decode())
            found = re.search(r"This page: ([\d,]+) tokens, \$([\d.]+)", page)
            assert found
            tokens, cost = tokens + int(found[1].replace(",", "")), cost + Decimal(found[2])
            names += re.findall(r'href="/t/acme/requests/(req_\w+)"', page)
            url = (re.findall(r'rel="next" href="([^"]+)"', page) or [""])[0]
        assert (tokens, cost.scaleb(15)) == (line.tokens, line.femto)
        assert len(set(names)) == len(names) == line.events == 3
    here = f"/t/acme/invoices/{bill.pk}/lines/1"
    assert operator.get(f"{here}?cursor=nonsense").content != b""
    assert operator.get(f"/t/acme/invoices/{bill.pk}/lines/99").status_code == 404


@pytest.mark.django_db
def test_the_current_month_equals_its_later_draft(client: Client, acme: Tenant) -> None:
    from billing.invoicing.drafts import do_draft
    from billing.ledger.credits import do_commit, do_grant_credit

    do_grant_credit(acme, CreditGrant.GrantType.PROMOTIONAL, 10**9, starts_at=last_month(), note="Gift")
    do_commit(acme, "Base", fee=1000, included_nano=2 * 10**9, first_month=f"{last_month():%Y-%m}")
    found = preview(acme, last_month())
    assert found is not None
    shown, lines = found
    assert not unscoped(Invoice).filter() and len(unscoped(CreditGrant).filter()) == 1  # nothing was written
    (draft,) = do_draft(month(), acme)
    same = ("subtotal", "taxable", "total", "credits", "taxes", "rounding_femto", "saved_femto", "events")
    assert [getattr(shown, name) for name in same] == [getattr(draft, name) for name in same]
    assert len(shown.credits) == 2
    assert [(line.tokens, line.cents) for line in lines] == [
        (line.tokens, line.cents) for line in sorted(unscoped(InvoiceLine).filter(), key=lambda line: line.position)
    ]


@pytest.mark.django_db
def test_an_invoice_has_five_formats_and_a_draft_two(operator: Client, acme: Tenant) -> None:
    draft = drafted(operator)
    owner = Client()
    owner.force_login(User.objects.get(email="owner@example.com"))
    for form, status in (("csv", 200), ("json", 200), ("pdf", 404), ("xml", 404), ("ubl", 404), ("html", 404)):
        assert owner.get(f"/t/acme/invoices/{draft.pk}/files/{form}").status_code == status
    send(operator, f"/operator/billing/{draft.pk}/finalize", typed="acme")
    bill = only()
    data = owner.get(f"/t/acme/invoices/{bill.pk}/files/json").content
    assert hashlib.sha256(data).hexdigest() == bill.sha256
    xml = owner.get(f"/t/acme/invoices/{bill.pk}/files/xml").content.decode()
    assert str(bill.number) in xml and "CrossIndustryInvoice" in xml
    other = owner.get(f"/t/acme/invoices/{bill.pk}/files/ubl")
    assert "ubl:Invoice" in other.content.decode()
    assert other["content-disposition"] == f'attachment; filename="{bill.number}-ubl.xml"'
    for client, search, url in (
        (owner, "/t/acme/search", "/t/acme/invoices/"),
        (operator, "/operator/search", "/operator/billing/"),
    ):
        assert f'href="{url}{bill.pk}"' in client.get(search, {"q": str(bill.number)[-6:]}).content.decode()
    page = owner.get(f"/t/acme/invoices/{bill.pk}/panels/check").content.decode()
    assert "Usage matches billing" in page and "3 usage records" in page


@pytest.mark.django_db
def test_invoices_require_the_permission(operator: Client, acme: Tenant) -> None:
    bill = final(operator)
    actions.do_add_member(acme, User.objects.create_user("dev@example.com"), "developer")
    actions.do_add_member(acme, User.objects.create_user("books@example.com"), "billing")
    for email, status in (("dev@example.com", 403), ("books@example.com", 200)):
        client = Client()
        client.force_login(User.objects.get(email=email))
        for path in (
            "",
            "upcoming",
            f"{bill.pk}",
            f"{bill.pk}/lines/1",
            f"{bill.pk}/files/pdf",
            f"{bill.pk}/panels/check",
        ):
            assert client.get(f"/t/acme/invoices/{path}").status_code == status, path
        found = client.get("/t/acme/search", {"q": str(bill.number)}).content.decode()
        assert (f'/invoices/{bill.pk}"' in found) == (status == 200)


@pytest.mark.django_db
def test_an_invoice_that_differs_from_its_usage_has_a_warning(operator: Client, acme: Tenant) -> None:
    bill = final(operator)
    event = unscoped(UsageEvent).filter()[0]
    event.request_id = "req_unbilled"
    with all_tenants_scope(BypassReason.SETTLER):
        UsageEvent.objects.all_tenants().bulk_create([event])
    page = operator.get(f"/operator/billing/{bill.pk}/panels/check").content.decode()
    assert "Usage and billing differ" in page
    assert "Raw usage differs" in page
    compared = operator.get(f"/operator/billing/panels/comparison?month={last_month():%Y-%m}").content.decode()
    assert "0 of 1 invoice match" in compared
    assert str(bill.number) in compared


@pytest.mark.django_db
def test_an_operator_downloads_the_files_of_an_invoice(operator: Client, acme: Tenant) -> None:
    bill = final(operator)
    page = operator.get(f"/operator/billing/{bill.pk}").content.decode()
    url = f"/operator/billing/{bill.pk}/files/pdf"
    assert f'href="{url}" download' in page
    found = operator.get(url)
    assert (found["Content-Type"], found.content[:5]) == ("application/pdf", b"%PDF-")
    assert operator.get(f"/operator/billing/{bill.pk}/files/doc").status_code == 404
