"""View models of the list of keys, its safety views, and the projects."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet

from billing.metering.usage import UsageReport, accepted, sums
from billing.models import Budget
from frontend.core.date_ranges import month_of
from frontend.core.numbers import Money, common_places
from frontend.core.page_context import PageContext
from frontend.tenant.keys.key_limits import KeyLimitRow, row_of
from millrace.apps.request_log.limiting_factor import binding
from tenants.models import ApiKey, LimitSet, Project
from tenants.permissions import Permission

PAGE_SIZE = 50
MAX_PROJECTS = 100
IDLE_AFTER = timedelta(days=90)
EXPIRES_SOON = timedelta(days=7)
SCOPES = {
    "inference": "Run inference",
    "models": "List models",
    "endpoints": "Manage endpoints",
    "manage": "Manage this organization: keys, limits, budgets, members",
}
VIEWS = (
    ("", "Active", ""),
    ("unlimited", "No key-level limit", ""),
    ("forever", "No expiration date", ""),
    ("idle", "Unused for 90 days", ""),
    ("ended", "Revoked or expired", ""),
)


@dataclass(frozen=True)
class KeySafetyView:
    """One of the safety views, with its number of keys and its URL."""

    label: str
    detail: str
    keys: int
    url: str
    current: bool
    warns: bool


@dataclass(frozen=True)
class KeySafety:
    views: tuple[KeySafetyView, ...]


@dataclass(frozen=True)
class KeyListRow:
    name: str
    prefix: str
    url: str
    project: str
    owner: str
    scopes: str
    restrictions: str
    last_used: datetime | None
    bound: KeyLimitRow | None  # the tightest limit
    spend: Money
    status: str
    status_kind: str
    expires_at: datetime | None


@dataclass(frozen=True)
class KeyListPanel:
    title: str
    rows: tuple[KeyListRow, ...]
    filtered: bool
    none_yet: bool
    new_url: str
    older_url: str
    first_url: str
    spend_places: int  # decimals of the column


@dataclass(frozen=True)
class KeyFilters:
    """Values of the filter form."""

    typed: str
    view: str
    project: str
    projects: tuple[tuple[str, str], ...]
    clear_url: str


@dataclass(frozen=True)
class ProjectRow:
    name: str
    slug: str
    keys: int
    spend: Money
    accepted: int
    keys_url: str
    edit_url: str
    delete_url: str


@dataclass(frozen=True)
class KeyProjects:
    rows: tuple[ProjectRow, ...]
    new_url: str
    spend_places: int


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


def safety(ctx: PageContext) -> KeySafety:
    counts = {f"n{place}": Count("pk", filter=held) for place, held in enumerate(conditions(ctx).values())}
    found = ApiKey.objects.for_tenant(ctx.tenant).order_by().aggregate(**counts)
    here = _view(ctx)
    return KeySafety(
        tuple(
            KeySafetyView(label, detail, found[f"n{place}"], _url(ctx, show=name), name == here, 0 < place < 4)
            for place, (name, label, detail) in enumerate(VIEWS)
        )
    )


def filters(ctx: PageContext) -> KeyFilters:
    projects = Project.objects.for_tenant(ctx.tenant).order_by("name", "pk").values_list("pk", "name")
    return KeyFilters(
        _typed(ctx),
        _view(ctx),
        ctx.query.get("project", ""),
        tuple((str(pk), name) for pk, name in projects[:MAX_PROJECTS]),
        _url(ctx, q="", project="") if _typed(ctx) or ctx.query.get("project") else "",
    )


def keys(ctx: PageContext) -> KeyListPanel:
    """Return a page of the keys, newest first."""
    rows = ApiKey.objects.for_tenant(ctx.tenant).filter(conditions(ctx)[_view(ctx)])
    if typed := _typed(ctx):
        rows = rows.filter(Q(name__icontains=typed) | Q(prefix__istartswith=typed))
    if (project := number(ctx.query.get("project", ""))) is not None:
        rows = rows.filter(project_id=project)
    if (before := number(ctx.query.get("before", ""))) is not None:
        rows = rows.filter(pk__lt=before)
    found = list(with_last_used(rows).order_by("-pk")[: PAGE_SIZE + 1])
    shown = found[:PAGE_SIZE]
    bounds = binding(ctx.tenant.pk, shown) if shown else {}
    spent = spending(ctx, "key") if shown else {}
    replaced = successors(ctx, shown)
    filtered = bool(typed or project is not None or _view(ctx))
    listed = tuple(_row(ctx, key, bounds[key.pk], spent.get(key.pk), key.pk in replaced) for key in shown)
    return KeyListPanel(
        dict((name, label) for name, label, _ in VIEWS)[_view(ctx)],
        listed,
        filtered,
        not shown and not filtered and not ApiKey.objects.for_tenant(ctx.tenant).exists(),
        ctx.url("keys-new") if ctx.may(Permission.KEYS_WRITE) else "",
        _url(ctx, before=str(shown[-1].pk)) if len(found) > PAGE_SIZE else "",
        _url(ctx) if before is not None else "",
        common_places(row.spend for row in listed),
    )


def with_last_used(rows: QuerySet[ApiKey]) -> QuerySet[ApiKey]:
    """Return keys with their last use, project and creator."""
    return rows.select_related("project", "created_by").annotate(last_used=F("usage__last_used_at"))


def successors(ctx: PageContext, keys: list[ApiKey]) -> set[int]:
    """Return the IDs of rotated keys whose successor is not revoked."""
    rows = ApiKey.objects.for_tenant(ctx.tenant).filter(replaces__in=[key.pk for key in keys], revoked_at=None)
    return set(rows.values_list("replaces_id", flat=True)) if keys else set()


def spending(ctx: PageContext, group: Any) -> dict[int, dict[str, Any]]:
    """Return this month's usage of each key or project."""
    start, end = month_of(ctx)
    found = sums(UsageReport(ctx.tenant.pk, start=start, end=end), group_by=(group,))
    return {row[f"{group}_id"]: row for row in found}


def _row(
    ctx: PageContext, key: ApiKey, bounds: tuple[Any, ...], spent: dict[str, Any] | None, replaced: bool
) -> KeyListRow:
    rows = [row_of(bound) for bound in bounds]
    label, kind = status(ctx, key, rows, replaced=replaced)
    return KeyListRow(
        name=key.name,
        prefix=f"{key.prefix}…",
        url=ctx.url("keys-detail", key.pk),
        project=key.project.name,
        owner=owner(key),
        scopes=", ".join(key.scopes),
        restrictions=restrictions(key),
        last_used=getattr(key, "last_used", None),
        bound=rows[0] if rows else None,
        spend=Money(spent["cost_femto"] if spent else 0),
        status=label,
        status_kind=kind,
        expires_at=key.expires_at if key.revoked_at is None else None,
    )


def owner(key: ApiKey) -> str:
    """Return the creator of a key."""
    if key.created_by is None:
        return "former member"
    return key.created_by.name or key.created_by.email


def restrictions(key: ApiKey) -> str:
    """Return a short description of the key's models and networks."""
    found = []
    if key.allowed_models is not None:
        found.append(f"{len(key.allowed_models)} model{'' if len(key.allowed_models) == 1 else 's'}")
    if key.allowed_ip_ranges is not None:
        found.append(f"{len(key.allowed_ip_ranges)} network{'' if len(key.allowed_ip_ranges) == 1 else 's'}")
    return f"only {' and '.join(found)}" if found else ""


def status(ctx: PageContext, key: ApiKey, bounds: list[KeyLimitRow], *, replaced: bool) -> tuple[str, str]:
    """Return the label of a key's status and the color of its badge."""
    if key.revoked_at is not None:
        return "Revoked", ""
    if key.expires_at is not None and key.expires_at <= ctx.now:
        return "Expired", ""
    if any(bound.level == "full" for bound in bounds):
        return "Blocked", "bad"
    if replaced:
        return "Being replaced", "info"
    if key.expires_at is not None and key.expires_at <= ctx.now + EXPIRES_SOON:
        return "Expires soon", "warn"
    if any(bound.level == "near" for bound in bounds):
        return "Near limit", "warn"
    return "Active", "good"


def projects(ctx: PageContext) -> KeyProjects:
    """Return the projects with their number of keys and their spend."""
    works = Count(
        "keys", filter=Q(keys__revoked_at=None) & (Q(keys__expires_at=None) | Q(keys__expires_at__gt=ctx.now))
    )
    rows = Project.objects.for_tenant(ctx.tenant).annotate(live=works).order_by("name", "pk")[:MAX_PROJECTS]
    spent = spending(ctx, "project")
    writes = ctx.may(Permission.PROJECTS_WRITE)
    found = tuple(
        ProjectRow(
            row.name,
            row.slug,
            row.live,
            Money(spent[row.pk]["cost_femto"] if row.pk in spent else 0),
            accepted(spent[row.pk]) if row.pk in spent else 0,
            f"{ctx.url('keys')}?{urlencode({'project': row.pk})}",
            ctx.url("keys-project", row.pk) if writes else "",
            ctx.url("keys-project-delete", row.pk) if writes else "",
        )
        for row in rows
    )
    new_url = ctx.url("keys-project-new") if writes else ""
    return KeyProjects(found, new_url, common_places(row.spend for row in found))


def number(text: str) -> int | None:
    """Return an ID from the query string, or None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _typed(ctx: PageContext) -> str:
    return ctx.query.get("q", "").strip()[:100].replace("\0", "")


def _view(ctx: PageContext) -> str:
    view = ctx.query.get("show", "")
    return view if view in {name for name, _, _ in VIEWS} else ""


def _url(ctx: PageContext, **changes: str) -> str:
    params = {name: value for name, value in ctx.query.items() if name in ("q", "project", "show")} | changes
    query = urlencode({name: value for name, value in params.items() if value})
    return f"{ctx.url('keys')}?{query}" if query else ctx.url("keys")
