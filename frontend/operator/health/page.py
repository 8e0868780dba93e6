"""The health page, one function for each panel."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import redis
from django.conf import settings
from django.db import connection
from django.urls import reverse, reverse_lazy
from django.utils.translation import gettext as _

from billing.models import Reconciliation, UsageQuarantine
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import duration, exact
from frontend.core.page_context import PageContext
from inference_worker.contract.unsettled_usage import UnsettledUsage
from millrace.apps.deployments.fleet_status import FleetStatus, ReplicaState, read_fleet_status
from millrace.apps.deployments.served_deployments import served_specs
from millrace.apps.health import health_checks
from millrace.apps.health.issues import HealthIssue, IssueType
from tenants.models import Tenant

MAX_ROWS = 20  # rows in quarantine, differences
KINDS = ("budget_period", "lease", "journal")
UNITS = ("tokens", "requests")
MILLISECOND = 1000  # microseconds
# Link of each issue type: label and URL name.
_SCREENS: dict[IssueType, tuple[str, str]] = {
    IssueType.BANK_ENTRY: (_lazy("Receivables"), "operator-receivables"),
    IssueType.BUDGET: (_lazy("Budgets"), "budgets"),
    IssueType.BUNDLE: (_lazy("Deployments"), "operator-deployments"),
    IssueType.COST: (_lazy("Margin"), "operator-margin"),
    IssueType.CORDON: (_lazy("Workers"), "operator-models"),
    IssueType.FAILURES: (_lazy("Fleet"), "operator-fleet"),
    IssueType.MODEL: (_lazy("Workers"), "operator-models"),
    IssueType.OBJECTIVE: (_lazy("Fleet"), "operator-fleet"),
    IssueType.OVERAGE: (_lazy("Margin"), "operator-margin"),
    IssueType.PAYMENT: (_lazy("Billing runs"), "operator-billing"),
    IssueType.PREFIX_ROUTING: (_lazy("Workers"), "operator-models"),
    IssueType.PRICE: (_lazy("Price book"), "operator-prices"),
    IssueType.QUEUE: (_lazy("Fleet"), "operator-fleet"),
    IssueType.REPLICA: (_lazy("Workers"), "operator-models"),
    IssueType.SCHEDULED_PRICES: (_lazy("Price book"), "operator-prices"),
    IssueType.UNPRICED: (_lazy("Price book"), "operator-prices"),
    IssueType.UPSTREAM: (_lazy("Deployments"), "operator-deployments"),
    IssueType.UPSTREAM_PAUSE: (_lazy("Deployments"), "operator-deployments"),
    IssueType.VARIANT: (_lazy("Workers"), "operator-models"),
    IssueType.WEBHOOK: (_lazy("Webhooks"), "webhooks"),
    IssueType.WORKER_NAME: (_lazy("Workers"), "operator-models"),
}
_PLACES = {
    IssueType.INVOICE: (_lazy("Billing"), reverse_lazy("operator-billing")),
    IssueType.QUARANTINE: (_lazy("Quarantine"), "#panel-quarantine"),
    IssueType.RECONCILIATION: (_lazy("Report"), "#panel-reconciliation"),
}


Stat = tuple[str, str, str, str]  # label, value, detail, and "warn", "bad" or ""


def issues(ctx: PageContext) -> dict[str, Any]:
    found = health_checks.find_issues(_replica_board(), ctx.now)
    return {"items": [(issue, *_link(issue)) for issue in found], "now": ctx.now}


def stats(ctx: PageContext) -> tuple[Stat, ...]:
    return (*_board_stats(_replica_board()), _ttft(ctx))


def queues(ctx: PageContext) -> dict[str, Any]:
    """Return the queues by model. There are no rows if Valkey is unavailable."""
    board = _replica_board()
    if board is None:
        return {"rows": None, "gateways": 0}
    return {"rows": [_queue(board, spec.name) for spec in served_specs()], "gateways": len(board.gateways)}


def reconciliation(ctx: PageContext) -> dict[str, Any]:
    """Return the last report of the reconciler; None if there is none."""
    last = Reconciliation.objects.order_by("-id").first()
    if last is None:
        return {"last": None}
    shown = last.differences[:MAX_ROWS]
    ids = {difference["tenant"] for difference in shown}
    names = dict(Tenant.objects.all_tenants().filter(pk__in=ids).values_list("pk", "name"))
    rows = [
        {
            "what": _describe_subject(difference),
            "tenant": names.get(difference["tenant"], _("tenant %(tenant)s") % {"tenant": difference["tenant"]}),
            "reserved": str(difference.get("reserved", "–")),
            "used": ", ".join(
                [
                    *([difference["used"]] if "used" in difference else ()),
                    *(f"{difference[unit]} {unit}" for unit in UNITS if difference.get(unit)),
                ]
            ),
        }
        for difference in shown
    ]
    return {"last": last, "differences": rows, "more": len(last.differences) - len(shown)}


def _describe_subject(difference: dict[str, Any]) -> str:
    """Return what differs: a budget period, a lease, or the journal of a worker on a host."""
    subject = next(f"{kind} {difference[kind]}" for kind in KINDS if kind in difference)
    return f"{subject} · {difference['host']}" if "host" in difference else subject


def quarantine(ctx: PageContext) -> dict[str, Any]:
    waiting = UsageQuarantine.objects.filter(resolved_at__isnull=True)
    return {"rows": list(waiting.order_by("-received_at")[:MAX_ROWS]), "number": waiting.count()}


def find_left_usage(journal_id: str) -> UnsettledUsage | None:
    """Return the last report of a lost worker about its journal; None if there is none, or Valkey is unavailable."""
    board = _replica_board()
    return None if board is None else board.left_usage.get(journal_id)


def _replica_board() -> FleetStatus | None:
    try:
        return read_fleet_status()
    except redis.RedisError:
        return None


def _link(issue: HealthIssue) -> tuple[str, str]:
    """Return the label and the URL of an issue's solution; empty if it must be solved on the machine."""
    if issue.issue_type in _SCREENS:
        label, name = _SCREENS[issue.issue_type]
        return label, reverse(name, args=[] if issue.tenant is None else [issue.tenant.slug])
    label, url = _PLACES.get(issue.issue_type, ("", ""))
    return label, str(url)


def _board_stats(board: FleetStatus | None) -> tuple[Stat, ...]:
    if board is None:
        return ((_("Broker"), _("Unavailable"), _("new requests receive 503"), "bad"),)
    alive = [status for status in board.replicas if status.state != ReplicaState.SILENT]
    ready = sum(status.state == ReplicaState.READY for status in alive)
    waits = [queue for gateway in board.gateways for queue in gateway.presence.waiting if not queue.batch]
    waiting = sum(queue.requests for queue in waits)
    oldest = max((queue.oldest_ms for queue in waits), default=0)
    flight = sum(gateway.presence.in_flight for gateway in board.gateways)
    queued = _("oldest %(oldest)s") % {"oldest": duration(oldest * MILLISECOND)} if waiting else _("queue empty")
    settler, backlog, lag = board.settler, "–", _("no settler running")
    if settler is not None:
        backlog = f"{settler.backlog:,}"
        lag = _("%(lag_ms)s behind") % {"lag_ms": duration(settler.lag_ms * MILLISECOND)} if board.settler_runs else lag
    return (
        (
            _("Replicas ready"),
            _("%(ready)s of %(replicas)s") % {"ready": ready, "replicas": len(board.replicas)},
            _other_stats(board),
            "" if ready else "bad",
        ),
        (_("Requests in flight"), f"{flight:,}", f"gateways: {len(board.gateways)}", ""),
        (_("Requests waiting"), f"{waiting:,}", queued, "warn" if oldest > MILLISECOND else ""),
        (_("Records to settle"), backlog, lag, "" if board.settler_runs else "bad"),
    )


def _other_stats(board: FleetStatus) -> str:
    states = [status.state for status in board.replicas if status.state != ReplicaState.READY]
    return ", ".join(f"{states.count(state)} {state}" for state in ReplicaState if state in states) or _(
        "all accept work"
    )


def _ttft(ctx: PageContext) -> Stat:
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
        return "TTFT, p95", "–", _("no requests in the last hour"), ""
    late = p95 > objective
    detail = _("of %(number)s in the last hour; target %(objective)s") % {
        "number": exact(number),
        "objective": duration(objective * MILLISECOND),
    }
    return "TTFT, p95", duration(p95 * MILLISECOND), detail, "warn" if late else ""


def _queue(board: FleetStatus, model: str) -> dict[str, Any]:
    replicas = [status for status in board.replicas if status.beat.model == model]
    waits = [queue for gateway in board.gateways for queue in gateway.presence.waiting if queue.model == model]
    return {
        "model": model,
        "ready": board.count_ready(model),
        "replicas": len(replicas),
        "running": sum(status.load for status in replicas if status.state != ReplicaState.SILENT),
        "waiting": sum(queue.requests for queue in waits if not queue.batch),
        "oldest_ms": max((queue.oldest_ms for queue in waits if not queue.batch), default=None),
        "batches": sum(queue.requests for queue in waits if queue.batch),
    }
