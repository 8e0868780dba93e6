"""Compilation of keys, with their limits and policies, into snapshots for gateways.

Everything here runs in an action's transaction (`tenants.actions.common.locked_tenant`), so once at a time per tenant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import redis
import structlog
from django.conf import settings
from django.db import transaction

from inference_worker.contract import valkey
from inference_worker.contract.script_files import read_script
from tenants.keys import snapshot
from tenants.models import (
    LIMITS,
    ApiKey,
    ApiKeySnapshotRow,
    ChangeEventRow,
    Experiment,
    LimitSet,
    RoutingPolicy,
    Tenant,
    UpstreamCredential,
)
from tenants.outbox import change_feed
from tenants.routing_policies import policy
from tenants.routing_policies.experiments import RunningExperiment
from tenants.tenant_settings import SETTINGS

log = structlog.get_logger(__name__)

_REPLACE_OLDER = read_script(Path(__file__).parent / "lua" / "replace_older.lua")
_BATCH_SIZE = 500
_FIELDS = snapshot.ApiKeySnapshot.__struct_fields__

Compiled = tuple[bytes, snapshot.ApiKeySnapshot]


def rebuild_key_snapshots(tenant: Tenant, change_type: ChangeEventRow.ChangeType, key: ApiKey | None = None) -> None:
    """Rebuild the snapshot of the key, or of all the tenant's keys, and write a change event."""
    keys = ApiKey.objects.for_tenant(tenant).order_by("pk")
    if key is not None:
        keys = keys.filter(pk=key.pk)
    record_change(tenant, change_type, key)
    compiled = _compile(tenant, list(keys))
    transaction.on_commit(partial(notify_gateways, compiled, tenant.pk))


def record_change(tenant: Tenant, change_type: ChangeEventRow.ChangeType, key: ApiKey | None = None) -> ChangeEventRow:
    """Write a change event."""
    return ChangeEventRow.objects.create(
        change_type=change_type, tenant_id=tenant.pk, key_id=None if key is None else key.pk
    )


def _compile(tenant: Tenant, keys: Sequence[ApiKey]) -> list[Compiled]:
    rows = ApiKeySnapshotRow.objects.for_tenant(tenant).filter(key__in=keys)
    versions = dict(rows.values_list("key_id", "version"))
    limits = list(LimitSet.objects.for_tenant(tenant))
    policies = list(RoutingPolicy.objects.for_tenant(tenant).filter(active=True).order_by("name"))
    own = UpstreamCredential.objects.for_tenant(tenant).order_by("pk")
    credentials = {name: credential for credential in own.defer("ciphertext") for name in credential.model_names}
    running = Experiment.objects.for_tenant(tenant).filter(state=Experiment.State.RUNNING).order_by("pk")
    experiments = {row.model: row.running for row in running}
    compiled = [
        (
            bytes(key.key_hash),
            _snapshot(tenant, key, limits, policies, credentials, experiments, versions.get(key.pk, 0) + 1),
        )
        for key in keys
    ]
    rows.delete()  # not updated: a new hash is a new row
    ApiKeySnapshotRow.objects.for_tenant(tenant).bulk_create(
        [
            ApiKeySnapshotRow(
                key_hash=key_hash,
                tenant=tenant,
                key_id=key_snapshot.key_id,
                version=key_snapshot.version,
                payload=snapshot.encode(key_snapshot),
            )
            for key_hash, key_snapshot in compiled
        ],
        batch_size=_BATCH_SIZE,
    )
    return compiled


def _snapshot(
    tenant: Tenant,
    key: ApiKey,
    limits: Iterable[LimitSet],
    policies: Iterable[RoutingPolicy],
    credentials: Mapping[str, UpstreamCredential],
    experiments: Mapping[str, RunningExperiment],
    version: int,
) -> snapshot.ApiKeySnapshot:
    return snapshot.ApiKeySnapshot(
        key_id=key.pk,
        tenant_id=tenant.pk,
        project_id=key.project_id,
        scopes=tuple(key.scopes),
        models=None if key.allowed_models is None else tuple(key.allowed_models),
        expires_at=None if key.expires_at is None else round(key.expires_at.timestamp() * 1e6),
        revoked=key.revoked_at is not None,
        suspended=tenant.is_suspended,
        limits=snapshot.LimitSnapshot(tuple(_limit_set(row) for row in limits if _applies(row, key))),
        version=version,
        allowed_ip_ranges=None if key.allowed_ip_ranges is None else tuple(key.allowed_ip_ranges),
        policies=_policies(policies),
        **{name: _value(name, getattr(tenant, name)) for name in SETTINGS if name in _FIELDS},
        credentials={name: credential.pk for name, credential in credentials.items()},
        credential_versions={name: credential.version for name, credential in credentials.items()},
        experiments=dict(experiments),
    )


def _value(name: str, value: Any) -> Any:
    """Return the value of a setting in snapshots: None instead of `default` for the platform's."""
    if name == "unknown_parameters":
        return None if value == "default" else value
    return tuple(value) if isinstance(value, list) else value


def _policies(rows: Iterable[RoutingPolicy]) -> dict[str, policy.Policy]:
    found = {}
    for row in rows:
        try:
            found[row.name] = policy.parse(row.body, version=row.version)
        except ValueError as exc:  # written by another release; the key must be revocable even so
            log.error("policy_unreadable", policy=row.name, version=row.version, error=str(exc))
    return found


def _applies(row: LimitSet, key: ApiKey) -> bool:
    return row.key_id in (None, key.pk) and row.project_id in (None, key.project_id)


def _limit_set(row: LimitSet) -> snapshot.LimitSetSnapshot:
    limits = {name: getattr(row, name) for name in LIMITS}
    return snapshot.LimitSetSnapshot(row.pk, row.scope, row.model, row.dry_run, **limits)


def notify_gateways(compiled: Sequence[Compiled], tenant_id: int) -> None:
    """Replace older copies of the snapshots in Valkey, and wake the gateways to poll the change feed.

    This is an optimization: gateways poll the change feed four times a second, and copies expire within a minute.
    Copies are replaced instead of deleted, because a gateway that has just read the old row stores it if there is no
    copy. Messages of two changes can arrive in any order.
    """
    try:
        with valkey.connect(settings.MILLRACE.valkey_url, valkey.NOTIFICATIONS) as broker:
            for start in range(0, len(compiled), _BATCH_SIZE):
                batch = compiled[start : start + _BATCH_SIZE]
                names = [snapshot.valkey_name(key_hash) for key_hash, _ in batch]
                values = [
                    value
                    for _, key_snapshot in batch
                    for value in (snapshot.encode(key_snapshot), key_snapshot.version)
                ]
                broker.eval(_REPLACE_OLDER, len(names), *names, snapshot.VALKEY_SECONDS, *values)
            broker.publish(change_feed.CHANNEL, str(tenant_id))
    except redis.RedisError as exc:
        log.warning("gateway_notification_failed", error=str(exc))
