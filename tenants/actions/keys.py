"""Actions on API keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection

from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions.common import ActionRefused, Conflict, check, locked_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys import ip_allowlist, playground_tokens, snapshot
from tenants.keys.key_snapshots import rebuild_key_snapshots
from tenants.models import ApiKey, ChangeEventRow, LimitSet, Project, Tenant, User
from tenants.outbox import change_feed

MAX_OVERLAP = timedelta(days=30)
MAX_COST_CENTERS = 200  # distinct texts of a tenant's keys
CHANGEABLE = ("name", "scopes", "allowed_models", "allowed_ip_ranges", "cost_center", "expires_at")


def do_create_api_key(
    project: Project,
    name: str,
    *,
    scopes: Sequence[str] = ("inference", "models"),
    allowed_models: Sequence[str] | None = None,
    allowed_ip_ranges: Sequence[str] | None = None,
    cost_center: str = "",
    expires_at: datetime | None = None,
    created_by: User | None = None,
) -> tuple[ApiKey, str]:
    """Create a key and return it with its secret, which is not stored.

    Raises:
        ActionRefused: a scope is unknown, an IP range or the cost center is not valid, or the expiration date is in the
            past.
        Conflict: the keys of the tenant have MAX_COST_CENTERS other cost centers.
    """
    with locked_tenant(project.tenant_id) as tenant:
        key = ApiKey(tenant=tenant, project=project, created_by=created_by)
        _set(
            key,
            {
                "name": name,
                "scopes": scopes,
                "allowed_models": allowed_models,
                "allowed_ip_ranges": allowed_ip_ranges,
                "cost_center": cost_center,
                "expires_at": expires_at,
            },
        )
        secret = _issue(key)
        audit.record("key.created", key, tenant_id=tenant.pk, after=audit.serialize_for_audit(key))
        rebuild_key_snapshots(tenant, ChangeEventRow.ChangeType.KEY, key)
    return key, secret


def do_update_api_key(key: ApiKey, **fields: Any) -> ApiKey:
    """Change fields in CHANGEABLE of an active key.

    Raises:
        ActionRefused: a value is not valid, as in do_create_api_key.
        Conflict: the key is revoked or expired.
    """
    with locked_tenant(key.tenant_id) as tenant:
        row = _live(tenant, key)
        before = audit.serialize_for_audit(row)
        _set(row, fields)
        row.save(update_fields=list(fields))
        audit.record("key.updated", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
        rebuild_key_snapshots(tenant, ChangeEventRow.ChangeType.KEY, row)
    return row


def do_rotate_api_key(key: ApiKey, overlap: timedelta, *, created_by: User | None = None) -> tuple[ApiKey, str]:
    """Create a key with the same rights, and let the old key expire after the overlap.

    If the old key expires sooner, its expiration date does not change. If the old key had a lifetime, the new key has
    the same lifetime from now.

    Raises:
        ActionRefused: the overlap is negative or longer than MAX_OVERLAP.
        Conflict: the key is revoked or expired, or already rotated.
    """
    if not timedelta(0) <= overlap <= MAX_OVERLAP:
        raise ActionRefused(Text("Choose an overlap of %(days)s days or less.", days=MAX_OVERLAP.days))
    now = datetime.now(UTC)
    with locked_tenant(key.tenant_id) as tenant:
        old = _live(tenant, key)
        if ApiKey.objects.for_tenant(tenant).filter(replaces=old, revoked_at__isnull=True).exists():
            raise Conflict(Text("This key was already rotated. Rotate its replacement instead."))
        before = audit.serialize_for_audit(old)
        new = ApiKey(
            tenant=tenant,
            project_id=old.project_id,
            name=old.name,
            scopes=old.scopes,
            allowed_models=old.allowed_models,
            allowed_ip_ranges=old.allowed_ip_ranges,
            cost_center=old.cost_center,
            expires_at=None if old.expires_at is None else now + (old.expires_at - old.created_at),
            created_by=created_by,
            replaces=old,
        )
        secret = _issue(new)
        old.expires_at = min(now + overlap, old.expires_at or datetime.max.replace(tzinfo=UTC))
        old.save(update_fields=["expires_at"])
        _copy_limits(tenant, old, new)
        audit.record("key.rotated", old, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(old))
        audit.record("key.created", new, tenant_id=tenant.pk, after=audit.serialize_for_audit(new))
        rebuild_key_snapshots(tenant, ChangeEventRow.ChangeType.KEY, old)
        rebuild_key_snapshots(tenant, ChangeEventRow.ChangeType.KEY, new)
    return new, secret


def do_revoke_api_key(key: ApiKey) -> bool:
    """Revoke the key permanently. Returns False if it is already revoked."""
    now = datetime.now(UTC)
    with locked_tenant(key.tenant_id) as tenant:
        rows = ApiKey.objects.for_tenant(tenant).filter(pk=key.pk)
        if not rows.filter(revoked_at__isnull=True).update(revoked_at=now):
            return False
        row = rows.get()
        before = audit.serialize_for_audit(row) | {"revoked_at": None}
        audit.record("key.revoked", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
        rebuild_key_snapshots(tenant, ChangeEventRow.ChangeType.KEY, row)
    return True


def do_rehash_api_key(key: ApiKey, secret: str) -> bool:
    """Store the key's hash with the newest pepper. Returns False if it already has that pepper."""
    newest = settings.MILLRACE.key_peppers[0]
    return _rehash(key, snapshot.hash_key(secret, newest), newest)


def do_rehash_unpeppered() -> int:
    """Add the newest pepper to all hashes without one, which needs no secrets. Returns the number of changed keys."""
    newest = settings.MILLRACE.key_peppers[0]
    with all_tenants_scope(BypassReason.COMMAND):
        keys = list(ApiKey.objects.all_tenants().filter(pepper="").select_related("tenant"))
    keys = [key for key in keys if key.tenant.status != Tenant.Status.PURGED]
    return sum(_rehash(key, snapshot.with_pepper(bytes(key.key_hash), newest), newest) for key in keys)


def do_create_playground_token(key: ApiKey, user: User) -> str:
    """Create a playground token, with which a user can use the key from a browser without its secret.

    See `tenants.keys.playground_tokens`.

    Raises:
        Conflict: the key is revoked or expired, or has no inference scope.
    """
    now = datetime.now(UTC)
    with locked_tenant(key.tenant_id) as tenant:
        row = _live(tenant, key)
        if "inference" not in row.scopes:
            raise Conflict(Text("This key has no inference permission."))
        audit.record("key.playground_token_created", row, tenant_id=row.tenant_id, after={"user_id": user.pk})
    secret = settings.MILLRACE.secret_key
    return playground_tokens.give(
        secret,
        key_id=row.pk,
        tenant_id=row.tenant_id,
        user_id=user.pk,
        now=now,
        generation=user.session_generation,
    )


def record_key_usage(used: Mapping[int, datetime]) -> None:
    """Store the times of keys' last use, unless newer times are stored. No audit entry is written.

    Gateways do the same without Django (`change_feed.RECORD_USAGE`).
    """
    with all_tenants_scope(BypassReason.KEY_LOOKUP), connection.cursor() as cursor:
        cursor.execute(change_feed.RECORD_USAGE, [list(used), list(used.values())])


def _rehash(key: ApiKey, key_hash: bytes, pepper: str) -> bool:
    with locked_tenant(key.tenant_id) as tenant:
        rows = ApiKey.objects.for_tenant(tenant).filter(pk=key.pk, key_hash=bytes(key.key_hash))
        if bytes(key.key_hash) == key_hash or not rows.update(key_hash=key_hash, pepper=snapshot.pepper_id(pepper)):
            return False
        row = ApiKey.objects.for_tenant(tenant).get(pk=key.pk)
        audit.record(
            "key.rehashed", row, tenant_id=tenant.pk, before={"pepper": key.pepper}, after={"pepper": row.pepper}
        )
        rebuild_key_snapshots(tenant, ChangeEventRow.ChangeType.KEY, row)
    return True


def _issue(key: ApiKey) -> str:
    """Generate the key's secret, save the new key and return the secret."""
    pepper = settings.MILLRACE.key_peppers[0]
    secret = snapshot.new_secret()
    key.prefix = snapshot.visible_prefix(secret)
    key.key_hash, key.pepper = snapshot.hash_key(secret, pepper), snapshot.pepper_id(pepper)
    check(key)
    key.save(force_insert=True)
    return secret


def _set(key: ApiKey, fields: Mapping[str, Any]) -> None:
    """Set fields in CHANGEABLE, and validate them."""
    if unknown := sorted(set(fields) - set(CHANGEABLE)):
        raise ActionRefused(Text("A key's %(unknown)s cannot be changed.", unknown=", ".join(unknown)))
    for name, value in fields.items():
        setattr(key, name, list(value) if name in ("scopes", "allowed_models") and value is not None else value)
    if unknown := sorted(set(key.scopes) - set(snapshot.SCOPES)):
        raise ActionRefused(
            Text(
                "Unknown scope %(unknown)s; known are %(scopes)s.",
                unknown=", ".join(unknown),
                scopes=", ".join(snapshot.SCOPES),
            )
        )
    if not key.scopes:
        raise ActionRefused(Text("Choose at least one permission."))
    if fields.get("expires_at") is not None and fields["expires_at"] <= datetime.now(UTC):
        raise ActionRefused(Text("The expiration date is in the past. Choose a later date."))
    if fields.get("cost_center"):
        key.cost_center = key.cost_center.strip()
        _require_few_cost_centers(key)
    if key.allowed_ip_ranges is not None:
        try:
            key.allowed_ip_ranges = list(ip_allowlist.normalize_networks(key.allowed_ip_ranges))
        except ValueError as exc:
            raise ActionRefused(Text("Allowed IPs: %(error)s.", error=text_of(exc))) from exc
    if key.pk is not None:
        check(key)


def _require_few_cost_centers(key: ApiKey) -> None:
    others = ApiKey.objects.for_tenant(key.tenant_id).exclude(pk=key.pk).exclude(cost_center__in=("", key.cost_center))
    if others.values("cost_center").distinct().order_by().count() >= MAX_COST_CENTERS:
        raise Conflict(
            Text(
                "The keys have %(max_cost_centers)s cost centers. Use one of them, or remove one from its keys.",
                max_cost_centers=MAX_COST_CENTERS,
            )
        )


def _live(tenant: Tenant, key: ApiKey) -> ApiKey:
    row = ApiKey.objects.for_tenant(tenant).filter(pk=key.pk).first()
    if row is None or not row.is_live:
        raise Conflict(Text("This key is revoked or expired. Create a new key."))
    return row


def _copy_limits(tenant: Tenant, old: ApiKey, new: ApiKey) -> None:
    """Copy the limits of the old key to the new key, so that rotation removes none."""
    for limits in LimitSet.objects.for_tenant(tenant).filter(key=old):
        limits.pk, limits.key = None, new
        limits._state.adding = True
        limits.save(force_insert=True)
