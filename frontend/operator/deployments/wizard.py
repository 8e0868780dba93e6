"""The wizard that adds a deployment: its source, its model with a check, its price, and a test call."""

from __future__ import annotations

import re
from typing import Any

from django import forms
from django.http import Http404, HttpResponse
from django.template.loader import render_to_string
from django.urls import path, reverse
from django.utils.translation import gettext as _

from billing.models import PriceVersion
from billing.pricing.prices import do_propose_prices
from billing.rates.pricing import Component, Tier
from frontend.core.backend_messages import translate_message
from frontend.core.form_validation import require_confirmation
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.rendering import redirect_with_message, render_page
from frontend.operator.deployments import fit
from frontend.operator.deployments.page import deployment_of
from frontend.operator.deployments.wizard_forms import SOURCES, FieldGroups
from frontend.operator.prices.forms import ModelPricesForm
from frontend.operator.prices.page import copy_prices, describe_draft, plain_prices, priced_models, usd_fields
from inference_worker.contract.settings import EMBEDDED
from inference_worker.contract.upstreams import UpstreamEngine
from millrace.apps.deployments import deployment_checks, offered_prices
from millrace.apps.deployments import deployments as catalog
from millrace.apps.deployments.model_listing import ListedModels, list_upstream_models
from millrace.apps.deployments.models import MILLRACE, Deployment
from millrace.apps.deployments.served_deployments import served_states
from tenants.actions import ActionRefused
from tenants.actions.common import FieldRefused
from tenants.models import UpstreamCredential

C = Component
STEPS = {
    "source": _lazy("Source"),
    "model": _lazy("Model"),
    "price": _lazy("Price"),
    "test": _lazy("Test"),
}
_CHECK_ID = re.compile(r"[0-9a-f]{32}")  # ID of a fit check
_CHECKED_FIELDS = ("preset", "base_url", "secret", "credential_id", "allow_internal")  # by the list of models
# The prices that are not folded, by the task of the model.
_SHOWN_PRICES = {
    "generate": (C.UNCACHED, C.CACHE_READ, C.CACHE_WRITE_5M, C.CACHE_WRITE_1H, C.OUTPUT),
    "embed": (C.UNCACHED, C.CACHE_READ),
    "rerank": (C.UNCACHED, C.SEARCHES),
}


@operator_page()
def choose_source(ctx: PageContext) -> HttpResponse:
    return render_page(
        ctx,
        "operator/deployments/sources.html",
        _("Add deployment"),
        sources=list(SOURCES.values()),
        **frame_of("source"),
    )


@operator_page(methods=FORM, step_up=True)
def add_deployment(ctx: PageContext) -> HttpResponse:
    """Add a deployment of the chosen source. A refused form is shown with the reason at its field."""
    source = SOURCES.get(ctx.arguments["source"])
    if source is None:
        raise Http404
    form = source.make_form(bound_data(ctx), list_credentials(ctx), _list_sources(ctx))
    shown_check = ctx.request.POST.get("fit_check", "")
    if not _CHECK_ID.fullmatch(shown_check):
        shown_check = ""
    if form.is_bound and form.is_valid():
        require_confirmation()
        try:
            row = _add(form.cleaned_data, shown_check)
        except ActionRefused as exc:
            add_refusal(form, exc)
        else:
            is_priced = offered_prices.has_price(row.name)
            step = "operator-deployments-test" if is_priced else "operator-deployments-price"
            return redirect_with_message(ctx, ctx.url(step, row.name), _describe_addition(row))
    return render_page(
        ctx,
        "operator/deployments/model.html",
        _("Add deployment: %(source)s") % {"source": source.title},
        status=422 if form.is_bound else 200,
        source=source,
        action=ctx.request.path,
        back=reverse("operator-deployments-new"),
        check_id=shown_check,
        shown_check=shown_check,
        form=form,
        groups=FieldGroups(form, source.shown),
        **frame_of("model"),
    )


def _add(data: dict[str, Any], shown_check: str) -> Deployment:
    """Check the deployment and its source, unless forced, and add it.

    Raises:
        ActionRefused: a value is invalid, or a check failed.
    """
    is_forced = data.pop("force", False)
    deployment_checks.check_deployment(force=is_forced, **data)
    if not is_forced:
        if data.get("engine", MILLRACE) == MILLRACE:
            fit.require_fit(shown_check, data)
        elif data["engine"] != UpstreamEngine.MANAGED:
            _require_reachable(data)
    return catalog.do_add_deployment(**data)


def _require_reachable(data: dict[str, Any]) -> None:
    """Require that the upstream responds and accepts the API key.

    Raises:
        FieldRefused: it does not.
    """
    try:
        _list_models(data)
    except FieldRefused as exc:
        text = _("%(reason)s Tick “Force” to add it anyway.") % {"reason": f"{translate_message(exc).rstrip('.')}."}
        raise FieldRefused(exc.field, exc.code, text) from exc


def _list_models(data: dict[str, Any]) -> ListedModels:
    options = {name: data[name] for name in ("engine", "source", "preset", "allow_internal", "credential_id")}
    return list_upstream_models(Deployment(**options), data.get("secret"))


@operator_page(methods=("POST",), step_up=True)
def list_models(ctx: PageContext) -> HttpResponse:
    """Return the models that the upstream of the form lists, or why they cannot be listed."""
    source = SOURCES.get(ctx.arguments["source"])
    if source is None or source.check != "models":
        raise Http404
    form = source.make_form(ctx.request.POST, list_credentials(ctx), ())
    form.full_clean()
    errors = [f"{form.fields[name].label}: {form.errors[name][0]}" for name in _CHECKED_FIELDS if name in form.errors]
    if errors:
        return _render_models(ctx, 422, error=" ".join(errors))
    require_confirmation()
    try:
        listed = _list_models(form.cleaned_data)
    except FieldRefused as exc:
        return _render_models(ctx, 422, error=translate_message(exc))
    return _render_models(ctx, 200, listed=listed, chosen=form.cleaned_data.get("upstream_model", ""))


def _render_models(ctx: PageContext, status: int, **context: Any) -> HttpResponse:
    text = render_to_string("operator/deployments/model.html#models", context, ctx.request)
    return HttpResponse(text, status=status)


@operator_page(methods=FORM)
def draft_price(ctx: PageContext) -> HttpResponse:
    """Draft the prices of a deployment, starting from its own ones or those of a deployment with the same source."""
    row = deployment_of(ctx)
    with ctx.scope():
        own = plain_prices(ctx, row.name, Tier.STANDARD.value)
        similar = [price for price in offered_prices.find_similar_prices(row) if price.tier == Tier.STANDARD]
        is_priced = not offered_prices.unpriced_names([row.name])
        models = priced_models(ctx)
    initial = {"tier": Tier.STANDARD.value} | (copy_prices(ctx) or usd_fields(own or similar)) | {"model": row.name}
    form = ModelPricesForm(bound_data(ctx), initial, models, ctx.request.path)
    form.fields["model"].disabled = True
    form.fields["model"].widget = forms.HiddenInput()
    test_url = ctx.url("operator-deployments-test", row.name)

    def draft(data: dict[str, Any]) -> PriceVersion:
        return do_propose_prices(
            data["proposal"],
            book=data["book"],
            tenant=data["tenant"],
            effective_from=data["since"],
            note=data["note"],
            created_by=ctx.user,
        )

    return form_view(
        ctx,
        _("Price of %(name)s") % {"name": row.name},
        form,
        draft,
        submit=_("Create draft"),
        back=test_url,
        message=lambda _done: describe_draft(ctx, is_new=True),
        then=test_url,
        template="operator/deployments/price.html",
        is_priced=is_priced,
        similar=similar,
        groups=FieldGroups(form, _price_fields(row)),
        **frame_of("price"),
    )


def _price_fields(row: Deployment) -> tuple[str, ...]:
    """Return the fields of the price form that are not folded."""
    return ("copy_from", *_SHOWN_PRICES[deployment_checks.deployment_task(row)])


def frame_of(current: str) -> dict[str, Any]:
    """Return the steps of the wizard, and the breadcrumbs, for the page of one step."""
    steps = [(label, name == current) for name, label in STEPS.items()]
    return {"steps": steps, "breadcrumbs": (Breadcrumb(_("Deployments"), reverse("operator-deployments")),)}


def add_refusal(form: forms.Form, exc: ActionRefused) -> None:
    """Add the error of an action to the form's field that it names, else to the form."""
    name = exc.field if isinstance(exc, FieldRefused) and exc.field in form.fields else None
    form.add_error(name, translate_message(exc))


def list_credentials(ctx: PageContext) -> list[tuple[int, str]]:
    """Return the platform's credentials, by ID."""
    with ctx.scope():
        rows = UpstreamCredential.objects.all_tenants().filter(tenant=None).order_by("name")
        return list(rows.values_list("pk", "name"))


def _list_sources(ctx: PageContext) -> list[str]:
    """Return the sources of other deployments that are no upstreams."""
    with ctx.scope():
        specs = [served.spec for served in served_states()]
    return sorted({spec.source for spec in specs if spec.upstream is None} - set(EMBEDDED))


def _describe_addition(row: Deployment) -> str:
    text = (
        _("%(name)s was added. Workers load it.")
        if offered_prices.has_price(row.name)
        else _("%(name)s was added. It has no price yet: its requests receive 503 until you publish one.")
    ) % {"name": row.name}
    return describe_check(text, row)


def describe_check(text: str, row: Deployment) -> str:
    """Return the text, and why the options were not checked against workers."""
    return f"{text} {translate_message(deployment_checks.check_workers(row, deployment_checks.read_board()))}".strip()


urlpatterns = [
    path("operator/deployments/new", choose_source, name="operator-deployments-new"),
    path("operator/deployments/<str:name>/price", draft_price, name="operator-deployments-price"),
    path("operator/deployments/new/<slug:source>", add_deployment, name="operator-deployments-new-source"),
    path("operator/deployments/new/<slug:source>/models", list_models, name="operator-deployments-new-models"),
]
