"""Billing runs: the page, an invoice, and the forms of what is done to them, each proved, typed and audited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import Http404, HttpResponse
from django.urls import path

from billing.actions.corrections import do_void, do_write_off
from billing.actions.drafts import notes_on
from billing.actions.invoices import do_finalize
from billing.actions.payments import outstanding
from billing.amounts import dollars
from billing.invoicing.lines import lines_of
from billing.models import Invoice, InvoiceLine, Period
from frontend.core.confirmation import Confirm
from frontend.core.form_view import ask, posted
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import done, show
from frontend.operator.billing import page, services
from frontend.operator.billing.forms import GrantCredit, IssueNote, RecordPayment, WithReason
from frontend.tenant.invoices.checking import Reconciled, reconciled
from frontend.tenant.invoices.document import shown
from frontend.tenant.invoices.tracing import traced
from tenants.models import Tenant

TITLE = "Billing runs"
FOREVER = "This cannot be undone. Final invoices can only be corrected by a credit note or voided."


def _check(visit: PageContext) -> Reconciled:
    return reconciled(_invoice(visit).pk, visit.now)


PANELS = Panels(
    "operator-billing-panel",
    (
        Panel("runs", "Billing period status", "operator/billing/runs.html", page.runs),
        Panel("stats", "Invoices by state", "operator/billing/stats.html", page.figures),
        Panel("list", "Invoices of the month", "operator/billing/list.html", page.listed),
        Panel(
            "comparison",
            "Invoices against usage",
            "operator/billing/comparison.html",
            page.compared,
            every=0,
            lazy=True,
        ),
    ),
)
CHECKS = Panels(
    "operator-billing-detail-panel",
    (Panel("check", "Usage check", "invoices/check.html", _check, every=0, lazy=True),),
)


@operator_page()
def billing(visit: PageContext) -> HttpResponse:
    with visit.scope():
        fields = page.fields(visit)
    metered = metering(visit.now)
    return show(visit, "operator/billing/page.html", TITLE, panels=PANELS, fields=fields, metering=metered)


@operator_page()
def invoice(visit: PageContext) -> HttpResponse:
    found = _invoice(visit)

    def line_url(line: InvoiceLine) -> str:
        return visit.url("operator-billing-line", found.pk, line.position)

    with visit.scope():
        one = visit.url
        it = shown(
            found,
            lines_of(found),
            visit.now,
            line_url=line_url,
            invoice_url=lambda pk: one("operator-billing-detail", pk),
        )
        can = _possible(visit, found)
    return show(
        visit,
        "operator/billing/detail.html",
        it.title,
        panels=CHECKS,
        breadcrumbs=_crumbs(visit),
        it=it,
        can=can,
        of=found,
    )


def _possible(visit: PageContext, found: Invoice) -> dict[str, str]:
    """Return the addresses of what may be done to it, by name; empty: not as it stands."""
    draft, is_open = found.state == Invoice.State.DRAFT, found.state == Invoice.State.OPEN
    paid, billed = found.state == Invoice.State.PAID, not found.gives_back
    untouched = billed and is_open and outstanding(found) == found.total and not notes_on(found).exists()
    able = {
        "finalize": draft and found.complete,
        "payment": billed and is_open,
        "credit-note": billed and (is_open or paid),
        "void": untouched,
        "write-off": billed and is_open,
    }
    found_urls = {
        name.replace("-", "_"): visit.url(f"operator-billing-{name}", found.pk) if it else ""
        for name, it in able.items()
    }
    return found_urls | {"credit": visit.url("operator-billing-credit", found.tenant.slug)}


@operator_page()
def line(visit: PageContext) -> HttpResponse:
    found = _invoice(visit)
    with visit.scope():
        rows = InvoiceLine.objects.all_tenants().filter(invoice=found, price_id__isnull=False)
        row = rows.filter(position=visit.arguments["line"]).first()
        if row is None:
            raise Http404
        here = visit.url("operator-billing-line", found.pk, row.position)
        told = traced(visit, found, row, here, "")
    name, up = found.number or "Draft", visit.url("operator-billing-detail", found.pk)
    breadcrumbs = (*_crumbs(visit), Breadcrumb(name, up))
    return show(
        visit, "invoices/line.html", f"Line {row.position}", breadcrumbs=breadcrumbs, told=told, up=up, name=name
    )


# A month.


@operator_page(methods=FORM, step_up=True)
def draft(visit: PageContext) -> HttpResponse:
    period = _period(visit)
    closes = period.closed_at is None and period.ends_at <= visit.now
    effect = f"Every tenant’s draft of {period.label} is recreated from its usage. Final invoices do not change."
    if closes:
        effect = f"{period.label} is closed permanently. Later usage goes to the next month. {effect}"

    def verb(data: dict[str, Any]) -> int:
        return services.draft(period, visit.now)

    return _confirm(
        visit,
        Confirm(period.label, posted(visit)),
        verb,
        title=f"Draft {period.label}",
        submit="Close and draft" if closes else "Draft",
        effect=effect,
        back=_month_url(visit, period),
        said=lambda count: f"{count} drafts of {period.label} were created.",
    )


@operator_page(methods=FORM, step_up=True)
def finalize_all(visit: PageContext) -> HttpResponse:
    period = _period(visit)
    with visit.scope():
        drafts = Invoice.objects.all_tenants().filter(period=period, state=Invoice.State.DRAFT, complete=True)
        count, worth = drafts.count(), sum(drafts.values_list("total", flat=True))
    many = f"{count} invoice{'' if count == 1 else 's'}"
    effect = f"{many} of {period.label} (total {dollars(worth)}) are numbered, booked and emailed. {FOREVER}"

    def said(did: services.Finalized) -> str:
        left = f" {did.left} remaining. Run Finalize all again." if did.left else ""
        faults = f" Not finalized: {'; '.join(did.refused)}." if did.refused else ""
        return f"{did.done} invoices of {period.label} finalized.{left}{faults}"

    return _confirm(
        visit,
        Confirm(period.label, posted(visit)),
        lambda data: services.finalize_all(period),
        title=f"Finalize {period.label}",
        submit="Finalize all",
        effect=effect,
        back=_month_url(visit, period),
        said=said,
    )


# An invoice.


@operator_page(methods=FORM, step_up=True)
def finalize(visit: PageContext) -> HttpResponse:
    found = _invoice(visit)
    if found.state != Invoice.State.DRAFT:
        return done(visit, visit.url("operator-billing-detail", found.pk), f"{found.number} is already final.")
    name = found.tenant.slug
    what = f"The draft of {found.period.label} for {found.tenant.name}, {dollars(found.total)}"
    return _on_invoice(
        visit,
        found,
        Confirm(name, posted(visit)),
        lambda data: do_finalize(found),
        title=f"Finalize {found.period.label} of {found.tenant.name}",
        submit="Finalize",
        effect=f"{what}, is numbered, booked and emailed. {FOREVER}",
        said=lambda row: f"{row.number} was finalized.",
    )


@operator_page(methods=FORM, step_up=True)
def payment(visit: PageContext) -> HttpResponse:
    found, owed = _final(visit)
    start = {"amount": f"{owed // 100}.{owed % 100:02}", "received_on": visit.now.date()}
    form = RecordPayment(str(found.number), posted(visit))
    form.initial = start
    return _on_invoice(
        visit,
        found,
        form,
        lambda data: services.pay(found, data),
        title=f"Record payment on {found.number}",
        submit="Record payment",
        effect=f"Books the amount as received from {found.tenant.name}. Balance due: {dollars(owed)}.",
        said=lambda paid: (
            "The payment was recorded." if paid[1] else "This payment was already recorded. Nothing changed."
        ),
        danger=False,
    )


@operator_page(methods=FORM, step_up=True)
def credit_note(visit: PageContext) -> HttpResponse:
    found, _ = _final(visit)
    with visit.scope():
        seen = notes_on(found).count()
    form = IssueNote(str(found.number), posted(visit))
    form.initial = {"seen": seen}
    given = "Reduces the balance due. Excess payments go to future invoices and applied credits are restored."
    return _on_invoice(
        visit,
        found,
        form,
        lambda data: services.credit_note(found, data),
        title=f"Credit note on {found.number}",
        submit="Issue credit note",
        effect=f"Credits the amount with tax to {found.tenant.name} and emails the credit note. {given}",
        said=lambda note: f"{note.number} was issued.",
    )


@operator_page(methods=FORM, step_up=True)
def void(visit: PageContext) -> HttpResponse:
    found, _ = _final(visit)
    return _on_invoice(
        visit,
        found,
        WithReason(str(found.number), posted(visit)),
        lambda data: do_void(found, data["reason"]),
        title=f"Void {found.number}",
        submit="Void",
        effect=f"{found.number} has no balance due. The number is kept, applied credits are restored and"
        " the month can be drafted again. This cannot be undone.",
        said=lambda row: f"{row.number} was voided.",
    )


@operator_page(methods=FORM, step_up=True)
def write_off(visit: PageContext) -> HttpResponse:
    found, owed = _final(visit)
    return _on_invoice(
        visit,
        found,
        WithReason(str(found.number), posted(visit)),
        lambda data: do_write_off(found, data["reason"]),
        title=f"Write off {found.number}",
        submit="Write off",
        effect=f"The {dollars(owed)} that {found.tenant.name} owes become bad debt. This cannot be undone.",
        said=lambda row: f"{row.number} was written off.",
    )


@operator_page(methods=FORM, step_up=True)
def credit(visit: PageContext) -> HttpResponse:
    """Give a tenant credit."""
    with visit.scope():
        tenant = Tenant.objects.all_tenants().filter(slug=visit.arguments["tenant"]).first()
        if tenant is None:
            raise Http404
        seen = services.credits_of(tenant)
    form = GrantCredit(tenant.slug, posted(visit))
    form.initial = {"seen": seen}
    return _confirm(
        visit,
        form,
        lambda data: services.grant(tenant, data),
        title=f"Add credit for {tenant.name}",
        submit="Add credit",
        effect=f"Reduces future invoices of {tenant.name}, before tax, until the credit is used up or expires.",
        back=visit.url("operator-tenants-detail", tenant.pk),
        said=lambda grant: f"{dollars(grant.nano // 10**7)} credit added for {tenant.name}.",
        danger=False,
    )


def _on_invoice(
    visit: PageContext, found: Invoice, form: Any, verb: Callable[[dict[str, Any]], Any], **given: Any
) -> HttpResponse:
    return _confirm(visit, form, verb, back=visit.url("operator-billing-detail", found.pk), **given)


def _confirm(
    visit: PageContext,
    form: Any,
    verb: Callable[[dict[str, Any]], Any],
    *,
    title: str,
    danger: bool = True,
    **given: Any,
) -> HttpResponse:
    """Return the page of one deed; what was done is said where `back` leads."""
    return ask(visit, title, form, verb, breadcrumbs=_crumbs(visit), danger=danger, **given)


def _period(visit: PageContext) -> Period:
    with visit.scope():
        found = Period.objects.select_related("entity").filter(pk=visit.arguments["period"]).first()
    if found is None:
        raise Http404
    return found


def _invoice(visit: PageContext) -> Invoice:
    with visit.scope():
        rows = Invoice.objects.all_tenants().select_related("entity", "period", "refers_to", "tenant")
        found = rows.filter(pk=visit.arguments["invoice"]).first()
    if found is None:
        raise Http404
    return found


def _final(visit: PageContext) -> tuple[Invoice, int]:
    """Return an invoice, no draft or note, and what is owed on it, in cents."""
    found = _invoice(visit)
    if found.state == Invoice.State.DRAFT or found.gives_back:
        raise Http404
    with visit.scope():
        return found, outstanding(found)


def _month_url(visit: PageContext, period: Period) -> str:
    return f"{visit.url('operator-billing')}?month={period.label}"


def _crumbs(visit: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb(TITLE, visit.url("operator-billing")),)


urlpatterns = [
    path("operator/billing/", billing, name="operator-billing"),
    PANELS.operator_url("operator/billing/"),
    path("operator/billing/months/<int:period>/draft", draft, name="operator-billing-draft"),
    path("operator/billing/months/<int:period>/finalize", finalize_all, name="operator-billing-finalize-all"),
    path("operator/billing/tenants/<slug:tenant>/credit", credit, name="operator-billing-credit"),
    path("operator/billing/<int:invoice>", invoice, name="operator-billing-detail"),
    CHECKS.operator_url("operator/billing/<int:invoice>/"),
    path("operator/billing/<int:invoice>/lines/<int:line>", line, name="operator-billing-line"),
    path("operator/billing/<int:invoice>/finalize", finalize, name="operator-billing-finalize"),
    path("operator/billing/<int:invoice>/payment", payment, name="operator-billing-payment"),
    path("operator/billing/<int:invoice>/credit-note", credit_note, name="operator-billing-credit-note"),
    path("operator/billing/<int:invoice>/void", void, name="operator-billing-void"),
    path("operator/billing/<int:invoice>/write-off", write_off, name="operator-billing-write-off"),
]
