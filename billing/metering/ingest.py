"""Conversion of usage messages to rows: each execution once, in one transaction per batch.

The settler may crash at any point, and messages may be repeated, late and out of order. So ingestion is idempotent: the
event of an execution never changes, and a message is in quarantine at most once.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import psycopg
import structlog
from django.db import DataError, IntegrityError, OperationalError, connection
from msgspec.structs import astuple

from billing.db_arrays import array, text_array
from billing.metering import cost_booking
from billing.metering.cost_booking import BookedUsage
from billing.metering.duplicate_events import PRECEDENCE, ExecutionKey, RepeatedEvent, merge, reverse_late
from billing.metering.partitions import ensure_partitions
from billing.models import UsageQuarantine
from billing.periods import stamps
from billing.pricing.rating import rate, rate_cards
from billing.rates.pricing import Rated, UnknownPriceError
from billing.rates.reserved_charge import charge, charge_within_reservation
from billing.reservations import reservations
from billing.reservations.reservations import exceeds_reservation, lease_of, used_by
from inference_worker.contract.messages import ExecutionUsage, decode_usage
from inference_worker.contract.request import TOKEN_COLUMNS
from inference_worker.contract.texts import Text, text_of
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_LOGGED_EXECUTIONS = 100  # executions per log line
MAX_CLOCK_SKEW_MICROSECONDS = 86_400_000_000  # an admission may be in the future of this clock
# Columns with the names of the fields of BillingContext, then of ExecutionUsage.
_CONTEXT_COLUMNS = {
    "request_id": "text",
    "execution": "bigint",
    **dict.fromkeys(("tenant_id", "project_id", "key_id"), "bigint"),
    "model": "text",
    **dict.fromkeys(("price_version", "lease_id", "fencing_token", "reserved_nano"), "bigint"),
    "end_user": "text",
}
_EVENT_COLUMNS = {
    "attempt": "bigint",
    **dict.fromkeys(("outcome", "finish_reason", "replica_id", "miss_reason"), "text"),
    **dict.fromkeys(("block_size", "queue_us", "ttft_us", "duration_us", "changed_at", "unpinned_tokens"), "bigint"),
    **dict.fromkeys(("reasoning_tokens", "accepted_drafts", "rejected_drafts", "host_tokens"), "bigint"),
    "usage_source": "text",
}
_COLUMNS = {
    "admitted_at": "timestamptz",
    **_CONTEXT_COLUMNS,
    **_EVENT_COLUMNS,
    **dict.fromkeys(TOKEN_COLUMNS, "bigint"),
    "price_ids": "text",  # an array as text, because unnest would flatten nested arrays
    "cost_femto": "numeric",
    "saved_femto": "numeric",
    "unbilled_tokens": "bigint",
    "invoice_period": "bigint",
}
_context_values = attrgetter(*_CONTEXT_COLUMNS)
_event_values = attrgetter(*_EVENT_COLUMNS)
_MAKERS = [text_array if column_type == "text" else array for column_type in _COLUMNS.values()]
_ARRAYS = ", ".join(f"%s::{column_type}[]" for column_type in _COLUMNS.values())
_VALUES = ", ".join(f"{name}::bigint[]" if name == "price_ids" else name for name in _COLUMNS)
# A reservation is released early by a gateway or when it is settled: see billing_release_unused and billing_settle.
_RELEASED_BY = """
CASE WHEN new.lease_id IS NULL THEN NULL WHEN EXISTS (
    SELECT FROM billing_earlyrelease r
    WHERE r.admitted_at = new.admitted_at AND r.request_id = new.request_id AND r.execution = new.execution
) THEN 'gateway' ELSE 'settler' END
"""
# NOTE: a value too long for its column must be rejected, not truncated. Assignment does so, a cast does not.
_INSERT = f"""
INSERT INTO billing_usageevent ({", ".join(_COLUMNS)}, settled_at, released_by)
SELECT {_VALUES}, statement_timestamp(), {_RELEASED_BY} FROM unnest({_ARRAYS}) AS new ({", ".join(_COLUMNS)})
ON CONFLICT (admitted_at, request_id, execution) DO NOTHING
RETURNING (extract(epoch FROM admitted_at) * 1000000)::bigint, request_id, execution
"""  # noqa: S608  (column names from above, nothing from outside)


class UsageMessage(NamedTuple):
    """A message of the usage stream. `payload` is None if it was deleted after its settlement."""

    stream_id: str
    payload: bytes | None


class UsageRow(NamedTuple):
    """A decoded message, its cost, and its values in the order of the columns, except the last.

    The tokens of `event` are those that are charged.
    """

    message: UsageMessage
    event: ExecutionUsage
    rated: Rated
    values: tuple[Any, ...]
    reported: BookedUsage

    @property
    def key(self) -> ExecutionKey:
        return self.values[:3]


@dataclass
class SettleResult:
    """The result of settling a batch."""

    settled: int = 0  # new rows
    repeated: int = 0  # events that had a row
    quarantined: int = 0


def settle(messages: Sequence[UsageMessage]) -> SettleResult:
    """Settle the messages. After this, each is a committed row or in quarantine.

    Raises: django.db.Error if the database is unavailable; the messages may be settled again.
    """
    result = SettleResult()
    latest = time.time_ns() // 1000 + MAX_CLOCK_SKEW_MICROSECONDS
    decoded, operator_paid = [], []
    for message in messages:
        event = None if message.payload is None else _decode(message, message.payload, latest, result)
        if event is not None and event[0].billing_context.is_operator_paid:
            operator_paid.append((message, event[0]))
        elif event is not None:
            decoded.append((message, *event))
    _book_or_split(operator_paid, result)
    rows = _rate(decoded, result)
    # In the order of the key, so that two settlers with the same messages cannot deadlock.
    rows.sort(key=lambda row: (row.key, PRECEDENCE.get(row.event.outcome, 3)))
    _store_or_split(rows, result)
    return result


def _book_or_split(messages: Sequence[tuple[UsageMessage, ExecutionUsage]], result: SettleResult) -> None:
    """Book the costs of executions that the operator pays for. The tenant has no usage event of them.

    If the database rejects one, halve the batch until it is found, and quarantine it.
    """
    if not messages:
        return
    try:
        with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
            cost_booking.book(cursor, [BookedUsage(event) for _, event in messages])
    except (IntegrityError, DataError) as exc:
        if len(messages) > 1:
            middle = len(messages) // 2
            _book_or_split(messages[:middle], result)
            _book_or_split(messages[middle:], result)
        else:
            _quarantine(messages[0][0], UsageQuarantine.Reason.REFUSED, _explain(exc), result)
        return
    result.settled += len(messages)


def _rate(decoded: Sequence[tuple[UsageMessage, ExecutionUsage, datetime]], result: SettleResult) -> list[UsageRow]:
    """Price each message. Quarantine those without a price, and those of the engine above their reservation."""
    rated = rate([event for _, event, _ in decoded])
    rows: list[UsageRow] = []
    for (message, event, admitted_at), cost in zip(decoded, rated, strict=True):
        if event.usage_source != "engine" and event.outcome != "failed":
            error = _charge(message, event, admitted_at, rows)
        elif isinstance(cost, UnknownPriceError):
            error = str(cost)
        else:
            error = exceeds_reservation(event, cost.cost_femto)
            if error is None:
                rows.append(UsageRow(message, event, cost, _values(event, admitted_at, cost), BookedUsage(event)))
        if error is not None:
            _quarantine(message, UsageQuarantine.Reason.REFUSED, error, result)
    return rows


def _charge(message: UsageMessage, event: ExecutionUsage, admitted_at: datetime, rows: list[UsageRow]) -> str | None:
    """Price an upstream's usage up to the reservation, and add its row. Return why it has no price, or None."""
    context = event.billing_context
    known = rate_cards([] if context.price_version is None else [context.price_version])
    if context.price_version is not None and context.price_version not in known:
        return Text("there is no price version %(version)s", version=str(context.price_version))
    card = known.get(context.price_version or 0)
    try:
        charged, rated, unbilled_tokens, unbilled_femto = charge_within_reservation(card, event.usage, context)
        if event.reported_usage is not None:
            full = charge(card, event.reported_usage, context.admitted_at, max_femto=None, max_tokens=None)
            unbilled_tokens = event.reported_usage.total - charged.total
            unbilled_femto = max(0, full.rated.cost_femto - rated.cost_femto)
    except UnknownPriceError as exc:
        return text_of(exc)
    billed = msgspec.structs.replace(
        event, usage=charged, reasoning_tokens=max(0, min(event.reasoning_tokens, charged.output))
    )
    values = _values(billed, admitted_at, rated, unbilled_tokens)
    rows.append(UsageRow(message, billed, rated, values, BookedUsage(event, unbilled_femto)))
    return None


def _decode(
    message: UsageMessage, payload: bytes, latest: int, result: SettleResult
) -> tuple[ExecutionUsage, datetime] | None:
    try:
        event = decode_usage(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:  # ValueError: invalid UTF-8
        _quarantine(message, UsageQuarantine.Reason.UNDECODABLE, str(exc), result)
        return None
    if event.billing_context.admitted_at > latest:
        _quarantine(message, UsageQuarantine.Reason.REFUSED, Text("admitted_at lies in the future"), result)
        return None
    try:
        return event, EPOCH + timedelta(microseconds=event.billing_context.admitted_at)
    except OverflowError:
        _quarantine(message, UsageQuarantine.Reason.REFUSED, Text("admitted_at is no date"), result)
        return None


def _values(event: ExecutionUsage, admitted_at: datetime, rated: Rated, unbilled_tokens: int = 0) -> tuple[Any, ...]:
    return (
        admitted_at,
        *_context_values(event.billing_context),
        *_event_values(event),
        *astuple(event.usage),
        rated.price_ids and array(rated.price_ids),
        rated.cost_femto,
        rated.saved_femto,
        unbilled_tokens,
    )


def _store_or_split(rows: Sequence[UsageRow], result: SettleResult) -> None:
    """Store the rows. If the database rejects one, halve the batch until the row is found, and quarantine it."""
    if not rows:
        return
    try:
        new = _store(rows)
    except (IntegrityError, DataError) as exc:
        if len(rows) > 1:
            middle = len(rows) // 2
            _store_or_split(rows[:middle], result)
            _store_or_split(rows[middle:], result)
        elif _is_unplaceable(exc) and ensure_partitions():
            _store_or_split(rows, result)
        else:
            reason = UsageQuarantine.Reason.UNPLACEABLE if _is_unplaceable(exc) else UsageQuarantine.Reason.REFUSED
            _quarantine(rows[0].message, reason, _explain(exc), result)
        return
    except OperationalError as exc:
        if not isinstance(exc.__cause__, psycopg.errors.SerializationFailure):
            raise
        _store_or_split(rows, result)  # a gateway released early between insert and settlement
        return
    result.settled += len(new)
    if len(new) < len(rows):
        _merge_repeated(rows, new, result)


def _store(rows: Sequence[UsageRow]) -> list[UsageRow]:
    """Insert and settle the rows in one transaction. Return the new rows."""
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        periods = stamps(cursor, [(row.event.billing_context.tenant_id, row.key[0]) for row in rows])
        columns = [*zip(*(row.values for row in rows), strict=True), periods]
        arrays = [make(column) for make, column in zip(_MAKERS, columns, strict=True)]
        new = _first_of(rows, _insert(arrays))
        late = reservations.settle(cursor, [(row.event, row.rated.cost_femto) for row in new])
        for row in new:
            lease = lease_of(row.event.billing_context)
            if lease in late and not reservations.adjust(
                cursor, lease, used_by(row.event, row.rated.cost_femto), must_fit=True
            ):
                reverse_late(cursor, row.key, row.event, row.rated)
        cost_booking.book(cursor, [row.reported for row in new])
    if log.isEnabledFor(logging.INFO):
        for start in range(0, len(new), MAX_LOGGED_EXECUTIONS):
            executions = [row.event.billing_context.log_fields() for row in new[start : start + MAX_LOGGED_EXECUTIONS]]
            log.info("usage_settled", executions=executions)
    return new


def _insert(arrays: Sequence[str]) -> set[tuple[int, str, int]]:
    """Insert the columns, and return the keys of the inserted rows.

    The values are parameters of the server, not quoted into the statement as Django does, because they are long.
    """
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        cursor.execute(_INSERT, arrays)
        return set(cursor.fetchall())


def _first_of(rows: Sequence[UsageRow], inserted: set[tuple[int, str, int]]) -> list[UsageRow]:
    """Return the inserted rows: of those with the same key the first."""
    found = []
    for row in rows:
        billing_context = row.event.billing_context
        key = (billing_context.admitted_at, billing_context.request_id, billing_context.execution)
        if key in inserted:
            inserted.discard(key)
            found.append(row)
    return found


def _merge_repeated(rows: Sequence[UsageRow], new: Sequence[UsageRow], result: SettleResult) -> None:
    """Merge the rows that were not inserted. Quarantine those that contradict what is stored."""
    went_in = {id(row) for row in new}
    repeated = [row for row in rows if id(row) not in went_in]
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        known = merge(cursor, [RepeatedEvent(row.key, row.event, row.rated) for row in repeated])
        cost_booking.book(cursor, [row.reported for row, agrees in zip(repeated, known, strict=True) if agrees])
    for row, agrees in zip(repeated, known, strict=True):
        if agrees:
            result.repeated += 1
        else:
            detail = Text("the execution was settled with other counts")
            _quarantine(row.message, UsageQuarantine.Reason.CONFLICT, detail, result)


def _quarantine(message: UsageMessage, reason: UsageQuarantine.Reason, detail: str, result: SettleResult) -> None:
    payload = message.payload or b""
    if not isinstance(detail, Text):
        detail = detail.replace("\x00", "").encode(errors="replace").decode()
    with all_tenants_scope(BypassReason.SETTLER):
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
    result.quarantined += created
    log.error("usage_quarantined", stream_id=message.stream_id, reason=reason.value, detail=detail, new=created)


def _is_unplaceable(error: Exception) -> bool:
    return "no partition of relation" in str(error)


def _explain(error: Exception) -> str:
    """Return the constraint's name or the error's first line. The other lines repeat the row."""
    diag = getattr(error.__cause__, "diag", None)
    return getattr(diag, "constraint_name", None) or str(error).partition("\n")[0]
