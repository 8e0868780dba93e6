"""Request records of the demo usage: of completed requests and of rejected ones.

Records are stored for some weeks, so only days within this time are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from billing.models import Budget, UsageEvent
from billing.rates.pricing import Tier
from millrace.apps.request_log.models import RequestOutcome, RequestRecord
from millrace.demo.history import PREFIX, DemoUsage
from millrace.demo.seeding import DemoTenant
from millrace.environment.configuration import platform_settings
from tenants.isolation.scopes import tenant_scope
from tenants.models import LimitSet

BATCH = 1000
RATE_LIMITED_SHARE = (
    40  # this many of 4096 requests of a key with a limit per minute are followed by one that was rejected
)
_GATEWAY = "demo"
_STATUS = {
    "completed": ("200", "", RequestOutcome.COMPLETED),
    "cancelled": ("nothing", "", RequestOutcome.CANCELLED),
    "failed": ("500", "internal_error", RequestOutcome.FAILED),
}


def record(demo_tenant: DemoTenant, history: Sequence[DemoUsage], now: datetime) -> int:
    """Write the missing records and return their number. Requests without a usage event were rejected by a budget."""
    since = now - timedelta(days=platform_settings().request_log_retention_days)
    recent = [use for use in history if _at(use) > since]
    tenant = demo_tenant.tenant
    with tenant_scope(tenant):
        events = UsageEvent.objects.for_tenant(tenant).filter(admitted_at__gte=since, request_id__startswith=PREFIX)
        settled = set(events.values_list("request_id", flat=True))
        existing = RequestRecord.objects.for_tenant(tenant).filter(started_at__gte=since, request_id__startswith=PREFIX)
        written = set(existing.values_list("request_id", flat=True))
        budget = _budget(demo_tenant)
        limits = {row.key_id: row for row in LimitSet.objects.for_tenant(tenant).filter(key__isnull=False)}
    rows = []
    for use in recent:
        billing_context = use.event.billing_context
        if billing_context.request_id in written:
            continue
        rows.append(_record(use, refused_by=None if billing_context.request_id in settled else budget))
        limit = limits.get(billing_context.key_id)
        if (
            limit is not None
            and limit.requests_per_minute
            and int(billing_context.request_id[-3:], 16) < RATE_LIMITED_SHARE
        ):
            rows.append(_rate_limited(use, limit))
    for start in range(0, len(rows), BATCH):
        with tenant_scope(tenant):
            RequestRecord.objects.for_tenant(tenant).bulk_create(rows[start : start + BATCH], ignore_conflicts=True)
    return len(rows)


def _budget(demo_tenant: DemoTenant) -> dict[str, Any]:
    """Return the tenant's budget in the format of a record's rejection."""
    rows = Budget.objects.for_tenant(demo_tenant.tenant).filter(mode="hard", key=None, project=None, member=None)
    row = rows.order_by("-unit", "pk").first()
    if row is None:
        return {"kind": "budget"}
    fields = {"id": row.pk, "name": row.name, "unit": row.unit, "period": row.period}
    return {"kind": "budget", **fields, "left": 0, "resets_at": None}


def _record(use: DemoUsage, refused_by: dict[str, Any] | None) -> RequestRecord:
    event, work = use.event, use.work
    billing_context, usage = event.billing_context, event.usage
    status, code, outcome = _STATUS[event.outcome]
    is_admitted = refused_by is None
    placement = {
        "execution": 0,
        "attempt": 1,
        "model": billing_context.model,
        "replica": event.replica_id,
        "by": "prefix" if usage.cache_read else "load",
        "load": 1,
        "credits": 8,
        "queued_ms": event.queue_us // 1000,
    }
    return RequestRecord(
        tenant_id=billing_context.tenant_id,
        started_at=_at(use),
        request_id=billing_context.request_id,
        project_id=billing_context.project_id,
        key_id=billing_context.key_id,
        gateway_id=_GATEWAY,
        endpoint="batch" if work.tier == Tier.BATCH else "chat.completions" if work.output else "embeddings",
        requested_model=billing_context.model,
        served_model=billing_context.model if is_admitted else "",
        stream=bool(work.output) and work.tier != Tier.BATCH and billing_context.request_id[-1] < "a",
        status=status if is_admitted else "429",
        code=code if is_admitted else "budget_exceeded",
        outcome=outcome if is_admitted else RequestOutcome.LIMITED,
        limited_by=None if refused_by is None else {**refused_by, "needed": use.need["money"]},
        route={"targets": [billing_context.model], "prompt_tokens": usage.prompt},
        placements=[placement] if is_admitted else [],
        prompt_tokens=usage.prompt,
        max_tokens=use.need["tokens"] - usage.prompt,
        reserved_nano=use.need["money"] if is_admitted else None,
        price_version=billing_context.price_version if is_admitted else None,
        end_user=billing_context.end_user,
        total_ms=(event.queue_us + event.duration_us) // 1000 + 6 if is_admitted else 9,
        ttft_ms=(event.queue_us + event.ttft_us) // 1000 + 5
        if is_admitted and outcome != RequestOutcome.FAILED
        else None,
    )


def _rate_limited(use: DemoUsage, limits: LimitSet) -> RequestRecord:
    """Return the record of a request that was rejected shortly after `use` by the key's rate limit."""
    row = _record(use, refused_by={"kind": "limit"})
    row.request_id, row.started_at = row.request_id[:-1] + "x", row.started_at + timedelta(milliseconds=250)
    row.code = "rate_limit_exceeded"
    row.limited_by = {
        "kind": "limit",
        "scope": "key",
        "id": limits.pk,
        "model": "",
        "name": "requests_per_minute",
        "limit": limits.requests_per_minute,
        "left": 0,
        "needed": 1,
        "reset_ms": 800,
    }
    return row


def _at(use: DemoUsage) -> datetime:
    return datetime.fromtimestamp(use.event.billing_context.admitted_at / 1_000_000, UTC)
