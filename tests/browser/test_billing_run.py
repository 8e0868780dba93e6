"""A billing period from drafts to payment, in a browser."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from billing.ledger.ledger import balance
from billing.models import (
    Account,
    InvoiceFile,
    LedgerEntry,
)
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tests.support.frontend.billing_run import audited_actions, make_billed_acme, month, only
from tests.support.frontend.pages import moved
from tests.support.rows import unscoped


@pytest.mark.usefixtures("table")
def test_a_month_from_draft_to_paid(opened: Callable[[str, str], Page]) -> None:
    tenant = make_billed_acme()

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
    (kept,) = unscoped(InvoiceFile).filter()
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
    expect(mine.get_by_role("row")).to_have_count(4)  # the heading, and an event per day
    with all_tenants_scope(BypassReason.BILLING):
        assert balance(tenant.pk, Account.CASH) == bill.total * 10**7
        assert balance(tenant.pk, Account.RECEIVABLE) == balance(tenant.pk, Account.DEPOSITS) == 0
    assert sum(entry.nano for entry in unscoped(LedgerEntry).filter()) == 0
    assert {"period.closed", "invoice.finalized", "payment.recorded", "invoice.paid"} <= set(audited_actions())
