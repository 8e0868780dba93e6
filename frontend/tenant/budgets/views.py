"""Budgets and quotas: the tree, one budget, and what is done to them; sets of limits are in `limits`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms as django_forms
from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.urls import path

from billing.actions.budgets import do_change_budget, do_make_budget, do_remove_budget
from billing.models import Budget
from frontend.core.confirmation import Confirm
from frontend.core.form_view import posted
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import carry_out, done, refused, show
from frontend.tenant.budgets import alerts, detail, dry_runs, limits, page, sets
from frontend.tenant.budgets.amounts import BudgetAmount, typed
from frontend.tenant.budgets.effect import effect_of
from frontend.tenant.budgets.forms import BudgetForm, NewBudget, RaiseForm
from frontend.tenant.budgets.scopes import choices, whose
from tenants.permissions import Permission

READS, WRITES = Permission.LIMITS_READ, Permission.LIMITS_WRITE
PANELS = Panels(
    "budgets-panel",
    (
        Panel("notices", "Notices", "budgets/notices.html", page.notices, every=10),
        Panel("tree", "Budgets and quotas", "budgets/tree.html", page.tree, every=10),
        Panel("limits", "Rate limits", "budgets/limits.html", sets.limits),
        Panel("alerts", "Alert history", "budgets/alerts.html", alerts.alerts),
    ),
)
ONE = Panels(
    "budgets-detail-panel",
    (
        Panel("current", "Current period", "budgets/current.html", detail.now, every=10),
        Panel("history", "Periods", "budgets/history.html", detail.past, every=60),
        Panel("alerts", "Alert history", "budgets/alerts.html", detail.told, every=60),
        Panel("simulation", "Last week", "budgets/simulation.html", detail.trial, every=0, lazy=True),
    ),
)


@tenant_page(READS)
def budgets(visit: PageContext) -> HttpResponse:
    writes = visit.may(WRITES)
    given: dict[str, Any] = {
        "new_url": visit.url("budgets-new") if writes else "",
        "limits_url": visit.url("budgets-limits-new") if writes else "",
        "metering": metering(visit.now),
    }
    return show(visit, "budgets/page.html", "Budgets and quotas", panels=PANELS, **given)


@tenant_page(READS)
def budget(visit: PageContext) -> HttpResponse:
    with visit.scope():
        head = detail.head(visit)
    given: dict[str, Any] = {"breadcrumbs": breadcrumbs(visit), "head": head, "metering": metering(visit.now)}
    return show(visit, "budgets/detail.html", head.name, panels=ONE, **given)


@tenant_page(WRITES, methods=FORM)
def new_budget(visit: PageContext) -> HttpResponse:
    with visit.scope():
        owners = choices(visit, members=True)
    initial = {"whose": visit.query.get("whose", ""), "counts": "money", "period": "month"}
    form = NewBudget(owners, posted(visit), initial)
    given = _given(visit, "Create budget", visit.url("budgets")) | {"try_url": visit.url("budgets-try")}

    def make(data: dict[str, Any]) -> Budget:
        return do_make_budget(visit.tenant, **owners[data["whose"]].named, **form.chosen())

    if visit.request.method == "POST":
        if carried := carry_out(form, make):
            return done(visit, visit.url("budgets"), f"{carried.value.name} was created. {effect_of(carried.value)}")
        return refused(visit, "budgets/form.html", "New budget", form, **given)
    return show(visit, "budgets/form.html", "New budget", form=form, **given)


@tenant_page(WRITES, methods=FORM)
def edit_budget(visit: PageContext) -> HttpResponse:
    row = _active(visit)
    form = BudgetForm(posted(visit), row)
    back = visit.url("budgets-detail", row.pk)
    given = _given(visit, "Save", back, row) | {"try_url": f"{visit.url('budgets-try')}?budget={row.pk}"}
    if visit.request.method == "POST":
        if carried := carry_out(form, lambda data: do_change_budget(row, **form.chosen())):
            return done(visit, back, f"{carried.value.name} was updated. {effect_of(carried.value)}")
        return refused(visit, "budgets/form.html", f"Edit {row.name}", form, **given)
    return show(visit, "budgets/form.html", f"Edit {row.name}", form=form, **given)


@tenant_page(WRITES, methods=FORM)
def raise_budget(visit: PageContext) -> HttpResponse:
    row = _active(visit)
    with visit.scope():
        standing = page.stand(visit, [row])[0]
    ends = standing.ends or visit.now + timedelta(days=7)
    initial = {
        "more": typed(row.raise_amount, row.unit) if standing.raised else "",
        "until": (ends - timedelta(seconds=1)).astimezone(visit.zone).date(),
    }
    form = RaiseForm(row.unit, visit.zone, posted(visit), initial)
    back = visit.url("budgets-detail", row.pk)
    given = _given(visit, "Raise limit", back, row) | {"standing": standing}

    def raise_it(data: dict[str, Any]) -> Budget:
        return do_change_budget(row, raise_amount=data["more"], raise_until=data["until"])

    if visit.request.method == "POST":
        if carried := carry_out(form, raise_it):
            more = BudgetAmount.whole(row.unit, carried.value.raise_amount).text
            said = f"{row.name} raised by {more}. {effect_of(carried.value)}"
            return done(visit, visit.url("budgets"), said)
        return refused(visit, "budgets/raise.html", f"Temporarily raise {row.name}", form, **given)
    return show(visit, "budgets/raise.html", f"Temporarily raise {row.name}", form=form, **given)


@tenant_page(WRITES, methods=FORM)
def lower_budget(visit: PageContext) -> HttpResponse:
    """End a raise before its time."""
    row = _active(visit)
    back = visit.url("budgets-detail", row.pk)
    form = django_forms.Form(posted(visit))
    effect = f"The limit of {row.name} returns to {BudgetAmount.whole(row.unit, row.amount).text} within a second."
    given = _given(visit, "End temporary raise", back, row) | {"effect": effect}
    if visit.request.method == "POST":
        if carried := carry_out(form, lambda data: do_change_budget(row, raise_amount=0, raise_until=None)):
            return done(visit, back, f"Temporary raise of {row.name} ended. {effect_of(carried.value)}")
        return refused(visit, "frontend/form.html", "End temporary raise", form, **given)
    return show(visit, "frontend/form.html", "End temporary raise", form=form, **given)


@tenant_page(WRITES, methods=FORM)
def remove_budget(visit: PageContext) -> HttpResponse:
    row = _active(visit)
    form = Confirm(row.name, posted(visit))
    hard = " Rejected requests pass within a second." if row.mode == Budget.Mode.HARD else ""
    owner = whose(row).label
    effect = f"{row.name} no longer limits {owner[0].lower()}{owner[1:]} and sends no more alerts.{hard}"
    given = _given(visit, "Remove budget", visit.url("budgets-detail", row.pk), row)
    given |= {"effect": f"{effect} Its history is kept.", "danger": True}
    if visit.request.method == "POST":
        if carry_out(form, lambda data: do_remove_budget(row)):
            return done(visit, visit.url("budgets"), f"{row.name} was removed.")
        return refused(visit, "frontend/form.html", f"Remove {row.name}", form, **given)
    return show(visit, "frontend/form.html", f"Remove {row.name}", form=form, **given)


@tenant_page(READS)
def try_budget(visit: PageContext) -> HttpResponse:
    """Return the effect of the budget as typed so far, for the form."""
    query = visit.query
    with visit.scope():
        owners = choices(visit, members=True)
        owner, unit, period = owners.get(query.get("whose", "")), query.get("counts", ""), query.get("period", "")
        if (text := query.get("budget", "")).isdigit() and len(text) < 19:
            rows = Budget.objects.for_tenant(visit.tenant).select_related("project", "key", "member")
            if (row := rows.filter(pk=int(text)).first()) is not None:
                owner, unit, period = whose(row), row.unit, row.period
        unit = unit if unit in ("money", "tokens", "requests") else "money"
        mode, amount = query.get("mode", ""), query.get("amount", "")[:40]
        said = dry_runs.of_budget(visit.tenant.pk, owner, mode, unit, period, amount)
    return render(visit.request, "budgets/simulation_result.html", {"said": said})


def _active(visit: PageContext) -> Budget:
    """Return the budget of the address, unless it was removed."""
    with visit.scope():
        row = detail.budget_of(visit)
    if not row.active:
        raise Http404
    return row


def breadcrumbs(visit: PageContext, row: Budget | None = None) -> tuple[Breadcrumb, ...]:
    found = (Breadcrumb("Budgets and quotas", visit.url("budgets")),)
    return (*found, Breadcrumb(row.name, visit.url("budgets-detail", row.pk))) if row else found


def _given(visit: PageContext, submit: str, back: str, row: Budget | None = None) -> dict[str, Any]:
    """Return what the forms' templates want."""
    given = {
        "action": visit.request.get_full_path(),
        "submit": submit,
        "back": back,
        "breadcrumbs": breadcrumbs(visit, row),
    }
    return given | {"effect": "", "danger": False, "budget": row}


urlpatterns = [
    path("t/<slug:slug>/budgets/", budgets, name="budgets"),
    path("t/<slug:slug>/budgets/new", new_budget, name="budgets-new"),
    path("t/<slug:slug>/budgets/try", try_budget, name="budgets-try"),
    PANELS.tenant_url("t/<slug:slug>/budgets/", READS),
    path("t/<slug:slug>/budgets/<int:budget>/", budget, name="budgets-detail"),
    path("t/<slug:slug>/budgets/<int:budget>/edit", edit_budget, name="budgets-edit"),
    path("t/<slug:slug>/budgets/<int:budget>/raise", raise_budget, name="budgets-raise"),
    path("t/<slug:slug>/budgets/<int:budget>/lower", lower_budget, name="budgets-lower"),
    path("t/<slug:slug>/budgets/<int:budget>/remove", remove_budget, name="budgets-remove"),
    ONE.tenant_url("t/<slug:slug>/budgets/<int:budget>/", READS),
    *limits.urlpatterns,
]
