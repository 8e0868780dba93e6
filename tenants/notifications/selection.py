"""The selection of notifications that a user sees, as expressions of queries."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Case, Count, Exists, IntegerField, OuterRef, Q, QuerySet, Subquery, Value, When
from django.db.models.functions import Coalesce
from django.db.models.lookups import Exact

from tenants.models import Membership, Notification, NotificationChannel, NotificationRead
from tenants.notifications.kinds import kinds_of


def unread_of_members(user_id: int, slug: str) -> Case:
    """Return the expression that counts a member's unread notifications of one tenant, for rows of memberships."""
    kinds = reduce(
        or_,
        (
            Q(Exact(OuterRef("role"), Value(role)), kind__in=[kind.name for kind in kinds_of(role)])
            for role in Membership.Role.values
        ),
    )
    of_tenant = Notification._base_manager.filter(
        tenant_id=OuterRef("tenant_id"), created_at__gte=OuterRef("created_at")
    )
    rows = select_visible(of_tenant, kinds, user_id, is_of_tenant=True).filter(~Exists(reads_of(f"user:{user_id}")))
    counted = rows.order_by().values("tenant_id").annotate(number=Count("pk")).values("number")
    return Case(When(tenant__slug=slug, then=Coalesce(Subquery(counted), 0)), default=0, output_field=IntegerField())


def select_visible(rows: QuerySet[Any], kinds: Q, user_id: int | None, *, is_of_tenant: bool) -> QuerySet[Any]:
    """Return the notifications of these kinds, without the user's own and those that the user hides."""
    if user_id is None:
        return rows.filter(kinds)
    of_tenant = {"tenant_id": OuterRef("tenant_id")} if is_of_tenant else {"tenant__isnull": True}
    hidden = NotificationChannel._base_manager.filter(
        user_id=user_id, kind=OuterRef("kind"), in_console=False, **of_tenant
    )
    return rows.filter(kinds, Q(actor_user_id=None) | ~Q(actor_user_id=user_id)).filter(~Exists(hidden))


def reads_of(reader: str) -> QuerySet[NotificationRead]:
    """Return the marks of a reader for a subquery of notifications."""
    return NotificationRead._base_manager.filter(notification_id=OuterRef("pk"), reader=reader)
