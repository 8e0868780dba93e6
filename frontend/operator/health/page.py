"""What the operators' first screen shows, one view model a panel."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import redis
from django.db import connection
from django.urls import NoReverseMatch, reverse

from billing.models import Reconciliation, UsageQuarantine
from frontend.core.numbers import duration
from frontend.core.page_context import PageContext
from millrace.apps.operations import health
from millrace.apps.operations.fleet_status import FleetStatus, ReplicaState, read_fleet_status
from millrace.apps.operations.health import HealthIssue, IssueType
from millrace.conf.environment import platform_settings
from tenants.models import Tenant

SHOWN = 20  # rows in quarantine, differences
UNITS = ("tokens", "requests")
MILLISECOND = 1000  # microseconds
# Where each kind of concern is seen to: a label and the name of an address, which is the tenant's for those of tenants.
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
class Item:
    """A concern, and where to see to it; no `url`: at the machine."""

    urgent: bool
    title: str
    todo: str
    label: str
    url: str


@dataclass(frozen=True)
class Needs:
    items: tuple[Item, ...]
    now: datetime


@dataclass(frozen=True)
class Figure:
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
    oldest: str  # of those that wait
    batches: int  # that wait


@dataclass(frozen=True)
class Queues:
    """None of the rows: the broker is away."""

    rows: tuple[QueueRow, ...] | None
    gateways: int


@dataclass(frozen=True)
class HealthDifference:
    what: str
    tenant: str
    reserved: str
    used: str


@dataclass(frozen=True)
class Report:
    """The reconciler's last one; None: there is none."""

    last: Reconciliation | None
    differences: tuple[HealthDifference, ...]
    more: int


@dataclass(frozen=True)
class HealthDismissedIssue:
    """A usage record in quarantine."""

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


def needs(visit: PageContext) -> Needs:
    found = health.find_issues(_board(), visit.now)
    return Needs(tuple(_item(one) for one in found), visit.now)


def figures(visit: PageContext) -> tuple[Figure, ...]:
    board = _board()
    return (*_of_board(board), _ttft(visit))


def queues(visit: PageContext) -> Queues:
    board = _board()
    if board is None:
        return Queues(None, 0)
    return Queues(tuple(_queue(board, spec.name) for spec in platform_settings().models), len(board.gateways))


def reconciliation(visit: PageContext) -> Report:
    last = Reconciliation.objects.order_by("-id").first()
    if last is None:
        return Report(None, (), 0)
    shown = last.differences[:SHOWN]
    names = dict(Tenant.objects.all_tenants().filter(pk__in={one["tenant"] for one in shown}).values_list("pk", "name"))
    rows = (
        HealthDifference(
            what=next(f"{kind} {one[kind]}" for kind in ("budget_period", "lease", "journal") if kind in one),
            tenant=names.get(one["tenant"], f"tenant {one['tenant']}"),
            reserved=str(one.get("reserved", "–")),
            used=", ".join(
                [*([one["used"]] if "used" in one else ()), *(f"{one[unit]} {unit}" for unit in UNITS if one.get(unit))]
            ),
        )
        for one in shown
    )
    return Report(last, tuple(rows), len(last.differences) - len(shown))


def quarantine(visit: PageContext) -> Quarantine:
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
        for row in waiting.order_by("-received_at")[:SHOWN]
    )
    return Quarantine(tuple(rows), waiting.count())


def _board() -> FleetStatus | None:
    try:
        return read_fleet_status()
    except redis.RedisError:
        return None


def _item(one: HealthIssue) -> Item:
    label, url = _PLACES.get(one.issue_type, ("", ""))
    if one.issue_type in _SCREENS:
        label, name = _SCREENS[one.issue_type]
        url = _address(name, one.tenant)
    if one.tenant is not None and not url:
        label, url = "Tenant", reverse("overview", args=[one.tenant.slug])
    return Item(one.urgent, one.title, one.todo, label, url)


def _address(name: str, tenant: Tenant | None) -> str:
    try:
        return reverse(name, args=[] if tenant is None else [tenant.slug])
    except NoReverseMatch:
        return ""


def _of_board(board: FleetStatus | None) -> tuple[Figure, ...]:
    if board is None:
        return (Figure("Broker", "Unavailable", "new requests receive 503", "bad"),)
    alive = [one for one in board.replicas if one.state != ReplicaState.SILENT]
    ready = sum(one.state == ReplicaState.READY for one in alive)
    waits = [each for gateway in board.gateways for each in gateway.presence.waiting if not each.batch]
    waiting = sum(each.requests for each in waits)
    oldest = max((each.oldest_ms for each in waits), default=0)
    flight = sum(gateway.presence.in_flight for gateway in board.gateways)
    told = board.settler
    return (
        Figure("Replicas ready", f"{ready} of {len(board.replicas)}", _others(board), "" if ready else "bad"),
        Figure("Requests in flight", f"{flight:,}", f"gateways: {len(board.gateways)}"),
        Figure(
            "Requests waiting",
            f"{waiting:,}",
            f"oldest {duration(oldest * MILLISECOND)}" if waiting else "queue empty",
            "warn" if oldest > MILLISECOND else "",
        ),
        Figure(
            "Records to settle",
            "–" if told is None else f"{told.backlog:,}",
            "no settler running"
            if told is None or not board.settler_runs
            else f"{duration(told.lag_ms * 1000)} behind",
            "" if board.settler_runs else "bad",
        ),
    )


def _others(board: FleetStatus) -> str:
    states = [one.state for one in board.replicas if one.state != ReplicaState.READY]
    return ", ".join(f"{states.count(state)} {state}" for state in ReplicaState if state in states) or "all accept work"


def _ttft(visit: PageContext) -> Figure:
    objective = platform_settings().ttft_slo_ms
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT percentile_disc(0.95) WITHIN GROUP (ORDER BY ttft_ms), count(ttft_ms)"
            " FROM request_log_requestrecord WHERE started_at >= %s AND ttft_ms IS NOT NULL",
            [visit.now - timedelta(hours=1)],
        )
        row: Any = cursor.fetchone()
    p95, number = row
    if p95 is None:
        return Figure("TTFT, p95", "–", "no requests in the last hour")
    late = p95 > objective
    detail = f"of {number:,} in the last hour; target {duration(objective * MILLISECOND)}"
    return Figure("TTFT, p95", duration(p95 * MILLISECOND), detail, "warn" if late else "")


def _queue(board: FleetStatus, model: str) -> QueueRow:
    replicas = [one for one in board.replicas if one.beat.model == model]
    waits = [each for gateway in board.gateways for each in gateway.presence.waiting if each.model == model]
    oldest = max((each.oldest_ms for each in waits if not each.batch), default=None)
    return QueueRow(
        model=model,
        url=f"{_address('operator-fleet', None)}?model={model}",
        ready=board.ready(model),
        replicas=len(replicas),
        running=sum(one.load for one in replicas if one.state != ReplicaState.SILENT),
        waiting=sum(each.requests for each in waits if not each.batch),
        oldest="–" if oldest is None else duration(oldest * MILLISECOND),
        batches=sum(each.requests for each in waits if each.batch),
    )
