"""Health checks for operators. Each check yields the issues that it finds.

A job runs the checks every minute and stores when each issue was first found and when it was resolved (HealthEvent).
These are the operators' alerts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from django.conf import settings
from django.db import connection
from django.db.models import Count, Exists, Min, OuterRef, Q, Sum

from billing.currencies.amounts import DEFAULT_CURRENCY, FEMTO_A_NANO, exact_amount, half_up
from billing.invoicing.files import missing_pdfs
from billing.models import (
    CompiledRateCard,
    DailyCost,
    ExecutionCost,
    Invoice,
    InvoiceEmail,
    InvoiceRunFailure,
    PaymentEvent,
    Period,
    Reconciliation,
    UsageQuarantine,
    UsageRollup,
    totals_of,
)
from billing.pricing.currencies import other_currencies
from billing.rates.pricing import Tier
from inference_worker.contract.command_line import format_command
from inference_worker.contract.compute_support import read_refusal
from inference_worker.contract.disk import FreeSpace
from inference_worker.contract.messages import Heartbeat, ReplicaPhase, worker_of
from inference_worker.contract.texts import Text
from millrace.apps.deployments.deployments import served_specs
from millrace.apps.deployments.fleet_status import FleetStatus, ReplicaState, WorkerStatus
from millrace.apps.deployments.gateway_heartbeat import HitRate
from millrace.apps.health.budget_usage import tenants_near_limits
from millrace.apps.health.models import Cordon, HealthEvent
from millrace.environment.disk_reserve import watched_directories
from millrace.environment.processes import read_processes
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import OutboxEmail, Tenant, WebhookDelivery, WebhookEndpoint

SETTLEMENT_LATE_MS = 60_000
RECONCILED_LATE = timedelta(minutes=20)
CORDONED_LONG = timedelta(hours=1)
EMAIL_LATE = timedelta(hours=1)
INVOICE_LATE = timedelta(hours=1)  # since its period was closed
QUEUE_SHARE = 3  # a request waits too long after a third of the maximum wait
LOOKBACK = timedelta(hours=1)  # for requests
MIN_REQUESTS = 20  # fewer are not evaluated
MAX_HIT_RATE_DIFFERENCE = 0.1  # predicted minus real cache hit rate of a replica that is acceptable
MAX_FAILED_PER_THOUSAND = 100  # failed requests per thousand that are acceptable
RETENTION = timedelta(days=90)
MAX_NAMESAKES = 5  # workers with one name that an issue lists
MANY_RESTARTS = 3  # recent restarts of a running process
_LOCK = 0x68656C74  # the number of an advisory lock; unique in the database


class IssueType(StrEnum):
    """The type of a health issue. Type and subject identify an issue until it is resolved."""

    BROKER = "broker"
    BUDGET = "budget"
    CORDON = "cordon"
    COST = "cost"
    DISK = "disk"
    FAILURES = "failures"
    EMAIL = "email"
    INVOICE = "invoice"
    MODEL = "model"
    OBJECTIVE = "objective"
    OVERAGE = "overage"
    PAYMENT = "payment"
    PREFIX_ROUTING = "prefix_routing"
    PRICE = "price"
    PROCESS = "process"
    QUARANTINE = "quarantine"
    QUEUE = "queue"
    RECONCILIATION = "reconciliation"
    REPLICA = "replica"
    SETTLER = "settler"
    SLOW = "slow"
    UNPRICED = "unpriced"
    UPSTREAM = "upstream"
    UPSTREAM_PAUSE = "upstream_pause"
    WEBHOOK = "webhook"
    WORKER_NAME = "worker_name"


@dataclass(frozen=True)
class HealthIssue:
    """A condition that an operator must handle. `urgent`: it already affects customers or money."""

    issue_type: IssueType
    subject: str
    urgent: bool
    title: str
    todo: str
    tenant: Tenant | None = None


_REQUESTS = """
SELECT served_model, count(*), count(*) FILTER (WHERE outcome = 'failed'),
    percentile_disc(0.95) WITHIN GROUP (ORDER BY ttft_ms)
FROM request_log_requestrecord WHERE started_at >= %s AND served_model <> ''
GROUP BY served_model ORDER BY served_model
"""


def find_issues(board: FleetStatus | None, now: datetime | None = None) -> list[HealthIssue]:
    """Return all issues, urgent ones first; inside `all_tenants_scope(…)`. `board`: None without Valkey."""
    now = now or datetime.now(UTC)
    issues = [_broker_away()] if board is None else [issue for check in _OF_BOARD for issue in check(board, now)]
    issues += [issue for check_rows in _OF_ROWS for issue in check_rows(now)]
    issues += [*_disk(), *_processes()]
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


# Checks of this machine.


def _disk() -> Iterator[HealthIssue]:
    platform = settings.MILLRACE
    space = FreeSpace(watched_directories(platform.data_dir), platform.min_free_disk)
    is_low = space.look()
    if space.free < space.resume_at:
        yield HealthIssue(
            IssueType.DISK,
            "",
            urgent=is_low,
            title=Text("Disk almost full: %(free)s MiB free", free=space.free // 2**20),
            todo=Text(
                "Below %(min_free)s MiB new requests are rejected with 503 until %(resume_at)s MiB are free. Free"
                " space on the disk of the data directory.",
                min_free=space.min_free // 2**20,
                resume_at=space.resume_at // 2**20,
            ),
        )


def _processes() -> Iterator[HealthIssue]:
    """Yield processes of `millrace up` that are down, or were restarted several times recently."""
    for process in read_processes(settings.MILLRACE.data_dir):
        if process.running and process.deaths < MANY_RESTARTS:
            continue
        yield HealthIssue(
            IssueType.PROCESS,
            process.name,
            urgent=not process.running,
            title=Text("%(name)s: %(state)s", name=process.name, state=process.describe()),
            todo=Text(
                "The process restarts automatically. Check the end of its log (%(name)s.log).", name=process.name
            ),
        )


# Checks of the fleet status.


def _broker_away() -> HealthIssue:
    return HealthIssue(
        IssueType.BROKER,
        "",
        urgent=True,
        title=Text("Broker unavailable"),
        todo=Text("New requests are rejected with 503 until Valkey is back. Check its process and disk."),
    )


def _models(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    for spec in served_specs(wanted_loaded=True):
        if board.count_ready(spec.name) or board.is_loadable(spec.name):
            continue
        there = [
            replica
            for replica in board.replicas
            if replica.beat.model == spec.name and replica.state != ReplicaState.SILENT
        ]
        cordoned = [
            replica
            for replica in there
            if replica.state in (ReplicaState.CORDONED, ReplicaState.DRAINING, ReplicaState.DRAINED)
        ]
        yield HealthIssue(
            IssueType.MODEL,
            spec.name,
            urgent=True,
            title=Text("No replica available for %(name)s", name=spec.name),
            todo=Text("Uncordon one of its workers.") if cordoned else _describe_absence([each.beat for each in there]),
        )


def _describe_absence(beats: Sequence[Heartbeat]) -> str:
    """Return why no replica serves a model, and what to do."""
    failed = next((beat.reason for beat in beats if beat.reason), "")  # also while its load is repeated
    if failed:
        return Text("It could not be loaded: %(failed)s", failed=read_refusal(failed))
    if any(beat.phase == ReplicaPhase.LOADING for beat in beats):
        return Text("A worker is loading it. Its requests receive 503 until then.")
    if not beats:
        return Text("No running worker has it. Its requests receive 503. Start a worker of its pools.")
    return Text("Its requests receive 503. Check the worker logs.")


def _failed_loads(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Report replicas that could not be loaded while others serve the model."""
    for replica in board.replicas:
        beat = replica.beat
        if replica.state != ReplicaState.SILENT and beat.reason and board.count_ready(beat.model):
            yield HealthIssue(
                IssueType.REPLICA,
                replica.id,
                urgent=False,
                title=Text("%(replica)s could not load %(model)s", replica=replica.name, model=beat.model),
                todo=read_refusal(beat.reason),
            )


def _upstreams(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Report upstreams that are down for all their replicas, and those that fail only for some tenants.

    For a replica without requests since its start, the upstream is up.
    """
    beats_by_model: dict[str, list[Heartbeat]] = {}
    for replica in board.replicas:
        if replica.state not in (ReplicaState.SILENT, ReplicaState.STARTING):
            beats_by_model.setdefault(replica.beat.model, []).append(replica.beat)
    for model, beats in sorted(beats_by_model.items()):
        paused = max(beat.tenants_paused for beat in beats)
        if all(beat.circuit_open for beat in beats):
            yield HealthIssue(
                IssueType.UPSTREAM,
                model,
                urgent=True,
                title=Text("The upstream of %(model)s is down", model=model),
                todo=Text(
                    "Its last requests failed, and new ones are rejected until a probe succeeds. Check the upstream."
                ),
            )
        elif paused:
            yield HealthIssue(
                IssueType.UPSTREAM_PAUSE,
                model,
                urgent=False,
                title=Text(
                    "The upstream of %(model)s fails for %(number)s tenant",
                    "The upstream of %(model)s fails for %(number)s tenants",
                    model=model,
                    number=paused,
                ),
                todo=Text(
                    "Their last requests failed, and new ones are paused until a probe succeeds. See the request log."
                ),
            )


def _replicas(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    for replica in board.replicas:
        if replica.state == ReplicaState.SILENT:
            if replica.age_ms is None:
                title = Text("%(replica)s sent no heartbeat for more than a minute", replica=replica.id)
            else:
                seconds = replica.age_ms // 1000
                title = Text("%(replica)s sent no heartbeat for %(seconds)s s", replica=replica.id, seconds=seconds)
            yield HealthIssue(
                IssueType.REPLICA,
                replica.id,
                urgent=False,
                title=title,
                todo=Text("The replica receives no new requests. After 10 s its streams fail. Check its process."),
            )


def _namesakes(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Report running workers that have the same name."""
    by_name: dict[str, list[WorkerStatus]] = defaultdict(list)
    for worker in board.workers:
        by_name[worker_of(worker.id)].append(worker)
    for name, workers in sorted(by_name.items()):
        if len(workers) > 1:
            described = ", ".join(
                f"{worker.id} on {worker.host or 'an unknown machine'}" for worker in workers[:MAX_NAMESAKES]
            )
            yield HealthIssue(
                IssueType.WORKER_NAME,
                name,
                urgent=True,
                title=Text("%(count)s workers have the name %(name)s", count=len(workers), name=name),
                todo=Text(
                    "They share a journal and slots: %(described)s. Set another MILLRACE_WORKER_NAME for all but one.",
                    described=described,
                ),
            )


def _disks(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    for replica in board.replicas:
        if replica.state == ReplicaState.DISK_LOW:
            yield HealthIssue(
                IssueType.DISK,
                replica.id,
                urgent=True,
                title=Text("%(replica)s accepts no new requests: disk almost full", replica=replica.id),
                todo=Text(
                    "Free disk space for the state directory on its machine. The replica then recovers automatically."
                ),
            )


def _slow_replicas(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    for replica in board.replicas:
        machine = None if replica.beat is None else replica.beat.machine
        if machine is not None and machine.slow is not None:
            yield HealthIssue(
                IssueType.SLOW,
                replica.id,
                urgent=False,
                title=Text("%(replica)s is slow: %(cause)s", replica=replica.id, cause=machine.slow.cause),
                todo=machine.slow.instruction,
            )


def _queues(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    waits: dict[str, tuple[int, int]] = {}
    for gateway in board.gateways:
        for queue in gateway.presence.waiting:
            if not queue.batch:  # batches have no maximum wait
                depth, oldest = waits.get(queue.model, (0, 0))
                waits[queue.model] = depth + queue.requests, max(oldest, queue.oldest_ms)
    longest = settings.MILLRACE.queue_timeout_seconds * 1000
    for model, (depth, oldest) in sorted(waits.items()):
        if oldest * QUEUE_SHARE > longest:
            yield HealthIssue(
                IssueType.QUEUE,
                model,
                urgent=True,
                title=Text(
                    "%(depth)s requests waiting for %(model)s, oldest %(oldest)s s",
                    depth=depth,
                    model=model,
                    oldest=round(oldest / 1000),
                ),
                todo=Text(
                    "After %(longest)s s they receive 503. Add a replica or lower the limits of top senders.",
                    longest=longest // 1000,
                ),
            )


def _prefix_routing(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Yield replicas that have cached much less of the prompts than their digests predict, as any gateway sees it."""
    rates: dict[str, HitRate] = {}
    for rate in (rate for gateway in board.gateways for rate in gateway.presence.hit_rates):
        if rate.requests >= MIN_REQUESTS and rate.difference >= MAX_HIT_RATE_DIFFERENCE:
            rates[rate.replica] = max(rates.get(rate.replica, rate), rate, key=lambda each: each.difference)
    for replica, rate in sorted(rates.items()):
        yield HealthIssue(
            IssueType.PREFIX_ROUTING,
            replica,
            urgent=False,
            title=Text(
                "Cache hit rate of %(replica)s is %(difference)s of the prompt tokens below the prediction",
                replica=replica,
                difference=f"{rate.difference:.0%}",
            ),
            todo=Text(
                "Requests are sent to this replica for prompts that it has not cached. Check its KV cache size and"
                " evictions, and whether workers and gateways run the same release. Drain and restart the replica."
            ),
        )


def _settler(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    if not board.settler_runs:
        yield HealthIssue(
            IssueType.SETTLER,
            "",
            urgent=True,
            title=Text("No settler running"),
            todo=Text("Usage is queued in the broker and not billed yet. Start the settler."),
        )
    elif board.settler is not None and board.settler.lag_ms > SETTLEMENT_LATE_MS:
        seconds = board.settler.lag_ms // 1000
        yield HealthIssue(
            IssueType.SETTLER,
            "",
            urgent=False,
            title=Text(
                "%(backlog)s usage records to settle, oldest %(seconds)s s",
                backlog=board.settler.backlog,
                seconds=seconds,
            ),
            todo=Text("Budgets count reservations until then. Check the settler and PostgreSQL."),
        )


# Checks of the database.


def _budgets(now: datetime) -> Iterator[HealthIssue]:
    near = tenants_near_limits(now)
    for tenant in Tenant.objects.all_tenants().filter(pk__in=near).order_by("pk"):
        budget, number = near[tenant.pk].budget, near[tenant.pk].budgets
        if budget.percent is None:
            title = Text(
                "%(tenant)s: budget “%(budget)s” has no budget left",
                "%(tenant)s: budget “%(budget)s” has no budget left, and %(more)s more",
                tenant=tenant.name,
                budget=budget.name,
                number=number,
                more=number - 1,
            )
        else:
            title = Text(
                "%(tenant)s: budget “%(budget)s” is %(percent)s%% used",
                "%(tenant)s: budget “%(budget)s” is %(percent)s%% used, and %(more)s more",
                tenant=tenant.name,
                budget=budget.name,
                percent=budget.percent,
                number=number,
                more=number - 1,
            )
        yield HealthIssue(
            IssueType.BUDGET,
            str(tenant.pk),
            urgent=budget.is_at_limit,
            title=title,
            todo=Text("Requests are being rejected. Raise the budget or contact the tenant.")
            if budget.is_at_limit
            else Text("Contact the tenant about raising the budget."),
            tenant=tenant,
        )


def _quarantine(now: datetime) -> Iterator[HealthIssue]:
    rows = UsageQuarantine.objects.filter(resolved_at__isnull=True).order_by().values("reason")
    todo = {
        UsageQuarantine.Reason.UNDECODABLE: Text(
            "Not a usage record. Find the process that writes to the usage stream."
        ),
        UsageQuarantine.Reason.REFUSED: Text("Check the violated rule, publish missing prices, then settle again."),
        UsageQuarantine.Reason.UNPLACEABLE: Text("Restore the archive of their month, then settle again."),
        UsageQuarantine.Reason.CONFLICT: Text("Two counts of one request. The first is billed. Compare, then dismiss."),
    }
    for row in rows.annotate(number=Count("pk"), first=Min("received_at")).order_by("reason"):
        title = Text(
            "%(number)s usage record is in quarantine (%(reason)s)",
            "%(number)s usage records are in quarantine (%(reason)s)",
            number=row["number"],
            reason=row["reason"],
        )
        yield HealthIssue(
            IssueType.QUARANTINE,
            row["reason"],
            urgent=True,
            title=_add_age(title, row["first"], now),
            todo=todo[UsageQuarantine.Reason(row["reason"])],
        )


def _invoices(now: datetime) -> Iterator[HealthIssue]:
    """Yield tenants whose invoices of a month could not be finalized, with the reason of the last run, and months that
    could not be invoiced at all.
    """
    documents = Invoice.objects.all_tenants().filter(tenant=OuterRef("tenant"), period=OuterRef("period"))
    has_draft = Q(Exists(documents.filter(state=Invoice.State.DRAFT)))
    is_missing = ~Q(Exists(documents)) & Q(period__invoiced_at=None)
    failures = InvoiceRunFailure.objects.filter(has_draft | is_missing).select_related("tenant", "period__entity")
    tenants = set()
    for failure in failures.order_by("-period__ends_at", "pk"):
        if failure.tenant is None:
            yield _not_invoiced(failure.period, failure.reason)
        elif failure.tenant_id not in tenants:
            tenants.add(failure.tenant_id)
            yield _not_finalized(failure.tenant, failure.period, failure.reason)
    drafts = Invoice.objects.all_tenants().filter(
        state=Invoice.State.DRAFT, complete=True, period__closed_at__lt=now - INVOICE_LATE
    )
    late = drafts.exclude(tenant__in=tenants).select_related("tenant", "period")
    for draft in late.order_by("tenant_id", "-pk").distinct("tenant_id"):
        yield _not_finalized(draft.tenant, draft.period)
    if number := missing_pdfs().filter(issued_at__lt=now - INVOICE_LATE).count():
        yield HealthIssue(
            IssueType.INVOICE,
            "pdf",
            urgent=True,
            title=Text("%(number)s final invoice has no PDF", "%(number)s final invoices have no PDF", number=number),
            todo=Text("Their emails wait for the PDF. Check the logs of the web jobs for invoice_pdf_failed."),
        )


def _not_finalized(tenant: Tenant, period: Period, reason: str = "") -> HealthIssue:
    return HealthIssue(
        IssueType.INVOICE,
        str(tenant.pk),
        urgent=True,
        title=Text("%(name)s: invoice of %(label)s not finalized", name=tenant.name, label=period.label),
        todo=reason or Text("Finalize the draft to see what is missing, such as a tax rule or a VAT ID."),
        tenant=tenant,
    )


def _not_invoiced(period: Period, reason: str) -> HealthIssue:
    return HealthIssue(
        IssueType.INVOICE,
        f"period-{period.pk}",
        urgent=True,
        title=Text("%(name)s: month %(label)s not invoiced", name=period.entity.name, label=period.label),
        todo=reason,
    )


def _payment_events(now: datetime) -> Iterator[HealthIssue]:
    """Yield payment providers with events that could not be booked and were not dismissed."""
    rows = PaymentEvent.objects.filter(status=PaymentEvent.Status.FAILED).order_by().values("provider")
    for row in rows.annotate(number=Count("pk"), first=Min("received_at")).order_by("provider"):
        title = Text(
            "%(number)s payment event of %(provider)s not booked",
            "%(number)s payment events of %(provider)s not booked",
            number=row["number"],
            provider=row["provider"],
        )
        yield HealthIssue(
            IssueType.PAYMENT,
            row["provider"],
            urgent=True,
            title=_add_age(title, row["first"], now),
            todo=Text("Check their details, record the payments, then dismiss the events."),
        )


def _add_age(title: str, first: datetime, now: datetime) -> str:
    """Return the title with the age of the oldest object, from a minute on."""
    if now - first < timedelta(minutes=1):
        return title
    return Text("%(title)s, oldest %(duration)s", title=title, duration=_describe_duration(first, now))


def _describe_duration(first: datetime, now: datetime) -> Text:
    """Return the time between, in whole minutes, hours or days."""
    minutes = int((now - first) / timedelta(minutes=1))
    if minutes < 60:
        return Text("%(number)s\xa0minute", "%(number)s\xa0minutes", number=minutes)
    if minutes < 24 * 60:
        return Text("%(number)s\xa0hour", "%(number)s\xa0hours", number=minutes // 60)
    return Text("%(number)s\xa0day", "%(number)s\xa0days", number=minutes // (24 * 60))


def _check_unrated(now: datetime) -> Iterator[HealthIssue]:
    rows = UsageRollup.objects.all_tenants().filter(
        bucket=totals_of(UsageRollup.Bucket.HOUR), start__gte=now - timedelta(days=1), tier="", completed__gt=0
    )
    for row in rows.order_by().values("model").annotate(executions=Sum("completed")).order_by("model"):
        yield HealthIssue(
            IssueType.UNPRICED,
            row["model"],
            urgent=False,
            title=Text(
                "%(executions)s requests of the last day to %(model)s were not priced",
                executions=row["executions"],
                model=row["model"],
            ),
            todo=Text("These requests are not billed. Add prices for the unpriced token types."),
        )


def _prices(now: datetime) -> Iterator[HealthIssue]:
    priced = set(
        CompiledRateCard.objects.filter(tenant_id=None, tier=Tier.STANDARD, effective_from__lte=now).values_list(
            "model", flat=True
        )
    )
    for spec in served_specs():
        if spec.name not in priced:
            yield HealthIssue(
                IssueType.PRICE,
                spec.name,
                urgent=True,
                title=Text("%(name)s has no price", name=spec.name),
                todo=Text("Its requests are rejected with 503 until a price is published."),
            )


def _overages(now: datetime) -> Iterator[HealthIssue]:
    """Yield deployments whose upstream counted more tokens than were reserved."""
    rows = ExecutionCost.objects.filter(admitted_at__gte=now - timedelta(days=1), unbilled_femto__gt=0)
    sums = (
        rows.order_by()
        .values("model", "tenant_id")
        .annotate(executions=Count("request_id"), femto=Sum("unbilled_femto"))
    )
    others = other_currencies()
    executions, femto = Counter[str](), defaultdict[str, Counter[str]](Counter)
    for row in sums:
        executions[row["model"]] += row["executions"]
        femto[row["model"]][others.get(row["tenant_id"], DEFAULT_CURRENCY)] += int(row["femto"])
    for model, amounts in sorted(femto.items()):
        parts = (exact_amount(half_up(amount, FEMTO_A_NANO), code) for code, amount in sorted(amounts.items()))
        lost = " + ".join(parts)
        yield HealthIssue(
            IssueType.OVERAGE,
            model,
            urgent=False,
            title=Text(
                "%(model)s: %(executions)s executions of the last day used more than was reserved",
                model=model,
                executions=executions[model],
            ),
            todo=Text(
                "%(lost)s was not billed. Compare the provider's tokens with the reservation of its requests.",
                lost=lost,
            ),
        )


def _costs(now: datetime) -> Iterator[HealthIssue]:
    """Yield deployments with tokens of today and yesterday that have no cost."""
    rows = DailyCost.objects.filter(day__gte=(now - timedelta(days=1)).date(), uncosted_tokens__gt=0)
    for row in rows.order_by().values("model").annotate(tokens=Sum("uncosted_tokens")).order_by("model"):
        yield HealthIssue(
            IssueType.COST,
            row["model"],
            urgent=False,
            title=Text(
                "%(model)s: %(tokens)s tokens since yesterday have no cost",
                model=row["model"],
                tokens=row["tokens"],
            ),
            todo=Text(
                "The margin is too high. Import its cost card with `%(command)s`.",
                command=format_command("costs import"),
            ),
        )


_ADVICE = {
    False: Text("Budget periods were corrected. Find the cause. Overdue leases require a running settler."),
    True: Text(
        "Budget periods were corrected. Find the cause. Overdue leases require a running settler. A worker's journal"
        " has usage that was never settled: start a worker of that name, which sends it."
    ),
}


def _reconciliation(now: datetime) -> Iterator[HealthIssue]:
    last = Reconciliation.objects.order_by("-id").first()
    if last is None or now - last.created_at > RECONCILED_LATE:
        title = Text("No reconciliation yet")
        if last is not None:
            title = Text("No reconciliation for %(duration)s", duration=_describe_duration(last.created_at, now))
        yield HealthIssue(
            IssueType.RECONCILIATION,
            "late",
            urgent=False,
            title=title,
            todo=Text("Reconciliation runs every five minutes. Check that beat and its worker are running."),
        )
    if last is not None and (last.differences or last.overdue_leases):
        title = Text(
            "Reconciliation found %(number)s difference, %(corrected)s corrected; overdue leases: %(overdue)s",
            "Reconciliation found %(number)s differences, %(corrected)s corrected; overdue leases: %(overdue)s",
            number=len(last.differences),
            corrected=last.corrected,
            overdue=last.overdue_leases,
        )
        yield HealthIssue(
            IssueType.RECONCILIATION,
            "differences",
            urgent=True,
            title=title,
            todo=_ADVICE[any("journal" in difference for difference in last.differences)],
        )


def _requests(now: datetime) -> Iterator[HealthIssue]:
    objective = settings.MILLRACE.ttft_slo_ms
    with connection.cursor() as cursor:
        cursor.execute(_REQUESTS, [now - LOOKBACK])
        rows = cursor.fetchall()
    for model, number, failed, p95 in rows:
        if number < MIN_REQUESTS:
            continue
        if p95 is not None and p95 > objective:
            yield HealthIssue(
                IssueType.OBJECTIVE,
                model,
                urgent=False,
                title=Text(
                    "%(model)s: TTFT p95 is %(p95)s ms, above the target of %(objective)s ms",
                    model=model,
                    p95=p95,
                    objective=objective,
                ),
                todo=Text("In the last hour. Check queue and batch size. If both are full, add a replica."),
            )
        if failed * MAX_FAILED_PER_THOUSAND > number:
            yield HealthIssue(
                IssueType.FAILURES,
                model,
                urgent=True,
                title=Text(
                    "%(model)s: %(failed)s of %(number)s requests failed during the last hour",
                    model=model,
                    failed=failed,
                    number=number,
                ),
                todo=Text("Failed requests are not billed. Check the worker logs and replica restarts."),
            )


def _cordons(now: datetime) -> Iterator[HealthIssue]:
    for cordon in Cordon.objects.filter(cordoned_at__lt=now - CORDONED_LONG).order_by("worker"):
        duration = _describe_duration(cordon.cordoned_at, now)
        if cordon.drain:
            title = Text("%(worker)s has been drained for %(duration)s", worker=cordon.worker, duration=duration)
        else:
            title = Text("%(worker)s has been cordoned for %(duration)s", worker=cordon.worker, duration=duration)
        yield HealthIssue(
            IssueType.CORDON,
            cordon.worker,
            urgent=False,
            title=title,
            todo=Text("By %(cordoned_by)s. Uncordon it when its work is done.", cordoned_by=cordon.cordoned_by),
        )


def _webhooks(now: datetime) -> Iterator[HealthIssue]:
    bad = Q(active=True, failing_since__lt=now - timedelta(hours=1)) | Q(active=False) & ~Q(disabled_because="")
    endpoints = WebhookEndpoint.objects.all_tenants().filter(bad).select_related("tenant").order_by("pk")
    failed = WebhookDelivery.objects.all_tenants().filter(state=WebhookDelivery.State.FAILED).values("endpoint_id")
    lost = dict(failed.filter(endpoint__in=endpoints).annotate(number=Count("pk")).values_list("endpoint_id", "number"))
    for endpoint in endpoints:
        yield HealthIssue(
            IssueType.WEBHOOK,
            str(endpoint.pk),
            urgent=False,
            title=_describe_webhook(endpoint, lost.get(endpoint.pk, 0), now),
            todo=endpoint.disabled_because or Text("Contact the tenant. Failed deliveries can be replayed later."),
            tenant=endpoint.tenant,
        )


def _describe_webhook(endpoint: WebhookEndpoint, lost: int, now: datetime) -> Text:
    values: dict[str, object] = {"tenant": endpoint.tenant.name, "url": endpoint.url}
    if not endpoint.active:
        title = Text("%(tenant)s: the webhook %(url)s was disabled", **values)
    elif endpoint.failing_since is None:
        title = Text("%(tenant)s: the webhook %(url)s has failed", **values)
    else:
        values["duration"] = _describe_duration(endpoint.failing_since, now)
        title = Text("%(tenant)s: the webhook %(url)s has failed for %(duration)s", **values)
    if not lost:
        return title
    return Text(
        "%(title)s; %(number)s event not delivered",
        "%(title)s; %(number)s events not delivered",
        title=title,
        number=lost,
    )


def _mails(now: datetime) -> Iterator[HealthIssue]:
    late = now - EMAIL_LATE
    waiting = OutboxEmail.objects.all_tenants().filter(sent_at__isnull=True, created_at__lt=late).count()
    unsent = InvoiceEmail.objects.all_tenants().exclude(state=InvoiceEmail.State.DROPPED)
    waiting += unsent.filter(sent_at__isnull=True, created_at__lt=late).count()
    if waiting:
        yield HealthIssue(
            IssueType.EMAIL,
            "",
            urgent=False,
            title=Text(
                "%(number)s email has not been sent for an hour",
                "%(number)s emails have not been sent for an hour",
                number=waiting,
            ),
            todo=Text("Check the mail server (MILLRACE_EMAIL_URL) and the web jobs."),
        )


_OF_BOARD: tuple[Callable[[FleetStatus, datetime], Iterable[HealthIssue]], ...] = (
    _models,
    _upstreams,
    _queues,
    _prefix_routing,
    _settler,
    _replicas,
    _failed_loads,
    _slow_replicas,
    _namesakes,
    _disks,
)
_OF_ROWS: tuple[Callable[[datetime], Iterable[HealthIssue]], ...] = (
    *(_quarantine, _reconciliation, _requests, _budgets, _check_unrated, _prices),
    *(_cordons, _webhooks, _mails, _invoices, _payment_events),
    *(_overages, _costs),
)
