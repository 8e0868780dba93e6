"""Sets of rate limits: setting, changing, trying and lifting them."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.urls import path

from frontend.core.confirmation import Confirm
from frontend.core.form_view import posted
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.rendering import carry_out, done, refused, show
from frontend.tenant.budgets import dry_runs
from frontend.tenant.budgets.forms import LimitsForm, NewLimits
from frontend.tenant.budgets.scopes import BudgetOwnerScope, choices, whose
from tenants.actions import Conflict, do_remove_limits, do_set_limits
from tenants.models import LimitSet
from tenants.permissions import Permission

READS, WRITES = Permission.LIMITS_READ, Permission.LIMITS_WRITE


@tenant_page(WRITES, methods=FORM)
def new_limits(visit: PageContext) -> HttpResponse:
    with visit.scope():
        owners = choices(visit, members=False)
    form = NewLimits(owners, posted(visit), {"whose": visit.query.get("whose", "")})
    given = _given(visit, "Set limits") | {"try_url": visit.url("budgets-limits-try"), "owner": None}

    def make(data: dict[str, Any]) -> BudgetOwnerScope:
        owner, model = owners[data["whose"]], data["model"]
        _no_other(visit, owner, model, dry_run=form.is_dry_run())
        do_set_limits(visit.tenant, form.limits(), **owner.named, model=model, dry_run=form.is_dry_run())
        return owner

    if visit.request.method == "POST":
        if carried := carry_out(form, make):
            return done(visit, visit.url("budgets"), f"{carried.value.label}: rate limits set.")
        return refused(visit, "budgets/limits_form.html", "Set rate limits", form, **given)
    return show(visit, "budgets/limits_form.html", "Set rate limits", form=form, **given)


def _no_other(visit: PageContext, owner: BudgetOwnerScope, model: str, *, dry_run: bool) -> None:
    """Reject limits where some exist, since they would be replaced unseen."""
    ids = {"project": None, "key": None} | owner.named
    with visit.scope():
        rows = LimitSet.objects.for_tenant(visit.tenant).filter(**ids, model=model, by_operator=False, dry_run=dry_run)
        if rows.exists():
            raise Conflict(f"{owner.label} already has limits. Edit those limits instead.")


@tenant_page(WRITES, methods=FORM)
def edit_limits(visit: PageContext) -> HttpResponse:
    row = _own(visit)
    owner = whose(row)
    form = LimitsForm(posted(visit), row)
    given = _given(visit, "Save") | {
        "try_url": f"{visit.url('budgets-limits-try')}?set={row.pk}",
        "owner": owner.label + (f", {row.model} only" if row.model else ""),
    }

    def change(data: dict[str, Any]) -> None:
        if form.is_dry_run() != row.dry_run:
            _no_other(visit, owner, row.model, dry_run=form.is_dry_run())
        do_set_limits(visit.tenant, form.limits(), **owner.named, model=row.model, dry_run=form.is_dry_run())
        if form.is_dry_run() != row.dry_run:
            do_remove_limits(row)  # killed before this, both stand: nothing passes that should not

    title = f"Limits of {owner.label[0].lower()}{owner.label[1:]}"
    if visit.request.method == "POST":
        if carry_out(form, change):
            return done(visit, visit.url("budgets"), f"{owner.label}: rate limits set.")
        return refused(visit, "budgets/limits_form.html", title, form, **given)
    return show(visit, "budgets/limits_form.html", title, form=form, **given)


@tenant_page(WRITES, methods=FORM)
def remove_limits(visit: PageContext) -> HttpResponse:
    row = _own(visit)
    owner = whose(row)
    form = Confirm(owner.row.name if owner.row else visit.tenant.name, posted(visit))
    effect = f"{owner.label} loses these limits within a second. Other limits that apply to its requests stay active."
    given = _given(visit, "Remove limits") | {"effect": effect, "danger": True}
    if visit.request.method == "POST":
        if carry_out(form, lambda data: do_remove_limits(row)):
            return done(visit, visit.url("budgets"), f"{owner.label}: rate limits removed.")
        return refused(visit, "frontend/form.html", "Remove limits", form, **given)
    return show(visit, "frontend/form.html", "Remove limits", form=form, **given)


@tenant_page(READS)
def try_limits(visit: PageContext) -> HttpResponse:
    """Return the effect of each limit as typed so far, for the form."""
    query = visit.query
    with visit.scope():
        owner, model = choices(visit, members=False).get(query.get("whose", "")), query.get("model", "")[:64]
        if (text := query.get("set", "")).isdigit() and len(text) < 19:
            rows = LimitSet.objects.for_tenant(visit.tenant).select_related("project", "key")
            if (row := rows.filter(pk=int(text)).first()) is not None:
                owner, model = whose(row), row.model
        dry_run = query.get("mode") == "dry_run"
        model = model.replace("\0", "")
        said = tuple(dry_runs.of_limits(visit.tenant.pk, owner, model, query, dry_run=dry_run))
    return render(visit.request, "budgets/limits_simulation.html", {"said": said})


def _own(visit: PageContext) -> LimitSet:
    """Return the set of the address; what the operator imposes is not the tenant's to change."""
    with visit.scope():
        rows = LimitSet.objects.for_tenant(visit.tenant).select_related("project", "key")
        row = rows.filter(pk=visit.arguments["limits"], by_operator=False).first()
    if row is None:
        raise Http404
    return row


def _given(visit: PageContext, submit: str) -> dict[str, Any]:
    back = visit.url("budgets")
    breadcrumbs = (Breadcrumb("Budgets and quotas", back),)
    given = {"action": visit.request.get_full_path(), "submit": submit, "back": back, "breadcrumbs": breadcrumbs}
    return given | {"effect": "", "danger": False}


urlpatterns = [
    path("t/<slug:slug>/limits/new", new_limits, name="budgets-limits-new"),
    path("t/<slug:slug>/limits/try", try_limits, name="budgets-limits-try"),
    path("t/<slug:slug>/limits/<int:limits>/edit", edit_limits, name="budgets-limits-edit"),
    path("t/<slug:slug>/limits/<int:limits>/remove", remove_limits, name="budgets-limits-remove"),
]
