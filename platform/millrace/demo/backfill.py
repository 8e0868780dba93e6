"""Settlement of the demo usage, like that of real usage: reserved from budgets and settled by the settler.

A request that a hard budget has no room for was rejected and has no usage. NOTE: budget leases get the creation date of
their usage, since the reconciler compares recently created leases with recently admitted events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
from django.db import connection

from billing.budgets.budgets import do_make_budget
from billing.currencies.amounts import FEMTO_A_NANO, NANO_A_CENT
from billing.metering import rollups
from billing.metering.end_users import build_end_users
from billing.metering.ingest import SettleResult, UsageMessage, settle
from billing.metering.partitions import ensure_partitions
from billing.models import Budget, CompiledRateCard, UsageEvent
from billing.pricing.rating import rate
from billing.rates.pricing import PriceIndex
from billing.reservations.budget_leases import LEASE_SECONDS, SETTLING_SECONDS, UNITS
from inference_worker.contract.messages import encode
from millrace.demo.history import PREFIX, DemoPeriod, DemoUsage, months, uses
from millrace.demo.records import record
from millrace.demo.seeding import DemoModels, DemoTenant
from millrace.demo.tenants import BudgetSpec
from tenants.actions import record_key_usage
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import ApiKey

BATCH = 2000
_OPEN = "SELECT budget_period_id, unit FROM billing_open_budget_periods(%s, %s, %s, %s)"
_LEASE = """
SELECT lease_id, fencing_token, budget_period_id, room
FROM billing_lease_budget(%s, 'demo', %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s, %s, NULL, NULL, NULL)
"""
_LASTING, _LONGEST = timedelta(seconds=LEASE_SECONDS), timedelta(seconds=SETTLING_SECONDS)
_DATE = "UPDATE billing_budgetlease SET created_at = %s WHERE id = %s"


@dataclass
class BackfillProgress:
    """The progress of a backfill."""

    done: int = 0  # number of processed days of all tenants
    of: int = 0
    settled: int = 0
    known: int = 0  # settled by an earlier run
    refused: int = 0
    quarantined: int = 0


def prices() -> PriceIndex:
    """Return all rate cards."""
    index = PriceIndex()
    with all_tenants_scope(BypassReason.COMMAND):
        index.add(row.decode() for row in CompiledRateCard.objects.order_by("pk"))
    return index


def backfill(
    demo_tenants: Sequence[DemoTenant],
    span: DemoPeriod,
    models: DemoModels,
    on_progress: Callable[[BackfillProgress], None],
) -> BackfillProgress:
    """Settle the usage of each tenant that no earlier run has settled, then update the rollups."""
    index, progress = prices(), BackfillProgress()
    plan = {demo_tenant.spec.slug: list(span.all_days(demo_tenant)) for demo_tenant in demo_tenants}
    for month in months([day for days in plan.values() for day in days]):
        ensure_partitions(month)
    progress.of = sum(len(days) for days in plan.values())
    for demo_tenant in demo_tenants:
        history = {day: uses(demo_tenant, day, span, models, index) for day in plan[demo_tenant.spec.slug]}
        everything = [use for day in history.values() for use in day]
        _budgets(demo_tenant, everything, span.now)
        sending = _Sending(demo_tenant, progress)
        for day, found in history.items():
            sending.send(day, found)
            progress.done += 1
            on_progress(progress)
        sending.flush()
        record(demo_tenant, everything, span.now)
    rollups.build()
    build_end_users()
    return progress


def _budgets(demo_tenant: DemoTenant, history: Sequence[DemoUsage], now: datetime) -> None:
    """Create the missing budgets. The amounts of some are derived from the history."""
    spec = demo_tenant.spec
    wanted: list[tuple[BudgetSpec, ApiKey | None]] = [(budget, None) for budget in spec.budgets]
    wanted += [(budget, demo_tenant.keys[key.name]) for key in spec.keys for budget in key.budgets]
    with tenant_scope(demo_tenant.tenant):
        known = set(Budget.objects.for_tenant(demo_tenant.tenant).values_list("name", flat=True))
    for budget, key in wanted:
        if budget.name in known:
            continue
        do_make_budget(
            demo_tenant.tenant,
            key=key,
            member=demo_tenant.people[budget.member] if budget.member else None,
            name=budget.name,
            unit=budget.unit,
            period=budget.period,
            amount=_amount(budget, history, now),
            mode=budget.mode,
            reduce_max_tokens=budget.reduce_max_tokens,
            rollover_limit=budget.rollover_limit,
            temporary_increase=budget.temporary_increase,
            increase_expires_at=now + timedelta(days=7) if budget.temporary_increase else None,
        )


def _amount(budget: BudgetSpec, history: Sequence[DemoUsage], now: datetime) -> int:
    if isinstance(budget.amount, int):
        return budget.amount
    sums: dict[str, int] = defaultdict(int)  # by month, or one sum
    for use, rated in zip(history, rate([use.event for use in history]), strict=True):
        at = _moment(use)
        if not isinstance(rated, Exception) and (budget.of != "days" or at >= now - timedelta(days=30)):
            sums[f"{at:%Y-%m}" if budget.of == "month" else ""] += rated.cost_femto
    spent = max(sums.values(), default=0) // FEMTO_A_NANO
    return max(NANO_A_CENT, round(spent * budget.amount / NANO_A_CENT) * NANO_A_CENT)


class _Sending:
    """The usage of one tenant that is being settled."""

    def __init__(self, demo_tenant: DemoTenant, progress: BackfillProgress) -> None:
        self._demo_tenant, self._progress = demo_tenant, progress
        self._waiting: list[UsageMessage] = []
        self._unbounded: set[str] = set()  # names of keys without a budget
        with tenant_scope(demo_tenant.tenant):
            events = UsageEvent.objects.for_tenant(demo_tenant.tenant).filter(request_id__startswith=PREFIX)
            self._known = set(events.values_list("request_id", flat=True))

    def send(self, day: date, uses: Iterable[DemoUsage]) -> None:
        """Settle a day's requests, grouped by key, as they fit the budgets."""
        by_key: dict[str, list[DemoUsage]] = {}
        for use in uses:
            if use.event.billing_context.request_id in self._known:
                self._progress.known += 1
            else:
                by_key.setdefault(use.key, []).append(use)
        for key, group in by_key.items():
            self._admit(key, day, group)
        if by_key:
            last = {group[-1].event.billing_context.key_id: _moment(group[-1]) for group in by_key.values()}
            record_key_usage(last)

    def flush(self) -> None:
        messages, self._waiting = self._waiting, []
        if not messages:
            return
        outcome: SettleResult = settle(messages)
        self._progress.settled += outcome.settled
        self._progress.quarantined += outcome.quarantined

    def _admit(self, key: str, day: date, group: Sequence[DemoUsage]) -> None:
        """Admit as much of the group as fits, in parts, since reservations are larger than the usage."""
        while group:
            lease, rooms = self._lease(key, day, group)
            if not rooms:
                self._queue(group, lease)
                return
            if self._waiting:
                self.flush()
                continue
            fitting, group = _split_uses(group, rooms)
            if not fitting:
                self._progress.refused += len(group)
                return
            self._admit(key, day, fitting)

    def _lease(self, key: str, day: date, group: Sequence[DemoUsage]) -> tuple[tuple[int, int] | None, dict[str, int]]:
        """Return a budget lease for the group, or the room per unit if the group does not fit.

        Both are empty if the key has no budget.
        """
        if key in self._unbounded:
            return None, {}
        row, tenant = self._demo_tenant.keys[key], self._demo_tenant.tenant
        noon = datetime(day.year, day.month, day.day, 12, tzinfo=UTC)
        amount = [sum(use.need[unit] for use in group) for unit in UNITS]
        with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
            cursor.execute(_OPEN, [tenant.pk, row.project_id, row.pk, noon])
            unit_of = dict(cursor.fetchall())
            if not unit_of:
                self._unbounded.add(key)
                return None, {}
            parameters: list[Any] = [tenant.pk, list(unit_of), amount, amount, amount, _LASTING, _LONGEST]
            cursor.execute(_LEASE, parameters)
            rows = cursor.fetchall()
            lease_id, fencing_token = rows[0][:2]
            if lease_id is not None:
                cursor.execute(_DATE, [_moment(group[0]), lease_id])
                return (lease_id, fencing_token), {}
        rooms: dict[str, int] = {}
        for _, _, budget_period_id, room in rows:
            unit = unit_of[budget_period_id]
            rooms[unit] = min(room, rooms.get(unit, room))
        return None, rooms

    def _queue(self, group: Sequence[DemoUsage], lease: tuple[int, int] | None) -> None:
        self._waiting += [
            UsageMessage(use.event.billing_context.request_id, encode(_build_event(use, lease))) for use in group
        ]
        if len(self._waiting) >= BATCH:
            self.flush()


def _build_event(use: DemoUsage, lease: tuple[int, int] | None) -> Any:
    """Return the event as a worker would send it, with its reservation."""
    held = {"reserved_nano": use.need["money"], "reserved_tokens": use.need["tokens"]}
    if lease is not None:
        held |= {"lease_id": lease[0], "fencing_token": lease[1]}
    return msgspec.structs.replace(
        use.event, billing_context=msgspec.structs.replace(use.event.billing_context, **held)
    )


def _split_uses(group: Sequence[DemoUsage], rooms: dict[str, int]) -> tuple[list[DemoUsage], list[DemoUsage]]:
    """Return the uses that fit into the rooms one after another, and the rest."""
    fitting, rest, left = [], [], dict(rooms)
    for use in group:
        if all(use.need[unit] <= room for unit, room in left.items()):
            left = {unit: room - use.need[unit] for unit, room in left.items()}
            fitting.append(use)
        else:
            rest.append(use)
    return fitting, rest


def _moment(use: DemoUsage) -> datetime:
    return datetime.fromtimestamp(use.event.billing_context.admitted_at / 1_000_000, UTC)
