"""Billing entities: the list, one entity, the forms of entities, tax rules and accounts, and the journal's files."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import path
from django.utils.translation import gettext as _

from billing.accounting.charts import do_set_chart, render_chart
from billing.accounting.exports import FILE_FORMATS, export_journal
from billing.invoicing.setup import do_add_entity, do_add_tax_rule, do_change_entity
from billing.models import BillingEntity
from frontend.core.backend_messages import translate_message
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.entities import forms, page
from tenants.actions import Conflict
from tenants.file_responses import file_response
from tenants.request_costs import REPORT_COST

CHART_FILE = "accounts.csv"
TITLE = _lazy("Billing entities")
LIST_PANELS = Panels(
    "operator-entities-panel",
    (Panel("list", TITLE, "operator/entities/page.html#list", page.entities, every=0),),
)
DETAIL_PANELS = Panels(
    "operator-entities-detail-panel",
    (
        Panel("rules", _lazy("Tax rules"), "operator/entities/detail.html#rules", page.tax_rules, every=0),
        Panel("journal", _lazy("Journal"), "operator/entities/detail.html#journal", page.journal, every=0, lazy=True),
    ),
)


@operator_page()
def entities(ctx: PageContext) -> HttpResponse:
    return render_page(ctx, "operator/entities/page.html", str(TITLE), panels=LIST_PANELS)


@operator_page()
def entity(ctx: PageContext) -> HttpResponse:
    found = _entity(ctx)
    return render_page(
        ctx,
        "operator/entities/detail.html",
        found.name,
        panels=DETAIL_PANELS,
        breadcrumbs=(_breadcrumb(ctx),),
        entity=found,
        email_texts=[text for text in _email_texts(found) if text[1]],
    )


def _email_texts(found: BillingEntity) -> list[tuple[str, str]]:
    return [
        (_("Text in emails with invoices and notes"), found.issued_email_text),
        (_("Text in reminders"), found.reminder_email_text),
        (_("Text in emails about suspensions"), found.suspension_email_text),
    ]


@operator_page(methods=FORM, step_up=True)
def new_entity(ctx: PageContext) -> HttpResponse:
    return form_view(
        ctx,
        _("New billing entity"),
        forms.EntityForm(bound_data(ctx)),
        lambda data: do_add_entity(**data),
        submit=_("Create"),
        back=ctx.url("operator-entities"),
        then=lambda made: ctx.url("operator-entities-detail", made.pk),
        message=lambda made: _("%(name)s was created.") % {"name": made.name},
        breadcrumbs=(_breadcrumb(ctx),),
    )


@operator_page(methods=FORM, step_up=True)
def edit_entity(ctx: PageContext) -> HttpResponse:
    found = _entity(ctx)
    return form_view(
        ctx,
        _("Edit %(name)s") % {"name": found.name},
        forms.EntityForm(bound_data(ctx), found),
        lambda data: do_change_entity(found, **data),
        message=lambda made: _("%(name)s was saved. The changes apply to the next invoices.") % {"name": made.name},
        **_form(ctx, found, _("Save")),
    )


@operator_page(methods=FORM, step_up=True)
def new_tax_rule(ctx: PageContext) -> HttpResponse:
    found, form = _entity(ctx), forms.TaxRuleForm(bound_data(ctx))
    return form_view(
        ctx,
        _("New tax rule of %(name)s") % {"name": found.name},
        form,
        lambda _data: do_add_tax_rule(entity=found, **form.values()),
        message=lambda _made: _("The tax rule was added."),
        effect=_("Applies to invoices of months that end on the first day or later. The most specific rule is used."),
        **_form(ctx, found, _("Add tax rule")),
    )


@operator_page(methods=FORM, step_up=True)
def chart(ctx: PageContext) -> HttpResponse:
    found = _entity(ctx)
    with ctx.scope():
        row = page.chart_of(ctx)
    form = forms.ChartForm(bound_data(ctx), initial=forms.chart_initial(row, render_chart(row)))
    return form_view(
        ctx,
        _("Accounts of %(name)s") % {"name": found.name},
        form,
        lambda data: do_set_chart(found, file_name=CHART_FILE, **data),
        message=lambda made: _("%(number)s account numbers were stored.") % {"number": len(made.lines)},
        **_form(ctx, found, _("Save")),
    )


@operator_page(cost=REPORT_COST)
def journal_file(ctx: PageContext) -> HttpResponseBase:
    """Return the journal of a month as a file. If an account or a rate is missing, the entity's page shows it."""
    found, file_format = _entity(ctx), ctx.arguments["file_format"]
    if file_format not in FILE_FORMATS:
        raise Http404
    with ctx.scope():
        month = page.month_of(ctx)
        try:
            file = export_journal(found, month, file_format)
        except Conflict as exc:
            back = f"{ctx.url('operator-entities-detail', found.pk)}?month={month}"
            return redirect_with_message(ctx, back, translate_message(exc), failed=True)
    return file_response(*file, "application/octet-stream")


def _entity(ctx: PageContext) -> BillingEntity:
    with ctx.scope():
        return page.entity_of(ctx)


def _form(ctx: PageContext, found: BillingEntity, submit: str) -> dict[str, Any]:
    back = ctx.url("operator-entities-detail", found.pk)
    return {"submit": submit, "back": back, "breadcrumbs": (_breadcrumb(ctx), Breadcrumb(found.name, back))}


def _breadcrumb(ctx: PageContext) -> Breadcrumb:
    return Breadcrumb(str(TITLE), ctx.url("operator-entities"))


SCREEN = ConsoleScreen("operator-entities", TITLE, icon="invoices", letter="s", group="billing", order=15)
urlpatterns = [
    path("operator/entities/", entities, name="operator-entities"),
    LIST_PANELS.operator_url("operator/entities/"),
    path("operator/entities/new", new_entity, name="operator-entities-new"),
    path("operator/entities/<int:entity>/", entity, name="operator-entities-detail"),
    DETAIL_PANELS.operator_url("operator/entities/<int:entity>/"),
    path("operator/entities/<int:entity>/edit", edit_entity, name="operator-entities-edit"),
    path("operator/entities/<int:entity>/tax-rules/new", new_tax_rule, name="operator-entities-tax-rule"),
    path("operator/entities/<int:entity>/accounts", chart, name="operator-entities-accounts"),
    path("operator/entities/<int:entity>/journal/<slug:file_format>", journal_file, name="operator-entities-journal"),
]
