"""Reconciliation of budget periods, leases, events and journals. Budget periods are repaired by correction rows.

Each step of a reservation is one transaction, so a difference comes from an internal error or a manual change of the
database. It is found within minutes and shown on the operators' first page.

A run reads what has changed since the last one: the budget periods with new row versions, and the leases that are open,
new, or of newly written usage. Once a day, a run reads all of the last days, with the changes that the others cannot
see, such as a manual change of a closed lease.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from django.db import connection
from django.db.models import Count

from billing.metering.worker_journals import find_unsettled
from billing.models import BudgetCorrection, Reconciliation, UsageQuarantine
from billing.periods import close_after
from inference_worker.contract.host import host_name
from inference_worker.contract.request import TOKEN_CLASSES
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)

LOOKBACK = timedelta(days=2)  # at ended budget periods and at created leases
FULL_EVERY = timedelta(days=1)
OVERLAP = timedelta(minutes=10)  # usage written in this time before the last run is read again; no commit takes longer
EARLIEST_ADMISSION = timedelta(hours=1)  # before the lease; a difference is confirmed with all events
REPORT_OVERDUE_AFTER = timedelta(minutes=15)  # without a report, which should come every 5 minutes
OVERDUE = timedelta(minutes=5)  # time of the settler to reclaim a lease

# Transactions from the horizon on may have committed after the statements of the run that has read it.
_HORIZON = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
_PERIODS = """
SELECT w.id FROM billing_budgetperiod w WHERE (w.period_end IS NULL OR w.period_end > %(since)s)
    AND (%(horizon)s::text IS NULL OR age(w.xmin) <= age(%(horizon)s::text::xid8::xid))
"""
# Budget periods whose amounts differ from the sums of their leases. One statement reads one snapshot.
_DIFFERING_PERIODS = """
WITH part AS (
    SELECT budget_period_ids, money, tokens, requests, settled_money, settled_tokens, settled_requests
    FROM billing_budgetlease WHERE budget_period_ids && %(ids)s::bigint[]
    UNION ALL
    SELECT budget_period_ids, 0, 0, 0, settled_money, settled_tokens, settled_requests
    FROM billing_budgetleasesum WHERE budget_period_ids && %(ids)s::bigint[]
), sums AS (
    SELECT unnested.id, sum(s.money) AS money, sum(s.tokens) AS tokens, sum(s.requests) AS requests,
        sum(s.settled_money) AS used_money, 1000000 * sum(s.settled_tokens) AS used_tokens,
        1000000 * sum(s.settled_requests) AS used_requests
    FROM part s CROSS JOIN LATERAL unnest(s.budget_period_ids) AS unnested (id) GROUP BY unnested.id
), compared AS (
    SELECT l.id, l.tenant_id,
        coalesce(CASE l.unit WHEN 'money' THEN s.money WHEN 'tokens' THEN s.tokens ELSE s.requests END, 0) - l.reserved
            AS reserved,
        coalesce(CASE l.unit WHEN 'money' THEN s.used_money WHEN 'tokens' THEN s.used_tokens
            ELSE s.used_requests END, 0) - l.used AS used
    FROM billing_budgetperiod l LEFT JOIN sums s ON s.id = l.id WHERE l.id = ANY(%(ids)s::bigint[])
)
SELECT id, tenant_id, reserved::bigint, used FROM compared WHERE reserved <> 0 OR used <> 0
"""
_CHANGED_LEASES = """
WITH changed AS (
    SELECT id FROM billing_budgetlease WHERE open
    UNION SELECT id FROM billing_budgetlease WHERE created_at > %(changed)s
    UNION SELECT lease_id FROM billing_usageevent WHERE settled_at > %(changed)s
    UNION SELECT lease_id FROM billing_adjustment WHERE created_at > %(changed)s
    UNION SELECT unnest(%(reported)s::bigint[])
)
SELECT l.id, l.created_at FROM changed JOIN billing_budgetlease l USING (id) WHERE l.created_at > %(since)s
"""
_TOKENS = " + ".join(TOKEN_CLASSES)
# Leases whose settled amounts differ from their executions with adjustments, with the difference of each unit.
_DIFFERING_LEASES = f"""
WITH adjusted AS (
    SELECT admitted_at, request_id, execution, sum(cost_femto) AS cost,
        sum({_TOKENS}) AS tokens
    FROM billing_adjustment WHERE admitted_at > %(admitted)s GROUP BY admitted_at, request_id, execution
), execution AS (
    SELECT e.lease_id, e.cost_femto + coalesce(a.cost, 0) AS cost, CASE WHEN e.outcome = 'failed' THEN 0 ELSE
        {_TOKENS} + coalesce(a.tokens, 0) END AS tokens
    FROM billing_usageevent e LEFT JOIN adjusted a USING (admitted_at, request_id, execution)
    JOIN billing_budgetlease s ON s.id = e.lease_id AND s.tenant_id = e.tenant_id
        AND s.fencing_token - coalesce(e.fencing_token, 0) IN (0, 1)  -- otherwise another lease: see billing_adjust
    WHERE e.admitted_at > %(admitted)s
        AND (%(ids)s::bigint[] IS NULL OR e.lease_id = ANY(%(ids)s::bigint[]))
), sums AS (
    SELECT lease_id, sum(cost) AS cost, sum(tokens) AS tokens, count(*) FILTER (WHERE tokens > 0) AS requests
    FROM execution GROUP BY lease_id
), compared AS (
    SELECT s.id, s.tenant_id, coalesce(l.cost, 0) - s.settled_money AS used,
        (coalesce(l.tokens, 0) - s.settled_tokens)::bigint AS tokens,
        coalesce(l.requests, 0) - s.settled_requests AS requests
    FROM billing_budgetlease s LEFT JOIN sums l ON l.lease_id = s.id
    WHERE s.created_at > %(since)s AND (%(ids)s::bigint[] IS NULL OR s.id = ANY(%(ids)s::bigint[]))
)
SELECT id, tenant_id, used, tokens, requests FROM compared WHERE used <> 0 OR tokens <> 0 OR requests <> 0
"""  # noqa: S608  (column names from above, nothing from outside)
_OVERDUE = "SELECT count(*) FROM billing_budgetlease WHERE open AND reclaim_at < %s"
_LOCK = "SELECT 1 FROM billing_budgetperiod WHERE id = %s FOR NO KEY UPDATE"
_MOVE = "SELECT billing_move_amounts(ARRAY[%s::bigint], ARRAY[%s::bigint], ARRAY[%s::numeric])"


def reconcile(journals: Path | None = None) -> Reconciliation:
    """Compare what has changed, or once a day all of the last days. Repair differences and write the report.

    Args: journals: the directory of the workers' journals, if it is on this machine.
    """
    now = datetime.now(UTC)
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        compared = _choose_rows(cursor, now)
        differing = _differing(cursor, compared.period_ids)
        leases = [
            {"lease": pk, "tenant": tenant_id, "used": str(used), "tokens": tokens, "requests": requests}
            for pk, tenant_id, used, tokens, requests in _differing_leases(cursor, compared)
        ]
        lost = [
            {
                "journal": worker.worker,
                "host": host_name(),
                "tenant": worker.tenant_id,
                "tokens": worker.tokens,
                "requests": worker.executions,
            }
            for worker in (find_unsettled(journals, now - close_after()) if journals else ())
        ]
    corrected = [fixed for period_id, *_ in differing if (fixed := _correct(period_id)) is not None]
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        cursor.execute(_OVERDUE, [now - OVERDUE])
        report = Reconciliation.objects.create(
            created_at=now,
            budget_periods=len(compared.period_ids),
            differences=[*corrected, *leases, *lost],
            corrected=len(corrected),
            overdue_leases=cursor.fetchone()[0],
            quarantined=UsageQuarantine.objects.filter(resolved_at__isnull=True).count(),
            is_full=compared.lease_ids is None,
            horizon=compared.horizon,
        )
    if not report.is_clean:
        log.error("reconciliation_failed", differences=report.differences, overdue_leases=report.overdue_leases)
    return report


class ReconciliationStatus(NamedTuple):
    """The newest report and the current quarantine, for operators."""

    report: Reconciliation | None  # None: no run yet
    is_late: bool  # the last report is too old: Celery beat may not run
    quarantine: dict[str, int]  # messages that no operator has handled, by reason

    @property
    def is_clean(self) -> bool:
        return self.report is not None and self.report.is_clean and not (self.is_late or self.quarantine)


def reconciliation_status() -> ReconciliationStatus:
    """Return the last report and the current quarantine. An all-tenants scope must be open."""
    report = Reconciliation.objects.first()
    open_ = UsageQuarantine.objects.filter(resolved_at__isnull=True)
    counts = dict(open_.values_list("reason").annotate(number=Count("pk")).order_by("reason"))
    is_late = report is None or report.created_at < datetime.now(UTC) - REPORT_OVERDUE_AFTER
    return ReconciliationStatus(report, is_late, counts)


class _Comparison(NamedTuple):
    """The budget periods and leases that one run compares."""

    since: datetime  # leases that were created later
    horizon: int
    period_ids: list[int]
    lease_ids: list[int] | None  # None: all
    admitted: datetime  # usage of the leases that was admitted later


def _choose_rows(cursor: Any, now: datetime) -> _Comparison:
    """Return the rows that have changed since the last run, or all of the last days if no full run was within a day.

    Leases that the last run has reported are compared again, until they agree.
    """
    since = now - LOOKBACK
    cursor.execute(_HORIZON)
    (horizon,) = cursor.fetchone()
    last = Reconciliation.objects.first()
    has_full = Reconciliation.objects.filter(is_full=True, created_at__gt=now - FULL_EVERY).exists()
    # After a failover, transaction numbers can be lower than before.
    if last is None or last.horizon is None or last.horizon > horizon or not has_full:
        cursor.execute(_PERIODS, {"since": since, "horizon": None})
        period_ids = [pk for (pk,) in cursor.fetchall()]
        return _Comparison(since, horizon, period_ids, None, since - timedelta(days=1))
    cursor.execute(_PERIODS, {"since": since, "horizon": last.horizon})
    period_ids = [pk for (pk,) in cursor.fetchall()]
    reported = [difference["lease"] for difference in last.differences if "lease" in difference]
    changed = {"since": since, "changed": last.created_at - OVERLAP, "reported": reported}
    cursor.execute(_CHANGED_LEASES, changed)
    created = dict(cursor.fetchall())
    return _Comparison(
        since, horizon, period_ids, list(created), min(created.values(), default=now) - EARLIEST_ADMISSION
    )


def _differing(cursor: Any, period_ids: list[int]) -> list[tuple[int, int, int, Any]]:
    cursor.execute(_DIFFERING_PERIODS, {"ids": period_ids})
    return list(cursor.fetchall())


def _differing_leases(cursor: Any, compared: _Comparison) -> list[tuple[int, int, Any, int, int]]:
    """Return the leases that differ from their events, with the differences."""
    values: dict[str, Any] = {"since": compared.since, "ids": compared.lease_ids, "admitted": compared.admitted}
    cursor.execute(_DIFFERING_LEASES, values)
    found = list(cursor.fetchall())
    if not found or compared.lease_ids is None:
        return found
    values |= {"ids": [pk for pk, *_ in found], "admitted": compared.since - timedelta(days=1)}
    cursor.execute(_DIFFERING_LEASES, values)
    return list(cursor.fetchall())


def _correct(budget_period_id: int) -> dict[str, Any] | None:
    """Correct a budget period by its leases. None: it already agrees."""
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        cursor.execute(_LOCK, [budget_period_id])
        found = _differing(cursor, [budget_period_id])
        if not found:
            return None
        ((_, tenant_id, reserved, used),) = found
        cursor.execute(_MOVE, [budget_period_id, reserved, used])
        BudgetCorrection.objects.create(
            created_at=datetime.now(UTC),
            tenant_id=tenant_id,
            budget_period_id=budget_period_id,
            used=used,
            reserved=reserved,
        )
    return {"budget_period": budget_period_id, "tenant": tenant_id, "reserved": reserved, "used": str(used)}
