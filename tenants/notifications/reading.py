"""What a viewer sees of the notifications, and which of them are read.

Roles and channels apply when notifications are read: a member who loses a role no longer sees those of the role.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.db.models import Exists, Q, QuerySet

from tenants.authentication import Access, KeyCaller
from tenants.models import Membership, Notification, NotificationRead
from tenants.notifications.kinds import KEY_ROLES, NOTIFICATION_KINDS, kinds_of
from tenants.notifications.notifying import rows_of
from tenants.notifications.selection import reads_of, select_visible

MAX_MARKED = 200  # notifications that one call of the API marks
_SNAPSHOT = re.compile(r"\d{1,18}:\d{1,18}:(\d{1,18}(,\d{1,18}){0,999})?")
# Transactions last shorter than this. Older notifications are also marked if their transaction's number is not known
# to the snapshot, as after a restored backup.
_SETTLED = timedelta(hours=1)


@dataclass(frozen=True)
class Viewer:
    """A user or an API key, and the kinds of notifications that they may see.

    tenant_id: None for an operator's own notifications.
    reader: the name under which they are marked as read.
    since: older ones are not shown, because the user was no member yet.
    """

    tenant_id: int | None
    reader: str
    user_id: int | None
    kinds: tuple[str, ...]
    since: datetime | None = None


def viewer_of(caller: Any, access: Access | None) -> Viewer:
    """Return the viewer for a caller's access to a tenant. None: an operator's own notifications.

    An operator sees all kinds of a tenant. The scope must be open.
    """
    if isinstance(caller, KeyCaller):
        roles = {KEY_ROLES[scope] for scope in caller.key.scopes if scope in KEY_ROLES}
        names = [name for name, kind in NOTIFICATION_KINDS.items() if not roles.isdisjoint(kind.roles)]
        return Viewer(caller.key.tenant_id, f"key:{caller.key.pk}", None, tuple(names), caller.key.created_at)
    reader = f"user:{caller.pk}"
    if access is None:
        return Viewer(None, reader, caller.pk, tuple(kind.name for kind in kinds_of(None)))
    if access.role is None:
        names = [name for name, kind in NOTIFICATION_KINDS.items() if not kind.is_for_operators]
        return Viewer(access.tenant.pk, reader, None, tuple(names))
    member = Membership.objects.for_tenant(access.tenant).filter(user_id=caller.pk).first()
    if member is None:
        return Viewer(access.tenant.pk, reader, caller.pk, ())
    kinds = tuple(kind.name for kind in kinds_of(member.role))
    return Viewer(access.tenant.pk, reader, caller.pk, kinds, member.created_at)


def visible_notifications(viewer: Viewer) -> QuerySet[Any]:
    """Return the notifications that the viewer sees, with `is_read`. The scope must be open."""
    rows = rows_of(Notification, viewer.tenant_id)
    if viewer.since is not None:
        rows = rows.filter(created_at__gte=viewer.since)
    rows = rows.annotate(is_read=Exists(reads_of(viewer.reader)))
    return select_visible(rows, Q(kind__in=viewer.kinds), viewer.user_id, is_of_tenant=viewer.tenant_id is not None)


def count_unread(viewer: Viewer) -> int:
    """Return the number of notifications that the viewer has not read. The scope must be open."""
    return visible_notifications(viewer).filter(is_read=False).count()


def current_snapshot() -> str:
    """Return the name of what this transaction sees, for `mark_seen`."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_current_snapshot()::text")
        return str(cursor.fetchone()[0])


def mark_read(viewer: Viewer, ids: list[int]) -> int:
    """Mark visible notifications as read. Returns how many were unread. The scope must be open."""
    return _mark(viewer, visible_notifications(viewer).filter(pk__in=ids))


def mark_seen(viewer: Viewer, snapshot: str, now: datetime) -> int:
    """Mark as read what was visible in a snapshot: a page of the list with `current_snapshot`.

    Notifications that arrived since are left unread, whatever the order of their IDs and commits. Returns how many
    were unread. The scope must be open.

    Raises:
        ValueError: the snapshot is not one.
    """
    if not _SNAPSHOT.fullmatch(snapshot):
        raise ValueError("not a snapshot")
    first, end, running = snapshot.split(":")
    pending = [int(number) for number in running.split(",") if number]
    is_seen = Q(xid__lt=int(first)) | (Q(xid__lt=int(end)) & ~Q(xid__in=pending))
    rows = visible_notifications(viewer).filter(is_seen | Q(created_at__lt=now - _SETTLED))
    return _mark(viewer, rows)


def _mark(viewer: Viewer, rows: QuerySet[Any]) -> int:
    # NOTE: the lock keeps a concurrent job from deleting the notifications first.
    unread = list(
        rows.filter(is_read=False)
        .order_by("pk")
        .select_for_update(no_key=True, of=("self",))
        .values_list("pk", flat=True)
    )
    marks = [NotificationRead(tenant_id=viewer.tenant_id, notification_id=pk, reader=viewer.reader) for pk in unread]
    rows_of(NotificationRead, viewer.tenant_id).bulk_create(marks, ignore_conflicts=True)
    return len(marks)
