"""The PDFs of final invoices.

A PDF is typeset after the transaction that finalizes the invoice, by the next run, email or download. It never prevents
an invoice, and a process can be killed at any time. It depends only on the stored invoice: if two processes typeset it
concurrently, one of two equal files is stored.
"""

from __future__ import annotations

import hashlib

import structlog
from django.db.models import QuerySet

from billing.invoicing import document, pdf
from billing.invoicing.lines import lines_of
from billing.models import Invoice, InvoiceFile
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)


def stored_pdf(invoice: Invoice) -> bytes:
    """Return the PDF of a final invoice. Typeset and store it first if there is none.

    The scope of all tenants must be open; `invoice` needs its period, entity and `refers_to`.
    """
    files = InvoiceFile.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice)
    if (file := files.first()) is None:
        _store_pdf(invoice)
        file = files.get()
    return bytes(file.pdf)


def _store_pdf(invoice: Invoice) -> None:
    """Typeset and store the PDF of a final invoice. A PDF that another process stored meanwhile is kept."""
    made = pdf.render_pdf(document.describe_invoice(invoice, lines_of(invoice)))
    row = InvoiceFile(invoice=invoice, tenant_id=invoice.tenant_id, pdf=made, sha256=hashlib.sha256(made).hexdigest())
    InvoiceFile.objects.for_tenant(invoice.tenant_id).bulk_create([row], ignore_conflicts=True)


def missing_pdfs() -> QuerySet[Invoice]:
    """Return the final invoices without a PDF. The scope of all tenants must be open."""
    return Invoice.objects.all_tenants().filter(number__isnull=False, file=None)


def store_pdfs() -> int:
    """Typeset the missing PDFs of final invoices, each in its own transaction. Return the number of new ones.

    An error of one invoice does not stop the others.
    """
    with all_tenants_scope(BypassReason.BILLING):
        waiting = list(missing_pdfs().order_by("pk").values_list("pk", flat=True))
    stored = 0
    for pk in waiting:
        try:
            stored += _store_missing(pk)
        except Exception as exc:  # noqa: BLE001  (an error of one invoice must not stop the others)
            log.error("invoice_pdf_failed", invoice=pk, error=str(exc))
    return stored


def _store_missing(pk: int) -> bool:
    """Typeset and store the PDF of an invoice. Return False if another process has stored it."""
    with all_tenants_scope(BypassReason.BILLING):
        rows = missing_pdfs().select_related("entity", "period", "refers_to")
        invoice = rows.filter(pk=pk).first()
        if invoice is not None:
            _store_pdf(invoice)
    return invoice is not None
