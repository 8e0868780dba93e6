"""What cache warming has computed, spent and saved for a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from django.db.models import Count, Q, Sum

from millrace.apps.answer_caches.cache_warming import spent_femto
from millrace.apps.answer_caches.models import WarmedPrompt
from tenants.models import Tenant

MAX_NEWEST = 100
MAX_RUNS = 20


@dataclass(frozen=True)
class WarmingStatus:
    """The prompts of a period, and the spending of the current day."""

    budget_nano: int
    spent_today_femto: int
    prompts: int
    computed: int  # those that have run
    used: int  # those that at least one request used
    hits: int
    spent_femto: int
    saved_femto: int
    newest: Sequence[WarmedPrompt]


def warming_status(tenant: Tenant, start: datetime, end: datetime) -> WarmingStatus:
    """Return the tenant's warmed prompts of a period. Its scope must be open."""
    rows = list(
        WarmedPrompt.objects.for_tenant(tenant).filter(created_at__gte=start, created_at__lt=end).order_by("-id")
    )
    return WarmingStatus(
        budget_nano=tenant.cache_warming_nano,
        spent_today_femto=spent_femto(tenant, datetime.now(UTC)),
        prompts=len(rows),
        computed=sum(bool(row.request_id) for row in rows),
        used=sum(row.hits > 0 for row in rows),
        hits=sum(row.hits for row in rows),
        spent_femto=sum(row.cost_femto or 0 for row in rows),
        saved_femto=sum(row.saved_femto for row in rows),
        newest=rows[:MAX_NEWEST],
    )


@dataclass(frozen=True)
class PastRun:
    """What one run has warmed. Its prompts have one time of creation."""

    started_at: datetime
    prompts: int
    prefixes: int  # prompts that are prefixes
    unsettled: int  # prompts whose cost is not known yet
    hits: int
    spent_femto: int
    saved_femto: int


def past_runs(tenant: Tenant, since: datetime) -> list[PastRun]:
    """Return the newest runs that have warmed prompts, newest first. The tenant's scope must be open."""
    rows = WarmedPrompt.objects.for_tenant(tenant).filter(created_at__gte=since).values("created_at")
    sums = rows.annotate(
        prompts=Count("id"),
        prefixes=Count("id", filter=Q(cache=WarmedPrompt.Cache.PREFIX)),
        unsettled=Count("id", filter=Q(cost_femto=None)),
        all_hits=Sum("hits"),
        spent=Sum("cost_femto", default=0),
        saved=Sum("saved_femto"),
    )
    return [
        PastRun(
            started_at=row["created_at"],
            prompts=row["prompts"],
            prefixes=row["prefixes"],
            unsettled=row["unsettled"],
            hits=row["all_hits"],
            spent_femto=int(row["spent"]),
            saved_femto=int(row["saved"]),
        )
        for row in sums.order_by("-created_at")[:MAX_RUNS]
    ]
