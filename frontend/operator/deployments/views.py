"""Deployments: the page, its panels, the form, and the actions load, drain, unload, remove and test."""

from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings
from django.http import HttpResponse
from django.urls import path, reverse
from django.utils.translation import gettext as _

from frontend.core.backend_messages import translate_message
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.deployments import fit, page
from frontend.operator.deployments.forms import OwnDeploymentForm, TestCallForm, UpstreamForm
from inference_worker.contract.deployments import WantedState
from millrace.apps.deployments import deployment_checks, offered_prices
from millrace.apps.deployments import deployments as catalog
from millrace.apps.deployments.models import Deployment
from millrace.client.testing import TestCallFailed, TestCallResult, send_test_call
from tenants.actions import ActionRefused
from tenants.models import UpstreamCredential

TEST_SECONDS = 60.0  # timeout of a test call
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
def add_deployment(ctx: PageContext) -> HttpResponse:
    def add(data: dict[str, Any]) -> Deployment:
        force = data.pop("force")
        deployment_checks.check_deployment(force=force, **data)
        if not force:
            fit.require_fit(shown_check, data)
        return catalog.do_add_deployment(**data)

    shown_check = ctx.request.POST.get("fit_check", "")[:32]

    return form_view(
        ctx,
        _("Add deployment"),
        OwnDeploymentForm(bound_data(ctx)),
        add,
        message=_describe_addition,
        template="operator/deployments/form.html",
        shown_check=shown_check,
        other=("operator-deployments-new-upstream", _("Add a model of another server or provider")),
        **_sheet(_("Add deployment")),
    )


@operator_page(methods=FORM, step_up=True)
def add_upstream(ctx: PageContext) -> HttpResponse:
    def add(data: dict[str, Any]) -> Deployment:
        deployment_checks.check_deployment(**data)
        return catalog.do_add_deployment(**data)

    return form_view(
        ctx,
        _("Add upstream"),
        UpstreamForm(bound_data(ctx), None, _credentials(ctx)),
        add,
        message=_describe_addition,
        template="operator/deployments/new.html",
        other=("operator-deployments-new", _("Add a model that Millrace's engine runs")),
        **_sheet(_("Add deployment")),
    )


@operator_page(methods=FORM, step_up=True)
def test(ctx: PageContext) -> HttpResponse:
    name = _deployment(ctx).name

    def send(data: dict[str, Any]) -> TestCallResult:
        try:
            return send_test_call(
                settings.MILLRACE.base_url, data["api_key"], name, data["prompt"], timeout=TEST_SECONDS
            )
        except TestCallFailed as exc:
            raise ActionRefused(str(exc)) from exc

    return form_view(
        ctx,
        _("Test %(name)s") % {"name": name},
        TestCallForm(bound_data(ctx)),
        send,
        message=lambda result: _("%(name)s answered: %(summary)s") % {"name": name, "summary": result.summary},
        **_sheet(_("Send request")),
    )


@operator_page(methods=FORM, step_up=True)
def edit(ctx: PageContext) -> HttpResponse:
    row = _deployment(ctx)
    form = (
        OwnDeploymentForm(bound_data(ctx), row)
        if row.upstream is None
        else UpstreamForm(bound_data(ctx), row, _credentials(ctx))
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
        message=lambda changed: _describe_check(_("%(name)s was updated.") % {"name": changed.name}, changed),
        **_sheet(_("Save"), effect),
    )


@operator_page(methods=FORM, step_up=True)
def load(ctx: PageContext) -> HttpResponse:
    name = _deployment(ctx).name
    return _state_view(
        ctx, name, WantedState.LOADED, _("Load"), _("Workers load %(name)s, and it accepts requests.") % {"name": name}
    )


@operator_page(methods=FORM, step_up=True)
def drain(ctx: PageContext) -> HttpResponse:
    name = _deployment(ctx).name
    effect = _(
        "%(name)s accepts no new requests: they receive 503. Running streams end, and the weights stay loaded."
    ) % {"name": name}
    return _state_view(ctx, name, WantedState.DRAINED, _("Drain"), effect)


@operator_page(methods=FORM, step_up=True)
def unload(ctx: PageContext) -> HttpResponse:
    name = _deployment(ctx).name
    effect = _(
        "%(name)s accepts no new requests: they receive 503. Its weights are dropped after its running streams."
    ) % {"name": name}
    return _state_view(ctx, name, WantedState.UNLOADED, _("Unload"), effect)


@operator_page(methods=FORM, step_up=True)
def remove(ctx: PageContext) -> HttpResponse:
    name = _deployment(ctx).name
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


def _credentials(ctx: PageContext) -> list[tuple[int, str]]:
    """Return the platform's credentials, by ID."""
    with ctx.scope():
        rows = UpstreamCredential.objects.all_tenants().filter(tenant=None).order_by("name")
        return list(rows.values_list("pk", "name"))


def _describe_addition(row: Deployment) -> str:
    text = (
        _("%(name)s was added. Workers load it.")
        if offered_prices.has_price(row.name)
        else _("%(name)s was added. It has no price yet: its requests receive 503 until you publish one.")
    ) % {"name": row.name}
    return _describe_check(text, row)


def _describe_check(text: str, row: Deployment) -> str:
    """Return the text, and why the options were not checked against workers."""
    return f"{text} {translate_message(deployment_checks.check_workers(row, deployment_checks.read_board()))}".strip()


def _deployment(ctx: PageContext) -> Deployment:
    found: Deployment = ctx.get(lambda: Deployment.objects.filter(name=ctx.arguments["name"]))
    return found


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
    path("operator/deployments/new", add_deployment, name="operator-deployments-new"),
    path("operator/deployments/new-upstream", add_upstream, name="operator-deployments-new-upstream"),
    path("operator/deployments/<str:name>/test", test, name="operator-deployments-test"),
    path("operator/deployments/<str:name>/edit", edit, name="operator-deployments-edit"),
    path("operator/deployments/<str:name>/load", load, name="operator-deployments-load"),
    path("operator/deployments/<str:name>/drain", drain, name="operator-deployments-drain"),
    path("operator/deployments/<str:name>/unload", unload, name="operator-deployments-unload"),
    path("operator/deployments/<str:name>/remove", remove, name="operator-deployments-remove"),
    *fit.urlpatterns,
    PANELS.operator_url("operator/deployments/"),
]
