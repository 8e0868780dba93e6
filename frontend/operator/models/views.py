"""Models and workers: the page, its panels, and cordoning, draining and uncordoning a worker."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import Http404, HttpResponse
from django.urls import path, reverse

from frontend.core.confirmation import Confirm
from frontend.core.form_view import posted
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import carry_out, done, refused, show
from frontend.operator.models import page
from frontend.operator.models.page import Effect
from millrace.apps.operations.cordons import do_cordon, do_uncordon
from millrace.apps.operations.models import Cordon

PANELS = Panels(
    "operator-models-panel",
    (
        Panel("models", "Models", "operator/models/models.html", page.models, every=30),
        Panel("replicas", "Replicas", "operator/models/replicas.html", page.replicas, every=5),
    ),
)


class Withdrawal(Confirm):
    """The worker's name typed, and why it is to get no work."""

    why = forms.CharField(max_length=200, required=False, label="Reason", help_text="Shown here and in the audit log")


@operator_page()
def models(visit: PageContext) -> HttpResponse:
    return show(visit, "operator/models/page.html", "Models and workers", panels=PANELS, metering=metering(visit.now))


@operator_page(methods=FORM)
def cordon(visit: PageContext) -> HttpResponse:
    worker, effect = _worker(visit)
    says = f"{worker} receives no new requests within a second, also after a restart. {_others(effect)}"
    goes_on = f" Its {effect.requests} running requests continue." if effect.requests else ""
    return _withdraw(visit, worker, "Cordon", says + goes_on, drain=False)


@operator_page(methods=FORM)
def drain(visit: PageContext) -> HttpResponse:
    worker, effect = _worker(visit)
    says = f"{worker} receives no new requests within a second, also after a restart. {_others(effect)}"
    back = "move to other replicas" if effect.others else "wait and are rejected eventually"
    goes_on = (
        f" Of its {effect.requests} requests, started ones continue and the others {back}." if effect.requests else ""
    )
    return _withdraw(visit, worker, "Drain", says + goes_on, drain=True)


@operator_page(methods=FORM)
def uncordon(visit: PageContext) -> HttpResponse:
    worker = visit.arguments["worker"]
    with visit.scope():
        if not Cordon.objects.filter(worker=worker).exists():
            raise Http404
    form = forms.Form(posted(visit))  # nothing is asked: only that it is sent
    effect = f"{worker} receives requests again within a second."
    title = f"Uncordon {worker}"
    given = _given(visit, "Uncordon", effect)
    if visit.request.method == "POST":
        if carry_out(form, lambda data: do_uncordon(worker)):
            return done(visit, reverse("operator-models"), f"{worker} accepts work again.")
        return refused(visit, "frontend/form.html", title, form, **given)
    return show(visit, "frontend/form.html", title, form=form, **given)


def _worker(visit: PageContext) -> tuple[str, Effect]:
    worker: str = visit.arguments["worker"]
    effect = page.effect(worker)
    if effect is None:
        raise Http404
    return worker, effect


def _others(effect: Effect) -> str:
    if not effect.others:
        return f"No other replica serves {effect.model}: its requests will be rejected with 503."
    return f"Its requests go to {effect.others} other replica{'' if effect.others == 1 else 's'} of {effect.model}."


def _withdraw(visit: PageContext, worker: str, submit: str, effect: str, *, drain: bool) -> HttpResponse:
    form = Withdrawal(worker, posted(visit))
    title = f"{submit} {worker}"
    given = _given(visit, submit, effect) | {"danger": True}
    if visit.request.method == "POST":
        if carry_out(form, lambda data: do_cordon(worker, drain=drain, why=data["why"])):
            return done(visit, reverse("operator-models"), f"{worker} receives no new work.")
        return refused(visit, "frontend/form.html", title, form, **given)
    return show(visit, "frontend/form.html", title, form=form, **given)


def _given(visit: PageContext, submit: str, effect: str) -> dict[str, Any]:
    back = reverse("operator-models")
    breadcrumbs = (Breadcrumb("Models and workers", back),)
    return {"action": visit.request.path, "submit": submit, "back": back, "effect": effect, "breadcrumbs": breadcrumbs}


urlpatterns = [
    path("operator/models/", models, name="operator-models"),
    path("operator/models/<str:worker>/cordon", cordon, name="operator-models-cordon"),
    path("operator/models/<str:worker>/drain", drain, name="operator-models-drain"),
    path("operator/models/<str:worker>/uncordon", uncordon, name="operator-models-uncordon"),
    PANELS.operator_url("operator/models/"),
]
