"""Views that set, change, simulate and remove rate limits."""

from __future__ import annotations

from typing import Any

from django.forms import Form
from django.http import HttpResponse
from django.shortcuts import render
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import in_sentence
from frontend.core.layout import Breadcrumb
from frontend.core.lists import number_param
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.tenant.budgets import dry_runs
from frontend.tenant.budgets.forms import LimitsForm, NewLimits
from frontend.tenant.budgets.scopes import BudgetOwnerScope, choices, owner_of
from tenants.actions import Conflict, do_remove_limits, do_set_limits
from tenants.models import LimitSet
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST

READS, WRITES = Permission.LIMITS_READ, Permission.LIMITS_WRITE


@tenant_page(WRITES, methods=FORM, cost=PAGE_COST)
def new_limits(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        owners = choices(ctx, members=False)
    form = NewLimits(owners, bound_data(ctx), {"owner": ctx.query.get("owner", "")})

    def make(data: dict[str, Any]) -> BudgetOwnerScope:
        owner, model = owners[data["owner"]], data["model"]
        _reject_duplicate(ctx, owner, model, dry_run=form.is_dry_run())
        do_set_limits(ctx.tenant, form.limits(), **owner.named, model=model, dry_run=form.is_dry_run())
        return owner

    return form_view(
        ctx,
        _("Set rate limits"),
        form,
        make,
        message=lambda owner: _("%(label)s: rate limits set.") % {"label": owner.label},
        template="budgets/page.html#limits_form",
        try_url=ctx.url("budgets-limits-try"),
        **_sheet(ctx, _("Set limits")),
    )


def _reject_duplicate(ctx: PageContext, owner: BudgetOwnerScope, model: str, *, dry_run: bool) -> None:
    """Reject new limits if the owner already has limits, because they would be replaced without notice."""
    ids = {"project": None, "key": None} | owner.named
    with ctx.scope():
        rows = LimitSet.objects.for_tenant(ctx.tenant).filter(
            **ids, model=model, set_by_operator=False, dry_run=dry_run
        )
        if rows.exists():
            raise Conflict(_("%(label)s already has limits. Edit those limits instead.") % {"label": owner.label})


@tenant_page(WRITES, methods=FORM)
def edit_limits(ctx: PageContext) -> HttpResponse:
    row = _editable_limits(ctx)
    owner = owner_of(row)
    form = LimitsForm(bound_data(ctx), row)

    def change(data: dict[str, Any]) -> None:
        if form.is_dry_run() != row.dry_run:
            _reject_duplicate(ctx, owner, row.model, dry_run=form.is_dry_run())
        do_set_limits(ctx.tenant, form.limits(), **owner.named, model=row.model, dry_run=form.is_dry_run())
        if form.is_dry_run() != row.dry_run:
            do_remove_limits(row)  # if the process is killed before this line, both sets apply

    title = _("Limits of %(owner)s") % {"owner": in_sentence(owner.label)}
    return form_view(
        ctx,
        title,
        form,
        change,
        message=lambda _done: _("%(label)s: rate limits set.") % {"label": owner.label},
        template="budgets/page.html#limits_form",
        try_url=f"{ctx.url('budgets-limits-try')}?set={row.pk}",
        owner=owner.label + (_(", %(model)s only") % {"model": row.model} if row.model else ""),
        **_sheet(ctx, _("Save")),
    )


@tenant_page(WRITES, methods=FORM)
def remove_limits(ctx: PageContext) -> HttpResponse:
    row = _editable_limits(ctx)
    owner = owner_of(row)
    return form_view(
        ctx,
        _("Remove limits"),
        Form(bound_data(ctx)),
        lambda _: do_remove_limits(row),
        message=lambda _done: _("%(label)s: rate limits removed.") % {"label": owner.label},
        effect=_("%(label)s loses these limits within a second. Other limits that apply to its requests stay active.")
        % {"label": owner.label},
        danger=True,
        **_sheet(ctx, _("Remove limits")),
    )


@tenant_page(READS, cost=PAGE_COST)
def simulate_limits(ctx: PageContext) -> HttpResponse:
    """Return the effect of each limit as typed so far."""
    query = ctx.query
    with ctx.scope():
        owner, model = choices(ctx, members=False).get(query.get("owner", "")), query.get("model", "")[:64]
        if (pk := number_param(ctx, "set")) is not None:
            rows = LimitSet.objects.for_tenant(ctx.tenant).select_related("project", "key")
            if (row := rows.filter(pk=pk).first()) is not None:
                owner, model = owner_of(row), row.model
        dry_run = query.get("mode") == "dry_run"
        simulations = tuple(dry_runs.simulate_limits(ctx.tenant.pk, owner, model, query, dry_run=dry_run))
    return render(ctx.request, "budgets/page.html#limits_simulation", {"simulations": simulations})


def _editable_limits(ctx: PageContext) -> LimitSet:
    """Return the limits in the URL. A tenant cannot change limits that the operator set."""
    own = {"pk": ctx.arguments["limits"], "set_by_operator": False}
    return ctx.get(lambda: LimitSet.objects.for_tenant(ctx.tenant).select_related("project", "key").filter(**own))


def _sheet(ctx: PageContext, submit: str) -> dict[str, Any]:
    back = ctx.url("budgets")
    breadcrumbs = (Breadcrumb(_("Budgets and quotas"), back),)
    return {"submit": submit, "back": back, "breadcrumbs": breadcrumbs, "action_url": ctx.request.get_full_path()}


urlpatterns = [
    path("t/<slug:slug>/limits/new", new_limits, name="budgets-limits-new"),
    path("t/<slug:slug>/limits/try", simulate_limits, name="budgets-limits-try"),
    path("t/<slug:slug>/limits/<int:limits>/edit", edit_limits, name="budgets-limits-edit"),
    path("t/<slug:slug>/limits/<int:limits>/remove", remove_limits, name="budgets-limits-remove"),
]
