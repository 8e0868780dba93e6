"""Unsettled usage in the workers' journals of this machine, and in those of lost workers on any machine.

A worker sends journaled usage until it is settled. So `find_unsettled` finds only usage that is not sent any more: of a
worker that is gone and does not return under its name. The journals of other machines cannot be read. `is_settled`
checks what their workers last reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
from django.db import connection

from billing.db_arrays import array, text_array
from billing.metering.partitions import existing_partitions, month_of, partition_name
from billing.models import UsageQuarantine
from inference_worker.contract.journal import read_journal
from inference_worker.contract.messages import ExecutionUsage
from inference_worker.contract.unsettled_usage import UnsettledUsage

log = structlog.get_logger(__name__)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MISSING = """
SELECT n.place FROM unnest(%s::timestamptz[], %s::text[], %s::bigint[]) WITH ORDINALITY
    AS n (admitted_at, request_id, execution, place)
WHERE NOT EXISTS (SELECT FROM billing_usageevent e
    WHERE e.admitted_at = n.admitted_at AND e.request_id = n.request_id AND e.execution = n.execution)
"""


class Unsettled(NamedTuple):
    """Unsettled usage of one tenant in the journal of one worker."""

    worker: str
    tenant_id: int
    executions: int
    tokens: int


def find_unsettled(directory: Path, before: datetime) -> list[Unsettled]:
    """Return by worker and tenant the usage in the journals below `folder` that was admitted before then and never
    settled.

    An all-tenants scope must be open. Archived months, messages in quarantine and journals that cannot be read are left
    out. The log names those journals.
    """
    attached = set(existing_partitions())
    found: dict[tuple[str, int], list[int]] = {}
    for journal in sorted(path for path in directory.glob("*") if path.is_dir()):
        try:
            journaled = {
                (event.billing_context.request_id, event.billing_context.execution): (event, payload)
                for event, payload in read_journal(journal)
                if not event.billing_context.is_operator_paid  # it has no usage event
                and _read_admission_time(event) < before
                and partition_name(month_of(_read_admission_time(event))) in attached
            }
        except (msgspec.MsgspecError, ValueError, OverflowError, OSError) as exc:
            log.exception("journal_unreadable", worker=journal.name, error_type=type(exc).__name__)
            continue
        for event in _without_row(list(journaled.values())):
            sums = found.setdefault((journal.name, event.billing_context.tenant_id), [0, 0])
            sums[0] += 1
            sums[1] += event.usage.total
    return [Unsettled(worker, tenant_id, *sums) for (worker, tenant_id), sums in sorted(found.items())]


def _without_row(journaled: Sequence[tuple[ExecutionUsage, bytes]]) -> list[ExecutionUsage]:
    if not journaled:
        return []
    keys = [
        (_read_admission_time(event), event.billing_context.request_id, event.billing_context.execution)
        for event, _ in journaled
    ]
    missing = [journaled[place] for place in _find_missing(keys)]
    quarantined = _find_quarantined(hashlib.sha256(payload).digest() for _, payload in missing)
    return [event for event, payload in missing if hashlib.sha256(payload).digest() not in quarantined]


def _find_quarantined(payload_hashes: Iterable[bytes]) -> set[bytes]:
    """Return those of the hashes whose messages are in quarantine, also handled ones."""
    rows: Any = UsageQuarantine.objects.filter(payload_hash__in=set(payload_hashes))
    return {bytes(payload_hash) for payload_hash in rows.values_list("payload_hash", flat=True)}


def _find_missing(keys: Sequence[tuple[datetime, str, int]]) -> list[int]:
    """Return the places of the executions without a usage event."""
    times, names, executions = zip(*keys, strict=True)
    with connection.cursor() as cursor:
        cursor.execute(_MISSING, [array(times), text_array(names), array(executions)])
        return [place - 1 for (place,) in cursor.fetchall()]


def is_settled(reported: UnsettledUsage) -> bool:
    """Return whether the usage that a lost worker reported as unsettled is settled, by its oldest and newest execution.

    An all-tenants scope must be open. Usage of archived months and in quarantine is settled.
    """
    attached = set(existing_partitions())
    entries = [
        entry
        for entry in dict.fromkeys((reported.oldest, reported.newest))
        if partition_name(month_of(_read_time(entry.admitted_at))) in attached
    ]
    if not entries:
        return True
    keys = [(_read_time(entry.admitted_at), entry.request_id, entry.execution) for entry in entries]
    missing = {entries[place].payload_hash for place in _find_missing(keys)}
    return missing <= _find_quarantined(missing)


def _read_admission_time(event: ExecutionUsage) -> datetime:
    return _read_time(event.billing_context.admitted_at)


def _read_time(microseconds: int) -> datetime:
    return EPOCH + timedelta(microseconds=microseconds)
