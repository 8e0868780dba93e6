"""A month is billed in the console: drafted, finalized, paid, corrected; and the books say the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from html import unescape
from typing import Any

import pytest
from django.test import Client
from playwright.sync_api import Page, expect

from billing.invoicing.preview import preview
from billing.ledger import balance
from billing.models import (
    Account,
    CreditGrant,
    Invoice,
    InvoiceFile,
    InvoiceLine,
    LedgerEntry,
    Payment,
    Period,
    UsageEvent,
)
from billing.periods import default_entity, ensure_periods
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant, User
from tests.billing import books
from tests.frontend.browsing import moved
from tests.frontend.console import PASSWORD, meter, remembered
from tests.seeing import Everybody, only_project

NOW = datetime.now(UTC)
LAST = (NOW.replace(day=1) - timedelta(days=1)).replace(day=1, hour=3, minute=0, second=0, microsecond=0)


def made() -> Tenant:
    """A tenant with usage in the month before."""
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_add_member(tenant, User.objects.create_user("owner@example.com", PASSWORD), "owner")
    key, _ = actions.do_create_api_key(only_project(tenant), "k")
    version = books.sheet()
    for number in range(3):
        counts = {"uncached": 1_000_001, "cache_read": 2_000_003 + number, "output": 300_007}
        at = LAST + timedelta(days=number)
        meter(tenant, at=at, project_id=key.project_id, key_id=key.pk, price_version=version, **counts)
    User.objects.create_superuser("op@example.com", PASSWORD)
    return tenant


@pytest.fixture
def acme(db: None) -> Tenant:
    return made()


@pytest.fixture
def operator(client: Client, acme: Tenant) -> Client:
    client.force_login(User.objects.get(email="op@example.com"))
    remembered(client.session)
    return client


def month() -> Period:
    with all_tenants_scope(BypassReason.BILLING):
        ensure_periods(default_entity(), LAST, LAST)
        return Period.objects.get(label=f"{LAST:%Y-%m}")


def only() -> Invoice:
    (found,) = Everybody(Invoice).filter(kind=Invoice.Kind.INVOICE)
    return found


def send(client: Client, path: str, status: int = 303, **fields: Any) -> str:
    answer = client.post(path, fields)
    page = unescape(answer.content.decode())
    assert answer.status_code == status, re.findall(r'class="(?:field-error|alert)".*?</', page)
    return page


def drafted(client: Client) -> Invoice:
    period = month()
    send(client, f"/operator/billing/months/{period.pk}/draft", typed=period.label)
    return only()


def final(client: Client) -> Invoice:
    draft = drafted(client)
    send(client, f"/operator/billing/{draft.pk}/finalize", typed="acme")
    return only()


def verbs() -> list[str]:
    return [entry.verb for entry in sorted(Everybody(AuditEntry).filter(), key=lambda entry: entry.pk)]


@pytest.mark.browser
@pytest.mark.usefixtures("table")
def test_a_month_from_draft_to_paid(opened: Callable[[str, str], Page]) -> None:
    tenant = made()

    def confirm(page: Any, name: str, button: str, **fields: str) -> None:
        dialog = page.locator("dialog[open]")
        for label, value in fields.items():
            dialog.get_by_label(label.replace("_", " ")).fill(value)
        dialog.get_by_label(f"Type {name} to confirm").fill(name)
        dialog.get_by_role("button", name=button).click()

    label = month().label
    page = opened("op@example.com", f"/operator/billing/?month={label}")
    page.get_by_role("link", name="Draft all").click()
    confirm(page, label, "Close and draft")
    moved(page, page.locator("#panel-list .badge", has_text="Draft"))
    page.locator("#panel-list").get_by_role("link", name="Finalize").click()
    expect(page.locator("dialog[open] .banner")).to_contain_text("cannot be undone")
    confirm(page, "acme", "Finalize")
    page.wait_for_url(re.compile(r"/operator/billing/\d+$"))
    expect(page.get_by_role("heading", level=1)).to_contain_text("INV-")
    expect(page.locator("#panel-check")).to_contain_text("Usage matches billing")
    bill = only()

    mine = opened("owner@example.com", "/t/acme/invoices/")
    row = mine.locator("#panel-list tbody tr", has_text=str(bill.number))
    expect(row.locator(".badge")).to_have_text("Open")
    with mine.expect_download() as download:
        row.get_by_role("link", name="PDF").click()
    sent = download.value.path().read_bytes()
    (kept,) = Everybody(InvoiceFile).filter()
    assert sent.startswith(b"%PDF") and hashlib.sha256(sent).hexdigest() == kept.sha256
    assert download.value.suggested_filename == f"{bill.number}.pdf"

    page.get_by_role("link", name="Record payment").click()
    confirm(page, str(bill.number), "Record payment", Reference="bank-77")
    expect(page.locator("dialog[open]")).to_have_count(0)
    expect(page.locator(".page-header .badge")).to_have_text("Paid")
    mine.goto(f"/t/acme/invoices/{bill.pk}")
    expect(mine.locator(".page-header .badge")).to_have_text("Paid")
    expect(mine.locator(".invoice-totals")).to_contain_text("Payment")
    mine.get_by_role("link", name="Output tokens").click()
    expect(mine.get_by_role("row")).to_have_count(4)  # the heading, and an event a day
    with all_tenants_scope(BypassReason.BILLING):
        assert balance(tenant.pk, Account.CASH) == bill.total * 10**7
        assert balance(tenant.pk, Account.RECEIVABLE) == balance(tenant.pk, Account.DEPOSITS) == 0
    assert sum(entry.nano for entry in Everybody(LedgerEntry).filter()) == 0
    assert {"period.closed", "invoice.finalized", "payment.recorded", "invoice.paid"} <= set(verbs())


@pytest.mark.django_db
def test_nothing_is_done_without_the_name_or_a_proof(operator: Client, acme: Tenant) -> None:
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
def test_all_drafts_are_finalized_and_one_that_cannot_be_is_named(
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
    fields = {"amount": "1.50", "reference": "b-1", "received_on": f"{NOW:%Y-%m-%d}", "typed": bill.number}
    for _ in range(2):
        send(operator, f"/operator/billing/{bill.pk}/payment", **fields)
    (paid,) = Everybody(Payment).filter()
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
    assert len(Everybody(Payment).filter()) == 1


@pytest.mark.django_db
def test_a_form_sent_twice_gives_one_credit_note_and_one_credit(operator: Client, acme: Tenant) -> None:
    bill = final(operator)
    note = {"amount": "2", "description": "Slow", "reason": "SLA", "seen": "0", "typed": bill.number}
    send(operator, f"/operator/billing/{bill.pk}/credit-note", **note)
    assert "Another credit note was issued" in send(operator, f"/operator/billing/{bill.pk}/credit-note", 422, **note)
    (given,) = Everybody(Invoice).filter(kind=Invoice.Kind.CREDIT_NOTE)
    assert given.subtotal == 200
    page = operator.get(f"/operator/billing/{bill.pk}").content.decode()
    assert f"Credit note {given.number}" in page
    credit = {"kind": "promotional", "amount": "5", "note": "Sorry", "seen": "0", "typed": "acme"}
    send(operator, "/operator/billing/tenants/acme/credit", **credit)
    assert "Another credit was added" in send(operator, "/operator/billing/tenants/acme/credit", 422, **credit)
    (grant,) = Everybody(CreditGrant).filter()
    assert (grant.nano, grant.note) == (5 * 10**9, "Sorry")
    assert "advance payments are too low" in send(
        operator, "/operator/billing/tenants/acme/credit", 422, **{**credit, "kind": "prepaid", "seen": "1"}
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("deed", "state", "verb"),
    [("void", "void", "invoice.voided"), ("write-off", "uncollectible", "invoice.written_off")],
)
def test_an_invoice_is_taken_back_or_given_up(operator: Client, acme: Tenant, deed: str, state: str, verb: str) -> None:
    bill = final(operator)
    send(operator, f"/operator/billing/{bill.pk}/{deed}", 422, typed=bill.number)  # without a reason
    send(operator, f"/operator/billing/{bill.pk}/{deed}", typed=bill.number, reason="Wrong tenant")
    assert only().state == state
    with all_tenants_scope(BypassReason.BILLING):
        assert balance(acme.pk, Account.RECEIVABLE) == 0
    (entry,) = Everybody(AuditEntry).filter(verb=verb)
    assert (entry.after["reason"], entry.actor) == ("Wrong tenant", "op@example.com")
    send(operator, f"/operator/billing/{bill.pk}/{deed}", 422, typed=bill.number, reason="Again")


@pytest.mark.django_db
def test_a_line_is_the_sum_of_the_events_it_leads_to(
    operator: Client, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.tenant.invoices.tracing.PAGE_SIZE", 2)
    bill = final(operator)
    operator.force_login(User.objects.get(email="owner@example.com"))
    for line in Everybody(InvoiceLine).filter(invoice_id=bill.pk):
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
def test_the_month_under_way_is_what_its_draft_will_be(client: Client, acme: Tenant) -> None:
    from billing.actions.credits import do_commit, do_grant_credit
    from billing.actions.drafts import do_draft

    do_grant_credit(acme, CreditGrant.Kind.PROMOTIONAL, 10**9, starts_at=LAST, note="Gift")
    do_commit(acme, "Base", fee=1000, included_nano=2 * 10**9, first_month=f"{LAST:%Y-%m}")
    found = preview(acme, LAST)
    assert found is not None
    shown, lines = found
    assert not Everybody(Invoice).filter() and len(Everybody(CreditGrant).filter()) == 1  # nothing was written
    (draft,) = do_draft(month(), acme)
    same = ("subtotal", "taxable", "total", "credits", "taxes", "residue_femto", "saved_femto", "events")
    assert [getattr(shown, name) for name in same] == [getattr(draft, name) for name in same]
    assert len(shown.credits) == 2
    assert [(line.tokens, line.cents) for line in lines] == [
        (line.tokens, line.cents) for line in sorted(Everybody(InvoiceLine).filter(), key=lambda line: line.position)
    ]


@pytest.mark.django_db
def test_an_invoice_comes_in_four_forms_and_a_draft_in_two(operator: Client, acme: Tenant) -> None:
    draft = drafted(operator)
    owner = Client()
    owner.force_login(User.objects.get(email="owner@example.com"))
    for form, status in (("csv", 200), ("json", 200), ("pdf", 404), ("xml", 404), ("html", 404)):
        assert owner.get(f"/t/acme/invoices/{draft.pk}/files/{form}").status_code == status
    send(operator, f"/operator/billing/{draft.pk}/finalize", typed="acme")
    bill = only()
    data = owner.get(f"/t/acme/invoices/{bill.pk}/files/json").content
    assert hashlib.sha256(data).hexdigest() == bill.sha256
    xml = owner.get(f"/t/acme/invoices/{bill.pk}/files/xml").content.decode()
    assert str(bill.number) in xml and "CrossIndustryInvoice" in xml
    for client, search, url in (
        (owner, "/t/acme/search", "/t/acme/invoices/"),
        (operator, "/operator/search", "/operator/billing/"),
    ):
        assert f'href="{url}{bill.pk}"' in client.get(search, {"q": str(bill.number)[-6:]}).content.decode()
    page = owner.get(f"/t/acme/invoices/{bill.pk}/panels/check").content.decode()
    assert "Usage matches billing" in page and "3 usage records" in page


@pytest.mark.django_db
def test_invoices_are_for_who_may_see_them(operator: Client, acme: Tenant) -> None:
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
def test_an_invoice_that_is_not_its_usage_says_so(operator: Client, acme: Tenant) -> None:
    bill = final(operator)
    event = Everybody(UsageEvent).filter()[0]
    event.request_id = "req_that_nobody_billed"
    with all_tenants_scope(BypassReason.SETTLER):
        UsageEvent.objects.all_tenants().bulk_create([event])
    page = operator.get(f"/operator/billing/{bill.pk}/panels/check").content.decode()
    assert "Usage and billing differ" in page
    assert "Raw usage differs" in page
    compared = operator.get(f"/operator/billing/panels/comparison?month={LAST:%Y-%m}").content.decode()
    assert "0 of 1 invoice match" in compared
    assert str(bill.number) in compared
