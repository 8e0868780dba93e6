"""The times in which tenants were deleted, from the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import TypeVar

from django.db.models import Exists, Model, OuterRef, Q, QuerySet, Subquery

from tenants.models import AuditEntry

_DELETED, _RESTORED = "tenant.deleted", "tenant.restored"

M = TypeVar("M", bound=Model)


def deleted_throughout(starts_at: datetime, ends_at: datetime) -> Q:
    """Return the condition that the tenant of a row was deleted from the start of a time to its end.

    The result for a time that has passed never changes. An all-tenants scope must be open.
    """
    entries = AuditEntry.objects.all_tenants().filter(
        tenant_id=OuterRef("tenant_id"), object_type="tenant", object_id=OuterRef("tenant_id")
    )
    before = entries.filter(action__in=(_DELETED, _RESTORED), created_at__lte=starts_at).order_by("-pk")
    restored = entries.filter(action=_RESTORED, created_at__gt=starts_at, created_at__lt=ends_at)
    return Q(Exists(before.filter(pk=Subquery(before.values("pk")[:1]), action=_DELETED))) & ~Q(Exists(restored))


def without_deleted(rows: QuerySet[M], starts_at: datetime, ends_at: datetime) -> list[M]:
    """Return rows of one tenant, or none if the tenant was deleted from the start of a time to its end.

    Most tenants have no such rows. The condition takes Django longer than the rows take PostgreSQL.
    """
    found = list(rows)
    return [] if found and rows.filter(deleted_throughout(starts_at, ends_at)).exists() else found
