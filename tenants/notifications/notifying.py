"""Writing of notifications, with their emails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db.models import Model, QuerySet

from tenants.audit import current_actor
from tenants.models import Notification, NotificationChannel, NotificationRead, Tenant
from tenants.notifications.kinds import NotificationKind
from tenants.outbox.email_outbox import enqueue_email


@dataclass(frozen=True)
class Notice:
    """The content of a notification.

    key: identifies the event in its tenant, so that it is reported once.
    link: path of the object's page, below `/t/<slug>/` or `/operator/`.
    """

    key: str
    text: str
    link: str


def notify(
    kind: NotificationKind,
    tenant_id: int | None,
    *notices: Notice,
    has_own_email: bool = False,
    actor_id: int | None = None,
) -> list[Notification]:
    """Write notifications and one email for them, in the caller's transaction and scope.

    A concurrent call with the same key waits for this transaction, and then finds the notification.

    Args:
        tenant_id: None for operators.
        has_own_email: True if the caller writes an email with more details.
        actor_id: the user who caused it and does not see it; None: the current actor.

    Returns:
        The notifications that are new.
    """
    actor = current_actor().user_id if actor_id is None else actor_id
    new = []
    for notice in notices:
        row, is_new = rows_of(Notification, tenant_id).get_or_create(
            tenant_id=tenant_id,
            deduplication_key=f"{kind.name}:{notice.key}",
            defaults={"kind": kind.name, "text": notice.text, "link": notice.link, "actor_user_id": actor},
        )
        if is_new:
            new.append(row)
    if new and not has_own_email and _has_recipients(kind, tenant_id):
        _write_email(kind, tenant_id, new, actor)
    return new


def drop_notifications(kind: NotificationKind, tenant_id: int | None, link: str) -> None:
    """Delete the notifications about an object that needs no attention any more."""
    delete_notifications(rows_of(Notification, tenant_id).filter(kind=kind.name, link=link))


def delete_notifications(rows: QuerySet[Notification]) -> int:
    """Delete notifications and the marks of their readers. Returns their number. The scope must be open.

    The lock is that of `tenants.notifications.reading`, which marks them as read concurrently.
    """
    locked = rows.order_by("pk").select_for_update(of=("self",))
    found = list(locked.values_list("pk", flat=True))
    NotificationRead._base_manager.filter(notification__in=found).delete()
    Notification._base_manager.filter(pk__in=found).delete()
    return len(found)


def rows_of(model: type[Model], tenant_id: int | None) -> QuerySet[Any]:
    """Return the rows of a tenant, or those of operators if `tenant_id` is None. The scope must be open."""
    manager: Any = model.objects  # type: ignore[attr-defined]
    rows: QuerySet[Any] = (
        manager.all_tenants().filter(tenant=None) if tenant_id is None else manager.for_tenant(tenant_id)
    )
    return rows


def _has_recipients(kind: NotificationKind, tenant_id: int | None) -> bool:
    """Return whether the email may have recipients: an email without them would count as failed."""
    if kind.is_emailed:
        return True
    return rows_of(NotificationChannel, tenant_id).filter(kind=kind.name, by_email=True).exists()


def _write_email(
    kind: NotificationKind, tenant_id: int | None, rows: Sequence[Notification], actor: int | None
) -> None:
    home = settings.MILLRACE.base_url
    if tenant_id is None:
        base, about = f"{home}/operator/", "This is a notification for operators."
    else:
        tenant = Tenant.objects.for_tenant(tenant_id).get()
        base, about = f"{home}/t/{tenant.slug}/", f"This is a notification of {tenant.name}."
    link = rows[0].link if len(rows) == 1 else "notifications/"
    more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
    lines = "\n".join(row.text for row in rows)
    subject = f"{rows[0].text[:180]}{more}"
    body = f"{lines}\n\n{about}\n\n{base}{link}"
    enqueue_email(tenant_id, sorted(kind.roles), subject, body, kind=kind, except_user_id=actor)
