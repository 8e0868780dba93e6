"""The usage of months that are not invoiced, summed from stored sums and from the events that were settled since.

The events of a month are read once. `PeriodUsage` stores their sums, up to a time before which every settlement is
committed, and each reading adds the events after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.db import connection

from billing.invoicing.lines import UsageLine, find_usage
from billing.metering.rollups import OVERLAP
from billing.models import Period, PeriodUsage


def read_usage(periods: Iterable[Period], tenant_id: int) -> dict[int, list[UsageLine]]:
    """Return a tenant's usage of each billing period, by its ID."""
    found: dict[int, list[UsageLine]] = {}
    for period, row in store_usage(periods, tenant_id):
        found[period.pk] = []
        if row.lines or not _is_complete(row, period):
            usage = find_usage(period, tenant_id, row.lines, since=row.settled_before)
            found[period.pk] = usage.get(tenant_id, [])
    return found


def store_usage(periods: Iterable[Period], tenant_id: int) -> list[tuple[Period, PeriodUsage]]:
    """Return the stored sums of each billing period. Those that are missing or old are stored first."""
    stored = {row.period_id: row for row in PeriodUsage.objects.for_tenant(tenant_id)}
    with connection.cursor() as cursor:
        cursor.execute("SELECT now()")
        committed = cursor.fetchone()[0] - OVERLAP
    found = []
    for period in periods:
        row = stored.get(period.pk)
        if row is None or (row.settled_before <= committed - OVERLAP and not _is_complete(row, period)):
            row = _store(period, tenant_id, row, committed)
        found.append((period, row))
    return found


def _is_complete(row: PeriodUsage, period: Period) -> bool:
    """Return whether the stored sums have all events: a closed period gets no more."""
    return period.closed_at is not None and row.settled_before >= period.closed_at + OVERLAP


def _store(period: Period, tenant_id: int, row: PeriodUsage | None, committed: datetime) -> PeriodUsage:
    """Store the sums of all events that were settled before that time."""
    known, since = ([], None) if row is None else (row.lines, row.settled_before)
    usage = find_usage(period, tenant_id, known, since=since, before=committed).get(tenant_id, [])
    new = PeriodUsage(
        tenant_id=tenant_id, period_id=period.pk, settled_before=committed, lines=[_encode(line) for line in usage]
    )
    PeriodUsage.objects.all_tenants().bulk_create(
        [new],
        update_conflicts=True,
        unique_fields=["tenant_id", "period_id"],
        update_fields=["settled_before", "lines"],
    )
    return new


def _encode(line: UsageLine) -> dict[str, Any]:
    return {
        "price_id": line.price_id,
        "usage_month": line.usage_month,
        "billed_period": line.billed_period,
        "events": line.events,
        "tokens": line.tokens,
        "first_at": line.first_at.isoformat(),
        "last_at": line.last_at.isoformat(),
    }
