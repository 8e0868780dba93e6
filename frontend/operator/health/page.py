"""View models of the health page, one for each panel."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import redis
from django.conf import settings
from django.db import connection
from django.urls import reverse

from billing.models import Reconciliation, UsageQuarantine
from frontend.core.numbers import duration
from frontend.core.page_context import PageContext
from millrace.apps.operations import health
from millrace.apps.operations.fleet_status import FleetStatus, ReplicaState, read_fleet_status
from millrace.apps.operations.health import HealthIssue, IssueType
from tenants.models import Tenant

MAX_ROWS = 20  # rows in quarantine, differences
UNITS = ("tokens", "requests")
MILLISECOND = 1000  # microseconds
# Link of each issue type: label and URL name.
_SCREENS: dict[IssueType, tuple[str, str]] = {
    IssueType.BUDGET: ("Budgets", "budgets"),
    IssueType.CORDON: ("Workers", "operator-models"),
    IssueType.FAILURES: ("Fleet", "operator-fleet"),
    IssueType.MODEL: ("Workers", "operator-models"),
    IssueType.OBJECTIVE: ("Fleet", "operator-fleet"),
    IssueType.PRICE: ("Price book", "operator-prices"),
    IssueType.QUEUE: ("Fleet", "operator-fleet"),
    IssueType.REPLICA: ("Workers", "operator-models"),
    IssueType.UNPRICED: ("Price book", "operator-prices"),
    IssueType.WEBHOOK: ("Webhooks", "webhooks"),
}
_PLACES = {
    IssueType.QUARANTINE: ("Quarantine", "#panel-quarantine"),
    IssueType.RECONCILIATION: ("Report", "#panel-reconciliation"),
}


@dataclass(frozen=True)
class HealthIssueItem:
    """A health issue with the link to its solution. `url` is empty if it must be solved on the machine."""

    urgent: bool
    title: str
    todo: str
    label: str
    url: str


@dataclass(frozen=True)
class HealthIssues:
    items: tuple[HealthIssueItem, ...]
    now: datetime


@dataclass(frozen=True)
class HealthStat:
    label: str
    value: str
    detail: str
    level: str = ""  # "warn" or "bad"
    exact: str = ""


@dataclass(frozen=True)
class QueueRow:
    model: str
    url: str
    ready: int
    replicas: int
    running: int
    waiting: int
    oldest: str  # age of the oldest waiting request
    batches: int  # waiting batch requests


@dataclass(frozen=True)
class HealthQueues:
    """The queues by model. There are no rows if Valkey is unavailable."""

    rows: tuple[QueueRow, ...] | None
    gateways: int


@dataclass(frozen=True)
class HealthDifference:
    what: str
    tenant: str
    reserved: str
    used: str


@dataclass(frozen=True)
class ReconciliationReport:
    """The last report of the reconciler; None if there is none."""

    last: Reconciliation | None
    differences: tuple[HealthDifference, ...]
    more: int


@dataclass(frozen=True)
class HealthDismissedIssue:
    """A usage message in quarantine."""

    received_at: datetime
    reason: str
    detail: str
    size: int
    replay_url: str
    dismiss_url: str


@dataclass(frozen=True)
class Quarantine:
    rows: tuple[HealthDismissedIssue, ...]
    number: int


def issues(ctx: PageContext) -> HealthIssues:
    found = health.find_issues(_replica_board(), ctx.now)
    return HealthIssues(tuple(_item(issue) for issue in found), ctx.now)


def stats(ctx: PageContext) -> tuple[HealthStat, ...]:
    board = _replica_board()
    return (*_board_stats(board), _ttft(ctx))


def queues(ctx: PageContext) -> HealthQueues:
    board = _replica_board()
    if board is None:
        return HealthQueues(None, 0)
    return HealthQueues(tuple(_queue(board, spec.name) for spec in settings.MILLRACE.models), len(board.gateways))


def reconciliation(ctx: PageContext) -> ReconciliationReport:
    last = Reconciliation.objects.order_by("-id").first()
    if last is None:
        return ReconciliationReport(None, (), 0)
    shown = last.differences[:MAX_ROWS]
    names = dict(
        Tenant.objects.all_tenants()
        .filter(pk__in={difference["tenant"] for difference in shown})
        .values_list("pk", "name")
    )
    rows = (
        HealthDifference(
            what=next(
                f"{kind} {difference[kind]}" for kind in ("budget_period", "lease", "journal") if kind in difference
            ),
            tenant=names.get(difference["tenant"], f"tenant {difference['tenant']}"),
            reserved=str(difference.get("reserved", "–")),
            used=", ".join(
                [
                    *([difference["used"]] if "used" in difference else ()),
                    *(f"{difference[unit]} {unit}" for unit in UNITS if difference.get(unit)),
                ]
            ),
        )
        for difference in shown
    )
    return ReconciliationReport(last, tuple(rows), len(last.differences) - len(shown))


def quarantine(ctx: PageContext) -> Quarantine:
    waiting = UsageQuarantine.objects.filter(resolved_at__isnull=True)
    rows = (
        HealthDismissedIssue(
            received_at=row.received_at,
            reason=row.reason,
            detail=row.detail,
            size=len(row.payload),
            replay_url=reverse("operator-health-replay", args=[row.pk]),
            dismiss_url=reverse("operator-health-dismiss", args=[row.pk]),
        )
        for row in waiting.order_by("-received_at")[:MAX_ROWS]
    )
    return Quarantine(tuple(rows), waiting.count())


def _replica_board() -> FleetStatus | None:
    try:
        return read_fleet_status()
    except redis.RedisError:
        return None


def _item(issue: HealthIssue) -> HealthIssueItem:
    label, url = _PLACES.get(issue.issue_type, ("", ""))
    if issue.issue_type in _SCREENS:
        label, name = _SCREENS[issue.issue_type]
        url = reverse(name, args=[] if issue.tenant is None else [issue.tenant.slug])
    return HealthIssueItem(issue.urgent, issue.title, issue.todo, label, url)


def _board_stats(board: FleetStatus | None) -> tuple[HealthStat, ...]:
    if board is None:
        return (HealthStat("Broker", "Unavailable", "new requests receive 503", "bad"),)
    alive = [status for status in board.replicas if status.state != ReplicaState.SILENT]
    ready = sum(status.state == ReplicaState.READY for status in alive)
    waits = [queue for gateway in board.gateways for queue in gateway.presence.waiting if not queue.batch]
    waiting = sum(queue.requests for queue in waits)
    oldest = max((queue.oldest_ms for queue in waits), default=0)
    flight = sum(gateway.presence.in_flight for gateway in board.gateways)
    settler = board.settler
    return (
        HealthStat("Replicas ready", f"{ready} of {len(board.replicas)}", _other_stats(board), "" if ready else "bad"),
        HealthStat("Requests in flight", f"{flight:,}", f"gateways: {len(board.gateways)}"),
        HealthStat(
            "Requests waiting",
            f"{waiting:,}",
            f"oldest {duration(oldest * MILLISECOND)}" if waiting else "queue empty",
            "warn" if oldest > MILLISECOND else "",
        ),
        HealthStat(
            "Records to settle",
            "–" if settler is None else f"{settler.backlog:,}",
            "no settler running"
            if settler is None or not board.settler_runs
            else f"{duration(settler.lag_ms * 1000)} behind",
            "" if board.settler_runs else "bad",
        ),
    )


def _other_stats(board: FleetStatus) -> str:
    states = [status.state for status in board.replicas if status.state != ReplicaState.READY]
    return ", ".join(f"{states.count(state)} {state}" for state in ReplicaState if state in states) or "all accept work"


def _ttft(ctx: PageContext) -> HealthStat:
    objective = settings.MILLRACE.ttft_slo_ms
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT percentile_disc(0.95) WITHIN GROUP (ORDER BY ttft_ms), count(ttft_ms)"
            " FROM request_log_requestrecord WHERE started_at >= %s AND ttft_ms IS NOT NULL",
            [ctx.now - timedelta(hours=1)],
        )
        row: Any = cursor.fetchone()
    p95, number = row
    if p95 is None:
        return HealthStat("TTFT, p95", "–", "no requests in the last hour")
    late = p95 > objective
    detail = f"of {number:,} in the last hour; target {duration(objective * MILLISECOND)}"
    return HealthStat("TTFT, p95", duration(p95 * MILLISECOND), detail, "warn" if late else "")


def _queue(board: FleetStatus, model: str) -> QueueRow:
    replicas = [status for status in board.replicas if status.beat.model == model]
    waits = [queue for gateway in board.gateways for queue in gateway.presence.waiting if queue.model == model]
    oldest = max((queue.oldest_ms for queue in waits if not queue.batch), default=None)
    return QueueRow(
        model=model,
        url=f"{reverse('operator-fleet')}?model={model}",
        ready=board.ready(model),
        replicas=len(replicas),
        running=sum(status.load for status in replicas if status.state != ReplicaState.SILENT),
        waiting=sum(queue.requests for queue in waits if not queue.batch),
        oldest="–" if oldest is None else duration(oldest * MILLISECOND),
        batches=sum(queue.requests for queue in waits if queue.batch),
    )
