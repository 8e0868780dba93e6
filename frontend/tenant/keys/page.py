"""The list of keys, its safety views, and the projects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Subquery
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from billing.metering.usage import UsageReport, count_accepted, sums
from billing.models import Budget, ExecutionOutcome
from frontend.core.date_ranges import month_of
from frontend.core.filter_chips import FilterBar, choice_chip, filter_bar, text_chip
from frontend.core.languages import lazy_text as _lazy
from frontend.core.list_tools import MAX_EXPORTED, ListTools
from frontend.core.lists import Choice, changed_url, keyset_page, named_rows, number_param, text_param
from frontend.core.numbers import Money, common_places
from frontend.core.page_context import PageContext
from frontend.core.screens import MAX_RESULTS_PER_KIND, SearchResult
from frontend.tenant.keys.key_limits import row_of
from millrace.apps.policy_results.limiting_factor import binding
from tenants.audit import PLATFORM
from tenants.models import ApiKey, AuditEntry, LimitSet, Project

PAGE_SIZE = 50
MAX_PROJECTS = 100
IDLE_AFTER = timedelta(days=90)
EXPIRES_SOON = timedelta(days=7)
_SPENT = (*ExecutionOutcome.values, "cost_femto")
SCOPES = {
    "inference": _lazy("Run inference"),
    "models": _lazy("List models"),
    "endpoints": _lazy("Manage endpoints"),
    "cache": _lazy("Replace cached answers"),
    "billing": _lazy("Read invoices and usage, pay and change the billing profile"),
    "manage": _lazy("Manage this organization: keys, limits, budgets, members"),
}
VIEWS = {
    "": _lazy("Active"),
    "unlimited": _lazy("No key-level limit"),
    "forever": _lazy("No expiration date"),
    "idle": _lazy("Unused for 90 days"),
    "ended": _lazy("Revoked or expired"),
}


def is_active(ctx: PageContext) -> Q:
    """Return the filter for keys that are neither revoked nor expired."""
    return Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=ctx.now))


def conditions(ctx: PageContext) -> dict[str, Q]:
    """Return the filter of each safety view."""
    own_limits = LimitSet.objects.for_tenant(ctx.tenant).filter(key=OuterRef("pk"), dry_run=False)
    own_budgets = Budget.objects.for_tenant(ctx.tenant).filter(key=OuterRef("pk"), active=True, mode=Budget.Mode.HARD)
    since = ctx.now - IDLE_AFTER
    idle = Q(usage__last_used_at__lt=since) | Q(usage=None, created_at__lt=since)
    works = is_active(ctx)
    return {
        "": works,
        "unlimited": works & ~Exists(own_limits) & ~Exists(own_budgets),
        "forever": works & Q(expires_at=None),
        "idle": works & idle,
        "ended": ~works,
    }


def safety(ctx: PageContext) -> list[dict[str, Any]]:
    """Return the safety views with their numbers of keys."""
    counts = {f"n{place}": Count("pk", filter=held) for place, held in enumerate(conditions(ctx).values())}
    found = ApiKey.objects.for_tenant(ctx.tenant).order_by().aggregate(**counts)
    return [
        {
            "link": Choice(label, changed_url(ctx, ctx.url("keys"), show=name), name == _view(ctx)),
            "keys": found[f"n{place}"],
            "warns": 0 < place < 4,
        }
        for place, (name, label) in enumerate(VIEWS.items())
    ]


def filters(ctx: PageContext) -> FilterBar:
    """Return the filter chips. Call inside `ctx.scope()`."""
    url = ctx.url("keys")
    projects = named_rows(Project.objects.for_tenant(ctx.tenant))
    chips = (choice_chip(ctx, url, "project", _("Project"), projects, number_param(ctx, "project")),)
    return filter_bar(ctx, url, chips, text_chip(ctx, url, "q", _("Name or prefix")))


def _select_keys(ctx: PageContext) -> QuerySet[ApiKey]:
    """Return the keys that the filters of the page select."""
    rows = ApiKey.objects.for_tenant(ctx.tenant).filter(conditions(ctx)[_view(ctx)])
    if typed := text_param(ctx, "q"):
        rows = rows.filter(Q(name__icontains=typed) | Q(prefix__istartswith=typed))
    if (project := number_param(ctx, "project")) is not None:
        rows = rows.filter(project_id=project)
    return rows


def export_rows(ctx: PageContext) -> Iterator[tuple[Any, ...]]:
    """Yield the newest keys with the page's filters. Call inside `ctx.scope()`."""
    rows = list(with_last_used(ctx, _select_keys(ctx)).order_by("-pk")[:MAX_EXPORTED])
    spent = spending(ctx, "key", (row.pk for row in rows)) if rows else {}
    for row in rows:
        used = row.last_used  # type: ignore[attr-defined]  # an annotation
        times = (row.created_at, used, row.expires_at, row.revoked_at)
        yield (
            *(row.pk, row.name, row.prefix, row.project.slug, owner(row), " ".join(row.scopes)),
            *(None if row.allowed_models is None else " ".join(row.allowed_models),),
            *(None if row.allowed_ip_ranges is None else " ".join(row.allowed_ip_ranges),),
            row.cost_center,
            *(at.isoformat() if at else None for at in times),
            Money(spent[row.pk]["cost_femto"] if row.pk in spent else 0).exact,
        )


TOOLS = ListTools(
    "keys",
    exported=(
        *("id", "name", "prefix", "project", "owner", "scopes", "allowed_models", "allowed_ip_ranges"),
        "cost_center",
        *("created_at", "last_used_at", "expires_at", "revoked_at", "spend_this_month"),
    ),
    rows=export_rows,
    columns={
        "project": _lazy("Project, owner"),
        "permissions": _lazy("Permissions"),
        "used": _lazy("Last used"),
        "limit": _lazy("#Tightest limit"),
        "spend": _lazy("#Spend this month"),
        "status": _lazy("Status"),
    },
    views=((_lazy("Active"), {}),),
)


def keys(ctx: PageContext) -> dict[str, Any]:
    """Return a page of the keys, newest first."""
    rows = _select_keys(ctx)
    filtered = bool(filters(ctx).is_filtered or _view(ctx))
    page = keyset_page(ctx, with_last_used(ctx, rows), ctx.url("keys"), PAGE_SIZE, filtered=filtered)
    shown = list(page.rows)
    bounds = binding(ctx.tenant.pk, shown) if shown else {}
    spent = spending(ctx, "key", (key.pk for key in shown)) if shown else {}
    replaced = successors(ctx, shown)
    listed = [_row(ctx, key, bounds[key.pk], spent.get(key.pk), key.pk in replaced) for key in shown]
    return {
        "title": VIEWS[_view(ctx)],
        "page": page,
        "rows": listed,
        "none_yet": not shown and not filtered and not ApiKey.objects.for_tenant(ctx.tenant).exists(),
        **TOOLS.table(ctx),
        "spend_places": common_places(row["spend"] for row in listed),
    }


def with_last_used(ctx: PageContext, rows: QuerySet[ApiKey]) -> QuerySet[ApiKey]:
    """Return keys with their last use, project and creator."""
    created = AuditEntry.objects.for_tenant(ctx.tenant).filter(
        object_type="apikey", object_id=OuterRef("pk"), action="key.created"
    )
    return rows.select_related("project", "created_by").annotate(
        last_used=F("usage__last_used_at"), creator=Subquery(created.order_by("pk").values("actor")[:1])
    )


def successors(ctx: PageContext, keys: list[ApiKey]) -> set[int]:
    """Return the IDs of rotated keys whose successor is not revoked."""
    rows = ApiKey.objects.for_tenant(ctx.tenant).filter(replaces__in=[key.pk for key in keys], revoked_at=None)
    return set(rows.values_list("replaces_id", flat=True)) if keys else set()


def spending(
    ctx: PageContext, group: Any, keys: Iterable[int] | None = None, more: tuple[str, ...] = ()
) -> dict[int, dict[str, Any]]:
    """Return this month's requests, cost and `more` sums of each key or project, only of the given keys."""
    start, end = month_of(ctx)
    key_ids = None if keys is None else tuple(keys)
    report = UsageReport(ctx.tenant.pk, start=start, end=end, key_ids=key_ids)
    found = sums(report, group_by=(group,), summed=(*_SPENT, *more))
    return {row[f"{group}_id"]: row for row in found}


def _row(
    ctx: PageContext, key: ApiKey, bounds: tuple[Any, ...], spent: dict[str, Any] | None, replaced: bool
) -> dict[str, Any]:
    rows = [row_of(bound) for bound in bounds]
    label, kind = status(ctx, key, rows, replaced=replaced)
    return {
        "key": key,
        "owner": owner(key),
        "restrictions": restrictions(key),
        "limit": rows[0] if rows else None,  # the tightest
        "spend": Money(spent["cost_femto"] if spent else 0),
        "status": label,
        "status_kind": kind,
    }


def owner(key: ApiKey) -> str:
    """Return the creator of a key of `with_last_used`: a user, another API key or a command of the operator."""
    if key.created_by is not None:
        return key.created_by.name or key.created_by.email
    creator: str | None = key.creator  # type: ignore[attr-defined]  # an annotation
    if creator is None or creator == PLATFORM.name:
        return _("Operator")
    return (
        _("API key %(name)s") % {"name": creator.removeprefix("key ")}
        if creator.startswith("key ")
        else _("%(creator)s (deleted user)") % {"creator": creator}
    )


def restrictions(key: ApiKey) -> str:
    """Return a short description of the key's models and networks."""
    found = []
    if key.allowed_models is not None:
        number = len(key.allowed_models)
        found.append(ngettext("%(number)s model", "%(number)s models", number) % {"number": number})
    if key.allowed_ip_ranges is not None:
        number = len(key.allowed_ip_ranges)
        found.append(ngettext("%(number)s network", "%(number)s networks", number) % {"number": number})
    return _("only %(found)s") % {"found": ", ".join(found)} if found else ""


def status(ctx: PageContext, key: ApiKey, bounds: list[dict[str, Any]], *, replaced: bool) -> tuple[str, str]:
    """Return the label of a key's status and the color of its badge."""
    if key.revoked_at is not None:
        return _("Revoked"), ""
    if key.expires_at is not None and key.expires_at <= ctx.now:
        return _("Expired"), ""
    if any(bound["level"] == "full" for bound in bounds):
        return _("Blocked"), "bad"
    if replaced:
        return _("Being replaced"), "info"
    if key.expires_at is not None and key.expires_at <= ctx.now + EXPIRES_SOON:
        return _("Expires soon"), "warn"
    if any(bound["level"] == "near" for bound in bounds):
        return _("Near limit"), "warn"
    return _("Active"), "good"


def projects(ctx: PageContext) -> dict[str, Any]:
    """Return the projects with their number of keys and their spend."""
    works = Count(
        "keys", filter=Q(keys__revoked_at=None) & (Q(keys__expires_at=None) | Q(keys__expires_at__gt=ctx.now))
    )
    rows = Project.objects.for_tenant(ctx.tenant).annotate(live=works).order_by("name", "pk")[:MAX_PROJECTS]
    spent = spending(ctx, "project")
    found: list[dict[str, Any]] = [
        {
            "project": row,
            "spend": Money(spent[row.pk]["cost_femto"] if row.pk in spent else 0),
            "accepted": count_accepted(spent[row.pk]) if row.pk in spent else 0,
        }
        for row in rows
    ]
    return {"rows": found, "spend_places": common_places(row["spend"] for row in found)}


def _view(ctx: PageContext) -> str:
    view = ctx.query.get("show", "")
    return view if view in VIEWS else ""


def find_keys(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield API keys by name or prefix."""
    rows = ApiKey.objects.for_tenant(ctx.tenant).filter(Q(name__icontains=typed) | Q(prefix__istartswith=typed))
    for key in rows.order_by("name")[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(key.name, ctx.url("keys-detail", key.pk), "keys", f"{key.prefix}…")
