"""Actions on tenants and projects."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection
from django.utils.text import slugify

from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions.common import ActionRefused, Conflict, check, insert, locked_tenant
from tenants.actions.members import do_add_member
from tenants.isolation.scopes import tenant_scope
from tenants.keys.key_snapshots import rebuild_key_snapshots
from tenants.models import (
    MAX_SLUG_LENGTH,
    ApiKey,
    ApiKeySnapshotRow,
    ApiKeyUsage,
    AuditEntry,
    ChangeEventRow,
    Experiment,
    IdempotentResponse,
    Invitation,
    LimitSet,
    Membership,
    Notification,
    NotificationChannel,
    NotificationRead,
    OutboxEmail,
    Project,
    RoutingPolicy,
    SavedView,
    Tenant,
    TenantJob,
    UpstreamCredential,
    User,
    WebhookEndpoint,
    WebhookEvent,
)
from tenants.tenant_settings import GROUPS, SETTINGS, problem

_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?")
API_ACCESS_INTERVAL = timedelta(hours=1)


def do_create_tenant(slug: str, name: str, *, owner: User | None = None, is_demo: bool = False) -> Tenant:
    """Create a tenant with its first project, `default`.

    Raises:
        ActionRefused: the slug is not valid. Conflict: the slug is taken.
    """
    tenant = Tenant(pk=_new_id(), slug=slug, name=name, is_demo=is_demo)
    with tenant_scope(tenant):
        insert(tenant, Text("A tenant with the slug %(slug)s already exists. Choose another slug.", slug=repr(slug)))
        audit.record("tenant.created", tenant, tenant_id=tenant.pk, after=audit.serialize_for_audit(tenant))
        do_create_project(tenant, "default", "Default")
        if owner is not None:
            do_add_member(tenant, owner, Membership.Role.OWNER)
    return tenant


def do_update_tenant(tenant: Tenant, *, name: str) -> Tenant:
    """Change the tenant's name."""
    with locked_tenant(tenant) as locked:
        before = audit.serialize_for_audit(locked)
        locked.name = name
        check(locked)
        locked.save(update_fields=["name"])
        audit.record(
            "tenant.updated", locked, tenant_id=locked.pk, before=before, after=audit.serialize_for_audit(locked)
        )
    return locked


def do_update_settings(tenant: Tenant, **values: Any) -> bool:
    """Change settings of the tenant, by their names in `SETTINGS`. Each group of settings has its own audit entry.

    With 0 days of content retention, stored prompts are removed. Cached answers expire as they were stored.
    Returns False if nothing changed.

    Raises:
        ActionRefused: a value is out of range or not one of the choices, or an origin is not valid.
    """
    if "allowed_origins" in values:
        values["allowed_origins"] = _origins(values["allowed_origins"])
    for name, value in values.items():
        if text := problem(SETTINGS[name], value):
            raise ActionRefused(text)
    is_changed = False
    with locked_tenant(tenant) as locked:
        for group, settings_of_group in GROUPS.items():
            fields = {setting.name: values[setting.name] for setting in settings_of_group if setting.name in values}
            if fields:
                is_changed |= _set(locked, f"tenant.{group.name}_updated", **fields)
    return is_changed


def _origins(origins: Iterable[str]) -> list[str]:
    """Return the origins in their normal form, each once.

    Raises:
        ActionRefused: there are too many origins, or one is not an origin.
    """
    setting = SETTINGS["allowed_origins"]
    allowed = sorted({origin.strip().rstrip("/").lower() for origin in origins})
    if len(allowed) > setting.max_items:
        raise ActionRefused(Text("At most %(max_items)s origins are allowed.", max_items=setting.max_items))
    for origin in allowed:
        if len(origin) > setting.max_length or not (origin == "*" or _ORIGIN.fullmatch(origin)):
            raise ActionRefused(
                Text("%(origin)s is not an origin. Use https://host, or * for any origin.", origin=repr(origin[:100]))
            )
    return allowed


def do_suspend_tenant(tenant: Tenant) -> bool:
    """Stop serving the tenant. Returns False if it is already suspended."""
    return _set(tenant, "tenant.suspended", status=Tenant.Status.SUSPENDED)


def do_resume_tenant(tenant: Tenant) -> bool:
    """Serve a suspended tenant again. Returns False if it is not suspended."""
    return _set(tenant, "tenant.resumed", status=Tenant.Status.ACTIVE)


def do_delete_tenant(tenant: Tenant) -> bool:
    """Stop serving the tenant, and schedule its purge. Returns False if it is already scheduled."""
    with locked_tenant(tenant) as locked:
        if locked.purge_after is not None:
            return False
        grace = timedelta(days=settings.MILLRACE.deletion_grace_days)
        return _set(locked, "tenant.deleted", purge_after=datetime.now(UTC) + grace)


def do_restore_tenant(tenant: Tenant) -> bool:
    """Cancel the scheduled purge of a tenant. Returns False if none is scheduled."""
    return _set(tenant, "tenant.restored", purge_after=None)


def do_purge_tenant(tenant: Tenant, *, now: datetime | None = None) -> bool:
    """Remove the data of a tenant whose scheduled purge is due. Returns False if it is not due.

    The tenant's row, audit log and usage are kept for its invoices.
    """
    now = now or datetime.now(UTC)
    with locked_tenant(tenant) as locked:
        if locked.purge_after is None or locked.purge_after > now:
            return False
        before = audit.serialize_for_audit(locked)
        ApiKey.objects.for_tenant(locked).filter(revoked_at__isnull=True).update(revoked_at=now)
        rebuild_key_snapshots(locked, ChangeEventRow.ChangeType.TENANT)
        for model in (ApiKeyUsage, ApiKeySnapshotRow, LimitSet, RoutingPolicy, ApiKey, Project, Invitation, Membership):
            model.objects.for_tenant(locked).delete()
        for message_model in (
            *(WebhookEndpoint, WebhookEvent, OutboxEmail, IdempotentResponse),
            *(UpstreamCredential, Experiment, SavedView, TenantJob),
            *(NotificationRead, Notification, NotificationChannel),
        ):
            message_model.objects.for_tenant(locked).delete()
        locked.status, locked.purge_after = Tenant.Status.PURGED, None
        locked.slug, locked.name = f"purged-{locked.pk}", f"Purged tenant {locked.pk}"
        locked.save(update_fields=["status", "purge_after", "slug", "name"])
        audit.record(
            "tenant.purged", locked, tenant_id=locked.pk, before=before, after=audit.serialize_for_audit(locked)
        )
    return True


def do_start_viewing(tenant: Tenant, until: datetime, why: str) -> None:
    """Write an audit entry about an operator who views the tenant's console until `until` at the latest.

    Raises:
        ActionRefused: the reason is empty. Conflict: the tenant no longer exists.
    """
    if not why.strip():
        raise ActionRefused(Text("Enter a reason."))
    with locked_tenant(tenant) as locked:
        after = {"until": until.isoformat(timespec="seconds"), "why": why.strip()[:200]}
        audit.record("tenant.view_started", locked, tenant_id=locked.pk, after=after)


def do_end_viewing(tenant: Tenant | int) -> None:
    """Write an audit entry about the end of the operator's view."""
    tenant_id = tenant if isinstance(tenant, int) else tenant.pk
    with tenant_scope(tenant_id):
        row = Tenant.objects.for_tenant(tenant_id).get(pk=tenant_id)
        audit.record("tenant.view_ended", row, tenant_id=tenant_id, before={"viewing": True}, after={"viewing": False})


def do_note_api_access(tenant: Tenant, request: str) -> None:
    """Write an audit entry about an operator's use of the API in a tenant, at most once per hour."""
    since = datetime.now(UTC) - API_ACCESS_INTERVAL
    with tenant_scope(tenant):
        same = {"object_type": "tenant", "object_id": tenant.pk, "action": "tenant.api_accessed"}
        rows = AuditEntry.objects.for_tenant(tenant).filter(
            **same, created_at__gt=since, actor_user_id=audit.current_actor().user_id
        )
        if not rows.exists():
            audit.record("tenant.api_accessed", tenant, tenant_id=tenant.pk, after={"request": request[:200]})


def do_create_project(tenant: Tenant, slug: str, name: str) -> Project:
    """Create a project of the tenant. An empty slug is derived from the name.

    Raises:
        ActionRefused: the slug is not valid. Conflict: the slug is taken.
    """
    with locked_tenant(tenant) as locked:
        project = Project(tenant=locked, slug=slug or _free_slug(locked, name), name=name)
        insert(project, Text("A project with the slug %(slug)s already exists. Choose another slug.", slug=repr(slug)))
        audit.record("project.created", project, tenant_id=locked.pk, after=audit.serialize_for_audit(project))
    return project


def do_update_project(project: Project, *, name: str) -> Project:
    """Change the project's name."""
    with locked_tenant(project.tenant_id) as tenant:
        row = _project(project)
        before = audit.serialize_for_audit(row)
        row.name = name
        check(row)
        row.save(update_fields=["name"])
        audit.record("project.updated", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
    return row


def do_delete_project(project: Project) -> None:
    """Delete a project that never had API keys. Usage refers to projects by their keys.

    Raises:
        Conflict: the project has or had keys, or no longer exists.
    """
    with locked_tenant(project.tenant_id) as tenant:
        row = _project(project)
        if ApiKey.objects.for_tenant(tenant).filter(project=row).exists():
            raise Conflict(Text("This project has or had API keys, so it cannot be deleted."))
        audit.record("project.deleted", row, tenant_id=tenant.pk, before=audit.serialize_for_audit(row))
        row.delete()


def _free_slug(tenant: Tenant, name: str) -> str:
    """Return a slug for the name that no project of the locked tenant has: search-bot, search-bot-2."""
    base = slugify(name)[:MAX_SLUG_LENGTH].strip("-_") or "project"
    taken = set(Project.objects.for_tenant(tenant).values_list("slug", flat=True))
    slug, number = base, 1
    while slug in taken:
        number += 1
        ending = f"-{number}"
        slug = base[: MAX_SLUG_LENGTH - len(ending)].rstrip("-_") + ending
    return slug


def _project(project: Project) -> Project:
    row = Project.objects.for_tenant(project.tenant_id).filter(pk=project.pk).first()
    if row is None:
        raise Conflict(Text("This project no longer exists."))
    return row


def _new_id() -> int:
    """Return the ID of the next tenant. The scope of the ID must be open before the row is written."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT nextval(pg_get_serial_sequence('tenants_tenant', 'id'))")
        return int(cursor.fetchone()[0])


def _set(tenant: Tenant, action: str, **fields: object) -> bool:
    """Set fields of the tenant's row and rebuild its key snapshots. Returns False if nothing changed."""
    with locked_tenant(tenant) as locked:
        before = audit.serialize_for_audit(locked)
        if all(getattr(locked, name) == value for name, value in fields.items()):
            return False
        for name, value in fields.items():
            setattr(locked, name, value)
        locked.save(update_fields=list(fields))
        audit.record(action, locked, tenant_id=locked.pk, before=before, after=audit.serialize_for_audit(locked))
        rebuild_key_snapshots(locked, ChangeEventRow.ChangeType.TENANT)
    return True
