"""Deployments: the page, its panels, the form, and the actions load, drain, unload, remove and draft price."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpResponse
from django.urls import path, reverse

from frontend.core.confirmation import Confirm
from frontend.core.form_view import bound_data, form_view
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.operator.deployments import page
from frontend.operator.deployments.forms import DeploymentForm
from inference_worker.contract.deployments import WantedState
from millrace.apps.operations import deployments as catalog
from millrace.apps.operations.models import Deployment

PANELS = Panels(
    "operator-deployments-panel",
    (
        Panel("stats", "Figures", "operator/deployments/stats.html", page.stats, every=15),
        Panel("list", "Deployments", "operator/deployments/list.html", page.deployments, every=5),
    ),
)


@operator_page()
def deployments(ctx: PageContext) -> HttpResponse:
    return render_page(ctx, "operator/deployments/page.html", "Deployments", panels=PANELS, metering=metering(ctx.now))


@operator_page(methods=FORM, step_up=True)
def new(ctx: PageContext) -> HttpResponse:
    def add(data: dict[str, Any]) -> Deployment:
        catalog.check_deployment(**data)
        return catalog.do_add_deployment(**data)

    return form_view(
        ctx,
        "Add deployment",
        DeploymentForm(bound_data(ctx)),
        add,
        message=_added,
        **_sheet("Add deployment"),
    )


@operator_page(methods=FORM, step_up=True)
def edit(ctx: PageContext) -> HttpResponse:
    row = _deployment(ctx)
    effect = (
        "A change of the source, revision, precision, context, KV cache or parsers loads a new version beside the old"
        " one, which serves until then."
    )
    return form_view(
        ctx,
        f"Edit {row.name}",
        DeploymentForm(bound_data(ctx), row),
        lambda data: catalog.do_update_deployment(row.name, **data),
        message=lambda changed: f"{changed.name} was updated.",
        **_sheet("Save", effect),
    )


@operator_page(methods=FORM, step_up=True)
def load(ctx: PageContext) -> HttpResponse:
    name = _deployment(ctx).name
    return _state_view(ctx, name, WantedState.LOADED, "Load", f"Workers load {name}, and it accepts requests.")


@operator_page(methods=FORM, step_up=True)
def drain(ctx: PageContext) -> HttpResponse:
    name = _deployment(ctx).name
    effect = f"{name} accepts no new requests: they receive 503. Running streams end, and the weights stay loaded."
    return _state_view(ctx, name, WantedState.DRAINED, "Drain", effect)


@operator_page(methods=FORM, step_up=True)
def unload(ctx: PageContext) -> HttpResponse:
    name = _deployment(ctx).name
    effect = f"{name} accepts no new requests: they receive 503. Its weights are dropped after its running streams."
    return _state_view(ctx, name, WantedState.UNLOADED, "Unload", effect)


@operator_page(methods=FORM, step_up=True)
def remove(ctx: PageContext) -> HttpResponse:
    name = _deployment(ctx).name
    return form_view(
        ctx,
        f"Remove {name}",
        Confirm(name, bound_data(ctx)),
        lambda _: catalog.do_remove_deployment(name),
        message=lambda _: f"{name} was removed.",
        danger=True,
        **_sheet("Remove", f"Requests for {name} receive 404. Running streams end first. Prices and usage stay."),
    )


@operator_page(methods=FORM, step_up=True)
def price(ctx: PageContext) -> HttpResponse:
    name = _deployment(ctx).name
    effect = f"Requests for {name} receive 503 until it has a price. Another operator publishes the draft."
    return form_view(
        ctx,
        f"Draft a price of {name}",
        forms.Form(bound_data(ctx)),  # a form without fields
        lambda _: catalog.do_draft_offered_price(name, by=ctx.user),
        message=lambda draft: f"Draft {draft.pk} was created. Review it in the price book.",
        then=lambda draft: reverse("operator-prices-detail", args=[draft.pk]),
        **_sheet("Create draft", effect),
    )


def _added(row: Deployment) -> str:
    if catalog.has_price(row.name):
        return f"{row.name} was added. Workers load it."
    return f"{row.name} was added. It has no price yet: its requests receive 503 until you publish one."


def _deployment(ctx: PageContext) -> Deployment:
    found: Deployment = ctx.get(lambda: Deployment.objects.filter(name=ctx.arguments["name"]))
    return found


def _state_view(ctx: PageContext, name: str, state: WantedState, submit: str, effect: str) -> HttpResponse:
    return form_view(
        ctx,
        f"{submit} {name}",
        forms.Form(bound_data(ctx)),
        lambda _: catalog.do_set_deployment_state(name, state),
        message=lambda _: f"{name} is being {state.value}.",
        danger=state != WantedState.LOADED,
        **_sheet(submit, effect),
    )


def _sheet(submit: str, effect: str = "") -> dict[str, Any]:
    back = reverse("operator-deployments")
    return {"submit": submit, "back": back, "effect": effect, "breadcrumbs": (Breadcrumb("Deployments", back),)}


urlpatterns = [
    path("operator/deployments/", deployments, name="operator-deployments"),
    path("operator/deployments/new", new, name="operator-deployments-new"),
    path("operator/deployments/<str:name>/edit", edit, name="operator-deployments-edit"),
    path("operator/deployments/<str:name>/load", load, name="operator-deployments-load"),
    path("operator/deployments/<str:name>/drain", drain, name="operator-deployments-drain"),
    path("operator/deployments/<str:name>/unload", unload, name="operator-deployments-unload"),
    path("operator/deployments/<str:name>/remove", remove, name="operator-deployments-remove"),
    path("operator/deployments/<str:name>/price", price, name="operator-deployments-price"),
    PANELS.operator_url("operator/deployments/"),
]
