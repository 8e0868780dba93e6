"""Health checks of requests, webhooks, emails and long cordons, by their rows in the database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection
from django.db.models import Count, Q

from billing.models import InvoiceEmail
from inference_worker.contract.texts import Text
from millrace.apps.health.issues import MIN_REQUESTS, HealthIssue, IssueType, describe_duration
from millrace.apps.health.models import Cordon
from tenants.models import OutboxEmail, WebhookDelivery, WebhookEndpoint

CORDONED_LONG = timedelta(hours=1)
EMAIL_LATE = timedelta(hours=1)
LOOKBACK = timedelta(hours=1)  # for requests
MAX_FAILED_PER_THOUSAND = 100  # failed requests per thousand that are acceptable
_REQUESTS = """
SELECT served_model, count(*), count(*) FILTER (WHERE outcome = 'failed'),
    percentile_disc(0.95) WITHIN GROUP (ORDER BY ttft_ms)
FROM request_log_requestrecord WHERE started_at >= %s AND served_model <> ''
GROUP BY served_model ORDER BY served_model
"""


def _check_requests(now: datetime) -> Iterator[HealthIssue]:
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


def _check_cordons(now: datetime) -> Iterator[HealthIssue]:
    for cordon in Cordon.objects.filter(cordoned_at__lt=now - CORDONED_LONG).order_by("worker"):
        duration = describe_duration(cordon.cordoned_at, now)
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


def _check_webhooks(now: datetime) -> Iterator[HealthIssue]:
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
        values["duration"] = describe_duration(endpoint.failing_since, now)
        title = Text("%(tenant)s: the webhook %(url)s has failed for %(duration)s", **values)
    if not lost:
        return title
    return Text(
        "%(title)s; %(number)s event not delivered",
        "%(title)s; %(number)s events not delivered",
        title=title,
        number=lost,
    )


def _check_emails(now: datetime) -> Iterator[HealthIssue]:
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


CHECKS: tuple[Callable[[datetime], Iterable[HealthIssue]], ...] = (
    _check_requests,
    _check_cordons,
    _check_webhooks,
    _check_emails,
)
