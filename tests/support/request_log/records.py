"""Records of requests."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connection

from billing.models import UsageEvent
from billing.periods import stamps
from billing.rates.pricing import COMPONENTS
from millrace.apps.feedback.models import SubmittedFeedback
from millrace.apps.request_log.models import RequestRecord
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant

NOW = datetime(2026, 11, 10, 12, 30, tzinfo=UTC)


def record(tenant: Tenant, number: int = 0, **changes: Any) -> RequestRecord:
    """Create the record of a request this number of minutes ago."""
    fields: dict[str, Any] = {"request_id": f"req_{number:03}", "started_at": NOW - timedelta(minutes=number)}
    fields |= {
        "project_id": 1,
        "key_id": 1,
        "gateway_id": "gw",
        "endpoint": "chat.completions",
        "requested_model": "mine",
    }
    fields |= {
        "served_model": "alpha",
        "stream": True,
        "status": "200",
        "code": "",
        "outcome": "completed",
        "total_ms": 9,
    }
    with tenant_scope(tenant):
        return RequestRecord.objects.create(tenant_id=tenant.pk, **fields | changes)


START, END = NOW - timedelta(hours=2), NOW + timedelta(hours=1)


def settle(
    tenant: Tenant,
    request_id: str,
    saved_femto: int = 0,
    at: datetime = NOW,
    cost_femto: int = 1,
    host_tokens: int = 0,
    missed: Mapping[str, Any] | None = None,
    **tokens: int,
) -> None:
    with all_tenants_scope(BypassReason.SETTLER), connection.cursor() as cursor:
        (period,) = stamps(cursor, [(tenant.pk, at)])
        UsageEvent.objects.all_tenants().create(
            admitted_at=at,
            request_id=request_id,
            execution=0,
            tenant_id=tenant.pk,
            project_id=1,
            key_id=1,
            model="alpha",
            attempt=1,
            outcome="completed",
            finish_reason="stop",
            **{name: tokens.get(name, 0) for name in COMPONENTS},
            replica_id="r",
            block_size=32,
            queue_us=0,
            ttft_us=0,
            duration_us=0,
            price_ids=[None for _ in COMPONENTS],
            cost_femto=cost_femto,
            host_tokens=host_tokens,
            saved_femto=saved_femto,
            invoice_period=period,
            settled_at=datetime.now(UTC),
            **(missed or {}),
        )


def give_feedback(tenant: Tenant, number: int, **fields: Any) -> None:
    with tenant_scope(tenant):
        SubmittedFeedback.objects.create(tenant_id=tenant.pk, request_id=f"req_{number:03}", key_id=1, **fields)
