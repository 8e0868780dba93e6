"""Reconciliation of budget periods, leases, events and journals. Budget periods are repaired by correction rows.

Each step of a reservation is one transaction, so a difference comes from an internal error or a manual change of the
database. It is found within minutes and shown on the operators' first page.
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
REPORT_OVERDUE_AFTER = timedelta(minutes=15)  # without a report, which should come every 5 minutes
OVERDUE = timedelta(minutes=5)  # time of the settler to reclaim a lease

# Budget periods whose amounts differ from the sums of their leases. One statement reads one snapshot.
_DIFFERING_PERIODS = """
WITH looked AS (
    SELECT w.* FROM billing_budgetperiod w WHERE (w.id = %(only)s::bigint OR %(only)s::bigint IS NULL)
        AND (w.period_end IS NULL OR w.period_end > %(since)s)
), sums AS (
    SELECT part.id, sum(s.money) AS money, sum(s.tokens) AS tokens, sum(s.requests) AS requests,
        sum(s.settled_money) AS used_money, 1000000 * sum(s.settled_tokens) AS used_tokens,
        1000000 * sum(s.settled_requests) AS used_requests
    FROM billing_budgetlease s CROSS JOIN LATERAL unnest(s.budget_period_ids) AS part (id)
    WHERE part.id IN (SELECT id FROM looked) GROUP BY part.id
), compared AS (
    SELECT l.id, l.tenant_id,
        coalesce(CASE l.unit WHEN 'money' THEN s.money WHEN 'tokens' THEN s.tokens ELSE s.requests END, 0) - l.reserved
            AS reserved,
        coalesce(CASE l.unit WHEN 'money' THEN s.used_money WHEN 'tokens' THEN s.used_tokens
            ELSE s.used_requests END, 0) - l.used AS used
    FROM looked l LEFT JOIN sums s ON s.id = l.id
)
SELECT id, tenant_id, reserved::bigint, used FROM compared WHERE reserved <> 0 OR used <> 0
"""
_TOKENS = " + ".join(TOKEN_CLASSES)
# Leases whose settled amounts differ from their executions with adjustments, with the difference of each unit.
_DIFFERING_LEASES = f"""
WITH adjusted AS (
    SELECT admitted_at, request_id, execution, sum(cost_femto) AS cost,
        sum({_TOKENS}) AS tokens
    FROM billing_adjustment WHERE admitted_at > %(since)s - interval '1 day' GROUP BY admitted_at, request_id, execution
), execution AS (
    SELECT e.lease_id, e.cost_femto + coalesce(a.cost, 0) AS cost, CASE WHEN e.outcome = 'failed' THEN 0 ELSE
        {_TOKENS} + coalesce(a.tokens, 0) END AS tokens
    FROM billing_usageevent e LEFT JOIN adjusted a USING (admitted_at, request_id, execution)
    JOIN billing_budgetlease s ON s.id = e.lease_id AND s.tenant_id = e.tenant_id
        AND s.fencing_token - e.fencing_token IN (0, 1)  -- otherwise it is another lease: see billing_adjust
    WHERE e.admitted_at > %(since)s - interval '1 day'
), sums AS (
    SELECT lease_id, sum(cost) AS cost, sum(tokens) AS tokens, count(*) FILTER (WHERE tokens > 0) AS requests
    FROM execution GROUP BY lease_id
), compared AS (
    SELECT s.id, s.tenant_id, coalesce(l.cost, 0) - s.settled_money AS used,
        (coalesce(l.tokens, 0) - s.settled_tokens)::bigint AS tokens,
        coalesce(l.requests, 0) - s.settled_requests AS requests
    FROM billing_budgetlease s LEFT JOIN sums l ON l.lease_id = s.id WHERE s.created_at > %(since)s
)
SELECT id, tenant_id, used, tokens, requests FROM compared WHERE used <> 0 OR tokens <> 0 OR requests <> 0
"""  # noqa: S608  (column names from above, nothing from outside)
_OVERDUE = "SELECT count(*) FROM billing_budgetlease WHERE open AND reclaim_at < %s"
_COUNT = "SELECT count(*) FROM billing_budgetperiod WHERE period_end IS NULL OR period_end > %s"
_LOCK = "SELECT 1 FROM billing_budgetperiod WHERE id = %s FOR NO KEY UPDATE"
_MOVE = "SELECT billing_move_amounts(ARRAY[%s::bigint], ARRAY[%s::bigint], ARRAY[%s::numeric])"


def reconcile(journals: Path | None = None) -> Reconciliation:
    """Compare the last days, repair differences and write the report.

    Args: journals: the directory of the workers' journals, if it is on this machine.
    """
    now = datetime.now(UTC)
    since = now - LOOKBACK
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        budget_periods = _differing(cursor, since)
        cursor.execute(_DIFFERING_LEASES, {"since": since})
        leases = [
            {"lease": pk, "tenant": tenant_id, "used": str(used), "tokens": tokens, "requests": requests}
            for pk, tenant_id, used, tokens, requests in cursor.fetchall()
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
    corrected = [
        fixed for budget_period_id, *_ in budget_periods if (fixed := _correct(budget_period_id, since)) is not None
    ]
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        cursor.execute(_COUNT, [since])
        compared = cursor.fetchone()[0]
        cursor.execute(_OVERDUE, [now - OVERDUE])
        report = Reconciliation.objects.create(
            created_at=now,
            budget_periods=compared,
            differences=[*corrected, *leases, *lost],
            corrected=len(corrected),
            overdue_leases=cursor.fetchone()[0],
            quarantined=UsageQuarantine.objects.filter(resolved_at__isnull=True).count(),
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


def _differing(cursor: Any, since: datetime, only: int | None = None) -> list[tuple[int, int, int, Any]]:
    cursor.execute(_DIFFERING_PERIODS, {"since": since, "only": only})
    return list(cursor.fetchall())


def _correct(budget_period_id: int, since: datetime) -> dict[str, Any] | None:
    """Correct a budget period by its leases. None: it already agrees."""
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        cursor.execute(_LOCK, [budget_period_id])
        found = _differing(cursor, since, budget_period_id)
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
