"""Budgets and quotas: the page, one budget, and the actions on it. Rate limits are in `limits`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms as django_forms
from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.urls import path
from django.utils.translation import gettext as _

from billing.budgets.budgets import do_change_budget, do_make_budget, do_remove_budget
from billing.models import Budget
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import in_sentence
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.lists import number_param
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen, PaletteAction
from frontend.tenant.budgets import alerts, detail, dry_runs, limits, page, replay, sets
from frontend.tenant.budgets.amounts import BudgetAmount, input_text, parse
from frontend.tenant.budgets.effect import effect_of
from frontend.tenant.budgets.forms import PERIODS, UNITS, BudgetForm, NewBudget, RaiseForm, percentages
from frontend.tenant.budgets.scopes import choices, owner_of
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST

READS, WRITES = Permission.LIMITS_READ, Permission.LIMITS_WRITE
PANELS = Panels(
    "budgets-panel",
    (
        Panel("notices", _lazy("Notices"), "budgets/page.html#notices", page.notices, every=10),
        Panel("tree", _lazy("Budgets and quotas"), "budgets/page.html#tree", page.tree, every=10),
        Panel("limits", _lazy("Rate limits"), "budgets/page.html#limits", sets.limits),
        Panel("alerts", _lazy("Alert history"), "budgets/page.html#alerts", alerts.alerts),
    ),
)
DETAIL_PANELS = Panels(
    "budgets-detail-panel",
    (
        Panel("current", _lazy("Current period"), "budgets/detail.html#current", detail.describe_period, every=10),
        Panel("history", _lazy("Periods"), "budgets/detail.html#history", detail.history, every=60),
        Panel("alerts", _lazy("Alert history"), "budgets/page.html#alerts", detail.budget_alerts, every=60),
        Panel(
            "simulation", _lazy("Last week"), "budgets/detail.html#simulation", detail.simulation, every=0, lazy=True
        ),
    ),
)


@tenant_page(READS)
def budgets(ctx: PageContext) -> HttpResponse:
    return render_page(ctx, "budgets/page.html", _("Budgets and quotas"), panels=PANELS, metering=metering(ctx.now))


@tenant_page(READS)
def budget(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        standing = detail.status_of(ctx)
    row = standing.budget
    context: dict[str, Any] = {
        "breadcrumbs": breadcrumbs(ctx),
        "standing": standing,
        "owner": owner_of(row).label,
        "writes": ctx.may(WRITES) and row.active,
        "is_muted": row.alerts_muted_until is not None and row.alerts_muted_until > ctx.now,
        "metering": metering(ctx.now),
    }
    return render_page(ctx, "budgets/detail.html", row.name, panels=DETAIL_PANELS, **context)


@tenant_page(WRITES, methods=FORM, cost=PAGE_COST)
def new_budget(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        owners = choices(ctx, members=True)
    form = NewBudget(owners, bound_data(ctx), _read_initial(ctx, {"counts": "money", "period": "month"}))
    return form_view(
        ctx,
        _("New budget"),
        form,
        lambda data: do_make_budget(ctx.tenant, **owners[data["owner"]].named, **form.chosen()),
        message=lambda made: (
            _("%(name)s was created. %(effect_of)s") % {"name": made.name, "effect_of": effect_of(made)}
        ),
        template="budgets/page.html#form",
        try_url=ctx.url("budgets-try"),
        **_sheet(ctx, _("Create budget")),
    )


@tenant_page(WRITES, methods=FORM)
def edit_budget(ctx: PageContext) -> HttpResponse:
    row = _active_budget(ctx)
    form = BudgetForm(bound_data(ctx), row, _read_initial(ctx, {}))
    return form_view(
        ctx,
        _("Edit %(name)s") % {"name": row.name},
        form,
        lambda _: do_change_budget(row, **form.chosen()),
        message=lambda changed: (
            _("%(name)s was updated. %(effect_of)s") % {"name": changed.name, "effect_of": effect_of(changed)}
        ),
        template="budgets/page.html#form",
        try_url=f"{ctx.url('budgets-try')}?budget={row.pk}",
        fixed={"unit": dict(UNITS)[row.unit], "owner": owner_of(row).label, "period": dict(PERIODS)[row.period]},
        **_sheet(ctx, _("Save"), row),
    )


@tenant_page(WRITES, methods=FORM)
def raise_budget(ctx: PageContext) -> HttpResponse:
    row = _active_budget(ctx)
    with ctx.scope():
        standing = page.statuses_of(ctx, [row])[0]
    ends = standing.ends or ctx.now + timedelta(days=7)
    initial = {
        "more": input_text(row.temporary_increase, row.unit) if standing.raised else "",
        "until": (ends - timedelta(seconds=1)).astimezone(ctx.zone).date(),
    }

    def message(changed: Budget) -> str:
        more = BudgetAmount.from_units(row.unit, changed.temporary_increase).text
        return _("%(name)s raised by %(more)s. %(effect_of)s") % {
            "name": row.name,
            "more": more,
            "effect_of": effect_of(changed),
        }

    return form_view(
        ctx,
        _("Temporarily raise %(name)s") % {"name": row.name},
        RaiseForm(row.unit, ctx.zone, bound_data(ctx), initial),
        lambda data: do_change_budget(row, temporary_increase=data["more"], increase_expires_at=data["until"]),
        message=message,
        then=ctx.url("budgets"),
        template="budgets/raise.html",
        standing=standing,
        **_sheet(ctx, _("Raise limit"), row),
    )


@tenant_page(WRITES, methods=FORM)
def lower_budget(ctx: PageContext) -> HttpResponse:
    """End a temporary raise early."""
    row = _active_budget(ctx)
    return form_view(
        ctx,
        _("End temporary raise"),
        django_forms.Form(bound_data(ctx)),
        lambda _: do_change_budget(row, temporary_increase=0, increase_expires_at=None),
        message=lambda changed: (
            _("Temporary raise of %(name)s ended. %(effect_of)s") % {"name": row.name, "effect_of": effect_of(changed)}
        ),
        effect=_("The limit of %(name)s returns to %(whole)s within a second.")
        % {"name": row.name, "whole": BudgetAmount.from_units(row.unit, row.amount).text},
        **_sheet(ctx, _("End temporary raise"), row),
    )


@tenant_page(WRITES, methods=FORM)
def remove_budget(ctx: PageContext) -> HttpResponse:
    row = _active_budget(ctx)
    hard = _(" Rejected requests pass within a second.") if row.mode == Budget.Mode.HARD else ""
    effect = _("%(name)s no longer limits %(owner)s and sends no more alerts.%(hard)s") % {
        "name": row.name,
        "owner": in_sentence(owner_of(row).label),
        "hard": hard,
    }
    return form_view(
        ctx,
        _("Remove %(name)s") % {"name": row.name},
        django_forms.Form(bound_data(ctx)),
        lambda _: do_remove_budget(row),
        message=lambda _done: _("%(name)s was removed.") % {"name": row.name},
        then=ctx.url("budgets"),
        effect=_("%(effect)s Its history is kept.") % {"effect": effect},
        danger=True,
        **_sheet(ctx, _("Remove budget"), row),
    )


@tenant_page(READS, cost=PAGE_COST)
def simulate_budget(ctx: PageContext) -> HttpResponse:
    """Return the effect of the budget as typed so far, and the previous month replayed against it."""
    query = ctx.query
    with ctx.scope():
        owners = choices(ctx, members=True)
        owner, unit, period = owners.get(query.get("owner", "")), query.get("counts", ""), query.get("period", "")
        url = ctx.url("budgets-new")
        if (pk := number_param(ctx, "budget")) is not None:
            rows = Budget.objects.for_tenant(ctx.tenant).select_related("project", "key", "member")
            if (row := rows.filter(pk=pk).first()) is not None:
                owner, unit, period, url = owner_of(row), row.unit, row.period, ctx.url("budgets-edit", row.pk)
        unit = unit if unit in ("money", "tokens", "requests") else "money"
        mode, amount = query.get("mode", ""), query.get("amount", "")[:40]
        simulation = dry_runs.simulate_budget(ctx.tenant.pk, owner, mode, unit, period, amount)
        found = None
        if owner is not None and period in dict(PERIODS):
            found = replay.month_replay(
                *(ctx.tenant.pk, owner, unit, period, mode, limit_of(amount, unit)),
                percentages(query.get("thresholds", "")),
                url,
                _read_initial(ctx, {}),
            )
    return render(ctx.request, "budgets/page.html#replay", {"simulation": simulation, "replay": found, "ctx": ctx})


def limit_of(amount: str, unit: str) -> int | None:
    """Return a typed amount in whole units; None if it is not an amount above zero."""
    try:
        return parse(amount, unit) or None
    except ValueError:
        return None


def _read_initial(ctx: PageContext, initial: dict[str, str]) -> dict[str, Any]:
    """Return the values of a budget form in the query string, over the initial ones."""
    names = ("name", "owner", "counts", "period", "amount", "mode", "thresholds", "rollover_limit")
    return initial | {name: ctx.query[name][:100] for name in names if name in ctx.query}


def _active_budget(ctx: PageContext) -> Budget:
    """Return the budget in the URL; 404 if it was removed."""
    with ctx.scope():
        row = detail.budget_of(ctx)
    if not row.active:
        raise Http404
    return row


def breadcrumbs(ctx: PageContext, row: Budget | None = None) -> tuple[Breadcrumb, ...]:
    found = (Breadcrumb(_("Budgets and quotas"), ctx.url("budgets")),)
    return (*found, Breadcrumb(row.name, ctx.url("budgets-detail", row.pk))) if row else found


def _sheet(ctx: PageContext, submit: str, row: Budget | None = None) -> dict[str, Any]:
    """Return the context of a form that leads back to the budget, or to the list."""
    return {
        "submit": submit,
        "back": ctx.url("budgets-detail", row.pk) if row else ctx.url("budgets"),
        "breadcrumbs": breadcrumbs(ctx, row),
        "action_url": ctx.request.get_full_path(),
        "budget": row,
    }


SCREEN = ConsoleScreen(
    "budgets",
    _lazy("Budgets and quotas"),
    icon="budgets",
    letter="b",
    group="billing",
    order=10,
    needs=Permission.LIMITS_READ,
    actions=(
        PaletteAction(_lazy("Create budget"), "budgets-new", "plus", Permission.LIMITS_WRITE),
        PaletteAction(_lazy("Set rate limits"), "budgets-limits-new", "gauge", Permission.LIMITS_WRITE),
    ),
    finders={_lazy("Actions"): page.find_raises},
)
urlpatterns = [
    path("t/<slug:slug>/budgets/", budgets, name="budgets"),
    path("t/<slug:slug>/budgets/new", new_budget, name="budgets-new"),
    path("t/<slug:slug>/budgets/try", simulate_budget, name="budgets-try"),
    PANELS.tenant_url("t/<slug:slug>/budgets/", READS),
    path("t/<slug:slug>/budgets/<int:budget>/", budget, name="budgets-detail"),
    path("t/<slug:slug>/budgets/<int:budget>/edit", edit_budget, name="budgets-edit"),
    path("t/<slug:slug>/budgets/<int:budget>/raise", raise_budget, name="budgets-raise"),
    path("t/<slug:slug>/budgets/<int:budget>/lower", lower_budget, name="budgets-lower"),
    path("t/<slug:slug>/budgets/<int:budget>/remove", remove_budget, name="budgets-remove"),
    DETAIL_PANELS.tenant_url("t/<slug:slug>/budgets/<int:budget>/", READS),
    *limits.urlpatterns,
]
