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
        first = actions.do_publish_policy(tenant, "mine", {"models": ["smollm2-135m", "smollm2-135m-f32"]})
        hours = {"start": "08:00", "end": "18:00", "zone": "Europe/Berlin", "days": ["mon", "tue"]}
        when = {"prompt_tokens": {"at_least": 900}, "keys": [key.pk], "hours": hours, "tools": False}
        big = [{"model": "smollm2-135m-f32"}, {"model": "gone", "weight": 0}]
        split = [{"model": "smollm2-135m", "weight": 9}, {"model": "smollm2-135m-f32"}]
        body = {"rules": [{"when": when, "targets": big}, {"targets": split}], "fallback_on": ["error"]}
        actions.do_publish_policy(tenant, "mine", body, created_by=world.owner)
        world.rows[f"{state}.policy"] = first.pk


def _newest(tenant: Any) -> int:
    from tenants.actions import do_publish_policy
    from tenants.models import RoutingPolicy

    rows = RoutingPolicy.objects.for_tenant(tenant)
    if not rows.exists():
        small, whole = "smollm2-135m", "smollm2-135m-f32"
        do_publish_policy(tenant, "assistant", {"models": [small]})
        long = {"when": {"prompt_tokens": {"at_least": 400}}, "targets": [{"model": whole}]}
        split = {"targets": [{"model": small, "weight": 9}, {"model": whole}]}
        do_publish_policy(tenant, "assistant", {"rules": [long, split]})
    return int(rows.filter(active=True).order_by("-pk")[0].pk)


ONE = ("populated",)
register(
    Screen("routing-detail", "/t/{slug}/routing/{policy}", queries=16, states=("populated", "over")),
    Screen("routing-edit", "/t/{slug}/routing/edit?from={policy}", queries=24, states=ONE),
    Screen("routing-new", "/t/{slug}/routing/edit", queries=20, states=("populated", "empty")),
    Screen("routing-unpublish", "/t/{slug}/routing/{policy}/unpublish", 12, states=ONE),
    Screen("routing", "/t/{slug}/routing/", queries=12),
    prepare=prepare,
    theirs={"policy": lambda world: world.rows["populated.policy"]},
    demo={"policy": _newest},
)
