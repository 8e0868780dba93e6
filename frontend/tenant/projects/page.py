"""One project: its figures, keys and budgets. The list is that of the keys' screen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db.models import Q, QuerySet

from billing.metering.usage import UsageReport, count_accepted, sums
from billing.models import Budget
from frontend.core.date_ranges import month_of
from frontend.core.lists import ListPage, keyset_page
from frontend.core.numbers import Money, common_places
from frontend.core.page_context import PageContext, first_or_404
from frontend.core.screens import MAX_RESULTS_PER_KIND, SearchResult
from frontend.tenant.keys.page import is_active
from frontend.tenant.overview.spend import budget_statuses
from tenants.models import ApiKey, Project

PAGE_SIZE = 25
MAX_BUDGETS = 20


def project_of(ctx: PageContext) -> Project:
    """Return the project in the URL. Call inside `ctx.scope()`."""
    rows: QuerySet[Project] = Project.objects.for_tenant(ctx.tenant).filter(pk=ctx.arguments["project"])
    return ctx.once("project", lambda: first_or_404(rows))


def figures(ctx: PageContext) -> dict[str, Any]:
    """Return the usage of this month and the number of active keys."""
    project = project_of(ctx)
    start, end = month_of(ctx)
    found = sums(UsageReport(ctx.tenant.pk, start=start, end=end), group_by=("project",))
    used = next((row for row in found if row["project_id"] == project.pk), None)
    keys = ApiKey.objects.for_tenant(ctx.tenant).filter(project=project)
    return {
        "spend": Money(used["cost_femto"] if used else 0),
        "saved": Money(used["saved_femto"] if used else 0),
        "accepted": count_accepted(used) if used else 0,
        "failed": used["failed"] if used else 0,
        "active_keys": keys.filter(is_active(ctx)).count(),
        "keys": keys.count(),
    }


def keys(ctx: PageContext) -> dict[str, Any]:
    """Return a page of the project's keys with their spend of this month."""
    project = project_of(ctx)
    start, end = month_of(ctx)
    rows = ApiKey.objects.for_tenant(ctx.tenant).filter(project=project).select_related("usage")
    page: ListPage = keyset_page(ctx, rows, ctx.url("projects-detail", project.pk), PAGE_SIZE)
    question = UsageReport(ctx.tenant.pk, start=start, end=end, key_ids=tuple(row.pk for row in page.rows))
    found = sums(question, group_by=("key",))
    spent = {row["key_id"]: Money(row["cost_femto"]) for row in found}
    listed = [
        {
            "key": row,
            "is_active": row.is_live,
            "last_used": row.usage.last_used_at if hasattr(row, "usage") else None,
            "spend": spent.get(row.pk, Money(0)),
        }
        for row in page.rows
    ]
    return {"page": page, "rows": listed, "places": common_places(row["spend"] for row in listed), "project": project}


def budgets(ctx: PageContext) -> dict[str, Any]:
    """Return the budgets of the project itself. Those of its keys are on their pages."""
    project = project_of(ctx)
    rows = Budget.objects.for_tenant(ctx.tenant).filter(project=project, active=True).order_by("pk")[:MAX_BUDGETS]
    return {"rows": budget_statuses(ctx, list(rows)), "project": project}


def find_projects(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield projects by name or slug."""
    rows = Project.objects.for_tenant(ctx.tenant).filter(Q(name__icontains=typed) | Q(slug__istartswith=typed))
    for row in rows.order_by("name")[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(row.name, ctx.url("projects-detail", row.pk), "layers", row.slug)
