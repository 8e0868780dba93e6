"""Billing periods: the months of each billing entity, and the assignment of events to them.

An event belongs to the period of its admission. If that one is closed, the event is late and belongs to the next open
period. The settler calls `stamps` in the transaction that inserts the events. Open periods are locked FOR SHARE there,
and FOR UPDATE while they are closed, so no event gets a closed period.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db.models import Max

from billing.models import BillingEntity, BillingProfile, Period
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

SETTLING = timedelta(minutes=10)  # to settle the usage of a request that ran to its deadline
_LOCK = """
SELECT id, entity_id, starts_at, ends_at FROM billing_period WHERE closed_at IS NULL AND ends_at > %s
ORDER BY ends_at, id FOR SHARE
"""
_ENTITIES = "SELECT tenant_id, entity_id FROM billing_billingprofile WHERE tenant_id = ANY(%s)"


class _Open(NamedTuple):
    """A period that is not closed."""

    pk: int
    starts_at: datetime
    ends_at: datetime


def month_bounds(time_zone: str, year: int, month: int) -> tuple[datetime, datetime]:
    """Return the UTC start and end of a month in the time zone; the end is exclusive."""
    zone = ZoneInfo(time_zone)
    years, index = divmod(year * 12 + month, 12)
    return (
        datetime(year, month, 1, tzinfo=zone).astimezone(UTC),
        datetime(years, index + 1, 1, tzinfo=zone).astimezone(UTC),
    )


def billing_zone(tenant_id: int) -> ZoneInfo:
    """Return the time zone of the tenant's billing entity, which no tenant scope shows."""
    with all_tenants_scope(BypassReason.BILLING):
        profile = BillingProfile.objects.for_tenant(tenant_id).select_related("entity").first()
        entity = BillingEntity.objects.filter(slug="default").first() if profile is None else profile.entity
    return ZoneInfo("UTC" if entity is None else entity.time_zone)


def default_entity() -> BillingEntity:
    """Return the default billing entity. It is created on first use."""
    return BillingEntity.objects.get_or_create(slug="default", defaults={"name": "Millrace", "country": "US"})[0]


def close_after() -> timedelta:
    """Return how long after its end a period accepts usage: until every request admitted in it has ended."""
    return timedelta(seconds=settings.MILLRACE.request_timeout_seconds) + SETTLING


def ensure_periods(entity: BillingEntity, first: datetime, last: datetime) -> None:
    """Create the entity's missing periods from the month of `first` to that of `last`."""
    zone = ZoneInfo(entity.time_zone)
    local, end = first.astimezone(zone), last.astimezone(zone)
    rows = []
    for number in range(local.year * 12 + local.month - 1, end.year * 12 + end.month):
        year, index = divmod(number, 12)
        starts_at, ends_at = month_bounds(entity.time_zone, year, index + 1)
        rows.append(Period(entity=entity, label=f"{year:04}-{index + 1:02}", starts_at=starts_at, ends_at=ends_at))
    Period.objects.bulk_create(rows, ignore_conflicts=True)


def stamps(cursor: Any, events: Sequence[tuple[int, datetime]]) -> list[int]:
    """Return the billing period of each (tenant, admitted at). It stays open until the transaction ends.

    Missing periods are created.
    """
    cursor.execute(_ENTITIES, [sorted({tenant for tenant, _ in events})])
    entity_of = dict(cursor.fetchall())
    if any(tenant not in entity_of for tenant, _ in events):
        default = default_entity().pk
        entity_of |= {tenant: default for tenant, _ in events if tenant not in entity_of}
    wanted = [(entity_of[tenant], at) for tenant, at in events]
    first = min(at for _, at in events)
    chosen = _choose(_lock(cursor, first), wanted)
    # Late, or the first event of a month.
    odd = [pair for pair, got in zip(wanted, chosen, strict=True) if got is None or got.starts_at > pair[1]]
    if odd:
        now = datetime.now(UTC)
        for entity in BillingEntity.objects.filter(pk__in={pair[0] for pair in odd}).order_by("pk"):
            times = [pair[1] for pair in odd if pair[0] == entity.pk]
            closed = Period.objects.filter(entity=entity, closed_at__isnull=False).aggregate(last=Max("ends_at"))[
                "last"
            ]
            ensure_periods(entity, min(times), max(*times, now, closed or now))
        chosen = _choose(_lock(cursor, first), wanted)
    if None in chosen:
        raise RuntimeError("a period was closed while it was chosen: try again")
    return [period.pk for period in chosen if period is not None]


def _lock(cursor: Any, first: datetime) -> dict[int, list[_Open]]:
    """Lock each entity's open periods that end after `first`. Return them in order."""
    cursor.execute(_LOCK, [first])
    open_periods: dict[int, list[_Open]] = {}
    for pk, entity, starts_at, ends_at in cursor.fetchall():
        open_periods.setdefault(entity, []).append(_Open(pk, starts_at, ends_at))
    return open_periods


def _choose(periods: dict[int, list[_Open]], wanted: Sequence[tuple[int, datetime]]) -> list[_Open | None]:
    """Return for each (entity, admitted at) the first open period that ends after it."""
    chosen: list[_Open | None] = []
    for entity, at in wanted:
        open_periods = periods.get(entity, [])
        index = bisect_right(open_periods, at, key=lambda period: period.ends_at)
        chosen.append(open_periods[index] if index < len(open_periods) else None)
    return chosen
