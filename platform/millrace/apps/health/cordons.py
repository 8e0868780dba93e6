"""Cordoning and draining workers.

PostgreSQL contains the cordons, and changes are in the audit log. A hash in Valkey is a copy, which gateways read twice
a second and workers with each heartbeat. It is written after each change and once a minute, which repairs a copy that
was lost or not written.
"""

from __future__ import annotations

import redis
import structlog
from django.conf import settings
from django.db import connection, transaction

from inference_worker.contract import valkey
from inference_worker.contract.messages import CORDONS_KEY
from inference_worker.contract.texts import Text
from millrace.apps.health.models import Cordon
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)

CORDON, DRAIN = "cordon", "drain"
_LOCK = 0x636F7264  # the number of an advisory lock; unique in the database


def do_cordon(worker: str, *, drain: bool = False, reason: str = "") -> Cordon:
    """Send the worker no new work until `do_uncordon`. It takes effect within half a second; running requests continue.

    With `drain`, the worker also returns requests that have not sent a token, for other workers.

    Raises:
        Conflict: the worker is already cordoned or drained. ActionRefused: a value is too long.
    """
    if not 0 < len(worker) <= 128 or len(reason) > 200:
        raise ActionRefused(Text("Enter a worker's name of at most 128 characters, and a reason of at most 200."))
    with all_tenants_scope(BypassReason.OPERATOR):
        _lock()
        existing = Cordon.objects.filter(worker=worker).first()
        if existing is not None and existing.drain == drain:
            if drain:
                raise Conflict(Text("%(worker)s is drained already.", worker=worker))
            raise Conflict(Text("%(worker)s is cordoned already.", worker=worker))
        before = None if existing is None else audit.serialize_for_audit(existing)
        cordon = existing or Cordon(worker=worker)
        cordon.drain, cordon.reason, cordon.cordoned_by = drain, reason, audit.current_actor().name
        cordon.save()
        action = "worker.drain_started" if drain else "worker.cordoned"
        audit.record(action, cordon, tenant_id=None, before=before, after=audit.serialize_for_audit(cordon))
        transaction.on_commit(_publish)
    return cordon


def do_uncordon(worker: str) -> None:
    """Remove the worker's cordon.

    Raises:
        Conflict: the worker is not cordoned.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        _lock()
        cordon = Cordon.objects.filter(worker=worker).first()
        if cordon is None:
            raise Conflict(Text("%(worker)s is not cordoned.", worker=worker))
        audit.record("worker.uncordoned", cordon, tenant_id=None, before=audit.serialize_for_audit(cordon))
        cordon.delete()
        transaction.on_commit(_publish)


def copy_cordons() -> int:
    """Replace the copy in Valkey. Returns the number of cordoned workers.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    with all_tenants_scope(BypassReason.OPERATOR), valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
        _lock()  # NOTE: locked while the copy is written, so that an older copy cannot replace a newer one
        wanted = {row.worker: DRAIN if row.drain else CORDON for row in Cordon.objects.all()}
        with broker.pipeline(transaction=True) as pipe:
            pipe.delete(CORDONS_KEY)
            if wanted:
                pipe.hset(CORDONS_KEY, mapping=wanted)
            pipe.execute()
    return len(wanted)


def _publish() -> None:
    try:
        copy_cordons()
    except redis.RedisError as exc:
        log.warning("cordon_sync_failed", error=str(exc))


def _lock() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
