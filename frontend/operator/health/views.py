"""Health: its page, its panels, what is done about a usage record in quarantine."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import Http404, HttpResponse
from django.urls import path, reverse

from billing.actions.quarantine import do_dismiss_quarantined, do_replay_quarantined
from billing.models import UsageQuarantine
from frontend.core.form_view import posted
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import carry_out, done, refused, show
from frontend.operator.health import page
from millrace.conf.environment import platform_settings

PANELS = Panels(
    "operator-health-panel",
    (
        Panel("issues", "Needs attention", "operator/health/issues.html", page.needs, every=10),
        Panel("stats", "Now", "operator/health/stats.html", page.figures, every=5),
        Panel("queues", "Queues", "operator/health/queues.html", page.queues, every=5),
        Panel("reconciliation", "Reconciliation", "operator/health/reconciliation.html", page.reconciliation, every=60),
        Panel("quarantine", "Quarantine", "operator/health/quarantine.html", page.quarantine, every=30),
    ),
)


class Dismissal(forms.Form):
    why = forms.CharField(max_length=200, label="Reason", help_text="Recorded in the audit log")


@operator_page()
def health(visit: PageContext) -> HttpResponse:
    context: dict[str, Any] = {"metering": metering(visit.now), "objective": platform_settings().ttft_slo_ms}
    return show(visit, "operator/health/page.html", "Health", panels=PANELS, **context)


@operator_page(methods=FORM, step_up=True)
def replay(visit: PageContext) -> HttpResponse:
    return _quarantined(
        visit,
        forms.Form(posted(visit)),  # nothing is asked: only that it is sent
        "Settle again",
        "Prices and stores the record once, as if received now, and bills its tenant.",
        "Record settled.",
        lambda pk, data: do_replay_quarantined(pk),
    )


@operator_page(methods=FORM, step_up=True)
def dismiss(visit: PageContext) -> HttpResponse:
    return _quarantined(
        visit,
        Dismissal(posted(visit)),
        "Dismiss",
        "The usage in this record is never counted or billed.",
        "Record dismissed.",
        lambda pk, data: do_dismiss_quarantined(pk, **data),
    )


def _quarantined(visit: PageContext, form: forms.Form, submit: str, effect: str, said: str, verb: Any) -> HttpResponse:
    pk = visit.arguments["pk"]
    with visit.scope():
        row = UsageQuarantine.objects.filter(pk=pk).first()
    if row is None:
        raise Http404
    title = f"{submit}: record {row.stream_id}"
    back = reverse("operator-health")
    breadcrumbs = (Breadcrumb("Health", back),)
    given: dict[str, Any] = {"action": visit.request.path, "submit": submit, "back": back, "effect": effect}
    given |= {"breadcrumbs": breadcrumbs}
    if visit.request.method == "POST":
        if carry_out(form, lambda data: verb(pk, data)):
            return done(visit, back, said)
        return refused(visit, "frontend/form.html", title, form, **given)
    return show(visit, "frontend/form.html", title, form=form, **given)


urlpatterns = [
    path("operator/", health, name="operator-health"),
    path("operator/quarantine/<int:pk>/replay", replay, name="operator-health-replay"),
    path("operator/quarantine/<int:pk>/dismiss", dismiss, name="operator-health-dismiss"),
    PANELS.operator_url("operator/health/"),
]
