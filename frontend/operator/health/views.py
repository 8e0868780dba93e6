"""Health: the page, its panels, and the actions on messages in quarantine and on the usage of lost workers."""

from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings
from django.http import Http404, HttpResponse
from django.urls import path, reverse
from django.utils.translation import gettext as _

from billing.metering.quarantine import do_dismiss_quarantined, do_replay_quarantined
from billing.models import UsageQuarantine
from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.metering import metering
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page
from frontend.core.screens import ConsoleScreen
from frontend.operator.health import page
from millrace.apps.health.left_usage import do_dismiss_left_usage

PANELS = Panels(
    "operator-health-panel",
    (
        Panel("issues", _lazy("Needs attention"), "operator/health/page.html#issues", page.issues, every=10),
        Panel("stats", _lazy("Now"), "operator/health/page.html#stats", page.stats, every=5),
        Panel("queues", _lazy("Queues"), "operator/health/page.html#queues", page.queues, every=5),
        Panel(
            "reconciliation",
            _lazy("Reconciliation"),
            "operator/health/page.html#reconciliation",
            page.reconciliation,
            every=60,
        ),
        Panel("quarantine", _lazy("Quarantine"), "operator/health/page.html#quarantine", page.quarantine, every=30),
    ),
)


class Dismissal(forms.Form):
    reason = forms.CharField(max_length=200, label=_lazy("Reason"), help_text=_lazy("Recorded in the audit log"))


@operator_page()
def health(ctx: PageContext) -> HttpResponse:
    context: dict[str, Any] = {"metering": metering(ctx.now), "objective": settings.MILLRACE.ttft_slo_ms}
    return render_page(ctx, "operator/health/page.html", _("Health"), panels=PANELS, **context)


@operator_page(methods=FORM, step_up=True)
def replay(ctx: PageContext) -> HttpResponse:
    return _show_form(
        ctx,
        forms.Form(bound_data(ctx)),  # a form without fields
        _("Settle again"),
        _("Prices and stores the record once, as if received now, and bills its tenant."),
        _("Record settled."),
        lambda pk, data: do_replay_quarantined(pk),
    )


@operator_page(methods=FORM, step_up=True)
def dismiss(ctx: PageContext) -> HttpResponse:
    return _show_form(
        ctx,
        Dismissal(bound_data(ctx)),
        _("Dismiss"),
        _("The usage in this record is never counted or billed."),
        _("Record dismissed."),
        lambda pk, data: do_dismiss_quarantined(pk, data["reason"]),
    )


@operator_page(methods=FORM, step_up=True)
def dismiss_usage(ctx: PageContext) -> HttpResponse:
    journal_id: str = ctx.arguments["journal"]
    report = page.find_left_usage(journal_id)
    if report is None:
        raise Http404
    back = reverse("operator-health")
    return form_view(
        ctx,
        _("Dismiss the usage of %(worker)s") % {"worker": report.worker},
        Dismissal(bound_data(ctx)),
        lambda data: do_dismiss_left_usage(journal_id, data["reason"]),
        submit=_("Dismiss"),
        back=back,
        message=lambda _done: _("Usage dismissed."),
        breadcrumbs=(Breadcrumb(_("Health"), back),),
        effect=_(
            "Health no longer lists this usage, and it is not billed. Dismiss it only if the disk of %(host)s is lost"
            " permanently. A worker that starts with its data directory after all settles the usage."
        )
        % {"host": report.host},
    )


def _show_form(ctx: PageContext, form: forms.Form, submit: str, effect: str, message: str, action: Any) -> HttpResponse:
    pk = ctx.arguments["pk"]
    row = ctx.get(lambda: UsageQuarantine.objects.filter(pk=pk))
    back = reverse("operator-health")
    return form_view(
        ctx,
        _("%(submit)s: record %(stream_id)s") % {"submit": submit, "stream_id": row.stream_id},
        form,
        lambda data: action(pk, data),
        submit=submit,
        back=back,
        message=lambda _: message,
        breadcrumbs=(Breadcrumb(_("Health"), back),),
        effect=effect,
    )


SCREEN = ConsoleScreen("operator-health", _lazy("Health"), icon="health", letter="h", group="top", order=10)
urlpatterns = [
    path("operator/", health, name="operator-health"),
    path("operator/quarantine/<int:pk>/replay", replay, name="operator-health-replay"),
    path("operator/quarantine/<int:pk>/dismiss", dismiss, name="operator-health-dismiss"),
    path("operator/left-usage/<str:journal>/dismiss", dismiss_usage, name="operator-health-dismiss-usage"),
    PANELS.operator_url("operator/health/"),
]
