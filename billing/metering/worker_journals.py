"""What lies in workers' journals on this machine and never became a row.

A worker sends what it has journalled until the settler has it, so this finds only what nobody sends: that of a worker
which has gone and does not come back under its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
from django.db import connection

from billing.metering.arrays import array, text_array
from billing.metering.partitions import existing_partitions, month_of, partition_name
from billing.models import UsageQuarantine
from inference_worker.contract.journal import journalled
from inference_worker.contract.messages import ExecutionUsage

log = structlog.get_logger(__name__)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MISSING = """
SELECT n.place FROM unnest(%s::timestamptz[], %s::text[], %s::bigint[]) WITH ORDINALITY
    AS n (admitted_at, request_id, execution, place)
WHERE NOT EXISTS (SELECT FROM billing_usageevent e
    WHERE e.admitted_at = n.admitted_at AND e.request_id = n.request_id AND e.execution = n.execution)
"""


class Unsettled(NamedTuple):
    """What of one tenant one worker has journalled in vain."""

    worker: str
    tenant_id: int
    executions: int
    tokens: int


def unsettled(folder: Path, before: datetime) -> list[Unsettled]:
    """By worker and tenant, what was admitted before then, is in the journals below `folder`, and was never settled.

    The scope must allow all tenants' rows. Months that are archived, and what is in quarantine, are left out; so is a
    journal that cannot be read, which the log names.
    """
    attached = set(existing_partitions())
    found: dict[tuple[str, int], list[int]] = {}
    for journal in sorted(path for path in folder.glob("*") if path.is_dir()):
        try:
            told = {
                (event.billing_context.request_id, event.billing_context.execution): (event, payload)
                for event, payload in journalled(journal)
                if _admitted(event) < before and partition_name(month_of(_admitted(event))) in attached
            }
        except (msgspec.MsgspecError, ValueError, OverflowError, OSError) as exc:
            log.exception("journal_unreadable", worker=journal.name, fault=type(exc).__name__)
            continue
        for event in _without_row(list(told.values())):
            sums = found.setdefault((journal.name, event.billing_context.tenant_id), [0, 0])
            sums[0] += 1
            sums[1] += event.usage.prompt + event.usage.output
    return [Unsettled(worker, tenant_id, *sums) for (worker, tenant_id), sums in sorted(found.items())]


def _without_row(told: Sequence[tuple[ExecutionUsage, bytes]]) -> list[ExecutionUsage]:
    if not told:
        return []
    keys = [(_admitted(event), event.billing_context.request_id, event.billing_context.execution) for event, _ in told]
    times, names, executions = zip(*keys, strict=True)
    with connection.cursor() as cursor:
        cursor.execute(_MISSING, [array(times), text_array(names), array(executions)])
        missing = [told[place - 1] for (place,) in cursor.fetchall()]
    hashes = {hashlib.sha256(payload).digest() for _, payload in missing}
    rows: Any = UsageQuarantine.objects.filter(payload_hash__in=hashes).values_list("payload_hash", flat=True)
    looked_at = {bytes(each) for each in rows}
    return [event for event, payload in missing if hashlib.sha256(payload).digest() not in looked_at]


def _admitted(event: ExecutionUsage) -> datetime:
    return EPOCH + timedelta(microseconds=event.billing_context.admitted_at)
