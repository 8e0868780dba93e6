"""Screens of routing: a model name with two versions, a withdrawn one, and the editor with a preview."""

from __future__ import annotations

from typing import Any

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from tenants import actions  # here: Django is not set up on import

    for state in ("populated", "over"):
        tenant, key = world.tenants[state], world.keys[state][0]
        actions.do_publish_policy(tenant, "old-name", {"models": ["smollm2-135m"]})
        actions.do_withdraw_policy(tenant, "old-name")
        first = actions.do_publish_policy(tenant, "mine", {"models": ["smollm2-135m", "smollm2-135m-int8"]})
        hours = {"start": "08:00", "end": "18:00", "zone": "Europe/Berlin", "days": ["mon", "tue"]}
        when = {"prompt_tokens": {"at_least": 900}, "keys": [key.pk], "hours": hours, "tools": False}
        big = [{"model": "smollm2-135m-int8"}, {"model": "gone", "weight": 0}]
        split = [{"model": "smollm2-135m", "weight": 9}, {"model": "smollm2-135m-int8"}]
        shadow = {"model": "smollm2-135m-int8", "percent": 20}
        rules = [{"when": when, "targets": big}, {"targets": split}]
        body = {"rules": rules, "fallback_on": ["error"], "shadow": shadow}
        for number in range(3):
            _compare(tenant, number)
        actions.do_publish_policy(tenant, "mine", body, created_by=world.owner, check_targets=False)  # one is gone
        world.rows[f"{state}.policy"] = first.pk
        checked = {
            "name": "Short questions",
            "when": {"task": ["qa"], "metadata": {"team": ["a"]}, "budget_left": {"at_least": 5}, "images": False},
            "strategy": "cheapest",
            "escalate": {"on": ["pattern", "empty"], "pattern": "(yes|no)"},
            "targets": [*split, {"model": "gone", "weight": 0}],
        }
        draft = {"rules": [checked, *rules], "fallback_on": ["error", "timeout"], "first_token_ms": 2000}
        world.rows[f"{state}.policy_draft"] = actions.do_save_policy_draft(
            tenant, "mine", draft, updated_by=world.owner
        ).pk


def _compare(tenant: Any, number: int) -> None:
    """Create a comparison with a shadow. The last one has no answer."""
    from datetime import UTC, datetime, timedelta

    from millrace.apps.policy_results.models import ShadowComparison
    from tenants.isolation.scopes import tenant_scope

    answered = number < 2
    with tenant_scope(tenant):
        ShadowComparison.objects.create(
            tenant_id=tenant.pk,
            started_at=datetime.now(UTC) - timedelta(minutes=1 + number),
            request_id=f"req_{number:032x}",
            requested_model="mine",
            policy_version=2,
            served_model="smollm2-135m",
            shadow_model="smollm2-135m-int8",
            is_operator_paid=False,
            code="" if answered else "server_is_overloaded",
            has_schema=True,
            failure="",
            shadow_failure="schema" if number == 1 else "",
            output_tokens=120,
            cost_femto=9 * 10**10,
            ttft_ms=180,
            total_ms=900,
            shadow_output_tokens=150 if answered else None,
            shadow_cost_femto=4 * 10**10 if answered else None,
            shadow_ttft_ms=120 if answered else None,
            shadow_total_ms=640 if answered else None,
        )


def _newest(tenant: Any) -> int:
    from tenants.actions import do_publish_policy
    from tenants.models import RoutingPolicy

    rows = RoutingPolicy.objects.for_tenant(tenant)
    if not rows.exists():
        small, whole = "smollm2-135m", "smollm2-135m-int8"
        do_publish_policy(tenant, "assistant", {"models": [small]})
        long = {"when": {"prompt_tokens": {"at_least": 400}}, "targets": [{"model": whole}]}
        split = {"targets": [{"model": small, "weight": 9}, {"model": whole}]}
        do_publish_policy(tenant, "assistant", {"rules": [long, split]})
    return int(rows.filter(active=True).order_by("-pk")[0].pk)


def _draft(tenant: Any) -> int:
    from tenants.actions import do_save_policy_draft

    small, whole = "smollm2-135m", "smollm2-135m-int8"
    short = {"name": "Short questions", "when": {"prompt_tokens": {"at_most": 200}}, "targets": [{"model": whole}]}
    checks = {"strategy": "ordered", "escalate": {"on": ["empty"]}, "targets": [{"model": whole}, {"model": small}]}
    return int(do_save_policy_draft(tenant, "assistant", {"rules": [short, checks]}).pk)


ONE = ("populated",)
register(
    Screen("routing-detail", "/t/{slug}/routing/{policy}", queries=24, states=("populated", "over")),
    Screen("routing-edit", "/t/{slug}/routing/edit?from={policy}", queries=38, states=ONE),
    Screen("routing-new", "/t/{slug}/routing/edit", queries=28, states=("populated", "empty")),
    Screen("routing-draft", "/t/{slug}/routing/edit?draft={policy_draft}", queries=36, states=ONE, ready=".rule-row"),
    Screen("routing-discard", "/t/{slug}/routing/drafts/{policy_draft}/discard", 12, states=ONE),
    Screen("routing-unpublish", "/t/{slug}/routing/{policy}/unpublish", 12, states=ONE),
    Screen("routing", "/t/{slug}/routing/", queries=17),
    prepare=prepare,
    theirs={
        "policy": lambda world: world.rows["populated.policy"],
        "draft": lambda world: world.rows["populated.policy_draft"],
    },
    demo={"policy": _newest, "policy_draft": _draft},
)
