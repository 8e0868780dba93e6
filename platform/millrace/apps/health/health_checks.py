"""Health checks for operators. Each check yields the issues that it finds.

A module of checks has one subject: fleet_checks.py, machine_checks.py, usage_checks.py, invoice_checks.py and
service_checks.py. A job runs the checks every minute and stores when each issue was first found and when it was
resolved (HealthEvent). These are the operators' alerts.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.db import connection

from millrace.apps.deployments.fleet_status import FleetStatus
from millrace.apps.health import fleet_checks, invoice_checks, machine_checks, service_checks, usage_checks
from millrace.apps.health.issues import HealthIssue
from millrace.apps.health.models import HealthEvent
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

RETENTION = timedelta(days=90)
_LOCK = 0x68656C74  # the number of an advisory lock; unique in the database
_ROW_CHECKS = (*usage_checks.CHECKS, *service_checks.CHECKS, *invoice_checks.CHECKS)


def find_issues(board: FleetStatus | None, now: datetime | None = None) -> list[HealthIssue]:
    """Return all issues, urgent ones first; inside `all_tenants_scope(…)`. `board`: None without Valkey."""
    now = now or datetime.now(UTC)
    if board is None:
        issues = [fleet_checks.describe_unreachable_broker()]
    else:
        issues = [issue for check_fleet in fleet_checks.CHECKS for issue in check_fleet(board, now)]
    issues += [issue for check_rows in _ROW_CHECKS for issue in check_rows(now)]
    hosts = machine_checks.find_hosts(board)
    issues += [issue for host in hosts for check_machine in machine_checks.CHECKS for issue in check_machine(host)]
    return sorted(issues, key=lambda issue: not issue.urgent)


def record_issues(board: FleetStatus | None, now: datetime | None = None) -> list[HealthIssue]:
    """Find the issues, store new ones and close resolved ones. Returns the current issues."""
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        issues = find_issues(board, now)
        known = {
            (event.issue_type, event.subject): event for event in HealthEvent.objects.filter(closed_at__isnull=True)
        }
        for issue in issues:
            event = known.pop((issue.issue_type, issue.subject), None) or HealthEvent(
                issue_type=issue.issue_type, subject=issue.subject, opened_at=now
            )
            title, tenant_id = issue.title, None if issue.tenant is None else issue.tenant.pk
            if (event.title, event.urgent) != (title, issue.urgent):
                event.title, event.urgent, event.tenant_id = title, issue.urgent, tenant_id
                event.save()
        HealthEvent.objects.filter(pk__in=[event.pk for event in known.values()]).update(closed_at=now)
    return issues


def purge_expired(now: datetime | None = None) -> int:
    """Remove events that were closed long ago. Returns their number."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        return HealthEvent.objects.filter(closed_at__lt=(now or datetime.now(UTC)) - RETENTION).delete()[0]
