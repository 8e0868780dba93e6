"""Billing a month, and paying, correcting and voiding its invoices, with the keyboard only."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from billing.invoicing.finalizing import do_finalize
from billing.models import CreditGrant, Invoice, UsageEvent
from frontend.operator.billing import services
from tenants import actions
from tenants.models import Tenant
from tests.support.frontend.billing_run import last_month, make_billed_acme, month
from tests.support.frontend.console import meter
from tests.support.rows import of, only_project, unscoped

pytestmark = pytest.mark.usefixtures("table")
MOST_STOPS = 150
FORMS = {
    "payment": ("Record payment", "Record payment", {"Reference": "bank-77"}, "Paid"),
    "credit-note": (
        "Credit note",
        "Issue credit note",
        {"Amount": "1", "Description": "Slow", "Reason": "SLA"},
        "Open",
    ),
    "void": ("Void", "Void", {"Reason": "Wrong tenant"}, "Void"),
    "write-off": ("Write off", "Write off", {"Reason": "Gone"}, "Uncollectible"),
}


def tab_to(page: Page, wanted: Locator) -> None:
    """Press Tab until the element has the focus, and check that the focus is visible."""
    expect(wanted).to_be_visible()
    for _ in range(MOST_STOPS):
        page.keyboard.press("Tab")
        if wanted.evaluate("one => one === document.activeElement"):
            assert wanted.evaluate("one => getComputedStyle(one).outlineStyle") != "none"
            return
    raise AssertionError(f"no key leads to {wanted}")


def fill(page: Page, link: str, name: str, submit: str, fields: dict[str, str]) -> None:
    """Open the form in its dialog, submit it with a wrong and then the right name, and check the focus.

    Args:
        name: what the form asks to type; empty: nothing.
    """
    opener = page.get_by_role("link", name=link).first
    tab_to(page, opener)
    page.keyboard.press("Enter")
    dialog = page.locator("dialog[open]")
    expect(dialog).to_be_visible()
    assert dialog.evaluate("one => one.contains(document.activeElement)"), "the focus stays behind the dialog"
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert opener.evaluate("one => one === document.activeElement"), "the focus does not come back"
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    for label, text in fields.items():
        tab_to(page, dialog.get_by_label(label))
        page.keyboard.type(text)
    if name:
        tab_to(page, dialog.get_by_label(f"Type {name} to confirm"))
        page.keyboard.type("another")
    tab_to(page, dialog.get_by_role("button", name=submit))
    page.keyboard.press("Enter")
    if not name:
        expect(dialog).to_have_count(0)
        return
    typed = dialog.get_by_label(f"Type {name} to confirm")
    expect(dialog.get_by_text(f"This does not match {name}.")).to_be_visible()
    expect(typed).to_be_focused()  # the field with the error
    page.keyboard.press("Control+a")
    page.keyboard.type(name)
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)


def bill(tenant: Tenant) -> Invoice:
    services.draft(month(), datetime.now(UTC))
    (draft,) = of(Invoice, tenant)
    return do_finalize(draft)


def test_a_month_is_drafted_finalized_and_credited(opened: Any) -> None:
    version = of(UsageEvent, make_billed_acme())[0].price_version
    other = actions.do_create_tenant("lab", "Lab")
    key, _ = actions.do_create_api_key(only_project(other), "k")
    given = {"at": last_month(), "project_id": key.project_id, "key_id": key.pk, "price_version": version}
    meter(other, uncached=1_000_001, output=5, **given)
    label = month().label
    page = opened("op@example.com", f"/operator/billing/?month={label}")
    fill(page, "Draft all", label, "Close and draft", {})
    expect(page.locator("#panel-list .badge", has_text="Draft")).to_have_count(2)
    fill(page, "Finalize invoice of Lab", "lab", "Finalize", {})
    page.wait_for_url(re.compile(r"/operator/billing/\d+$"))
    page.goto(f"/operator/billing/?month={label}")
    fill(page, "Finalize 1", label, "Finalize all", {})
    expect(page.locator("#panel-list .badge", has_text="Open")).to_have_count(2)
    fill(page, "Credit for Lab", "", "Add credit", {"Amount": "5", "Note": "Sorry"})
    page.wait_for_url(re.compile(r"/operator/tenants/\d+/$"))
    assert [(row.nano, row.note) for row in of(CreditGrant, other)] == [(5 * 10**9, "Sorry")]


@pytest.mark.parametrize("deed", FORMS)
def test_an_invoice_is_paid_corrected_or_voided(opened: Any, deed: str) -> None:
    row = bill(make_billed_acme())
    link, submit, fields, state = FORMS[deed]
    page = opened("op@example.com", f"/operator/billing/{row.pk}")
    fill(page, link, str(row.number), submit, fields)
    expect(page.locator(".page-header .badge")).to_have_text(state)
    if deed == "credit-note":
        (note,) = unscoped(Invoice).filter(invoice_type=Invoice.InvoiceType.CREDIT_NOTE)
        assert note.subtotal == 100


def test_a_tenant_reads_and_downloads_its_invoice(opened: Any) -> None:
    row = bill(make_billed_acme())
    page = opened("owner@example.com", "/t/acme/invoices/")
    tab_to(page, page.locator("#panel-list").get_by_role("link", name=str(row.number), exact=True))
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/t/acme/invoices/{row.pk}")
    tab_to(page, page.get_by_role("link", name="PDF", exact=True))
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == f"{row.number}.pdf"
    tab_to(page, page.get_by_role("link", name="Output tokens"))
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/t/acme/invoices/{row.pk}/lines/*")
    expect(page.get_by_role("row")).to_have_count(4)  # the heading, and an event per day
    tab_to(page, page.get_by_role("navigation", name="Breadcrumb").get_by_role("link", name=str(row.number)))
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/t/acme/invoices/{row.pk}")
