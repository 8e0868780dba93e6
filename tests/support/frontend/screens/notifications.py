"""Screens of notifications: every kind, read and unread, and the table of channels."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from inference_worker.contract.texts import Text
from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    for state in ("populated", "over"):
        world.rows[f"{state}.notification"] = _write_each(world.tenants[state], world.owner)
    _write_for_operators(world)


def _write_each(tenant: Any, owner: Any) -> int:
    """Write a notification of each kind of a tenant, of which one is read. Return the ID of an unread one."""
    from tenants.isolation.scopes import tenant_scope  # here: Django is not set up on import
    from tenants.notifications import kinds
    from tenants.notifications.notifying import Notice, notify
    from tenants.notifications.reading import Viewer, mark_read

    long_name = "budget-of-the-support-team-" + "x" * 120
    texts = {
        kinds.BUDGET_THRESHOLD: Text("%(used)s of the budget %(name)s is used", used="80%", name=long_name),
        kinds.INVOICE_ISSUED: Text("Invoice %(number)s was issued: %(total)s", number="2026-0001", total="$261.09"),
        kinds.INVOICE_PAST_DUE: Text(
            "Invoice %(number)s is past due: %(owed)s outstanding", number="2026-0001", owed="$261.09"
        ),
        kinds.KEY_EXPIRES: Text(
            "API key %(name)s (%(prefix)s…) expires on %(expires_at)s",
            name="prod-search",
            prefix="sk-mr-1a2b",
            expires_at=datetime(2026, 12, 7, 12, tzinfo=UTC),
        ),
        kinds.EXPERIMENT_STOPPED: Text("Experiment %(name)s reached its planned end", name="cheaper"),
    }
    with tenant_scope(tenant):
        rows = [
            notify(kind, tenant.pk, Notice("shown", text, ""), has_own_email=True)[0] for kind, text in texts.items()
        ]
        viewer = Viewer(tenant.pk, f"user:{owner.pk}", owner.pk, tuple(kind.name for kind in texts))
        mark_read(viewer, [rows[1].pk])
    return rows[0].pk


def _write_for_operators(world: World) -> None:
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope
    from tenants.notifications import kinds
    from tenants.notifications.notifying import Notice, notify

    text = Text(
        "Draft price version %(version)s by %(author)s waits for approval", version="7", author="pat@example.com"
    )
    with all_tenants_scope(BypassReason.COMMAND):
        (row,) = notify(kinds.PRICE_DRAFT, None, Notice("shown", text, "prices/"), has_own_email=True)
    world.rows["populated.operator_notification"] = row.pk


register(
    Screen("notifications", "/t/{slug}/notifications/", queries=16),
    Screen("notifications-unread", "/t/{slug}/notifications/?show=unread", queries=16, states=("populated", "empty")),
    Screen("notifications-channels", "/t/{slug}/notifications/channels", queries=12, states=("populated",)),
    Screen(
        "operator-notifications",
        "/operator/notifications/",
        queries=16,
        who="operator",
        states=("populated", "error"),
    ),
    Screen(
        "operator-notifications-channels",
        "/operator/notifications/channels",
        queries=14,
        who="operator",
        states=("populated",),
    ),
    prepare=prepare,
    theirs={"notification": lambda world: world.rows["populated.notification"]},
)
