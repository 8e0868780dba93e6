"""Periodic work on notifications: those of expiring API keys, and the removal of old ones."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any

from django.db import connection

from inference_worker.contract.texts import Text
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import ApiKey, Notification
from tenants.notifications.kinds import KEY_EXPIRES
from tenants.notifications.notifying import Notice, delete_notifications, notify

RETENTION = timedelta(days=90)
MAX_NOTIFICATIONS = 500  # notifications of a tenant, or of operators
EXPIRY_NOTICE = timedelta(days=7)  # time from the notification to the expiration of a key
MAX_EXPIRING_KEYS = 100  # keys of a tenant, the first ones to expire
_BATCH = 1000
# Only a tenant with new notifications can have too many.
_RECENT = timedelta(hours=1)

# Keys that were created for so short a time, and keys that have a replacement, expire as intended.
_EXPIRING = """
SELECT tenant_id, id FROM (
    SELECT key.tenant_id, key.id, key.expires_at,
        row_number() OVER (PARTITION BY key.tenant_id ORDER BY key.expires_at, key.id) AS place
    FROM tenants_apikey key JOIN tenants_tenant tenant ON tenant.id = key.tenant_id AND tenant.status <> 'purged'
    WHERE key.revoked_at IS NULL AND key.expires_at > %(now)s AND key.expires_at <= %(until)s
        AND key.expires_at - key.created_at > %(before)s
        AND NOT EXISTS (SELECT FROM tenants_apikey other WHERE other.replaces_id = key.id AND other.revoked_at IS NULL)
) expiring
WHERE place <= %(most)s AND NOT EXISTS (
    SELECT FROM tenants_notification known WHERE known.tenant_id = expiring.tenant_id
        AND known.deduplication_key
            = %(kind)s || ':' || expiring.id || ':' || floor(extract(epoch FROM expiring.expires_at))::bigint)
ORDER BY expires_at, id LIMIT %(batch)s
"""
_EXCESS = """
SELECT id FROM (
    SELECT id, row_number() OVER (PARTITION BY tenant_id ORDER BY id DESC) AS place FROM tenants_notification
    WHERE coalesce(tenant_id, 0) IN (
        SELECT DISTINCT coalesce(tenant_id, 0) FROM tenants_notification WHERE created_at >= %s)
) ordered WHERE place > %s LIMIT %s
"""


def notify_of_expiring_keys(now: datetime) -> int:
    """Notify the tenants of API keys that expire soon, once for each date. Returns the number of notifications."""
    new = 0
    while True:
        found = defaultdict[int, list[int]](list)
        with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
            values: dict[str, Any] = {"now": now, "until": now + EXPIRY_NOTICE, "before": EXPIRY_NOTICE}
            values |= {"most": MAX_EXPIRING_KEYS, "kind": KEY_EXPIRES.name, "batch": _BATCH}
            cursor.execute(_EXPIRING, values)
            for tenant_id, key_id in cursor.fetchall():
                found[tenant_id].append(key_id)
        written = sum(_notify_tenant(tenant_id, key_ids) for tenant_id, key_ids in found.items())
        new += written
        if not written:  # also if another process has written the same ones
            return new


def _notify_tenant(tenant_id: int, key_ids: list[int]) -> int:
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        keys = ApiKey.objects.for_tenant(tenant_id).filter(pk__in=key_ids, revoked_at=None).order_by("expires_at", "pk")
        notices = [
            Notice(
                f"{key.pk}:{int(key.expires_at.timestamp())}",
                Text(
                    "API key %(name)s (%(prefix)s…) expires on %(expires_at)s",
                    name=key.name,
                    prefix=key.prefix,
                    expires_at=key.expires_at,
                ),
                f"keys/{key.pk}/",
            )
            for key in keys
            if key.expires_at is not None
        ]
        return len(notify(KEY_EXPIRES, tenant_id, *notices))


def remove_old_notifications(now: datetime) -> int:
    """Remove notifications that are too old, and the oldest ones of tenants with too many. Returns their number."""
    removed = 0
    while True:
        with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
            old = Notification.objects.all_tenants().filter(created_at__lt=now - RETENTION)
            ids = list(old.values_list("pk", flat=True)[:_BATCH])
            cursor.execute(_EXCESS, [now - _RECENT, MAX_NOTIFICATIONS, _BATCH])
            ids += [row[0] for row in cursor.fetchall()]
            removed += delete_notifications(Notification.objects.all_tenants().filter(pk__in=ids))
        if not ids:
            return removed
