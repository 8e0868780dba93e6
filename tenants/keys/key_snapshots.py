"""Compiles keys, with their limits and policies, into the snapshots the data plane reads, and tells the gateways.

Everything here runs inside a verb's transaction (`tenants.actions.common.changing`), so of one tenant once at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import redis
import structlog
from django.db import transaction

from millrace.conf.environment import platform_settings
from tenants.keys import snapshot
from tenants.models import LIMITS, ApiKey, ChangeLog, KeySnapshot, LimitSet, RoutingPolicy, Tenant
from tenants.outbox import change_feed
from tenants.routing_policies import policy

log = structlog.get_logger(__name__)

# KEYS: the copies. ARGV: how many seconds they live; then, for each, the new one and its version.
_REPLACE_OLDER = """
for place, name in ipairs(KEYS) do
    local payload, version = ARGV[2 * place], tonumber(ARGV[2 * place + 1])
    local held = redis.call('GET', name)
    if not held or cmsgpack.unpack(held)['version'] <= version then
        redis.call('SET', name, payload, 'EX', ARGV[1])
    end
end
"""
_BATCH = 500

Compiled = tuple[bytes, snapshot.ApiKeySnapshot]


def recompile(tenant: Tenant, kind: ChangeLog.Kind, key: ApiKey | None = None) -> None:
    """Write the snapshots of the key, or of all the tenant's keys, again, and a row of the change log."""
    keys = ApiKey.objects.for_tenant(tenant).order_by("pk")
    if key is not None:
        keys = keys.filter(pk=key.pk)
    note(tenant, kind, key)
    compiled = _compile(tenant, list(keys))
    transaction.on_commit(partial(tell_gateways, compiled, tenant.pk))


def note(tenant: Tenant, kind: ChangeLog.Kind, key: ApiKey | None = None) -> ChangeLog:
    """Write a row of the change log."""
    return ChangeLog.objects.create(kind=kind, tenant_id=tenant.pk, key_id=None if key is None else key.pk)


def _compile(tenant: Tenant, keys: Sequence[ApiKey]) -> list[Compiled]:
    rows = KeySnapshot.objects.for_tenant(tenant).filter(key__in=keys)
    versions = dict(rows.values_list("key_id", "version"))
    limits = list(LimitSet.objects.for_tenant(tenant))
    policies = list(RoutingPolicy.objects.for_tenant(tenant).filter(active=True).order_by("name"))
    compiled = [
        (bytes(key.key_hash), _snapshot(tenant, key, limits, policies, versions.get(key.pk, 0) + 1)) for key in keys
    ]
    rows.delete()  # and not updated: a hash that was made again is another row
    KeySnapshot.objects.for_tenant(tenant).bulk_create(
        [
            KeySnapshot(
                key_hash=key_hash,
                tenant=tenant,
                key_id=made.key_id,
                version=made.version,
                payload=snapshot.encode(made),
            )
            for key_hash, made in compiled
        ],
        batch_size=_BATCH,
    )
    return compiled


def _snapshot(
    tenant: Tenant, key: ApiKey, limits: Iterable[LimitSet], policies: Iterable[RoutingPolicy], version: int
) -> snapshot.ApiKeySnapshot:
    return snapshot.ApiKeySnapshot(
        key_id=key.pk,
        tenant_id=tenant.pk,
        project_id=key.project_id,
        tenant_slug=tenant.slug,
        scopes=tuple(key.scopes),
        models=None if key.allowed_models is None else tuple(key.allowed_models),
        expires_at=None if key.expires_at is None else round(key.expires_at.timestamp() * 1e6),
        revoked=key.revoked_at is not None,
        suspended=tenant.is_suspended,
        limits=snapshot.LimitSnapshot(tuple(_limit_set(row) for row in limits if _applies(row, key))),
        version=version,
        allowed_addresses=None if key.allowed_addresses is None else tuple(key.allowed_addresses),
        policies=_policies(policies),
        keep_content_days=tenant.keep_content_days,
    )


def _policies(rows: Iterable[RoutingPolicy]) -> dict[str, policy.Policy]:
    found = {}
    for row in rows:
        try:
            found[row.name] = policy.parse(row.body, version=row.version)
        except ValueError as exc:  # of a release that knew other rules: no reason not to revoke a key
            log.error("policy_unreadable", policy=row.name, version=row.version, error=str(exc))
    return found


def _applies(row: LimitSet, key: ApiKey) -> bool:
    return row.key_id in (None, key.pk) and row.project_id in (None, key.project_id)


def _limit_set(row: LimitSet) -> snapshot.LimitSetSnapshot:
    limits = {name: getattr(row, name) for name in LIMITS}
    return snapshot.LimitSetSnapshot(row.pk, row.scope, row.model, row.dry_run, **limits)


def tell_gateways(compiled: Sequence[Compiled], tenant_id: int) -> None:
    """Replace the copies the gateways share, unless they are newer, and wake the gateways to read the change log.

    This only hastens: a gateway reads the change log four times a second and the row behind it, and copies end by
    themselves within a minute. Replaced and not deleted: a gateway that read the old row a moment ago writes its copy
    only where there is none; of two changes the later one's message may come first.
    """
    try:
        with redis.Redis.from_url(platform_settings().valkey_url, socket_timeout=2) as broker:
            for start in range(0, len(compiled), _BATCH):
                batch = compiled[start : start + _BATCH]
                names = [snapshot.valkey_name(key_hash) for key_hash, _ in batch]
                values = [value for _, made in batch for value in (snapshot.encode(made), made.version)]
                broker.eval(_REPLACE_OLDER, len(names), *names, snapshot.VALKEY_SECONDS, *values)
            broker.publish(change_feed.CHANNEL, str(tenant_id))
    except redis.RedisError as exc:
        log.warning("gateway_notification_failed", error=str(exc))
