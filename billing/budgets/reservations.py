"""The settler's side of holds: what settled executions held goes back to their windows, and what they used is used.

Called inside the transaction that inserts the events, so an execution moves its windows exactly when it becomes a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connection

from billing.metering.arrays import array
from inference_worker.contract.messages import ExecutionUsage
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

FEMTO_PER_NANO = 10**6

_SETTLE = """
SELECT billing_settle(%s::bigint[], %s::integer[], %s::bigint[], %s::bigint[], %s::bigint[], %s::numeric[],
    %s::bigint[], %s::bigint[])
"""
_ADJUST = "SELECT billing_adjust(%s::bigint, %s::numeric, %s::bigint, %s::bigint, %s)"
_REAP = "SELECT count(*) FROM billing_reap(%s)"
_OPEN_BEFORE = "SELECT count(*) FROM billing_slice WHERE open AND made_at < %s"


class ReservationUse(NamedTuple):
    """What an execution uses of each unit's windows."""

    femto: int
    tokens: int
    requests: int

    def __neg__(self) -> ReservationUse:
        return ReservationUse(-self.femto, -self.tokens, -self.requests)


def used_by(event: ExecutionUsage, cost_femto: int) -> ReservationUse:
    """Return what counts of an execution. A failed one counts for nothing, nor does one that never ran."""
    if event.outcome == "failed":
        return ReservationUse(0, 0, 0)
    tokens = event.usage.prompt + event.usage.output
    return ReservationUse(cost_femto, tokens, min(tokens, 1))


def over_its_hold(event: ExecutionUsage, cost_femto: int) -> str | None:
    """How an execution used more than was held for it, which admission makes impossible; None: it did not.

    Where no budget bounds it, its hold is no part of any window, but says all the same what it can come to.
    """
    billing_context, used = event.billing_context, used_by(event, cost_femto)
    hold, hold_tokens = billing_context.hold, billing_context.hold_tokens
    if billing_context.slice_id is not None:
        hold, hold_tokens = hold or 0, hold_tokens or 0
    if hold is not None and used.femto > hold * FEMTO_PER_NANO:
        return f"costs {used.femto} femto-USD, more than its hold"
    if hold_tokens is not None and used.tokens > hold_tokens:
        return f"used {used.tokens} tokens, more than its hold"
    return None


def settle(cursor: Any, executions: Iterable[tuple[ExecutionUsage, int]]) -> set[int]:
    """Move the windows of new executions, each with its cost. Returns the slices whose holds had gone back before:
    their executions are late, and have moved nothing."""
    sums: dict[tuple[int, int], list[int]] = {}
    for event, cost_femto in executions:
        billing_context = event.billing_context
        if billing_context.slice_id is None:
            continue
        used = used_by(event, cost_femto)
        total = sums.setdefault((billing_context.slice_id, billing_context.fence or 0), [0] * 6)
        for place, amount in enumerate((billing_context.hold or 0, billing_context.hold_tokens or 0, 1, *used)):
            total[place] += amount
    if not sums:
        return set()
    columns = zip(*((*slice_, *total) for slice_, total in sums.items()), strict=True)
    cursor.execute(_SETTLE, [array(column) for column in columns])
    return {slice_id for (slice_id,) in cursor.fetchall()}


def adjust(cursor: Any, slice_id: int | None, use: ReservationUse, *, must_fit: bool = False) -> bool:
    """Count more, or less, as used through a slice. False: it must fit its windows and does not; nothing was moved."""
    if slice_id is None:
        return True
    cursor.execute(_ADJUST, [slice_id, *use, must_fit])
    return bool(cursor.fetchone()[0])


def reap(before: datetime) -> int:
    """Take back what slices hold whose requests cannot run any more. All that was told before then must be settled."""
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        cursor.execute(_REAP, [before])
        return int(cursor.fetchone()[0])


def open_before(cursor: Any, moment: datetime) -> int:
    """How many slices made before then may still have requests that are not settled."""
    cursor.execute(_OPEN_BEFORE, [moment])
    return int(cursor.fetchone()[0])
