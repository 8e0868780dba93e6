"""The charges of a month: one function for drafts, previews, final invoices, notes and checks."""

from __future__ import annotations

import io
from datetime import timedelta
from typing import Any

import pypdf
import pytest

from billing.invoicing import checks, month_charges
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.line_sources import BilledMonth, LineSource, MonthDraft
from billing.invoicing.preview import preview
from billing.models import Invoice, InvoiceLine
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import OCTOBER, over, pdf_of, period, price, use
from tests.support.billing.invoice_forms import attached
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6


class SupportSource(LineSource):
    """A source that bills support to one tenant each month."""

    line_types = ("support",)

    def __init__(self, tenant: Tenant, *, at_issue: bool) -> None:
        self.tenant, self.at_issue = tenant, at_issue
        self.billed: list[str | None] = []

    def tenants(self, month: BilledMonth) -> Any:
        return [self.tenant.pk]

    def lines(self, draft: MonthDraft) -> list[InvoiceLine]:
        if not draft.is_invoice:
            return []
        values = {"tenant_id": self.tenant.pk, "line_type": "support", "description": "Support hours"}
        return [InvoiceLine(invoice=draft.invoice, femto=7 * 10**15, cents=700, **values)]

    def is_decided_at_issue(self, draft: MonthDraft) -> bool:
        return self.at_issue

    def mark_billed(self, draft: MonthDraft) -> None:
        self.billed.append(draft.invoice.number)


def lines(invoice: Invoice) -> list[tuple[str, str, int]]:
    rows = sorted(unscoped(InvoiceLine).filter(invoice_id=invoice.pk), key=lambda row: row.position)
    assert [row.position for row in rows] == list(range(1, len(rows) + 1))
    return [(row.line_type, row.description, row.cents) for row in rows]


def assert_recomputed(*invoices: Invoice) -> None:
    for invoice in invoices:
        with all_tenants_scope(BypassReason.BILLING):
            rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to__period")
            result = checks.check(rows.get(pk=invoice.pk))
        assert (result.ledger_difference, result.same_data, result.same_pdf) == (0, True, True)


@pytest.mark.parametrize("at_issue", [False, True])
@pytest.mark.parametrize("place", [0, 1, 6])
@pytest.mark.parametrize("has_usage", [False, True])
def test_a_further_source_is_in_every_place(acme, monkeypatch, at_issue, place, has_usage):
    """A draft, a preview, the final invoice, its check, PDF and XML have the line of a source that is added here."""
    source = SupportSource(acme, at_issue=at_issue)
    monkeypatch.setattr(month_charges, "SOURCES", list(month_charges.SOURCES))
    month_charges.SOURCES.insert(place, source)
    month = period(OCTOBER)
    if has_usage:
        use(acme, OCTOBER, (price("3"), MILLION))
    expected = [("support", "Support hours", 700)]
    if has_usage:
        expected.insert(0 if place else 1, ("usage", "", 300))
    shown = preview(acme, OCTOBER)
    assert shown is not None
    assert [(row.line_type, row.description, row.cents) for row in shown[1]] == expected
    do_close_period(month, now=over(month))
    (draft,) = do_draft(month)
    assert (lines(draft), draft.subtotal) == (expected, shown[0].subtotal)
    final = do_finalize(draft, now=month.ends_at + timedelta(days=1))
    assert (lines(final), source.billed) == (expected, [final.number])
    assert_recomputed(final)
    pages = pypdf.PdfReader(io.BytesIO(pdf_of(final))).pages
    assert "Support hours" in "".join(page.extract_text() for page in pages)
    assert b"Support hours" in attached(final)[1]
