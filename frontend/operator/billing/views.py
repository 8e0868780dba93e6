"""Billing runs: the page, an invoice, and the forms of its actions, with re-authentication and audit entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import Count, Sum
from django.forms import Form
from django.http import Http404, HttpResponse
from django.urls import path
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from billing.currencies.amounts import decimal_cents, dollars, minor_digits, nano_a_cent
from billing.invoicing.corrections import (
    can_claim_relief,
    can_debit,
    do_claim_tax_relief,
    do_issue_credit_note,
    do_issue_debit_note,
    do_void,
    do_write_off,
    find_void_obstacle,
)
from billing.invoicing.drafts import debits_and_credits
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.lines import lines_of
from billing.invoicing.tax_rates import find_problem
from billing.ledger.matching import sum_outstanding
from billing.models import Invoice, InvoiceLine, Payment, Period
from billing.pricing.currencies import currency_of
from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, first_or_404, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.billing import page, services
from frontend.operator.billing.forms import GrantCredit, IssueNote, RecordPayment, RecordTenantPayment, WithReason
from frontend.operator.billing.reports import report
from frontend.tenant.invoices import listing
from frontend.tenant.invoices.checking import check_invoice
from frontend.tenant.invoices.document import document_of
from frontend.tenant.invoices.statement import STATEMENT_FILES, describe, read_shown, receipt_file, statement_file
from frontend.tenant.invoices.tracing import trace_line
from frontend.tenant.invoices.views import file_response
from tenants.models import Tenant
from tenants.request_costs import PAGE_COST, REPORT_COST

TITLE = _lazy("Billing runs")
NO_EXPIRY = _lazy("This cannot be undone. Final invoices can only be corrected by a credit note or voided.")


def _check(ctx: PageContext) -> dict[str, Any]:
    return check_invoice(_invoice(ctx).pk, ctx.now)


PANELS = Panels(
    "operator-billing-panel",
    (
        Panel("runs", _lazy("Billing period status"), "operator/billing/page.html#runs", page.runs),
        Panel("stats", _lazy("Invoices by state"), "operator/billing/page.html#stats", page.stats),
        Panel("list", _lazy("Invoices of the month"), "operator/billing/page.html#list", page.invoice_list),
        Panel(
            "comparison",
            _lazy("Invoices against usage"),
            "operator/billing/page.html#comparison",
            page.comparison,
            every=0,
            lazy=True,
        ),
    ),
)
CHECKS = Panels(
    "operator-billing-detail-panel",
    (Panel("check", _lazy("Usage check"), "invoices/check.html", _check, every=0, lazy=True),),
)


@operator_page()
def billing(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context = {"filters": page.filters(ctx), "metering": metering(ctx.now), **page.TOOLS.page(ctx)}
    return render_page(ctx, "operator/billing/page.html", TITLE, panels=PANELS, **context)


@operator_page()
def invoice(ctx: PageContext) -> HttpResponse:
    found = _invoice(ctx)

    def line_url(line: InvoiceLine) -> str:
        return ctx.url("operator-billing-line", found.pk, line.position)

    with ctx.scope():
        url_of = ctx.url
        document = document_of(
            found,
            lines_of(found),
            ctx.now,
            line_url=line_url,
            invoice_url=lambda pk: url_of("operator-billing-detail", pk),
        )
        can, problem = _possible(ctx, found), find_problem(found, ctx.now)
    return render_page(
        ctx,
        "operator/billing/detail.html",
        document["title"],
        panels=CHECKS,
        breadcrumbs=_crumbs(ctx),
        document=document,
        can=can,
        problem=problem,
        of=found,
    )


def _possible(ctx: PageContext, found: Invoice) -> dict[str, str]:
    """Return the URLs of the actions by name; empty if the action is not possible in this state."""
    draft, is_open = found.state == Invoice.State.DRAFT, found.state == Invoice.State.OPEN
    paid, billed = found.state == Invoice.State.PAID, not found.is_credit_note
    able = {
        "finalize": draft and found.complete,
        "payment": billed and is_open,
        "credit-note": billed and (is_open or paid),
        "debit-note": can_debit(found),
        "void": billed and (is_open or paid) and find_void_obstacle(found) is None,
        "write-off": billed and is_open,
        "claim-tax-relief": billed and can_claim_relief(found),
    }
    found_urls = {
        name.replace("-", "_"): ctx.url(f"operator-billing-{name}", found.pk) if is_allowed else ""
        for name, is_allowed in able.items()
    }
    return found_urls | {"credit": ctx.url("operator-billing-credit", found.tenant.slug)}


@operator_page()
def line(ctx: PageContext) -> HttpResponse:
    found = _invoice(ctx)
    with ctx.scope():
        rows = InvoiceLine.objects.all_tenants().filter(invoice=found, price_id__isnull=False)
        row = first_or_404(rows.filter(position=ctx.arguments["line"]))
        here = ctx.url("operator-billing-line", found.pk, row.position)
        trace = trace_line(ctx, found, row, here, "")
    name, up = found.number or _("Draft"), ctx.url("operator-billing-detail", found.pk)
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


# A month.


@operator_page(methods=FORM, step_up=True)
def draft(ctx: PageContext) -> HttpResponse:
    period = _period(ctx)
    closes = period.closed_at is None and period.ends_at <= ctx.now
    effect = _("Every tenant’s draft of %(label)s is recreated from its usage. Final invoices do not change.") % {
        "label": period.label
    }
    if closes:
        effect = _("%(label)s is closed permanently. Later usage goes to the next month. %(effect)s") % {
            "label": period.label,
            "effect": effect,
        }

    def action(data: dict[str, Any]) -> int:
        return services.draft(period, ctx.now)

    return _confirm(
        ctx,
        Confirm(period.label, bound_data(ctx)) if closes else Form(bound_data(ctx)),
        action,
        title=_("Draft %(label)s") % {"label": period.label},
        submit=_("Close and draft") if closes else _("Draft"),
        effect=effect,
        back=_month_url(ctx, period),
        message=lambda count: (
            _("%(count)s drafts of %(label)s were created.") % {"count": count, "label": period.label}
        ),
    )


@operator_page(methods=FORM, step_up=True)
def finalize_all(ctx: PageContext) -> HttpResponse:
    period = _period(ctx)
    with ctx.scope():
        drafts = Invoice.objects.all_tenants().filter(period=period, state=Invoice.State.DRAFT, complete=True)
        sums = drafts.order_by("currency").values_list("currency").annotate(Count("pk"), Sum("total"))
        found = [(count, dollars(total, currency)) for currency, count, total in sums]
    number, worth = sum(row[0] for row in found), _(" and ").join(row[1] for row in found) or dollars(0)
    numbered = ngettext(
        "%(number)s invoice of %(month)s (total %(total)s) is numbered, booked and emailed.",
        "%(number)s invoices of %(month)s (total %(total)s) are numbered, booked and emailed.",
        number,
    ) % {"number": number, "month": period.label, "total": worth}
    effect = f"{numbered} {NO_EXPIRY}"

    def message(did: services.Finalized) -> str:
        left = _(" %(left)s remaining. Run Finalize all again.") % {"left": did.left} if did.left else ""
        errors = _(" Not finalized: %(refused)s.") % {"refused": "; ".join(did.refused)} if did.refused else ""
        return _("%(done)s invoices of %(label)s finalized.%(left)s%(errors)s") % {
            "done": did.done,
            "label": period.label,
            "left": left,
            "errors": errors,
        }

    return _confirm(
        ctx,
        Confirm(period.label, bound_data(ctx)),
        lambda data: services.finalize_all(period),
        title=_("Finalize %(label)s") % {"label": period.label},
        submit=_("Finalize all"),
        effect=effect,
        back=_month_url(ctx, period),
        message=message,
    )


# An invoice.


@operator_page()
def file(ctx: PageContext) -> HttpResponse:
    """Return an invoice as a file, as its tenant gets it."""
    return file_response(_invoice(ctx), ctx.arguments["form"])


@operator_page(methods=FORM, step_up=True)
def finalize(ctx: PageContext) -> HttpResponse:
    found = _invoice(ctx)
    if found.state != Invoice.State.DRAFT:
        return redirect_with_message(
            ctx,
            ctx.url("operator-billing-detail", found.pk),
            _("%(number)s is already final.") % {"number": found.number},
        )
    name = found.tenant.slug
    what = _("The draft of %(label)s for %(name)s, %(dollars)s") % {
        "label": found.period.label,
        "name": found.tenant.name,
        "dollars": dollars(found.total, found.currency),
    }
    return _on_invoice(
        ctx,
        found,
        Confirm(name, bound_data(ctx)),
        lambda data: do_finalize(found),
        title=_("Finalize %(label)s of %(name)s") % {"label": found.period.label, "name": found.tenant.name},
        submit=_("Finalize"),
        effect=_("%(what)s, is numbered, booked and emailed. %(note)s") % {"what": what, "note": NO_EXPIRY},
        message=lambda row: _("%(number)s was finalized.") % {"number": row.number},
    )


@operator_page(methods=FORM, step_up=True)
def payment(ctx: PageContext) -> HttpResponse:
    found, owed = _final(ctx)
    start = {"amount": decimal_cents(owed, minor_digits(found.currency)), "received_on": ctx.now.date()}
    form = RecordPayment(str(found.number), found.currency, bound_data(ctx))
    form.initial = start
    return _on_invoice(
        ctx,
        found,
        form,
        lambda data: services.pay(found, data),
        title=_("Record payment on %(number)s") % {"number": found.number},
        submit=_("Record payment"),
        effect=_("Books the amount as received from %(name)s. Balance due: %(dollars)s.")
        % {"name": found.tenant.name, "dollars": dollars(owed, found.currency)},
        message=_payment_message,
        danger=False,
    )


def _note_form(ctx: PageContext, found: Invoice) -> IssueNote:
    form = IssueNote(str(found.number), found.currency, bound_data(ctx))
    with ctx.scope():
        form.initial = {"seen": debits_and_credits(found).count()}
    return form


@operator_page(methods=FORM, step_up=True)
def credit_note(ctx: PageContext) -> HttpResponse:
    found = _final(ctx)[0]
    context = _("Reduces the balance due. Excess payments go to future invoices and applied credits are restored.")
    return _on_invoice(
        ctx,
        found,
        _note_form(ctx, found),
        lambda data: services.issue_note(found, data, do_issue_credit_note),
        title=_("Credit note on %(number)s") % {"number": found.number},
        submit=_("Issue credit note"),
        effect=_("Credits the amount with tax to %(name)s and emails the credit note. %(context)s")
        % {"name": found.tenant.name, "context": context},
        message=lambda note: _("%(number)s was issued.") % {"number": note.number},
    )


@operator_page(methods=FORM, step_up=True)
def debit_note(ctx: PageContext) -> HttpResponse:
    found = _final(ctx)[0]
    return _on_invoice(
        ctx,
        found,
        _note_form(ctx, found),
        lambda data: services.issue_note(found, data, do_issue_debit_note),
        title=_("Debit note on %(number)s") % {"number": found.number},
        submit=_("Issue debit note"),
        effect=_("Charges the amount with tax to %(name)s and emails the debit note.") % {"name": found.tenant.name},
        message=lambda note: _("%(number)s was issued.") % {"number": note.number},
    )


@operator_page(methods=FORM, step_up=True)
def void(ctx: PageContext) -> HttpResponse:
    found = _final(ctx)[0]
    return _on_invoice(
        ctx,
        found,
        WithReason(str(found.number), bound_data(ctx)),
        lambda data: do_void(found, data["reason"]),
        title=_("Void %(number)s") % {"number": found.number},
        submit=_("Void"),
        effect=_(
            "A cancellation with today’s date is issued and emailed. %(number)s keeps its number and has no balance "
            "due. Applied credits are restored and the month can be drafted again. This cannot be undone."
        )
        % {"number": found.number},
        message=lambda row: _("%(number)s was voided.") % {"number": row.number},
    )


@operator_page(methods=FORM, step_up=True)
def write_off(ctx: PageContext) -> HttpResponse:
    found, owed = _final(ctx)
    return _on_invoice(
        ctx,
        found,
        WithReason(str(found.number), bound_data(ctx)),
        lambda data: do_write_off(found, data["reason"]),
        title=_("Write off %(number)s") % {"number": found.number},
        submit=_("Write off"),
        effect=(
            _(
                "The %(dollars)s that %(name)s owes become bad debt. Their tax is owed until you record the claim for "
                "its relief. This cannot be undone."
            )
            if found.entity.relief_after_claim
            else _(
                "The %(dollars)s that %(name)s owes become bad debt without their tax, which is no longer owed. This "
                "cannot be undone."
            )
        )
        % {"dollars": dollars(owed, found.currency), "name": found.tenant.name},
        message=lambda row: _("%(number)s was written off.") % {"number": row.number},
    )


@operator_page(methods=FORM, step_up=True)
def claim_tax_relief(ctx: PageContext) -> HttpResponse:
    found = _final(ctx)[0]
    return _on_invoice(
        ctx,
        found,
        WithReason(str(found.number), bound_data(ctx)),
        lambda data: do_claim_tax_relief(found, data["reason"]),
        title=_("Tax relief of %(number)s") % {"number": found.number},
        submit=_("Record claim"),
        effect=_(
            "Records that you claimed the relief. The tax of the written-off amount is no longer owed, unless it is "
            "paid later."
        ),
        message=lambda row: _("The claim for %(number)s was recorded.") % {"number": row.number},
    )


@operator_page(methods=FORM, step_up=True)
def credit(ctx: PageContext) -> HttpResponse:
    """Grant a credit to a tenant."""
    with ctx.scope():
        tenant = first_or_404(Tenant.objects.all_tenants().filter(slug=ctx.arguments["tenant"]))
        seen, currency = services.credits_of(tenant), currency_of(tenant.pk)
    form = GrantCredit(currency, bound_data(ctx))
    form.initial = {"seen": seen, "currency": currency}
    return _confirm(
        ctx,
        form,
        lambda data: services.grant(tenant, data),
        title=_("Add credit for %(name)s") % {"name": tenant.name},
        submit=_("Add credit"),
        effect=_("Reduces future invoices of %(name)s, before tax, until the credit is used up or expires.")
        % {"name": tenant.name},
        back=ctx.url("operator-tenants-detail", tenant.pk),
        message=lambda grant: (
            _("%(dollars)s credit added for %(name)s.")
            % {"dollars": dollars(grant.nano // nano_a_cent(currency), currency), "name": tenant.name}
        ),
        danger=False,
    )


@operator_page(methods=FORM, step_up=True)
def tenant_payment(ctx: PageContext) -> HttpResponse:
    """Record a payment of a tenant, for its open invoices or for prepaid credit."""
    with ctx.scope():
        tenant = first_or_404(Tenant.objects.all_tenants().filter(slug=ctx.arguments["tenant"]))
        currency = currency_of(tenant.pk)
    form = RecordTenantPayment(tenant.slug, currency, bound_data(ctx))
    form.initial = {"received_on": ctx.now.date(), "currency": currency}
    return _confirm(
        ctx,
        form,
        lambda data: services.pay_tenant(tenant, data),
        title=_("Record payment of %(name)s") % {"name": tenant.name},
        submit=_("Record payment"),
        effect=_("Books the amount as received from %(name)s.") % {"name": tenant.name},
        back=ctx.url("operator-tenants-detail", tenant.pk),
        message=_payment_message,
        danger=False,
    )


# Statements and receipts.


@operator_page(cost=PAGE_COST)
def statement(ctx: PageContext) -> HttpResponse:
    """Show a tenant's statement of account."""
    tenant = _tenant(ctx)
    described = describe(
        read_shown(ctx, tenant),
        invoice_url=lambda pk: ctx.url("operator-billing-detail", pk),
        receipt_url=lambda pk: ctx.url("operator-billing-receipt", pk),
        file_url=lambda form: ctx.url(f"operator-billing-statement-{form}", tenant.slug),
    )
    tenants = Breadcrumb(_("Tenants"), ctx.url("operator-tenants"))
    return render_page(
        ctx,
        "invoices/statement_page.html",
        _("Statement of account of %(name)s") % {"name": tenant.name},
        breadcrumbs=(tenants, Breadcrumb(tenant.name, ctx.url("operator-tenants-detail", tenant.pk))),
        statement=described,
    )


@operator_page(cost=REPORT_COST)
def statement_as_file(ctx: PageContext) -> HttpResponse:
    tenant = _tenant(ctx)
    return statement_file(ctx, tenant, ctx.arguments["form"], ctx.url("operator-billing-statement", tenant.slug))


@operator_page(cost=REPORT_COST)
def receipt(ctx: PageContext) -> HttpResponse:
    """Return the receipt of a payment or refund as PDF."""
    key = ctx.arguments["payment"]
    payment = ctx.get(lambda: Payment.objects.all_tenants().select_related("tenant").filter(pk=key))
    return receipt_file(ctx, payment, payment.tenant)


def _tenant(ctx: PageContext) -> Tenant:
    return ctx.get(lambda: Tenant.objects.all_tenants().filter(slug=ctx.arguments["tenant"]))


def _payment_message(paid: tuple[Payment, bool]) -> str:
    return _("The payment was recorded.") if paid[1] else _("This payment was already recorded. Nothing changed.")


def _on_invoice(
    ctx: PageContext, found: Invoice, form: Any, action: Callable[[dict[str, Any]], Any], **context: Any
) -> HttpResponse:
    return _confirm(ctx, form, action, back=ctx.url("operator-billing-detail", found.pk), **context)


def _confirm(
    ctx: PageContext,
    form: Any,
    action: Callable[[dict[str, Any]], Any],
    *,
    title: str,
    danger: bool = True,
    **context: Any,
) -> HttpResponse:
    """Return the form of one action. Its message is shown at `back`."""
    return form_view(ctx, title, form, action, breadcrumbs=_crumbs(ctx), danger=danger, **context)


def _period(ctx: PageContext) -> Period:
    return ctx.get(lambda: Period.objects.select_related("entity").filter(pk=ctx.arguments["period"]))


def _invoice(ctx: PageContext) -> Invoice:
    related = ("entity", "period", "refers_to", "tenant")
    return ctx.get(lambda: Invoice.objects.all_tenants().select_related(*related).filter(pk=ctx.arguments["invoice"]))


def _final(ctx: PageContext) -> tuple[Invoice, int]:
    """Return a final invoice and its balance due in cents."""
    found = _invoice(ctx)
    if found.state == Invoice.State.DRAFT or found.is_credit_note:
        raise Http404
    with ctx.scope():
        return found, sum_outstanding(found)


def _month_url(ctx: PageContext, period: Period) -> str:
    return f"{ctx.url('operator-billing')}?month={period.label}"


def _crumbs(ctx: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb(TITLE, ctx.url("operator-billing")),)


SCREEN = ConsoleScreen(
    "operator-billing",
    _lazy("Billing runs"),
    icon="runs",
    letter="b",
    group="billing",
    order=10,
    finders={_lazy("Invoices"): listing.find_invoices},
)
urlpatterns = [
    path("operator/billing/", billing, name="operator-billing"),
    *page.TOOLS.operator_urls("operator/billing/"),
    PANELS.operator_url("operator/billing/"),
    path("operator/billing/months/<int:period>/draft", draft, name="operator-billing-draft"),
    path("operator/billing/months/<int:period>/finalize", finalize_all, name="operator-billing-finalize-all"),
    path(
        "operator/billing/entities/<slug:billing_entity>/<slug:report_name>/<slug:report_period>",
        report,
        name="operator-billing-report",
    ),
    path("operator/billing/tenants/<slug:tenant>/credit", credit, name="operator-billing-credit"),
    path("operator/billing/tenants/<slug:tenant>/payment", tenant_payment, name="operator-billing-tenant-payment"),
    path("operator/billing/tenants/<slug:tenant>/statement", statement, name="operator-billing-statement"),
    *(
        path(
            f"operator/billing/tenants/<slug:tenant>/statement/{form}",
            statement_as_file,
            {"form": form},
            name=f"operator-billing-statement-{form}",
        )
        for form in STATEMENT_FILES
    ),
    path("operator/billing/payments/<int:payment>/receipt", receipt, name="operator-billing-receipt"),
    path("operator/billing/<int:invoice>", invoice, name="operator-billing-detail"),
    CHECKS.operator_url("operator/billing/<int:invoice>/"),
    path("operator/billing/<int:invoice>/lines/<int:line>", line, name="operator-billing-line"),
    path("operator/billing/<int:invoice>/files/<slug:form>", file, name="operator-billing-file"),
    path("operator/billing/<int:invoice>/finalize", finalize, name="operator-billing-finalize"),
    path("operator/billing/<int:invoice>/payment", payment, name="operator-billing-payment"),
    path("operator/billing/<int:invoice>/credit-note", credit_note, name="operator-billing-credit-note"),
    path("operator/billing/<int:invoice>/debit-note", debit_note, name="operator-billing-debit-note"),
    path("operator/billing/<int:invoice>/void", void, name="operator-billing-void"),
    path("operator/billing/<int:invoice>/write-off", write_off, name="operator-billing-write-off"),
    path("operator/billing/<int:invoice>/claim-tax-relief", claim_tax_relief, name="operator-billing-claim-tax-relief"),
]
