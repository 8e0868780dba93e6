"""Usage that lost workers may have left unsettled in their journals, by their last reports."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from django.conf import settings

from billing.metering.worker_journals import is_settled
from inference_worker.contract import valkey
from inference_worker.contract.texts import Text
from inference_worker.contract.unsettled_usage import UNSETTLED_KEY
from millrace.apps.deployments.fleet_status import FleetStatus
from millrace.apps.health.issues import HealthIssue, IssueType, add_age
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
                " Start a worker with the data directory of %(host)s, which settles it.",
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
