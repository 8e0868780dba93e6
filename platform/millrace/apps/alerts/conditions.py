"""The conditions of alert rules: what each metric reads, and when it is over or below its threshold.

The work of a rule is bounded: it reads at most `MAX_REQUESTS` requests, or `MAX_SUBJECTS` keys or health events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection
from django.db.models import F, Q
from django.db.models.functions import Coalesce

from billing.currencies.amounts import exact_amount
from billing.invoicing.prepayment import available_nano
from billing.ledger.credits import with_rest
from billing.models import BillingProfile, CreditGrant
from billing.pricing.currencies import currency_of
from inference_worker.contract.texts import Text
from millrace.apps.alerts.models import AlertRule
from millrace.apps.deployments.models import MILLRACE, Deployment
from millrace.apps.health.issues import IssueType
from millrace.apps.health.models import HealthEvent
from tenants.models import ApiKey

MAX_REQUESTS = 50_000  # number of the newest requests in the window
MAX_SUBJECTS = 1000
# A health event that ended before the check of its rule still triggers an alert.
LATE = timedelta(hours=1)
Metric = AlertRule.Metric


@dataclass(frozen=True)
class Breach:
    """A condition that is true. A rule has one for each subject: a key, a health event, or none."""

    subject: str
    summary: str
    value: int | None = None
    samples: int | None = None
    is_over: bool = False  # it ended before the check


# NOTE: the limit is inside the filters. It bounds the rows that are read, also if few of them are of the model.
_REQUESTS = """
SELECT count(*), count(*) FILTER (WHERE outcome = 'failed'), count(ttft_ms),
    percentile_disc(0.95) WITHIN GROUP (ORDER BY ttft_ms)
FROM (SELECT outcome, ttft_ms, project_id, requested_model, served_model, replay_of FROM request_log_requestrecord
    WHERE tenant_id = %(tenant)s AND started_at >= %(start)s AND started_at < %(end)s
    ORDER BY started_at DESC LIMIT %(most)s) r
WHERE outcome NOT IN ('limited', 'refused') AND replay_of = ''
    AND (%(project)s::bigint IS NULL OR project_id = %(project)s)
    AND (%(model)s = '' OR requested_model = %(model)s OR served_model = %(model)s)
"""


def find_breaches(rule: AlertRule, now: datetime) -> list[Breach]:
    """Return the subjects for which the condition of the rule is true; inside `all_tenants_scope(…)`."""
    return _CONDITIONS[Metric(rule.metric)](rule, now)


def _read_requests(rule: AlertRule, now: datetime) -> tuple[int, int, int, int | None]:
    """Return the accepted requests, the failed ones, those with a first token, and the 95th percentile of TTFT."""
    with connection.cursor() as cursor:
        cursor.execute(
            _REQUESTS,
            {
                "tenant": rule.tenant_id,
                "start": now - rule.window,
                "end": now,
                "project": rule.project_id,
                "model": rule.model,
                "most": MAX_REQUESTS,
            },
        )
        requests, failed, timed, p95 = cursor.fetchone()
    return requests, failed, timed, p95


def _error_rate(rule: AlertRule, now: datetime) -> list[Breach]:
    requests, failed, _, _ = _read_requests(rule, now)
    if requests < (rule.min_requests or 1) or failed * 10_000 <= rule.threshold * requests:
        return []
    rate = failed * 10_000 // requests
    summary = Text(
        "Error rate is %(rate)s, above %(limit)s: %(failed)s of %(requests)s failed in %(duration)s",
        rate=_percent(rate),
        limit=_percent(rule.threshold),
        failed=failed,
        requests=_describe_requests(rule, requests),
        duration=_describe_duration(rule.window),
    )
    return [Breach("", summary, rate, requests)]


def _ttft_p95(rule: AlertRule, now: datetime) -> list[Breach]:
    *_, timed, p95 = _read_requests(rule, now)
    if p95 is None or timed < (rule.min_requests or 1) or p95 <= rule.threshold:
        return []
    summary = Text(
        "TTFT p95 is %(p95)s ms, above %(limit)s ms: of %(requests)s in %(duration)s",
        p95=p95,
        limit=rule.threshold,
        requests=_describe_requests(rule, timed),
        duration=_describe_duration(rule.window),
    )
    return [Breach("", summary, p95, timed)]


def _key_expiry(rule: AlertRule, now: datetime) -> list[Breach]:
    keys = ApiKey.objects.for_tenant(rule.tenant_id).filter(
        Q() if rule.project_id is None else Q(project_id=rule.project_id),
        revoked_at=None,
        expires_at__gt=now,
        expires_at__lte=now + timedelta(days=rule.threshold),
    )
    return [
        Breach(
            str(key.pk),
            Text(
                "API key %(name)s (%(prefix)s…) expires on %(expires_at)s",
                name=key.name,
                prefix=key.prefix,
                expires_at=key.expires_at,
            ),
            (key.expires_at - now).days,
        )
        for key in keys.order_by("expires_at", "pk")[:MAX_SUBJECTS]
        if key.expires_at is not None
    ]


def _credit(rule: AlertRule, now: datetime) -> list[Breach]:
    left = _credit_left(rule.tenant_id, now)
    if left is None or left >= rule.threshold:
        return []
    currency = currency_of(rule.tenant_id)
    left_text, least = (exact_amount(max(0, nano), currency) for nano in (left, rule.threshold))
    return [Breach("", Text("Credit balance is %(left)s, below %(least)s", left=left_text, least=least), left)]


def _credit_left(tenant_id: int, now: datetime) -> int | None:
    """Return the credit in nano-units: a prepaid tenant's balance, else its unused credit. None: it never had any."""
    profile = BillingProfile.objects.for_tenant(tenant_id).select_related("tenant", "entity").first()
    if profile is not None and profile.is_prepaid:
        return available_nano(profile.tenant, profile, now)
    grants = CreditGrant.objects.for_tenant(tenant_id)
    if not grants.exists():
        return None
    usable = grants.filter(Q(expires_at=None) | Q(expires_at__gt=now), starts_at__lte=now)
    return sum(int(grant.rest) for grant in with_rest(usable))


def _health(rule: AlertRule, now: datetime) -> list[Breach]:
    """Return the health events that lasted as long as the rule's threshold, also those that are over."""
    events = HealthEvent.objects.filter(Q(closed_at=None) | Q(closed_at__gt=now - LATE))
    if rule.metric == Metric.REPLICA_DOWN:
        events = events.filter(issue_type=IssueType.REPLICA)
    else:
        types = {IssueType.MODEL}
        if rule.metric == Metric.UPSTREAM_DOWN:
            types |= {IssueType.FAILURES, IssueType.UPSTREAM}
            events = events.filter(subject__in=Deployment.objects.exclude(engine=MILLRACE).values("name"))
        events = events.filter(issue_type__in=types)
    if rule.model:
        events = events.filter(subject=rule.model)
    lasted = events.annotate(ended_at=Coalesce("closed_at", now)).filter(
        ended_at__gte=F("opened_at") + timedelta(minutes=rule.threshold),
        ended_at__gt=rule.created_at,  # events from before the rule are not reported
    )
    return [
        Breach(
            str(event.pk),
            Text("%(title)s (since %(opened_at)s)", title=event.title, opened_at=event.opened_at),
            int(((event.closed_at or now) - event.opened_at).total_seconds()) // 60,
            is_over=event.closed_at is not None,
        )
        for event in lasted.order_by("pk")[:MAX_SUBJECTS]
    ]


_CONDITIONS: Mapping[Metric, Callable[[AlertRule, datetime], list[Breach]]] = {
    Metric.ERROR_RATE: _error_rate,
    Metric.TTFT_P95: _ttft_p95,
    Metric.KEY_EXPIRY: _key_expiry,
    Metric.CREDIT: _credit,
    Metric.REPLICA_DOWN: _health,
    Metric.DEPLOYMENT_DOWN: _health,
    Metric.UPSTREAM_DOWN: _health,
}


def _percent(hundredths: int) -> str:
    return f"{hundredths // 100}.{hundredths % 100:02}%"


def _describe_duration(window: timedelta) -> Text:
    minutes = int(window.total_seconds()) // 60
    if minutes >= 60:
        return Text("%(number)s hour", "%(number)s hours", number=minutes // 60)
    return Text("%(number)s minute", "%(number)s minutes", number=minutes)


def _describe_requests(rule: AlertRule, number: int) -> Text:
    """Return the number of requests, with the project and the model of the rule."""
    values: dict[str, object] = {"number": number, "model": rule.model}
    if rule.project is None:
        if rule.model:
            return Text("%(number)s requests to %(model)s", **values)
        return Text("%(number)s requests", **values)
    values["project"] = rule.project.name
    if rule.model:
        return Text("%(number)s requests of project %(project)s to %(model)s", **values)
    return Text("%(number)s requests of project %(project)s", **values)
