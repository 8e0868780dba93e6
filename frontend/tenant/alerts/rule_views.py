"""Alert rules: the page, their forms, and acknowledgment. Operators have the same forms for rules of the platform."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import Http404, HttpResponse
from django.urls import path
from django.utils.translation import gettext as _

from frontend.core.form_view import bound_data, form_view
from frontend.core.languages import day_text
from frontend.core.languages import lazy_text as _lazy
from frontend.core.layout import Breadcrumb
from frontend.core.lists import named_rows
from frontend.core.page_context import FORM, PageContext, tenant_page
from frontend.core.panels import Panel, Panels
from frontend.core.rendering import redirect_with_message, render_page
from frontend.tenant.alerts import rules
from frontend.tenant.alerts.forms import MuteForm
from frontend.tenant.alerts.rule_forms import AlertRuleForm, NewAlertRule
from millrace.apps.alerts.actions import (
    do_acknowledge_rule_alert,
    do_change_alert_rule,
    do_create_alert_rule,
    do_remove_alert_rule,
)
from millrace.apps.alerts.models import AlertRule
from millrace.apps.deployments.served_deployments import served_specs
from tenants.models import Project, Tenant
from tenants.permissions import Permission
from tenants.request_costs import PAGE_COST

READS, WRITES = Permission.LIMITS_READ, Permission.LIMITS_WRITE
MAX_RECEIVERS = 200
Metric = AlertRule.Metric
PANELS = Panels(
    "alerts-rules-panel",
    (
        Panel("rules", _lazy("Alert rules"), "alerts/rules.html", rules.rules, every=10),
        Panel("history", _lazy("Alert history"), "alerts/rule_history.html", rules.history, every=10),
    ),
)


@tenant_page(READS)
def alert_rules(ctx: PageContext) -> HttpResponse:
    with ctx.scope():
        filters = rules.filters(ctx)
    return render_page(ctx, "alerts/page.html#rules_page", _("Alert rules"), panels=PANELS, filters=filters)


def new_rule(ctx: PageContext) -> HttpResponse:
    """Show and process the form of a new rule. On operator pages, it is a rule of the platform."""
    metrics = rules.OF_PLATFORM if ctx.access is None else rules.OF_TENANT
    metric = _chosen_metric(ctx, metrics)
    projects, tenants = [], []
    with ctx.scope():
        if ctx.access is None:
            receivers = Tenant.objects.all_tenants().filter(status=Tenant.Status.ACTIVE, purge_after=None)
            tenants = list(receivers.order_by("name", "pk").values_list("pk", "name")[:MAX_RECEIVERS])
        else:
            projects = list(named_rows(Project.objects.for_tenant(ctx.tenant)))
    models = [spec.name for spec in served_specs()]
    form = NewAlertRule(metric, bound_data(ctx), projects=projects, models=models, tenants=tenants)

    def create(data: dict[str, Any]) -> AlertRule:
        with ctx.scope():
            tenant = (
                Tenant.objects.all_tenants().get(pk=int(data["tenant"])) if ctx.access is None else ctx.access.tenant
            )
            project = Project.objects.for_tenant(tenant).get(pk=int(data["project"])) if data.get("project") else None
        return do_create_alert_rule(
            tenant, metric=metric, **form.chosen(), project=project, model=data.get("model") or ""
        )

    tabs = [{"label": rules.METRICS[each], "url": f"?metric={each}", "current": each == metric} for each in metrics]
    return form_view(
        ctx,
        _("New alert rule"),
        form,
        create,
        message=lambda _made: _("Alert rule created. It is checked every minute."),
        template="alerts/page.html#rule_form",
        tabs=tabs,
        **_sheet(ctx, _("Create rule")),
    )


def edit_rule(ctx: PageContext) -> HttpResponse:
    row = _changeable_rule(ctx)
    form = AlertRuleForm(Metric(row.metric), bound_data(ctx), row)
    return form_view(
        ctx,
        _("Edit alert rule"),
        form,
        lambda _data: do_change_alert_rule(row, **form.chosen()),
        message=lambda _done: _("Alert rule updated"),
        template="alerts/page.html#rule_form",
        **_sheet(ctx, _("Save")),
    )


def mute_rule(ctx: PageContext) -> HttpResponse:
    row = _rule_in_url(ctx)
    form = MuteForm(bound_data(ctx))

    def message(changed: AlertRule) -> str:
        until = changed.muted_until and changed.muted_until.astimezone(ctx.zone)
        if until is None:
            return _("Alerts of this rule are sent.")
        return _("Alerts of this rule are muted until %(when)s.") % {"when": day_text(until, "j F, H:i")}

    return form_view(
        ctx,
        _("Mute alert rule"),
        form,
        lambda _data: do_change_alert_rule(row, muted_until=form.until(ctx.now)),
        message=message,
        effect=_(
            "Muted alerts are in the history. They are not sent by email, webhook or channel, also not afterwards."
        ),
        **_sheet(ctx, _("Save")),
    )


def remove_rule(ctx: PageContext) -> HttpResponse:
    row = _changeable_rule(ctx)
    return form_view(
        ctx,
        _("Remove alert rule"),
        forms.Form(bound_data(ctx)),
        lambda _data: do_remove_alert_rule(row),
        message=lambda _done: _("Alert rule removed"),
        effect=_("This rule sends no more alerts: “%(words)s” Its history is kept.") % {"words": rules.in_words(row)},
        danger=True,
        **_sheet(ctx, _("Remove rule")),
    )


def acknowledge_alert(ctx: PageContext) -> HttpResponse:
    row = ctx.get(lambda: rules.visible_alerts(ctx).filter(pk=ctx.arguments["rule_alert"]))
    do_acknowledge_rule_alert(row)
    return redirect_with_message(ctx, _back(ctx), _("Alert acknowledged"))


def _chosen_metric(ctx: PageContext, metrics: tuple[Metric, ...]) -> Metric:
    wanted = ctx.query.get("metric", metrics[0])
    if wanted not in metrics:
        raise Http404
    return Metric(wanted)


def _rule_in_url(ctx: PageContext) -> AlertRule:
    return ctx.get(lambda: rules.visible_rules(ctx).filter(pk=ctx.arguments["alert_rule"]))


def _changeable_rule(ctx: PageContext) -> AlertRule:
    """Return the rule in the URL; 404 for a tenant's user if only operators may change it."""
    row = _rule_in_url(ctx)
    if ctx.access is not None and row.is_of_platform:
        raise Http404
    return row


def _back(ctx: PageContext) -> str:
    return f"{ctx.url('operator-alerts')}?show=rules" if ctx.access is None else ctx.url("alerts-rules")


def _sheet(ctx: PageContext, submit: str) -> dict[str, Any]:
    title = _("Alerts") if ctx.access is None else _("Alert rules")
    return {
        "submit": submit,
        "back": _back(ctx),
        "breadcrumbs": (Breadcrumb(title, _back(ctx)),),
        "action_url": ctx.request.get_full_path(),
    }


urlpatterns = [
    path("t/<slug:slug>/alerts/rules/", alert_rules, name="alerts-rules"),
    path(
        "t/<slug:slug>/alerts/rules/new",
        tenant_page(WRITES, methods=FORM, cost=PAGE_COST)(new_rule),
        name="alerts-rules-new",
    ),
    path(
        "t/<slug:slug>/alerts/rules/<int:alert_rule>/edit",
        tenant_page(WRITES, methods=FORM)(edit_rule),
        name="alerts-rules-edit",
    ),
    path(
        "t/<slug:slug>/alerts/rules/<int:alert_rule>/mute",
        tenant_page(WRITES, methods=FORM, step_up=False)(mute_rule),
        name="alerts-rules-mute",
    ),
    path(
        "t/<slug:slug>/alerts/rules/<int:alert_rule>/remove",
        tenant_page(WRITES, methods=FORM)(remove_rule),
        name="alerts-rules-remove",
    ),
    path(
        "t/<slug:slug>/alerts/rules/alerts/<int:rule_alert>/acknowledge",
        tenant_page(WRITES, methods=("POST",), step_up=False)(acknowledge_alert),
        name="alerts-rules-acknowledge",
    ),
    PANELS.tenant_url("t/<slug:slug>/alerts/rules/", READS),
]
