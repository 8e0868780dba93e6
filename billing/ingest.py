"""From messages of the usage stream to rows: each leg once, in one transaction a batch, and nothing lost.

The settler may crash at any point and messages may come twice, late and out of order. So everything here can be done
again: a leg that has its row keeps it, and a message that is in quarantine stays there once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
import structlog
from django.db import DataError, IntegrityError, connection

from billing.models import UsageQuarantine
from billing.partitions import ensure_partitions
from inference_worker.protocol import UsageEvent, decode_usage
from tenants.roles import SystemUse
from tenants.scoping import system

log = structlog.get_logger(__name__)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LOGGED_AT_ONCE = 100  # legs in a line of the log
MOST_AHEAD = timedelta(days=1)  # that an admission may lie in the future by this clock
_RANK = {"failed": 0, "cancelled": 1, "completed": 2}  # of messages of one leg in one batch, the first counts
_COLUMNS = {
    "admitted_at": "timestamptz",
    "request_id": "text",
    "leg": "bigint",
    "tenant_id": "bigint",
    "project_id": "bigint",
    "key_id": "bigint",
    "model": "text",
    "attempt": "bigint",
    "verdict": "text",
    "finish_reason": "text",
    "uncached": "bigint",
    "cache_read": "bigint",
    "cache_write_5m": "bigint",
    "cache_write_1h": "bigint",
    "output": "bigint",
    "replica_id": "text",
    "block_size": "bigint",
    "queue_us": "bigint",
    "ttft_us": "bigint",
    "duration_us": "bigint",
    "price_version": "bigint",
    "slice_id": "bigint",
    "fence": "bigint",
    "hold": "bigint",
}
_COUNTED = ("attempt", "verdict", "uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output")
_COUNTED_AT = [list(_COLUMNS).index(name) for name in _COUNTED]
_ARRAYS = ", ".join(f"%s::{kind}[]" for kind in _COLUMNS.values())
# NOTE: a value too wide for its column must be refused, not cut: assignment does so, a cast to varchar(n) would not.
_INSERT = f"""
INSERT INTO billing_usageevent ({", ".join(_COLUMNS)}, settled_at)
SELECT *, statement_timestamp() FROM unnest({_ARRAYS})
ON CONFLICT (admitted_at, request_id, leg) DO NOTHING
RETURNING admitted_at, request_id, leg
"""  # noqa: S608  (column names from above, nothing from outside)
_STORED = f"""
SELECT admitted_at, request_id, leg, {", ".join(_COUNTED)} FROM billing_usageevent
WHERE (admitted_at, request_id, leg) IN (SELECT * FROM unnest(%s::timestamptz[], %s::text[], %s::bigint[]))
"""  # noqa: S608


LegKey = tuple[datetime, str, int]


class Message(NamedTuple):
    """One entry of the stream. `payload` is None if it was deleted while it was pending: whoever did had settled it."""

    stream_id: str
    payload: bytes | None


class Row(NamedTuple):
    """A decoded message and its values in the order of the columns."""

    message: Message
    event: UsageEvent
    values: tuple[Any, ...]

    @property
    def key(self) -> LegKey:
        return self.values[:3]

    @property
    def counted(self) -> tuple[Any, ...]:
        """What two messages of one leg must agree on."""
        return tuple(self.values[position] for position in _COUNTED_AT)


@dataclass
class Outcome:
    """What became of a batch."""

    settled: int = 0  # events that are rows now
    repeated: int = 0  # events that were rows before
    quarantined: int = 0


def settle(messages: Sequence[Message]) -> Outcome:
    """Bring the messages into the database. When this returns, each is a committed row or in quarantine.

    Raises:
        django.db.Error: the database is away or not ready; nothing is known to be done, and all may be tried again.
    """
    outcome = Outcome()
    rows = []
    for message in messages:
        row = None if message.payload is None else _decode(message, message.payload, outcome)
        if row is not None:
            rows.append(row)
    # In the order of the key, so that two settlers with the same messages never wait for each other in a circle.
    rows.sort(key=lambda row: (row.key, _RANK.get(row.event.verdict, 3)))
    _store_or_split(rows, outcome)
    return outcome


def _decode(message: Message, payload: bytes, outcome: Outcome) -> Row | None:
    try:
        event = decode_usage(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:  # ValueError: text that is no UTF-8
        _quarantine(message, UsageQuarantine.Reason.UNDECODABLE, str(fault), outcome)
        return None
    try:
        admitted_at = EPOCH + timedelta(microseconds=event.envelope.admitted_at)
    except OverflowError:
        _quarantine(message, UsageQuarantine.Reason.REFUSED, "admitted_at is no date", outcome)
        return None
    if admitted_at > datetime.now(UTC) + MOST_AHEAD:
        _quarantine(message, UsageQuarantine.Reason.REFUSED, "admitted_at lies in the future", outcome)
        return None
    return Row(message, event, _values(event, admitted_at))


def _values(event: UsageEvent, admitted_at: datetime) -> tuple[Any, ...]:
    envelope, usage = event.envelope, event.usage
    return (
        admitted_at,
        envelope.request_id,
        envelope.leg,
        envelope.tenant_id,
        envelope.project_id,
        envelope.key_id,
        envelope.model,
        event.attempt,
        event.verdict,
        event.finish_reason,
        usage.uncached,
        usage.cache_read,
        usage.cache_write_5m,
        usage.cache_write_1h,
        usage.output,
        event.replica_id,
        event.block_size,
        event.queue_us,
        event.ttft_us,
        event.duration_us,
        envelope.price_version,
        envelope.slice_id,
        envelope.fence,
        envelope.hold,
    )


def _store_or_split(rows: Sequence[Row], outcome: Outcome) -> None:
    """Store the rows; if one of them is refused, halve until it stands alone and put that one into quarantine."""
    if not rows:
        return
    try:
        inserted = _store(rows)
    except (IntegrityError, DataError) as fault:
        if len(rows) > 1:
            middle = len(rows) // 2
            _store_or_split(rows[:middle], outcome)
            _store_or_split(rows[middle:], outcome)
        elif _is_unplaceable(fault) and ensure_partitions():
            _store_or_split(rows, outcome)
        else:
            reason = UsageQuarantine.Reason.UNPLACEABLE if _is_unplaceable(fault) else UsageQuarantine.Reason.REFUSED
            _quarantine(rows[0].message, reason, _explain(fault), outcome)
        return
    outcome.settled += len(inserted)
    if len(inserted) < len(rows):
        _check_repeated(rows, inserted, outcome)


def _store(rows: Sequence[Row]) -> Counter[LegKey]:
    """Insert in one transaction; what a leg's settling moves besides its row belongs into the same one."""
    with system(SystemUse.SETTLER, durable=True), connection.cursor() as cursor:
        cursor.execute(_INSERT, [list(column) for column in zip(*(row.values for row in rows), strict=True)])
        inserted = Counter(cursor.fetchall())
    settled = [row.event.envelope for row in rows if row.key in inserted]
    for start in range(0, len(settled), LOGGED_AT_ONCE):
        legs = [envelope.log_fields() for envelope in settled[start : start + LOGGED_AT_ONCE]]
        log.info("legs_settled", legs=legs)
    return inserted


def _check_repeated(rows: Sequence[Row], inserted: Counter[LegKey], outcome: Outcome) -> None:
    """Of the rows that did not go in, those that count otherwise than the leg's stored row are not to be lost."""
    left, repeated = Counter(inserted), []
    for row in rows:
        if left[row.key]:
            left[row.key] -= 1
        else:
            repeated.append(row)
    with system(SystemUse.SETTLER), connection.cursor() as cursor:
        cursor.execute(_STORED, [list(column) for column in zip(*(row.key for row in repeated), strict=True)])
        stored = {found[:3]: found[3:] for found in cursor.fetchall()}
    for row in repeated:
        if row.counted == stored[row.key]:
            outcome.repeated += 1
        else:
            _quarantine(row.message, UsageQuarantine.Reason.CONFLICT, "the leg was settled with other counts", outcome)


def _quarantine(message: Message, reason: UsageQuarantine.Reason, detail: str, outcome: Outcome) -> None:
    payload = message.payload or b""
    detail = detail.replace("\x00", "").encode(errors="replace").decode()
    with system(SystemUse.SETTLER):
        _, created = UsageQuarantine.objects.get_or_create(
            payload_hash=hashlib.sha256(payload).digest(),
            defaults={
                "received_at": datetime.now(UTC),
                "stream_id": message.stream_id,
                "reason": reason,
                "detail": detail,
                "payload": payload,
            },
        )
    outcome.quarantined += created
    log.error("usage_quarantined", stream_id=message.stream_id, reason=reason.value, detail=detail, new=created)


def _is_unplaceable(fault: Exception) -> bool:
    return "no partition of relation" in str(fault)


def _explain(fault: Exception) -> str:
    """The constraint or the fault's first line; the lines after it would repeat the row."""
    diag = getattr(fault.__cause__, "diag", None)
    return getattr(diag, "constraint_name", None) or str(fault).partition("\n")[0]
