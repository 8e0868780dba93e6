"""Invoices: the list, a document with its downloads, the upcoming invoice, and the usage of a line."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.invoicing import document, facturx, ubl
from billing.invoicing.exports import as_csv
from billing.invoicing.files import stored_pdf
from billing.invoicing.lines import lines_of
from billing.invoicing.preview import preview
from billing.models import Invoice, InvoiceLine, Payment
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, first_or_404, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.invoices import listing
from frontend.tenant.invoices.checking import check_invoice
from frontend.tenant.invoices.document import document_of
from frontend.tenant.invoices.payment import can_pay_online, payment_view, top_up_view
from frontend.tenant.invoices.statement import STATEMENT_FILES, describe, read_shown, receipt_file, statement_file
from frontend.tenant.invoices.tracing import trace_line
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST, REPORT_COST

NEEDS = Permission.BILLING_READ
FILES = {"pdf": "PDF", "csv": "CSV", "xml": "Factur-X XML", "ubl": "UBL XML", "json": "JSON"}
_ENDINGS = {"xml": "-cii.xml", "ubl": "-ubl.xml"}  # ends of file names by form, if they are not the form
_TYPES = {
    "pdf": "application/pdf",
    "csv": "text/csv; charset=utf-8",
    "xml": "application/xml",
    "ubl": "application/xml",
    "json": "application/json",
}


def _check(ctx: PageContext) -> dict[str, Any]:
    pk: int = ctx.arguments["invoice"]
    if not Invoice.objects.for_tenant(ctx.tenant).filter(pk=pk).exists():
        raise Http404
    return check_invoice(pk, ctx.now)


PANELS = Panels(
    "invoices-panel",
    (
        Panel("upcoming", _lazy("Upcoming invoice"), "invoices/page.html#upcoming", listing.upcoming),
        Panel("balance", _lazy("Balance due"), "invoices/page.html#balance", listing.balance_due),
        Panel("list", _lazy("Invoices and credit notes"), "invoices/page.html#list", listing.invoice_list),
    ),
)
CHECKS = Panels(
    "invoices-detail-panel",
    (Panel("check", _lazy("Usage check"), "invoices/check.html", _check, every=0, lazy=True),),
)


@tenant_page(NEEDS, cost=PAGE_COST)
def invoices(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context = {"filters": listing.filters(ctx), "metering": metering(ctx.now), **listing.TOOLS.page(ctx)}
        context["can_top_up"] = can_pay_online(ctx)
    return render_page(ctx, "invoices/page.html", _("Invoices"), panels=PANELS, **context)


@tenant_page(NEEDS, cost=PAGE_COST)
def upcoming(ctx: PageContext) -> HttpResponse:
    """Show the upcoming invoice as a preview."""
    found = preview(ctx.tenant, ctx.now)
    document = None
    if found:
        with all_tenants_scope(BypassReason.BILLING):
            document = document_of(*found, ctx.now, line_url=lambda line: "", invoice_url=lambda pk: "")
    metered = metering(ctx.now)
    return render_page(
        ctx,
        "invoices/upcoming_detail.html",
        _("Upcoming invoice"),
        breadcrumbs=_crumbs(ctx),
        document=document,
        metering=metered,
    )


@tenant_page(NEEDS)
def invoice(ctx: PageContext) -> HttpResponse:
    found = find(ctx)
    document = _document(ctx, found)
    final = found.state != Invoice.State.DRAFT
    forms = FILES if final else {"csv": FILES["csv"], "json": FILES["json"]}
    files = [(label, ctx.url("invoices-file", found.pk, form)) for form, label in forms.items()]
    context: dict[str, Any] = {"document": document, "files": files, "final": final}
    is_open = found.state == Invoice.State.OPEN and not found.is_credit_note
    context |= {"invoice": found}
    context["can_pay"] = is_open and can_pay_online(ctx)
    return render_page(
        ctx, "invoices/detail.html", document["title"], panels=CHECKS, breadcrumbs=_crumbs(ctx), **context
    )


@tenant_page(Permission.BILLING_WRITE, methods=FORM)
def pay(ctx: PageContext) -> HttpResponse:
    found = find(ctx)
    if found.state != Invoice.State.OPEN or found.is_credit_note:
        raise Http404
    return payment_view(ctx, found)


@tenant_page(Permission.BILLING_WRITE, methods=FORM)
def top_up(ctx: PageContext) -> HttpResponse:
    return top_up_view(ctx)


@tenant_page(NEEDS, cost=PAGE_COST)
def statement(ctx: PageContext) -> HttpResponse:
    """Show the statement of account."""
    shown = read_shown(ctx, ctx.tenant)
    described = describe(
        shown,
        invoice_url=lambda pk: ctx.url("invoices-detail", pk),
        receipt_url=lambda pk: ctx.url("invoices-receipt", pk),
        file_url=lambda form: ctx.url(f"invoices-statement-{form}"),
    )
    return render_page(
        ctx,
        "invoices/statement_page.html",
        _("Statement of account"),
        breadcrumbs=_crumbs(ctx),
        statement=described,
    )


@tenant_page(NEEDS, cost=REPORT_COST)
def statement_as_file(ctx: PageContext) -> HttpResponse:
    return statement_file(ctx, ctx.tenant, ctx.arguments["form"], ctx.url("invoices-statement"))


@tenant_page(NEEDS, cost=REPORT_COST)
def receipt(ctx: PageContext) -> HttpResponse:
    """Return the receipt of a payment or refund as PDF."""
    payment = ctx.get(lambda: Payment.objects.for_tenant(ctx.tenant).filter(pk=ctx.arguments["payment"]))
    return receipt_file(ctx, payment, ctx.tenant)


@tenant_page(NEEDS)
def line(ctx: PageContext) -> HttpResponse:
    """Show the usage events of a line."""
    found = find(ctx)
    with ctx.scope():
        rows = InvoiceLine.objects.for_tenant(ctx.tenant)
        row = first_or_404(rows.filter(invoice=found, position=ctx.arguments["line"], price_id__isnull=False))
        here = ctx.url("invoices-line", found.pk, row.position)
        trace = trace_line(ctx, found, row, here, "requests-detail")
    name, up = found.number or _("Draft"), ctx.url("invoices-detail", found.pk)
    breadcrumbs = (*_crumbs(ctx), Breadcrumb(name, up))
    return render_page(
        ctx,
        "invoices/line.html",
        _("Line %(position)s") % {"position": row.position},
        breadcrumbs=breadcrumbs,
        trace=trace,
        up=up,
        name=name,
    )


@tenant_page(NEEDS)
def file(ctx: PageContext) -> HttpResponse:
    """Return the invoice as a file."""
    return file_response(find(ctx), ctx.arguments["form"])


def file_response(found: Invoice, form: str) -> HttpResponse:
    """Return an invoice as a file.

    Raises:
        Http404: there is no such file, or none of a draft.
    """
    final = found.state != Invoice.State.DRAFT
    if form not in FILES or (form in ("pdf", "xml", "ubl") and not final):
        raise Http404
    with all_tenants_scope(BypassReason.BILLING):
        body = _body(found, form)
    answer = HttpResponse(body, content_type=_TYPES[form])
    name = f"{found.number or 'draft'}{_ENDINGS.get(form, f'.{form}')}"
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer


def _body(found: Invoice, form: str) -> bytes | str:
    if form == "pdf":
        return stored_pdf(found)
    described = document.describe_invoice(found, lines_of(found))
    if form in ("xml", "ubl"):
        return facturx.xml(described) if form == "xml" else ubl.xml(described)
    return as_csv(described) if form == "csv" else document.encode_document(described)


def find(ctx: PageContext) -> Invoice:
    """Return the invoice in the URL.

    Raises:
        Http404: the tenant has no such invoice.
    """
    with all_tenants_scope(BypassReason.BILLING):  # periods and entities belong to no tenant
        rows = Invoice.objects.for_tenant(ctx.tenant).select_related("entity", "period", "refers_to", "tenant")
        return first_or_404(rows.filter(pk=ctx.arguments["invoice"]))


def _document(ctx: PageContext, found: Invoice) -> dict[str, Any]:
    def line_url(line: InvoiceLine) -> str:
        return ctx.url("invoices-line", found.pk, line.position)

    with all_tenants_scope(BypassReason.BILLING):
        return document_of(
            found,
            lines_of(found),
            ctx.now,
            line_url=line_url,
            invoice_url=lambda pk: ctx.url("invoices-detail", pk),
        )


def _crumbs(ctx: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb(_("Invoices"), ctx.url("invoices")),)


SCREEN = ConsoleScreen(
    "invoices",
    _lazy("Invoices"),
    icon="invoices",
    letter="i",
    group="billing",
    order=30,
    needs=Permission.BILLING_READ,
    finders={_lazy("Invoices"): listing.find_invoices},
)
urlpatterns = [
    path("t/<slug:slug>/invoices/", invoices, name="invoices"),
    PANELS.tenant_url("t/<slug:slug>/invoices/", NEEDS),
    *listing.TOOLS.tenant_urls("t/<slug:slug>/invoices/", NEEDS),
    path("t/<slug:slug>/invoices/upcoming", upcoming, name="invoices-upcoming"),
    path("t/<slug:slug>/invoices/top-up", top_up, name="invoices-top-up"),
    path("t/<slug:slug>/invoices/statement", statement, name="invoices-statement"),
    *(
        path(
            f"t/<slug:slug>/invoices/statement/{form}",
            statement_as_file,
            {"form": form},
            name=f"invoices-statement-{form}",
        )
        for form in STATEMENT_FILES
    ),
    path("t/<slug:slug>/invoices/payments/<int:payment>/receipt", receipt, name="invoices-receipt"),
    path("t/<slug:slug>/invoices/<int:invoice>/pay", pay, name="invoices-pay"),
    path("t/<slug:slug>/invoices/<int:invoice>", invoice, name="invoices-detail"),
    path("t/<slug:slug>/invoices/<int:invoice>/lines/<int:line>", line, name="invoices-line"),
    path("t/<slug:slug>/invoices/<int:invoice>/files/<slug:form>", file, name="invoices-file"),
    CHECKS.tenant_url("t/<slug:slug>/invoices/<int:invoice>/", NEEDS),
]
