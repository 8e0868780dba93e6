"""The test call of a deployment with an operator's API key: its answer, speed and cost. The last step of the wizard."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Sum
from django.http import HttpResponse
from django.template.loader import render_to_string
from django.urls import path, reverse
from django.utils.translation import gettext as _

from billing.models import UsageEvent
from billing.pricing.currencies import currency_of
from frontend.core.form_view import bound_data
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money
from frontend.core.page_context import FORM, PageContext, operator_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import render_page, run_action
from frontend.operator.deployments.forms import TestCallForm
from frontend.operator.deployments.page import LABELS, board_or_none, deployment_of
from frontend.operator.deployments.wizard import frame_of
from millrace.apps.deployments.deployment_status import deployment_status
from millrace.apps.deployments.offered_prices import find_drafts, unpriced_names
from millrace.client.testing import TestCallFailed, TestCallResult, send_test_call
from tenants.actions import ActionRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, release_connection

CALL_SECONDS = 60.0  # timeout of the call
SETTLE_SECONDS, POLL_SECONDS = 3.0, 0.2  # for the settlement of its usage, which has the cost
_CLOCK_SKEW = timedelta(minutes=5)  # between the gateway that admits the request and this process


def _state(ctx: PageContext) -> dict[str, Any]:
    """Return what the deployment still needs before it answers: replicas, and a published price."""
    row = deployment_of(ctx)
    status = deployment_status(row, board_or_none())
    label, badge = LABELS[status.state]
    is_unpriced = bool(unpriced_names([row.name]))
    drafts = find_drafts(row.name) if is_unpriced else []
    return {"status": status, "label": label, "badge": badge, "is_unpriced": is_unpriced, "drafts": drafts}


PANELS = Panels(
    "operator-deployments-test-panel",
    (Panel("state", _lazy("State"), "operator/deployments/test.html#state", _state, every=5),),
)


@operator_page(methods=FORM, step_up=True)
def call_deployment(ctx: PageContext) -> HttpResponse:
    """Show the form of a test call, and its result below. The form stays as it is."""
    row = deployment_of(ctx)
    form = TestCallForm(bound_data(ctx))
    sent = run_action(form, lambda data: _send(row.name, data)) if form.is_bound else None
    context: dict[str, Any] = {"form": form, "result": None if sent is None else sent.value[0]}
    context["cost"] = None if sent is None else sent.value[1]
    status = 422 if form.is_bound and sent is None else 200
    if form.is_bound and ctx.is_fragment:
        text = render_to_string("operator/deployments/test.html#result", context, ctx.request)
        return HttpResponse(text, status=status)
    return render_page(
        ctx,
        "operator/deployments/test.html",
        _("Test %(name)s") % {"name": row.name},
        status=status,
        panels=PANELS,
        action=ctx.request.path,
        back=reverse("operator-deployments"),
        **context,
        **frame_of("test"),
    )


def _send(name: str, data: dict[str, Any]) -> tuple[TestCallResult, Money | None]:
    """Send the call as a stream, and return its result with its cost, which is None while it is not settled.

    Raises:
        ActionRefused: the platform responds with an error.
    """
    since = datetime.now(UTC) - _CLOCK_SKEW
    release_connection()
    try:
        result = send_test_call(
            settings.MILLRACE.base_url, data["api_key"], name, data["prompt"], stream=True, timeout=CALL_SECONDS
        )
    except TestCallFailed as exc:
        raise ActionRefused(str(exc)) from exc
    return result, _wait_for_cost(result.request_id, since) if result.request_id else None


def _wait_for_cost(request_id: str, since: datetime) -> Money | None:
    """Return the cost of a request once its usage is settled; None if that takes longer than a few seconds."""
    give_up_at = time.monotonic() + SETTLE_SECONDS
    while (cost := _read_cost(request_id, since)) is None and time.monotonic() < give_up_at:
        time.sleep(POLL_SECONDS)
    return cost


def _read_cost(request_id: str, since: datetime) -> Money | None:
    with all_tenants_scope(BypassReason.OPERATOR):
        events = UsageEvent.objects.all_tenants().filter(request_id=request_id, admitted_at__gte=since)
        found = list(events.values_list("tenant_id").annotate(Sum("cost_femto")))
        return Money(int(found[0][1]), currency_of(found[0][0])) if found else None


urlpatterns = [
    path("operator/deployments/<str:name>/test", call_deployment, name="operator-deployments-test"),
    PANELS.operator_url("operator/deployments/<str:name>/test/"),
]
