"""Confirmation by the gateways that a change has taken effect.

Each gateway adds its ID to a set in Valkey when it has applied a change of limits or budgets. A change is confirmed
when all running gateways are in its set. A gateway that cannot read the change feed stops admitting by its old data
after 0.75 s (millrace.gateway.admission.budget_admission), or with MILLRACE_STALE_KEY_SECONDS when it has received the
message about the change. A change is therefore never missed, only unconfirmed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import redis
import structlog
from django.conf import settings
from django.db import transaction

from inference_worker.contract import valkey
from tenants.models import ChangeEventRow
from tenants.outbox.change_feed import CHANNEL, GATEWAYS_KEY, applied_key, gateway_heartbeat_key

log = structlog.get_logger(__name__)

WAIT_SECONDS = 1.0
POLL_SECONDS = 0.005

Pending = tuple[str, ...] | None  # IDs of gateways that have not applied a change; None: unknown


def after_commit(change: ChangeEventRow, report: Callable[[Pending], None]) -> None:
    """Wait for the gateways after the commit, and report those that have not applied the change."""
    transaction.on_commit(lambda: report(wait_for_gateways(change)))


def wait_for_gateways(change: ChangeEventRow) -> Pending:
    """Wake the gateways, and wait up to `WAIT_SECONDS` until all running ones have applied the change."""
    ends, change_id = time.monotonic() + WAIT_SECONDS, change.pk
    try:
        with valkey.connect(settings.MILLRACE.valkey_url, valkey.CONFIRMATIONS) as broker:
            broker.publish(CHANNEL, str(change.tenant_id))
            while (pending := _find_pending(broker, change_id)) and time.monotonic() < ends:
                time.sleep(POLL_SECONDS)
    except redis.RedisError as exc:
        log.warning("gateway_confirmation_failed", change_id=change_id, error=str(exc))
        return None
    if pending:
        log.warning("gateways_pending", change_id=change_id, gateways=pending)
    return pending


def _find_pending(broker: redis.Redis, change_id: int) -> tuple[str, ...]:
    unconfirmed: Any = broker.sdiff([GATEWAYS_KEY, applied_key(change_id)])
    named = sorted(name.decode() for name in unconfirmed)
    return tuple(name for name in named if broker.exists(gateway_heartbeat_key(name)))
