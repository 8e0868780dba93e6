"""Settlement of reservations: releases them from their budget periods and adds what was used.

The functions run in the transaction that inserts the usage events. So an execution changes its budget periods exactly
when its event is inserted.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from django.db import connection

from billing.currencies.amounts import FEMTO_A_NANO
from billing.db_arrays import array
from billing.rates.reserved_charge import reserved_by
from inference_worker.contract.messages import BillingContext, ExecutionUsage
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

_SETTLE = """
SELECT * FROM billing_settle(%s::bigint[], %s::integer[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
    %s::numeric[], %s::bigint[], %s::bigint[])
"""
_ADJUST = "SELECT billing_adjust(%s::bigint, %s::integer, %s::bigint, %s::numeric, %s::bigint, %s::bigint, %s)"
_RECLAIM = "SELECT count(*) FROM billing_reclaim_leases(%s)"
_OPEN_BEFORE = "SELECT count(*) FROM billing_budgetlease WHERE open AND created_at < %s"


class LeaseKey(NamedTuple):
    """The identity of a lease. A failover of PostgreSQL can assign an ID a second time."""

    id: int
    fencing_token: int
    tenant_id: int


class ReservationUse(NamedTuple):
    """The amounts that an execution used, by unit."""

    femto: int
    tokens: int
    requests: int

    def __neg__(self) -> ReservationUse:
        return ReservationUse(-self.femto, -self.tokens, -self.requests)


def lease_of(billing_context: BillingContext) -> LeaseKey | None:
    """Return the lease that an execution was admitted from; None: it needed none."""
    if billing_context.lease_id is None:
        return None
    return LeaseKey(billing_context.lease_id, billing_context.fencing_token or 0, billing_context.tenant_id)


def used_by(event: ExecutionUsage, cost_femto: int) -> ReservationUse:
    """Return the amounts that an execution used. A failed execution, or one that never started, used nothing."""
    if event.outcome == "failed":
        return ReservationUse(0, 0, 0)
    return ReservationUse(cost_femto, event.usage.total, min(event.usage.total, 1))


def exceeds_reservation(event: ExecutionUsage, cost_femto: int) -> str | None:
    """Return how an execution exceeds its reservation, or None. Admission makes that impossible.

    The check also applies to executions without budgets, which carry the maximum cost as a reservation.
    """
    used = used_by(event, cost_femto)
    reserved_nano, reserved_tokens = reserved_by(event.billing_context)
    if reserved_nano is not None and used.femto > reserved_nano * FEMTO_A_NANO:
        return f"costs {used.femto} femto-USD, more than its reservation"
    if reserved_tokens is not None and used.tokens > reserved_tokens:
        return f"used {used.tokens} tokens, more than its reservation"
    return None


def settle(cursor: Any, executions: Iterable[tuple[ExecutionUsage, int]]) -> set[LeaseKey]:
    """Settle new executions, each with its cost. Return the leases that were reclaimed, or lost in a failover.

    The executions of those leases are late. They have changed nothing.
    """
    sums: dict[LeaseKey, list[int]] = {}
    for event, cost_femto in executions:
        billing_context = event.billing_context
        lease = lease_of(billing_context)
        if lease is None:
            continue
        used = used_by(event, cost_femto)
        total = sums.setdefault(lease, [0] * 6)
        for place, amount in enumerate(
            (billing_context.reserved_nano or 0, billing_context.reserved_tokens or 0, 1, *used)
        ):
            total[place] += amount
    if not sums:
        return set()
    columns = zip(*((*lease, *total) for lease, total in sums.items()), strict=True)
    cursor.execute(_SETTLE, [array(column) for column in columns])
    return {LeaseKey(*row) for row in cursor.fetchall()}


def adjust(cursor: Any, lease: LeaseKey | None, use: ReservationUse, *, must_fit: bool = False) -> bool:
    """Add to the amounts used through a lease. Return False if it must fit its budget periods and does not.

    If the lease was lost in a failover, nothing is added.
    """
    if lease is None:
        return True
    cursor.execute(_ADJUST, [*lease, *use, must_fit])
    return bool(cursor.fetchone()[0])


def reclaim(before: datetime) -> int:
    """Reclaim leases whose requests cannot run any more. Return how many. All usage reported before must be settled."""
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        cursor.execute(_RECLAIM, [before])
        return int(cursor.fetchone()[0])


def open_before(cursor: Any, moment: datetime) -> int:
    """Return how many leases from before that time may have unsettled requests."""
    cursor.execute(_OPEN_BEFORE, [moment])
    return int(cursor.fetchone()[0])
