"""Screens of budgets and quotas, with every owner, unit and mode, and with budget periods, alerts and limits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    for state in ("populated", "over"):
        _fill(world, state)


def _fill(world: World, state: str) -> None:
    from billing.budgets.alerts import check_thresholds
    from billing.budgets.budgets import do_change_budget, do_make_budget  # here: Django is not set up on import
    from billing.models import BudgetPeriod
    from tenants import actions
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    tenant, project, key, now = world.tenants[state], world.projects[state], world.keys[state][0], datetime.now(UTC)
    month = {"unit": "money", "period": "month"}
    whole = do_make_budget(tenant, name="Everything", amount=100 * 10**9, **month)
    trial = do_make_budget(tenant, project=project, name="On trial", amount=10**9, mode="dry_run", **month)
    do_make_budget(tenant, key=key, name="Tokens", unit="tokens", period="day", amount=5_000_000, rollover_limit=9)
    do_make_budget(tenant, member=world.owner, name="Mine", unit="requests", period="lifetime", amount=10, mode="soft")
    do_change_budget(trial, temporary_increase=5 * 10**8, increase_expires_at=now + timedelta(days=3))
    used = {"populated": 60, "over": 100}[state]
    start = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    end = (start + timedelta(days=32)).replace(day=1)
    span = {"tenant_id": tenant.pk, "unit": "money", "period_start": start, "period_end": end}
    with all_tenants_scope(BypassReason.BILLING):
        BudgetPeriod.objects.create(budget_id=whole.pk, used=used * 10**15, reserved=0, rolled_over=0, **span)
        BudgetPeriod.objects.create(
            budget_id=trial.pk, used=3 * 10**14, reserved=10**8, rolled_over=10**7, rejected=4, **span
        )
    limits = actions.do_set_limits(tenant, {"requests_per_minute": 600, "long_prompt_concurrency": 2}, project=project)
    check_thresholds()
    world.rows[f"{state}.budget"] = whole.pk
    world.rows[f"{state}.trial"] = trial.pk
    world.rows[f"{state}.limits"] = limits.pk


def _budget(tenant: Any) -> int:
    from billing.models import Budget

    rows = Budget.objects.for_tenant(tenant).filter(active=True, unit="money").order_by("pk")
    pk: int = rows.values_list("pk", flat=True)[0]
    return pk


def _limits(tenant: Any) -> int:
    from tenants.models import LimitSet

    rows = LimitSet.objects.for_tenant(tenant).filter(set_by_operator=False).order_by("pk")
    pk: int = rows.values_list("pk", flat=True)[0]
    return pk


register(
    Screen("budgets", "/t/{slug}/budgets/", queries=34),
    Screen("budgets-detail", "/t/{slug}/budgets/{budget}/", queries=36, states=("populated", "over", "error")),
    Screen("budgets-trial", "/t/{slug}/budgets/{trial}/", queries=36, states=("populated",)),
    Screen("budgets-new", "/t/{slug}/budgets/new?owner=account", queries=14, states=("populated", "empty")),
    Screen("budgets-edit", "/t/{slug}/budgets/{budget}/edit", queries=14, states=("populated",)),
    Screen("budgets-raise", "/t/{slug}/budgets/{budget}/raise", queries=18, states=("populated",)),
    Screen("budgets-lower", "/t/{slug}/budgets/{trial}/lower", queries=14, states=("populated",)),
    Screen("budgets-remove", "/t/{slug}/budgets/{budget}/remove", queries=12, states=("populated",)),
    Screen("budgets-limits-new", "/t/{slug}/limits/new", queries=18, states=("populated",)),
    Screen("budgets-limits-edit", "/t/{slug}/limits/{limits}/edit", queries=12, states=("populated",)),
    Screen("budgets-limits-remove", "/t/{slug}/limits/{limits}/remove", queries=12, states=("populated",)),
    prepare=prepare,
    theirs={
        "budget": lambda world: world.rows["populated.budget"],
        "limits": lambda world: world.rows["populated.limits"],
    },
    demo={"budget": _budget, "trial": _budget, "limits": _limits},
)
