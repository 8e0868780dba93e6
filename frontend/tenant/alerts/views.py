"""Alerts: the page, acknowledgment, muting, and the forms of channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from billing.budgets.alert_actions import do_acknowledge_alert
from billing.budgets.budgets import do_change_budget
from billing.models import Budget, BudgetAlert
from frontend.core.form_view import bound_data, form_view
from frontend.core.labels import choice_label
from frontend.core.languages import day_text
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.core.screens import ConsoleScreen, PaletteAction
from frontend.tenant.alerts import page, rule_views
from frontend.tenant.alerts.forms import ChannelForm, MuteForm, PagerDutyForm, SlackForm
from tenants.actions.channels import do_create_pagerduty_channel, do_create_slack_channel
from tenants.models import WebhookEndpoint
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST

READS, WRITES = Permission.LIMITS_READ, Permission.LIMITS_WRITE
PANELS = Panels(
    "alerts-panel",
    (
        Panel("history", _lazy("Alert history"), "alerts/page.html#history", page.history, every=10),
        Panel(
            "channels", _lazy("Channels"), "alerts/page.html#channels", page.channels, needs=Permission.WEBHOOKS_READ
        ),
    ),
)


@tenant_page(READS, cost=PAGE_COST)
def alerts(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        context = {"filters": page.filters(ctx), **page.TOOLS.page(ctx)}
    return render_page(ctx, "alerts/page.html", _("Alerts"), panels=PANELS, **context)


@tenant_page(WRITES, methods=("POST",), step_up=False)  # it changes no limit
def acknowledge(ctx: PageContext) -> HttpResponse:
    row = ctx.get(lambda: BudgetAlert.objects.for_tenant(ctx.tenant).filter(pk=ctx.arguments["alert"]))
    do_acknowledge_alert(row)
    return redirect_with_message(ctx, ctx.url("alerts"), _("Alert acknowledged"))


@tenant_page(WRITES, methods=FORM, step_up=False)
def mute(ctx: PageContext) -> HttpResponse:
    row = ctx.get(lambda: Budget.objects.for_tenant(ctx.tenant).filter(pk=ctx.arguments["budget"], active=True))
    form = MuteForm(bound_data(ctx))

    def message(changed: Budget) -> str:
        until = changed.alerts_muted_until
        when = until and until.astimezone(ctx.zone)
        return (
            _("Alerts of %(name)s are muted until %(when)s.") % {"name": row.name, "when": day_text(when, "j F, H:i")}
            if when
            else _("Alerts of %(name)s are sent.") % {"name": row.name}
        )

    return form_view(
        ctx,
        _("Mute alerts of %(name)s") % {"name": row.name},
        form,
        lambda _: do_change_budget(row, alerts_muted_until=form.until(ctx.now)),
        submit=_("Save"),
        back=ctx.url("budgets-detail", row.pk),
        message=message,
        effect=_(
            "Muted alerts are in the history. They are not sent by email, webhook or channel, also not afterwards."
        ),
        breadcrumbs=(Breadcrumb(_("Budgets and quotas"), ctx.url("budgets")),),
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def new_slack(ctx: PageContext) -> HttpResponse:
    return _new_channel(
        ctx,
        _("Add Slack channel"),
        SlackForm(bound_data(ctx)),
        lambda data: do_create_slack_channel(ctx.tenant, **data),
    )


@tenant_page(Permission.WEBHOOKS_WRITE, methods=FORM)
def new_pagerduty(ctx: PageContext) -> HttpResponse:
    form = PagerDutyForm(bound_data(ctx))
    return _new_channel(
        ctx, _("Add PagerDuty service"), form, lambda data: do_create_pagerduty_channel(ctx.tenant, **data)
    )


def _new_channel(
    ctx: PageContext, title: str, form: ChannelForm, create: Callable[[dict[str, Any]], WebhookEndpoint]
) -> HttpResponse:
    return form_view(
        ctx,
        title,
        form,
        create,
        submit=_("Add channel"),
        back=ctx.url("alerts"),
        message=lambda made: (
            _("%(kind)s channel added. Send a test event to check it.")
            % {"kind": choice_label(made.get_kind_display())}
        ),
        breadcrumbs=(Breadcrumb(_("Alerts"), ctx.url("alerts")),),
    )


SCREEN = ConsoleScreen(
    "alerts",
    _lazy("Alerts"),
    icon="alerts",
    letter="l",
    group="billing",
    order=20,
    needs=Permission.LIMITS_READ,
    actions=(
        PaletteAction(_lazy("New alert rule"), "alerts-rules-new", "alerts", Permission.LIMITS_WRITE),
        PaletteAction(_lazy("Add Slack channel"), "alerts-slack", "alerts", Permission.WEBHOOKS_WRITE),
        PaletteAction(_lazy("Add PagerDuty service"), "alerts-pagerduty", "alerts", Permission.WEBHOOKS_WRITE),
    ),
)
urlpatterns = [
    path("t/<slug:slug>/alerts/", alerts, name="alerts"),
    *page.TOOLS.tenant_urls("t/<slug:slug>/alerts/", READS),
    path("t/<slug:slug>/alerts/slack", new_slack, name="alerts-slack"),
    path("t/<slug:slug>/alerts/pagerduty", new_pagerduty, name="alerts-pagerduty"),
    path("t/<slug:slug>/alerts/<int:alert>/acknowledge", acknowledge, name="alerts-acknowledge"),
    path("t/<slug:slug>/budgets/<int:budget>/mute", mute, name="budgets-mute"),
    PANELS.tenant_url("t/<slug:slug>/alerts/", READS),
    *rule_views.urlpatterns,
]
