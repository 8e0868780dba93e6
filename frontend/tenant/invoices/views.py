"""Invoices: the list, a document and its downloads, the month under way, a line's usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import Http404, HttpResponse
from django.urls import path

from billing.invoicing import document, facturx
from billing.invoicing.exports import as_csv
from billing.invoicing.lines import lines_of
from billing.invoicing.preview import preview
from billing.models import Invoice, InvoiceFile, InvoiceLine
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import show
from frontend.tenant.invoices import listing
from frontend.tenant.invoices.checking import Reconciled, reconciled
from frontend.tenant.invoices.document import Document, shown
from frontend.tenant.invoices.tracing import traced
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.permissions import Permission

NEEDS = Permission.BILLING_READ
FORMS = {"pdf": "PDF", "csv": "CSV", "xml": "Factur-X XML", "json": "JSON"}
_TYPES = {
    "pdf": "application/pdf",
    "csv": "text/csv; charset=utf-8",
    "xml": "application/xml",
    "json": "application/json",
}


@dataclass(frozen=True)
class Download:
    label: str
    url: str


def _check(visit: PageContext) -> Reconciled:
    pk: int = visit.arguments["invoice"]
    if not Invoice.objects.for_tenant(visit.tenant).filter(pk=pk).exists():
        raise Http404
    return reconciled(pk, visit.now)


PANELS = Panels(
    "invoices-panel",
    (
        Panel("upcoming", "Upcoming invoice", "invoices/upcoming.html", listing.upcoming),
        Panel("balance", "Balance due", "invoices/balance.html", listing.standing),
        Panel("list", "Invoices and credit notes", "invoices/list.html", listing.listed),
    ),
)
CHECKS = Panels(
    "invoices-detail-panel",
    (Panel("check", "Usage check", "invoices/check.html", _check, every=0, lazy=True),),
)


@tenant_page(NEEDS)
def invoices(visit: PageContext) -> HttpResponse:
    return show(visit, "invoices/page.html", "Invoices", panels=PANELS, metering=metering(visit.now))


@tenant_page(NEEDS)
def upcoming(visit: PageContext) -> HttpResponse:
    """Upcoming invoice as the invoice it would be now."""
    found = preview(visit.tenant, visit.now)
    it = None
    if found:
        with all_tenants_scope(BypassReason.BILLING):
            it = shown(*found, visit.now, line_url=lambda line: "", invoice_url=lambda pk: "")
    metered = metering(visit.now)
    return show(
        visit, "invoices/upcoming_detail.html", "Upcoming invoice", breadcrumbs=_crumbs(visit), it=it, metering=metered
    )


@tenant_page(NEEDS)
def invoice(visit: PageContext) -> HttpResponse:
    found = find(visit)
    it = _document(visit, found)
    final = found.state != Invoice.State.DRAFT
    forms = FORMS if final else {"csv": FORMS["csv"], "json": FORMS["json"]}
    files = [Download(label, visit.url("invoices-file", found.pk, form)) for form, label in forms.items()]
    given: dict[str, Any] = {"it": it, "files": files, "final": final}
    return show(visit, "invoices/detail.html", it.title, panels=CHECKS, breadcrumbs=_crumbs(visit), **given)


@tenant_page(NEEDS)
def line(visit: PageContext) -> HttpResponse:
    """Return a line's usage events."""
    found = find(visit)
    with visit.scope():
        rows = InvoiceLine.objects.for_tenant(visit.tenant)
        row = rows.filter(invoice=found, position=visit.arguments["line"], price_id__isnull=False).first()
        if row is None:
            raise Http404
        here = visit.url("invoices-line", found.pk, row.position)
        told = traced(visit, found, row, here, "requests-detail")
    name, up = found.number or "Draft", visit.url("invoices-detail", found.pk)
    breadcrumbs = (*_crumbs(visit), Breadcrumb(name, up))
    return show(
        visit, "invoices/line.html", f"Line {row.position}", breadcrumbs=breadcrumbs, told=told, up=up, name=name
    )


@tenant_page(NEEDS)
def file(visit: PageContext) -> HttpResponse:
    """Return the invoice as a file."""
    found, form = find(visit), visit.arguments["form"]
    final = found.state != Invoice.State.DRAFT
    if form not in FORMS or (form in ("pdf", "xml") and not final):
        raise Http404
    with all_tenants_scope(BypassReason.BILLING):
        body = _body(found, form)
    answer = HttpResponse(body, content_type=_TYPES[form])
    answer.headers["Content-Disposition"] = f'attachment; filename="{found.number or "draft"}.{form}"'
    return answer


def _body(found: Invoice, form: str) -> bytes | str:
    if form == "pdf":
        return bytes(InvoiceFile.objects.for_tenant(found.tenant_id).get(invoice=found).pdf)
    described = document.described(found, lines_of(found))
    if form == "xml":
        return facturx.xml(described)
    return as_csv(described) if form == "csv" else document.encoded(described)


def find(visit: PageContext) -> Invoice:
    """Return the invoice of the address.

    Raises:
        Http404: the tenant has none such.
    """
    with all_tenants_scope(BypassReason.BILLING):  # months and entities are nobody's rows
        rows = Invoice.objects.for_tenant(visit.tenant).select_related("entity", "period", "refers_to", "tenant")
        found = rows.filter(pk=visit.arguments["invoice"]).first()
    if found is None:
        raise Http404
    return found


def _document(visit: PageContext, found: Invoice) -> Document:
    def line_url(line: InvoiceLine) -> str:
        return visit.url("invoices-line", found.pk, line.position)

    with all_tenants_scope(BypassReason.BILLING):
        return shown(
            found,
            lines_of(found),
            visit.now,
            line_url=line_url,
            invoice_url=lambda pk: visit.url("invoices-detail", pk),
        )


def _crumbs(visit: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb("Invoices", visit.url("invoices")),)


urlpatterns = [
    path("t/<slug:slug>/invoices/", invoices, name="invoices"),
    PANELS.tenant_url("t/<slug:slug>/invoices/", NEEDS),
    path("t/<slug:slug>/invoices/upcoming", upcoming, name="invoices-upcoming"),
    path("t/<slug:slug>/invoices/<int:invoice>", invoice, name="invoices-detail"),
    path("t/<slug:slug>/invoices/<int:invoice>/lines/<int:line>", line, name="invoices-line"),
    path("t/<slug:slug>/invoices/<int:invoice>/files/<slug:form>", file, name="invoices-file"),
    CHECKS.tenant_url("t/<slug:slug>/invoices/<int:invoice>/", NEEDS),
]
