"""Screens of alerts and channels. The budgets' screens create the alerts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from inference_worker.contract.texts import Text
from tests.support.frontend.console import Screen, World, register

FORMS = ("populated",)


def prepare(world: World) -> None:
    from billing.models import BudgetAlert  # here: Django is not set up on import
    from tenants.actions.channels import do_create_pagerduty_channel
    from tenants.isolation.scopes import tenant_scope

    tenant = world.tenants["populated"]
    do_create_pagerduty_channel(tenant, "k" * 32, description="On call")
    with tenant_scope(tenant):
        alert = BudgetAlert.objects.for_tenant(tenant).order_by("pk").first()
    world.rows["populated.alert"] = alert.pk if alert else 0
    for state in ("populated", "over"):
        _add_rules(world, state)


def _add_rules(world: World, state: str) -> None:
    """Add a rule of each metric, with open, resolved, acknowledged and muted alerts."""
    from millrace.apps.alerts.actions import do_change_alert_rule, do_create_alert_rule
    from millrace.apps.alerts.models import AlertRule, RuleAlert
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    tenant, now = world.tenants[state], datetime.now(UTC)
    errors = do_create_alert_rule(tenant, metric="error_rate", threshold=250, project=world.projects[state])
    do_create_alert_rule(tenant, metric="ttft_p95", threshold=2000, model="smollm2-135m", window_minutes=60)
    do_create_alert_rule(tenant, metric="key_expiry", threshold=14)
    credit = do_create_alert_rule(tenant, metric="credit", threshold=10 * 10**9)
    do_change_alert_rule(credit, muted_until=now + timedelta(days=1))
    for metric in AlertRule.OF_PLATFORM:
        do_create_alert_rule(tenant, metric=metric, threshold=5)
    summary = Text(
        "Error rate is %(rate)s, above %(limit)s: %(failed)s of %(requests)s failed in %(duration)s",
        rate="7.31%",
        limit="2.50%",
        failed=42,
        requests=Text("%(number)s requests", number=574),
        duration=Text("%(number)s minute", "%(number)s minutes", number=15),
    )
    low = Text("Credit balance is %(left)s, below %(least)s", left="$4.12", least="$10.00")
    silent = Text("%(replica)s sent no heartbeat for %(seconds)s s", replica="w1/m", seconds=30)
    given = {"tenant": tenant, "threshold": 250, "created_at": now, "last_seen_at": now}
    with all_tenants_scope(BypassReason.COMMAND):
        RuleAlert.objects.create(rule=errors, summary=summary, value=731, samples=574, **given)
        done = {"resolved_at": now, "acknowledged_at": now, "acknowledged_by": "owner@example.com"}
        RuleAlert.objects.create(rule=credit, summary=low, is_muted=True, **given)
        last = RuleAlert.objects.create(rule=errors, summary=summary, value=731, samples=574, **given, **done)
        platform = AlertRule.objects.all_tenants().filter(tenant=tenant, metric="replica_down").get()
        RuleAlert.objects.create(rule=platform, summary=silent, subject="7", **given)
    world.rows |= {f"{state}.alert_rule": errors.pk, f"{state}.rule_alert": last.pk}
    world.rows[f"{state}.platform_rule"] = platform.pk


register(
    Screen("alerts", "/t/{slug}/alerts/", queries=30),
    Screen("alerts-slack", "/t/{slug}/alerts/slack", queries=12, states=("populated",)),
    Screen("alerts-pagerduty", "/t/{slug}/alerts/pagerduty", queries=12, states=("populated",)),
    Screen("budgets-mute", "/t/{slug}/budgets/{budget}/mute", queries=14, states=("populated",)),
    Screen("alerts-rules", "/t/{slug}/alerts/rules/", queries=30),
    *(
        Screen(f"alerts-rules-new-{metric}", f"/t/{{slug}}/alerts/rules/new?metric={metric}", queries=14, states=FORMS)
        for metric in ("error_rate", "ttft_p95", "key_expiry", "credit")
    ),
    *(
        Screen(f"alerts-rules-{verb}", f"/t/{{slug}}/alerts/rules/{{alert_rule}}/{verb}", queries=14, states=FORMS)
        for verb in ("edit", "mute", "remove")
    ),
    Screen("operator-alerts-rules", "/operator/alerts/?show=rules", queries=20, who="operator", states=FORMS),
    Screen(
        "operator-alerts-rules-new",
        "/operator/alerts/rules/new?metric=upstream_down",
        queries=12,
        who="operator",
        states=FORMS,
    ),
    Screen(
        "operator-alerts-rules-edit",
        "/operator/alerts/rules/{platform_rule}/edit",
        queries=12,
        who="operator",
        states=FORMS,
    ),
    prepare=prepare,
    theirs={
        "alert": lambda world: world.rows["populated.alert"],
        "alert_rule": lambda world: world.rows["populated.alert_rule"],
        "rule_alert": lambda world: world.rows["populated.rule_alert"],
    },
)
