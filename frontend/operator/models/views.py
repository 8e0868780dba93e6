"""Models and workers: the page, its panels, and the actions cordon, drain and uncordon."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import Http404, HttpResponse
from django.urls import path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.models import page
from frontend.operator.models.page import CordonEffect
from millrace.apps.health.cordons import do_cordon, do_uncordon
from millrace.apps.health.models import Cordon

PANELS = Panels(
    "operator-models-panel",
    (
        Panel("models", _lazy("Models"), "operator/models/page.html#models", page.models, every=30),
        Panel("replicas", _lazy("Replicas"), "operator/models/page.html#replicas", page.replicas, every=5),
    ),
)


class CordonForm(forms.Form):
    """The reason of a cordon."""

    reason = forms.CharField(
        max_length=200, required=False, label=_lazy("Reason"), help_text=_lazy("Shown here and in the audit log")
    )


@operator_page()
def models(ctx: PageContext) -> HttpResponse:
    return render_page(
        ctx, "operator/models/page.html", _("Models and workers"), panels=PANELS, metering=metering(ctx.now)
    )


@operator_page(methods=FORM)
def cordon(ctx: PageContext) -> HttpResponse:
    worker, effect = _worker(ctx)
    says = _("%(worker)s receives no new requests within a second, also after a restart. %(others)s") % {
        "worker": worker,
        "others": _others(effect),
    }
    goes_on = (
        _(" Its %(requests)s running requests continue.") % {"requests": effect.requests} if effect.requests else ""
    )
    return _cordon_view(ctx, worker, _("Cordon"), says + goes_on, drain=False)


@operator_page(methods=FORM)
def drain(ctx: PageContext) -> HttpResponse:
    worker, effect = _worker(ctx)
    says = _("%(worker)s receives no new requests within a second, also after a restart. %(others)s") % {
        "worker": worker,
        "others": _others(effect),
    }
    back = _("move to other replicas") if effect.others else _("wait and are rejected eventually")
    goes_on = (
        _(" Of its %(requests)s requests, started ones continue and the others %(back)s.")
        % {"requests": effect.requests, "back": back}
        if effect.requests
        else ""
    )
    return _cordon_view(ctx, worker, _("Drain"), says + goes_on, drain=True)


@operator_page(methods=FORM)
def uncordon(ctx: PageContext) -> HttpResponse:
    worker = ctx.arguments["worker"]
    ctx.get(lambda: Cordon.objects.filter(worker=worker))
    return form_view(
        ctx,
        _("Uncordon %(worker)s") % {"worker": worker},
        forms.Form(bound_data(ctx)),  # a form without fields
        lambda _: do_uncordon(worker),
        message=lambda _done: _("%(worker)s accepts work again.") % {"worker": worker},
        **_sheet(_("Uncordon"), _("%(worker)s receives requests again within a second.") % {"worker": worker}),
    )


def _worker(ctx: PageContext) -> tuple[str, CordonEffect]:
    worker: str = ctx.arguments["worker"]
    effect = page.effect(worker)
    if effect is None:
        raise Http404
    return worker, effect


def _others(effect: CordonEffect) -> str:
    if not effect.others:
        return _("No other replica serves %(model)s: its requests will be rejected with 503.") % {"model": effect.model}
    text = ngettext(
        "Its requests go to %(number)s other replica of %(model)s.",
        "Its requests go to %(number)s other replicas of %(model)s.",
        effect.others,
    )
    return text % {"number": effect.others, "model": effect.model}


def _cordon_view(ctx: PageContext, worker: str, submit: str, effect: str, *, drain: bool) -> HttpResponse:
    return form_view(
        ctx,
        f"{submit} {worker}",
        CordonForm(bound_data(ctx)),
        lambda data: do_cordon(worker, drain=drain, reason=data["reason"]),
        message=lambda _done: _("%(worker)s receives no new work.") % {"worker": worker},
        danger=True,
        **_sheet(submit, effect),
    )


def _sheet(submit: str, effect: str) -> dict[str, Any]:
    back = reverse("operator-models")
    return {
        "submit": submit,
        "back": back,
        "effect": effect,
        "breadcrumbs": (Breadcrumb(_("Models and workers"), back),),
    }


SCREEN = ConsoleScreen(
    "operator-models", _lazy("Models and workers"), icon="models", letter="m", group="infrastructure", order=20
)
urlpatterns = [
    path("operator/models/", models, name="operator-models"),
    path("operator/models/<str:worker>/cordon", cordon, name="operator-models-cordon"),
    path("operator/models/<str:worker>/drain", drain, name="operator-models-drain"),
    path("operator/models/<str:worker>/uncordon", uncordon, name="operator-models-uncordon"),
    PANELS.operator_url("operator/models/"),
]
