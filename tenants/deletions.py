"""The times in which tenants were deleted, from the audit log."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Exists, OuterRef, Q, Subquery

from tenants.models import AuditEntry, Tenant

_DELETED, _RESTORED = "tenant.deleted", "tenant.restored"


def deleted_throughout(starts_at: datetime, ends_at: datetime, tenant_id: int | None = None) -> Q:
    """Return the condition that a tenant was deleted from the start of a time to its end.

    The result for a time that has passed never changes. An all-tenants scope must be open.

    Args:
        tenant_id: the tenant. None: the tenant of each row.
    """
    tenant = OuterRef("tenant_id") if tenant_id is None else tenant_id
    entries = AuditEntry.objects.all_tenants().filter(tenant_id=tenant, object_type="tenant", object_id=tenant)
    before = entries.filter(action__in=(_DELETED, _RESTORED), created_at__lte=starts_at).order_by("-pk")
    restored = entries.filter(action=_RESTORED, created_at__gt=starts_at, created_at__lt=ends_at)
    return Q(Exists(before.filter(pk=Subquery(before.values("pk")[:1]), action=_DELETED))) & ~Q(Exists(restored))


def was_deleted_throughout(tenant_id: int, starts_at: datetime, ends_at: datetime) -> bool:
    """Return whether a tenant was deleted from the start of a time to its end. An all-tenants scope must be open.

    Django compiles the condition in more time than PostgreSQL needs for it, so callers first look for rows to omit.
    """
    rows = Tenant.objects.all_tenants().filter(pk=tenant_id)
    return rows.filter(deleted_throughout(starts_at, ends_at, tenant_id)).exists()
