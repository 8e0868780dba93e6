"""Cordoning and draining workers.

Postgres says who is cordoned, with an audit row; the broker's hash `cordons` is a copy, which gateways read twice a
second and workers with each heartbeat. A copy is written after each change and once a minute: whatever was lost in
between (the process after its commit, the broker with its memory) is put right by the next one.
"""

from __future__ import annotations

import redis
import structlog
from django.db import connection, transaction

from inference_worker.contract.messages import CORDONS_KEY
from millrace.apps.operations.broker import connect
from millrace.apps.operations.models import Cordon
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)

CORDON, DRAIN = "cordon", "drain"
_LOCK = 0x636F7264  # any number that is nobody else's advisory lock


def do_cordon(worker: str, *, drain: bool = False, reason: str = "") -> Cordon:
    """Send the worker no new work, from half a second on and until `do_uncordon`; what it has begun continues.

    With `drain` it also gives back what has sent no token, for other workers to answer.

    Raises:
        Conflict: that is so already. ActionRefused: a value is too long.
    """
    if not 0 < len(worker) <= 128 or len(reason) > 200:
        raise ActionRefused("Want a worker's name, and a reason of at most 200 characters.")
    with all_tenants_scope(BypassReason.OPERATOR):
        _lock()
        found = Cordon.objects.filter(worker=worker).first()
        if found is not None and found.drain == drain:
            raise Conflict(f"{worker} is {'drained' if drain else 'cordoned'} already.")
        before = None if found is None else audit.described(found)
        cordon = found or Cordon(worker=worker)
        cordon.drain, cordon.reason, cordon.cordoned_by = drain, reason, audit.current_actor().name
        cordon.save()
        action = "worker.drain_started" if drain else "worker.cordoned"
        audit.record(action, cordon, tenant_id=None, before=before, after=audit.described(cordon))
        transaction.on_commit(_tell)
    return cordon


def do_uncordon(worker: str) -> None:
    """Let it take work again.

    Raises:
        Conflict: it is not cordoned.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        _lock()
        found = Cordon.objects.filter(worker=worker).first()
        if found is None:
            raise Conflict(f"{worker} is not cordoned.")
        audit.record("worker.uncordoned", found, tenant_id=None, before=audit.described(found))
        found.delete()
        transaction.on_commit(_tell)


def copy_cordons() -> int:
    """Make the broker's copy what the database says; returns how many are cordoned.

    Raises:
        redis.RedisError: the broker is away.
    """
    with all_tenants_scope(BypassReason.OPERATOR), connect() as broker:
        _lock()  # NOTE: held while the copy is written, so that no older one comes after a newer
        wanted = {row.worker: DRAIN if row.drain else CORDON for row in Cordon.objects.all()}
        with broker.pipeline(transaction=True) as pipe:
            pipe.delete(CORDONS_KEY)
            if wanted:
                pipe.hset(CORDONS_KEY, mapping=wanted)
            pipe.execute()
    return len(wanted)


def _tell() -> None:
    try:
        copy_cordons()
    except redis.RedisError as exc:
        log.warning("cordon_sync_failed", error=str(exc))


def _lock() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
