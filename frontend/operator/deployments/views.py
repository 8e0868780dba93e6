"""Deployments: the page, its panels, and the actions edit, load, drain, unload and remove."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpResponse
from django.urls import path, reverse
from django.utils.translation import gettext as _

from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.deployments import fit, page, testing, wizard
from frontend.operator.deployments.forms import OwnDeploymentForm, UpstreamForm
from inference_worker.contract.deployments import WantedState
from millrace.apps.deployments import deployment_checks
from millrace.apps.deployments import deployments as catalog
from millrace.apps.deployments.models import Deployment

PANELS = Panels(
    "operator-deployments-panel",
    (
        Panel("stats", _lazy("Figures"), "operator/deployments/page.html#stats", page.stats, every=15),
        Panel("list", _lazy("Deployments"), "operator/deployments/page.html#list", page.deployments, every=5),
        Panel("upstreams", _lazy("Upstreams"), "operator/deployments/page.html#upstreams", page.upstreams, every=15),
    ),
)


@operator_page()
def deployments(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context: dict[str, Any] = {"filters": page.filters(ctx), "metering": metering(ctx.now)}
    return render_page(ctx, "operator/deployments/page.html", _("Deployments"), panels=PANELS, **context)


@operator_page(methods=FORM, step_up=True)
def edit(ctx: PageContext) -> HttpResponse:
    row = page.deployment_of(ctx)
    form = (
        OwnDeploymentForm(bound_data(ctx), row)
        if row.upstream is None
        else UpstreamForm(bound_data(ctx), row, wizard.list_credentials(ctx))
    )
    effect = _(
        "A change of the source, revision, precision, context, KV cache or parsers loads a new version "
        "beside the old one, which serves until then."
    )

    def change(data: dict[str, Any]) -> Deployment:
        deployment_checks.check_changed_source(row.name, data)
        return catalog.do_update_deployment(row.name, **data)

    return form_view(
        ctx,
        _("Edit %(name)s") % {"name": row.name},
        form,
        change,
        message=lambda changed: wizard.describe_check(_("%(name)s was updated.") % {"name": changed.name}, changed),
        **_sheet(_("Save"), effect),
    )


@operator_page(methods=FORM, step_up=True)
def load(ctx: PageContext) -> HttpResponse:
    name = page.deployment_of(ctx).name
    return _state_view(
        ctx, name, WantedState.LOADED, _("Load"), _("Workers load %(name)s, and it accepts requests.") % {"name": name}
    )


@operator_page(methods=FORM, step_up=True)
def drain(ctx: PageContext) -> HttpResponse:
    name = page.deployment_of(ctx).name
    effect = _(
        "%(name)s accepts no new requests: they receive 503. Running streams end, and the weights stay loaded."
    ) % {"name": name}
    return _state_view(ctx, name, WantedState.DRAINED, _("Drain"), effect)


@operator_page(methods=FORM, step_up=True)
def unload(ctx: PageContext) -> HttpResponse:
    name = page.deployment_of(ctx).name
    effect = _(
        "%(name)s accepts no new requests: they receive 503. Its weights are dropped after its running streams."
    ) % {"name": name}
    return _state_view(ctx, name, WantedState.UNLOADED, _("Unload"), effect)


@operator_page(methods=FORM, step_up=True)
def remove(ctx: PageContext) -> HttpResponse:
    name = page.deployment_of(ctx).name
    return form_view(
        ctx,
        _("Remove %(name)s") % {"name": name},
        forms.Form(bound_data(ctx)),
        lambda _: catalog.do_remove_deployment(name),
        message=lambda _done: _("%(name)s was removed.") % {"name": name},
        danger=True,
        **_sheet(
            _("Remove"),
            _("Requests for %(name)s receive 404. Running streams end first. Prices and usage stay.") % {"name": name},
        ),
    )


_STATES_DONE = {
    WantedState.LOADED: _lazy("%(name)s is being loaded."),
    WantedState.DRAINED: _lazy("%(name)s is being drained."),
    WantedState.UNLOADED: _lazy("%(name)s is being unloaded."),
}


def _state_view(ctx: PageContext, name: str, state: WantedState, submit: str, effect: str) -> HttpResponse:
    return form_view(
        ctx,
        f"{submit} {name}",
        forms.Form(bound_data(ctx)),
        lambda _: catalog.do_set_deployment_state(name, state),
        message=lambda _done: _STATES_DONE[state] % {"name": name},
        danger=state != WantedState.LOADED,
        **_sheet(submit, effect),
    )


def _sheet(submit: str, effect: str = "") -> dict[str, Any]:
    back = reverse("operator-deployments")
    return {"submit": submit, "back": back, "effect": effect, "breadcrumbs": (Breadcrumb(_("Deployments"), back),)}


SCREEN = ConsoleScreen(
    "operator-deployments", _lazy("Deployments"), icon="layers", letter="d", group="infrastructure", order=10
)
urlpatterns = [
    path("operator/deployments/", deployments, name="operator-deployments"),
    path("operator/deployments/<str:name>/edit", edit, name="operator-deployments-edit"),
    path("operator/deployments/<str:name>/load", load, name="operator-deployments-load"),
    path("operator/deployments/<str:name>/drain", drain, name="operator-deployments-drain"),
    path("operator/deployments/<str:name>/unload", unload, name="operator-deployments-unload"),
    path("operator/deployments/<str:name>/remove", remove, name="operator-deployments-remove"),
    *testing.urlpatterns,
    *wizard.urlpatterns,
    *fit.urlpatterns,
    PANELS.operator_url("operator/deployments/"),
]
