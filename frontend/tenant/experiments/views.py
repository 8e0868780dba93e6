"""Experiments: the list, a new one, the results, and the actions start, stop and delete."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.tenant.experiments import page
from frontend.tenant.experiments.forms import ExperimentForm
from tenants import actions
from tenants.models import Experiment
from tenants.permissions import Permission

PANELS = Panels(
    "experiments-panel", (Panel("list", _lazy("Experiments"), "experiments/page.html#list", page.experiments),)
)


@tenant_page(Permission.POLICIES_READ)
def experiments(ctx: PageContext) -> HttpResponse:
    return render_page(ctx, "experiments/page.html", _("Experiments"), panels=PANELS)


@tenant_page(Permission.POLICIES_READ)
def detail(ctx: PageContext) -> HttpResponse:
    row = _experiment(ctx)
    with ctx.scope():
        found = page.detail(ctx, row)
    return render_page(ctx, "experiments/detail.html", row.name, breadcrumbs=_crumbs(ctx), **found)


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def create_experiment(ctx: PageContext) -> HttpResponse:
    return form_view(
        ctx,
        _("New experiment"),
        ExperimentForm(bound_data(ctx)),
        lambda data: actions.do_create_experiment(ctx.tenant, **ExperimentForm.fields_of(data), created_by=ctx.user),
        message=lambda made: _("%(name)s created. Start it when you are ready.") % {"name": made.name},
        then=lambda made: ctx.url("experiments-detail", made.pk),
        **_sheet(ctx, _("Create draft"), ctx.url("experiments")),
    )


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def start(ctx: PageContext) -> HttpResponse:
    row = _experiment(ctx)
    return form_view(
        ctx,
        _("Start %(name)s") % {"name": row.name},
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_start_experiment(row),
        message=lambda made: _("%(name)s started.") % {"name": made.name},
        effect=_("Requests for %(model)s are assigned to its arms within a second. The arms can't be changed later.")
        % {"model": row.model},
        **_sheet(ctx, _("Start"), ctx.url("experiments-detail", row.pk)),
    )


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def stop(ctx: PageContext) -> HttpResponse:
    row = _experiment(ctx)
    return form_view(
        ctx,
        _("Stop %(name)s") % {"name": row.name},
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_stop_experiment(row),
        message=lambda made: _("%(name)s stopped.") % {"name": row.name} if made else _("Already stopped."),
        effect=_(
            "All requests for %(model)s use the route without the experiment within a second. A stopped "
            "experiment can't be started again."
        )
        % {"model": row.model},
        **_sheet(ctx, _("Stop"), ctx.url("experiments-detail", row.pk)),
    )


@tenant_page(Permission.POLICIES_WRITE, methods=FORM)
def delete(ctx: PageContext) -> HttpResponse:
    row = _experiment(ctx)
    return form_view(
        ctx,
        _("Delete %(name)s") % {"name": row.name},
        forms.Form(bound_data(ctx)),
        lambda _: actions.do_delete_experiment(row),
        message=lambda was: _("%(name)s deleted.") % {"name": row.name} if was else _("Already deleted."),
        danger=True,
        effect=_("The draft is deleted permanently."),
        **_sheet(ctx, _("Delete"), ctx.url("experiments")),
    )


def _experiment(ctx: PageContext) -> Experiment:
    return ctx.get(lambda: Experiment.objects.for_tenant(ctx.tenant).filter(pk=ctx.arguments["experiment"]))


def _crumbs(ctx: PageContext) -> tuple[Breadcrumb, ...]:
    return (Breadcrumb(_("Experiments"), ctx.url("experiments")),)


def _sheet(ctx: PageContext, submit: str, back: str) -> dict[str, Any]:
    return {"submit": submit, "back": back, "breadcrumbs": _crumbs(ctx)}


_ROOT = "t/<slug:slug>/experiments/"
SCREEN = ConsoleScreen(
    "experiments",
    _lazy("Experiments"),
    icon="percent",
    letter="e",
    group="build",
    order=50,
    needs=Permission.POLICIES_READ,
)
urlpatterns = [
    path(_ROOT, experiments, name="experiments"),
    path(f"{_ROOT}new", create_experiment, name="experiments-new"),
    path(f"{_ROOT}<int:experiment>", detail, name="experiments-detail"),
    path(f"{_ROOT}<int:experiment>/start", start, name="experiments-start"),
    path(f"{_ROOT}<int:experiment>/stop", stop, name="experiments-stop"),
    path(f"{_ROOT}<int:experiment>/delete", delete, name="experiments-delete"),
    PANELS.tenant_url(_ROOT, Permission.POLICIES_READ),
]
