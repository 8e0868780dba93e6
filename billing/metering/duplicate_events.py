"""Merging of several messages of one execution, in any order: failed precedes cancelled, which precedes completed.

The first message becomes the event and never changes. A message with higher precedence is added as an adjustment, so
that event and adjustments together have its outcome and counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from typing import Any, NamedTuple

import structlog
from msgspec.structs import astuple

from billing.db_arrays import array, text_array
from billing.periods import stamps
from billing.rates.pricing import Rated
from billing.reservations import reservations
from billing.reservations.reservations import LeaseKey, ReservationUse
from inference_worker.contract.messages import BillingContext, ExecutionUsage
from inference_worker.contract.request import TOKEN_CLASSES, TOKEN_COLUMNS

log = structlog.get_logger(__name__)

LATE = "late"
RECONCILED = "reconciled"
# The lowest takes precedence. A reconciled count gives way to every outcome.
PRECEDENCE = {LATE: -1, "failed": 0, "cancelled": 1, "completed": 2, RECONCILED: 3}

ExecutionKey = tuple[datetime, str, int]
_SUMS = ", ".join((*TOKEN_COLUMNS, "cost_femto", "saved_femto"))
_KEYS = "SELECT * FROM unnest(%s::timestamptz[], %s::text[], %s::bigint[])"
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(id, 0)) FROM unnest(%s::text[]) AS id"
_EVENT = f"""
SELECT admitted_at, request_id, execution, outcome, price_ids, lease_id, fencing_token, tenant_id, {_SUMS}
FROM billing_usageevent
WHERE (admitted_at, request_id, execution) IN ({_KEYS})
"""  # noqa: S608  (column names from above, nothing from outside)
_ADJUSTMENTS = f"""
SELECT admitted_at, request_id, execution, outcome, {_SUMS} FROM billing_adjustment
WHERE (admitted_at, request_id, execution) IN ({_KEYS})
"""  # noqa: S608
_INSERT = f"""
INSERT INTO billing_adjustment (admitted_at, request_id, execution, outcome, tenant_id, project_id, key_id, model,
    price_version, lease_id, price_ids, invoice_period, created_at, {_SUMS})
VALUES ({"%s, " * 12} statement_timestamp() {", %s" * (len(TOKEN_COLUMNS) + 2)})
"""  # noqa: S608


@dataclass
class SettledExecution:
    """An execution as stored, with its adjustments."""

    outcome: str
    price_ids: list[int | None] | None
    lease: LeaseKey | None
    event_sums: tuple[int, ...]  # sums of the event
    sums: tuple[int, ...]  # with the adjustments
    outcomes: set[str] = field(default_factory=set)  # outcomes of event and adjustments

    @property
    def rank(self) -> int:
        return min(PRECEDENCE[outcome] for outcome in self.outcomes)


class RepeatedEvent(NamedTuple):
    """A message of an execution that already has an event."""

    key: ExecutionKey
    event: ExecutionUsage
    rated: Rated


def merge(cursor: Any, arrivals: Sequence[RepeatedEvent]) -> list[bool]:
    """Merge later messages. Return False for each that contradicts the stored event and does not take precedence."""
    executions = read_executions(cursor, [arrival.key for arrival in arrivals])
    odd = [arrival for arrival in arrivals if not _repeats(executions[arrival.key], arrival)]
    if odd:  # one after the other, read again under the lock
        lock_requests(cursor, {arrival.key[1] for arrival in odd})
        executions |= read_executions(cursor, [arrival.key for arrival in odd])
    return [_merge(cursor, executions[arrival.key], arrival) for arrival in arrivals]


def lock_requests(cursor: Any, request_ids: Iterable[str]) -> None:
    """Lock requests until the end of the transaction, so that their adjustments are written one after the other."""
    cursor.execute(_LOCK, [sorted(request_ids)])


def _merge(cursor: Any, execution: SettledExecution, arrival: RepeatedEvent) -> bool:
    if _repeats(execution, arrival):
        return True
    event, rated = arrival.event, arrival.rated
    rank = PRECEDENCE[event.outcome]
    if rank > execution.rank or (rank == execution.rank and event.outcome != execution.outcome):
        return True  # the stored outcome takes precedence
    if rank == execution.rank:
        return event.outcome == "failed"  # billed in neither case; an upstream's failure may have tokens
    wanted = (0,) * len(execution.sums) if event.outcome == "failed" else _sums(event, rated)
    change = tuple(after - before for after, before in zip(wanted, execution.sums, strict=True))
    if change[-2] > 0 or any(count > 0 for count in change[: len(TOKEN_COLUMNS)]):
        return False
    prices = _merge_prices(execution.price_ids, rated.price_ids)
    lease = execution.lease
    lease_id = None if lease is None else lease.id
    write_adjustment(cursor, arrival.key, event.billing_context, event.outcome, change, prices, lease_id)
    after, before = tokens_of(wanted), tokens_of(execution.sums)
    reservations.adjust(cursor, lease, ReservationUse(change[-2], after - before, min(after, 1) - min(before, 1)))
    execution.sums = wanted
    execution.outcomes.add(event.outcome)
    return True


def _repeats(execution: SettledExecution, arrival: RepeatedEvent) -> bool:
    return arrival.event.outcome == execution.outcome and _sums(arrival.event, arrival.rated) == execution.event_sums


def reverse_late(cursor: Any, key: ExecutionKey, event: ExecutionUsage, rated: Rated) -> None:
    """Write off an execution whose reservation was reclaimed and for which its budget periods have no room."""
    change = tuple(-amount for amount in _sums(event, rated))
    context = event.billing_context
    write_adjustment(cursor, key, context, LATE, change, rated.price_ids, context.lease_id)


def write_adjustment(
    cursor: Any,
    key: ExecutionKey,
    billing_context: BillingContext,
    outcome: str,
    change: tuple[int, ...],
    price_ids: list[int | None] | None,
    lease_id: int | None,
) -> None:
    """Write an adjustment with this change of the tokens, the cost and the savings."""
    (period,) = stamps(cursor, [(billing_context.tenant_id, key[0])])
    row = [
        *key,
        outcome,
        billing_context.tenant_id,
        billing_context.project_id,
        billing_context.key_id,
        billing_context.model,
    ]
    cursor.execute(_INSERT, [*row, billing_context.price_version, lease_id, price_ids, period, *change])
    log.warning("usage_adjusted", request_id=key[1], execution=key[2], outcome=outcome, cost_femto=change[-2])


def read_executions(cursor: Any, keys: Sequence[ExecutionKey]) -> dict[ExecutionKey, SettledExecution]:
    """Return the stored executions of these keys, with their adjustments."""
    times, ids, numbers = zip(*keys, strict=True)
    columns = [array(times), text_array(ids), array(numbers)]
    cursor.execute(_EVENT, columns)
    executions = {}
    for admitted_at, request_id, number, outcome, price_ids, lease_id, token, tenant_id, *sums in cursor.fetchall():
        counts = tuple(int(total) for total in sums)
        lease = None if lease_id is None else LeaseKey(lease_id, token or 0, tenant_id)
        executions[admitted_at, request_id, number] = SettledExecution(
            outcome, price_ids, lease, counts, counts, {outcome}
        )
    cursor.execute(_ADJUSTMENTS, columns)
    for admitted_at, request_id, number, outcome, *sums in cursor.fetchall():
        execution = executions[admitted_at, request_id, number]
        execution.sums = tuple(before + int(change) for before, change in zip(execution.sums, sums, strict=True))
        execution.outcomes.add(outcome)
    return executions


def _sums(event: ExecutionUsage, rated: Rated) -> tuple[int, ...]:
    return (*astuple(event.usage), rated.cost_femto, rated.saved_femto)


def tokens_of(sums: Sequence[int]) -> int:
    """Return the tokens of prompt and output."""
    return sum(count for name, count in zip(TOKEN_COLUMNS, sums, strict=False) if name in TOKEN_CLASSES)


def _merge_prices(first: list[int | None] | None, second: list[int | None] | None) -> list[int | None] | None:
    """Return the price of each component that either of them has."""
    if first is None or second is None:
        return first or second
    # NOTE: events of earlier releases have fewer components.
    return [price if price is not None else other for price, other in zip_longest(first, second)]
