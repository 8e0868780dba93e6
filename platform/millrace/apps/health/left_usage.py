"""Usage that lost workers may have left unsettled in their journals, by their last reports, and its dismissal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import redis
from django.conf import settings

from billing.metering.worker_journals import is_settled
from inference_worker.contract import valkey
from inference_worker.contract.texts import Text
from inference_worker.contract.unsettled_usage import UNSETTLED_KEY
from millrace.apps.deployments.fleet_status import FleetStatus, read_fleet_status
from millrace.apps.health.issues import HealthIssue, IssueType, add_age
from millrace.apps.health.models import HealthEvent
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope


def check_left_usage(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Report lost workers whose last reported usage is not settled."""
    for journal_id, report in board.left_usage.items():
        if is_settled(report):
            continue
        title = Text(
            "%(worker)s on %(host)s is lost with %(number)s unsettled execution",
            "%(worker)s on %(host)s is lost with %(number)s unsettled executions",
            worker=report.worker,
            host=report.host,
            number=report.executions,
        )
        yield HealthIssue(
            IssueType.UNSETTLED,
            journal_id,  # several lost workers may have one name
            urgent=True,
            title=add_age(title, datetime.fromtimestamp(report.oldest.admitted_at / 1_000_000, UTC), now),
            todo=Text(
                "The oldest one is %(request)s. If the settler runs, this usage is only in the journal of the worker."
                " Start a worker with the data directory of %(host)s, which settles it. If its disk is lost"
                " permanently, dismiss the usage.",
                request=report.oldest.request_id,
                host=report.host,
            ),
        )


def forget_settled(board: FleetStatus) -> int:
    """Remove the reports of lost workers whose usage is settled. Returns their number.

    A worker that returns meanwhile writes its report again with its next heartbeat.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        settled = [journal_id for journal_id, report in board.left_usage.items() if is_settled(report)]
    if settled:
        with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
            broker.hdel(UNSETTLED_KEY, *settled)
    return len(settled)


def do_dismiss_left_usage(journal_id: str, reason: str) -> None:
    """Dismiss the usage that a lost worker reported as unsettled, because its journal is lost too.

    Health no longer lists it. The usage itself is not changed: a worker that has the journal after all reports and
    settles it. The audit entry is committed before the report is removed, so a process that is killed in between leaves
    the issue, and a second dismissal has an entry of its own.

    Raises:
        Conflict: no lost worker has such a report. ActionRefused: without a reason, or Valkey cannot be reached.
    """
    if not reason.strip() or len(reason) > 200:
        raise ActionRefused(Text("Enter a reason of up to 200 characters."))
    try:
        report = read_fleet_status().left_usage.get(journal_id)
        if report is None:
            raise Conflict(
                Text("This usage is no longer listed: it was settled or dismissed, or its worker runs again.")
            )
        name = f"{report.worker} ({report.host})"
        before = {
            "worker": report.worker,
            "host": report.host,
            "executions": report.executions,
            "request": report.oldest.request_id,
        }
        with all_tenants_scope(BypassReason.OPERATOR):
            event = HealthEvent(issue_type=IssueType.UNSETTLED, subject=journal_id, title=name)  # not stored
            audit.record(
                "unsettled_usage.dismissed", event, tenant_id=None, before=before, after={"why": reason.strip()}
            )
        with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
            broker.hdel(UNSETTLED_KEY, journal_id)
    except redis.RedisError as exc:
        raise ActionRefused(Text("The usage was not dismissed, because Valkey cannot be reached. Try again.")) from exc
