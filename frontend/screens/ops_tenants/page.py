"""What operators see of all tenants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db.models import Count, F, Q, Sum
from django.db.models.functions import Coalesce
from django.urls import reverse

from billing.models import TOKEN_CLASSES, UsageEvent, Verdict
from billing.usage import this_month
from frontend.metering import Metering, metering
from frontend.numbers import exact
from tenants.models import ApiKey, Tenant
from tenants.roles import SystemUse
from tenants.scoping import system


@dataclass(frozen=True)
class TenantRow:
    name: str
    slug: str
    url: str
    status: str
    status_label: str
    is_demo: bool
    live_keys: str
    requests: str
    failed: str
    tokens: str
    since: datetime


@dataclass(frozen=True)
class TenantList:
    now: datetime
    metering: Metering
    rows: tuple[TenantRow, ...]


def tenant_list(now: datetime | None = None) -> TenantList:
    """Every tenant with its keys and its use of this month: three queries, however many there are."""
    start, now = this_month(now)
    billed = ~Q(verdict=Verdict.FAILED)
    tokens = sum((F(name) for name in TOKEN_CLASSES[1:]), F(TOKEN_CLASSES[0]))
    with system(SystemUse.OPERATOR):
        events = UsageEvent.objects.all_tenants().filter(admitted_at__gte=start, admitted_at__lt=now)
        used: dict[int, Mapping[str, Any]] = {
            row["tenant_id"]: row
            for row in events.values("tenant_id").annotate(
                requests=Count("leg"),
                failed=Count("leg", filter=~billed),
                tokens=Coalesce(Sum(tokens, filter=billed), 0),
            )
        }
        live = ApiKey.objects.all_tenants().filter(revoked_at__isnull=True)
        live = live.filter(Q(expires_at__isnull=True) | Q(expires_at__gt=now)).order_by()
        keys = dict(live.values_list("tenant_id").annotate(Count("id")))
        tenants = list(Tenant.objects.all_tenants())
    none = {"requests": 0, "failed": 0, "tokens": 0}
    rows = (_row(tenant, keys.get(tenant.pk, 0), used.get(tenant.pk, none)) for tenant in tenants)
    return TenantList(now, metering(now), tuple(rows))


def _row(tenant: Tenant, live_keys: int, used: Mapping[str, Any]) -> TenantRow:
    return TenantRow(
        name=tenant.name,
        slug=tenant.slug,
        url=reverse("overview", args=[tenant.slug]),
        status=tenant.status,
        status_label=Tenant.Status(tenant.status).label,
        is_demo=tenant.is_demo,
        live_keys=exact(live_keys),
        requests=exact(used["requests"]),
        failed=exact(used["failed"]),
        tokens=exact(used["tokens"]),
        since=tenant.created_at.astimezone(UTC),
    )
