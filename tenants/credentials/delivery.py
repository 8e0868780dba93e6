"""Delivery of upstream credentials to worker processes, after each change and every few seconds.

It is idempotent: a process's box is replaced only if its contents differ from what the process needs.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import msgspec
import redis
import structlog
from django.conf import settings
from django.db import connection
from django.db.models import Q

from inference_worker.contract import valkey
from inference_worker.contract.credentials import (
    BOX_TTL_SECONDS,
    WORKER_KEYS_KEY,
    SealedContents,
    WorkerKey,
    decode_worker_key,
    seal,
    sealed_credentials_name,
    sealed_version,
    worker_key_name,
)
from tenants.credentials.encryption import NoEncryptionKey, decrypt_secret, known_key_ids
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import UpstreamCredential

log = structlog.get_logger(__name__)

_LOCK = 0x63726564  # the number of an advisory lock; unique in the database


def seconds_until_delivery() -> float | None:
    """Return 0 if worker processes need credentials, otherwise None.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    return 0.0 if _reader(settings.MILLRACE.valkey_url).exists(WORKER_KEYS_KEY) else None


@cache
def _reader(url: str) -> redis.Redis:
    """Return the client of `seconds_until_delivery`. It stays connected, since it is used every few seconds."""
    return valkey.connect(url, valkey.PAGES)


def deliver_credentials() -> int:
    """Seal to each worker process the credentials that it needs. Returns the number of replaced boxes.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    worker_secret: str = settings.MILLRACE.worker_secret
    with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
        if not broker.exists(WORKER_KEYS_KEY):
            return 0
        with all_tenants_scope(BypassReason.OPERATOR), connection.cursor() as cursor:
            # NOTE: locked while boxes are written, so that an older box cannot replace a newer one.
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            return sum(_deliver(broker, key) for key in _worker_keys(broker, worker_secret))


def deliver_after_change() -> None:
    """Deliver the credentials after a change. If Valkey cannot be reached, the next periodic delivery repairs it."""
    try:
        deliver_credentials()
    except redis.RedisError as exc:
        log.warning("credential_delivery_failed", error=str(exc))


def _worker_keys(broker: redis.Redis, worker_secret: str) -> list[WorkerKey]:
    """Return the authenticated keys of the processes that need credentials, and remove processes that have ended."""
    members: Any = broker.smembers(WORKER_KEYS_KEY)
    process_ids = sorted(raw.decode() for raw in members)
    payloads: Any = broker.mget([worker_key_name(process_id) for process_id in process_ids]) if process_ids else []
    found, ended = [], []
    for process_id, payload in zip(process_ids, payloads, strict=True):
        if payload is None:
            ended.append(process_id)
            continue
        try:
            found.append(decode_worker_key(payload, process_id, worker_secret))
        except ValueError as exc:
            log.warning("worker_key_refused", process_id=process_id, error=str(exc))
    if ended:
        broker.srem(WORKER_KEYS_KEY, *ended)  # a process that was disconnected adds itself again
    return found


def _deliver(broker: redis.Redis, key: WorkerKey) -> bool:
    """Replace the box of a process if its contents differ. Returns whether they did."""
    rows = list(
        UpstreamCredential.objects.all_tenants()
        .filter(Q(pk__in=key.credentials, tenant=None) | Q(model_names__overlap=list(key.deployments)))
        .order_by("pk")
    )
    known = known_key_ids()
    contents = [(row.pk, row.version, row.encryption_key_id in known, row.max_concurrency) for row in rows]
    version = hashlib.sha256(repr((key.public_key, contents)).encode()).hexdigest()[:16]
    name = sealed_credentials_name(key.process_id)
    current: bytes | None = broker.get(name)  # type: ignore[assignment]
    if current is not None and _version(current) == version:
        return False
    secrets = {}
    for row in rows:
        try:
            secrets[row.pk] = decrypt_secret(row)
        except NoEncryptionKey as exc:  # the other credentials are delivered
            log.error("credential_unreadable", credential_id=row.pk, error=str(exc))
    limits = {row.pk: row.max_concurrency for row in rows if row.max_concurrency is not None}
    broker.set(name, seal(SealedContents(secrets, limits), version, key), ex=BOX_TTL_SECONDS)
    log.info("credentials_delivered", process_id=key.process_id, count=len(secrets))
    return True


def _version(payload: bytes) -> str:
    try:
        return sealed_version(payload)
    except msgspec.MsgspecError:
        return ""
