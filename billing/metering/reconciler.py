"""Compares windows, slices, events and journals; repairs windows, and only by rows that say so.

Each step of a hold's life is one transaction, so there is nothing to find unless an internal error or a hand in the
database made it. Then it is found within minutes and stands in a report on the operators' first screen.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from django.db import connection
from django.db.models import Count

from billing.actions.drafts import close_after
from billing.metering.worker_journals import unsettled
from billing.models import Correction, Reconciliation, UsageQuarantine
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)

LOOKBACK = timedelta(days=2)  # at windows that ended and slices that were made
REPORT_OVERDUE_AFTER = timedelta(minutes=15)  # without a report: it should come every five
OVERDUE = timedelta(minutes=5)  # that the settler may take to reap a slice

# What windows should hold and have used, by their slices; only those that differ. One statement sees one moment.
_WINDOWS = """
WITH looked AS (
    SELECT w.* FROM billing_window w WHERE (w.id = %(only)s::bigint OR %(only)s::bigint IS NULL)
        AND (w.period_end IS NULL OR w.period_end > %(since)s)
), sums AS (
    SELECT part.id, sum(s.money) AS money, sum(s.tokens) AS tokens, sum(s.requests) AS requests,
        sum(s.settled_money) AS used_money, 1000000 * sum(s.settled_tokens) AS used_tokens,
        1000000 * sum(s.settled_requests) AS used_requests
    FROM billing_slice s CROSS JOIN LATERAL unnest(s.windows) AS part (id)
    WHERE part.id IN (SELECT id FROM looked) GROUP BY part.id
), compared AS (
    SELECT l.id, l.tenant_id,
        coalesce(CASE l.unit WHEN 'money' THEN s.money WHEN 'tokens' THEN s.tokens ELSE s.requests END, 0) - l.held
            AS held,
        coalesce(CASE l.unit WHEN 'money' THEN s.used_money WHEN 'tokens' THEN s.used_tokens
            ELSE s.used_requests END, 0) - l.used AS used
    FROM looked l LEFT JOIN sums s ON s.id = l.id
)
SELECT id, tenant_id, held::bigint, used FROM compared WHERE held <> 0 OR used <> 0
"""
# Slices that have settled other than their executions, adjustments added, come to: of each unit, by how much.
_SLICES = """
WITH adjusted AS (
    SELECT admitted_at, request_id, execution, sum(cost_femto) AS cost,
        sum(uncached + cache_read + cache_write_5m + cache_write_1h + output) AS tokens
    FROM billing_adjustment WHERE admitted_at > %(since)s - interval '1 day' GROUP BY admitted_at, request_id, execution
), execution AS (
    SELECT e.slice_id, e.cost_femto + coalesce(a.cost, 0) AS cost, CASE WHEN e.outcome = 'failed' THEN 0 ELSE
        e.uncached + e.cache_read + e.cache_write_5m + e.cache_write_1h + e.output + coalesce(a.tokens, 0) END AS tokens
    FROM billing_usageevent e LEFT JOIN adjusted a USING (admitted_at, request_id, execution)
    WHERE e.slice_id IS NOT NULL AND e.admitted_at > %(since)s - interval '1 day'
), sums AS (
    SELECT slice_id, sum(cost) AS cost, sum(tokens) AS tokens, count(*) FILTER (WHERE tokens > 0) AS requests
    FROM execution GROUP BY slice_id
), compared AS (
    SELECT s.id, s.tenant_id, coalesce(l.cost, 0) - s.settled_money AS used,
        (coalesce(l.tokens, 0) - s.settled_tokens)::bigint AS tokens,
        coalesce(l.requests, 0) - s.settled_requests AS requests
    FROM billing_slice s LEFT JOIN sums l ON l.slice_id = s.id WHERE s.made_at > %(since)s
)
SELECT id, tenant_id, used, tokens, requests FROM compared WHERE used <> 0 OR tokens <> 0 OR requests <> 0
"""
_OVERDUE = "SELECT count(*) FROM billing_slice WHERE open AND reap_at < %s"
_COUNT = "SELECT count(*) FROM billing_window WHERE period_end IS NULL OR period_end > %s"
_LOCK = "SELECT 1 FROM billing_window WHERE id = %s FOR NO KEY UPDATE"
_MOVE = "SELECT billing_move(ARRAY[%s::bigint], ARRAY[%s::bigint], ARRAY[%s::numeric])"


def reconcile(journals: Path | None = None) -> Reconciliation:
    """Compare everything of the last days, repair what differs, and write the report.

    Args:
        journals: the folder of the workers' journals, as far as they lie on this machine.
    """
    now = datetime.now(UTC)
    since = now - LOOKBACK
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        windows = _differing(cursor, since)
        cursor.execute(_SLICES, {"since": since})
        slices = [
            {"slice": pk, "tenant": tenant_id, "used": str(used), "tokens": tokens, "requests": requests}
            for pk, tenant_id, used, tokens, requests in cursor.fetchall()
        ]
        lost = [
            {"journal": each.worker, "tenant": each.tenant_id, "tokens": each.tokens, "requests": each.executions}
            for each in (unsettled(journals, now - close_after()) if journals else ())
        ]
    corrected = [fixed for window_id, *_ in windows if (fixed := _correct(window_id, since)) is not None]
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        cursor.execute(_COUNT, [since])
        compared = cursor.fetchone()[0]
        cursor.execute(_OVERDUE, [now - OVERDUE])
        report = Reconciliation.objects.create(
            at=now,
            windows=compared,
            differences=[*corrected, *slices, *lost],
            corrected=len(corrected),
            overdue_slices=cursor.fetchone()[0],
            quarantined=UsageQuarantine.objects.filter(resolved_at__isnull=True).count(),
        )
    if not report.is_clean:
        log.error("reconciliation_failed", differences=report.differences, overdue_slices=report.overdue_slices)
    return report


class ReconciliationStatus(NamedTuple):
    """How the books stand, for operators: the newest report, and what lies in quarantine now."""

    report: Reconciliation | None  # None: it has never run
    is_late: bool  # the last comparison is too old: something is wrong with the beat
    quarantine: dict[str, int]  # messages that nobody has looked at, by reason

    @property
    def is_clean(self) -> bool:
        return self.report is not None and self.report.is_clean and not (self.is_late or self.quarantine)


def standing() -> ReconciliationStatus:
    """Return the last report, and the quarantine as it is now. The scope must allow all tenants' rows."""
    report = Reconciliation.objects.first()
    open_ = UsageQuarantine.objects.filter(resolved_at__isnull=True)
    counts = dict(open_.values_list("reason").annotate(number=Count("pk")).order_by("reason"))
    is_late = report is None or report.at < datetime.now(UTC) - REPORT_OVERDUE_AFTER
    return ReconciliationStatus(report, is_late, counts)


def _differing(cursor: Any, since: datetime, only: int | None = None) -> list[tuple[int, int, int, Any]]:
    cursor.execute(_WINDOWS, {"since": since, "only": only})
    return list(cursor.fetchall())


def _correct(window_id: int, since: datetime) -> dict[str, Any] | None:
    """Make a window agree with its slices. None: it already agrees."""
    with all_tenants_scope(BypassReason.SETTLER, durable=True), connection.cursor() as cursor:
        cursor.execute(_LOCK, [window_id])
        found = _differing(cursor, since, window_id)
        if not found:
            return None
        ((_, tenant_id, held, used),) = found
        cursor.execute(_MOVE, [window_id, held, used])
        Correction.objects.create(
            made_at=datetime.now(UTC), tenant_id=tenant_id, window_id=window_id, used=used, held=held
        )
    return {"window": window_id, "tenant": tenant_id, "held": held, "used": str(used)}
