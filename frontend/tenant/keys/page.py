"""The list of keys, what in it is unsafe, and the projects."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet

from billing.metering.usage import UsageReport, sums
from billing.models import Budget
from frontend.core.date_ranges import month_of
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.tenant.keys.bounds import KeyBoundRow, row_of
from millrace.apps.request_log.limiting_factor import binding
from tenants.models import ApiKey, LimitSet, Project
from tenants.permissions import Permission

SIZE = 50
MOST_PROJECTS = 100
IDLE = timedelta(days=90)
SOON = timedelta(days=7)
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
class View:
    """One of the safety views: how many keys it holds, and where it is."""

    label: str
    detail: str
    keys: int
    url: str
    current: bool
    warns: bool


@dataclass(frozen=True)
class Safety:
    views: tuple[View, ...]


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
    bound: KeyBoundRow | None  # the one with least left
    others: int
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


@dataclass(frozen=True)
class KeyFilters:
    """What stands in the filters."""

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
    requests: int
    keys_url: str
    edit_url: str
    remove_url: str


@dataclass(frozen=True)
class KeyProjects:
    rows: tuple[ProjectRow, ...]
    new_url: str


def live(visit: PageContext) -> Q:
    """Keys that work now."""
    return Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=visit.now))


def conditions(visit: PageContext) -> dict[str, Q]:
    """Return what each view holds."""
    own_limits = LimitSet.objects.for_tenant(visit.tenant).filter(key=OuterRef("pk"), dry_run=False)
    own_budgets = Budget.objects.for_tenant(visit.tenant).filter(key=OuterRef("pk"), active=True, mode=Budget.Mode.HARD)
    since = visit.now - IDLE
    idle = Q(usage__last_used_at__lt=since) | Q(usage=None, created_at__lt=since)
    works = live(visit)
    return {
        "": works,
        "unlimited": works & ~Exists(own_limits) & ~Exists(own_budgets),
        "forever": works & Q(expires_at=None),
        "idle": works & idle,
        "ended": ~works,
    }


def safety(visit: PageContext) -> Safety:
    counts = {f"n{place}": Count("pk", filter=held) for place, held in enumerate(conditions(visit).values())}
    found = ApiKey.objects.for_tenant(visit.tenant).order_by().aggregate(**counts)
    here = _view(visit)
    return Safety(
        tuple(
            View(label, detail, found[f"n{place}"], _with(visit, show=name), name == here, 0 < place < 4)
            for place, (name, label, detail) in enumerate(VIEWS)
        )
    )


def fields(visit: PageContext) -> KeyFilters:
    projects = Project.objects.for_tenant(visit.tenant).order_by("name", "pk").values_list("pk", "name")
    return KeyFilters(
        _typed(visit),
        _view(visit),
        visit.query.get("project", ""),
        tuple((str(pk), name) for pk, name in projects[:MOST_PROJECTS]),
        _with(visit, q="", project="") if _typed(visit) or visit.query.get("project") else "",
    )


def keys(visit: PageContext) -> KeyListPanel:
    """Return a page of the keys, newest first."""
    rows = ApiKey.objects.for_tenant(visit.tenant).filter(conditions(visit)[_view(visit)])
    if typed := _typed(visit):
        rows = rows.filter(Q(name__icontains=typed) | Q(prefix__istartswith=typed))
    if (project := number(visit.query.get("project", ""))) is not None:
        rows = rows.filter(project_id=project)
    if (before := number(visit.query.get("before", ""))) is not None:
        rows = rows.filter(pk__lt=before)
    found = list(with_use(rows).order_by("-pk")[: SIZE + 1])
    shown = found[:SIZE]
    bounds = binding(visit.tenant.pk, shown) if shown else {}
    spent = spending(visit, "key") if shown else {}
    replaced = successors(visit, shown)
    filtered = bool(typed or project is not None or _view(visit))
    return KeyListPanel(
        dict((name, label) for name, label, _ in VIEWS)[_view(visit)],
        tuple(_row(visit, key, bounds[key.pk], spent.get(key.pk), key.pk in replaced) for key in shown),
        filtered,
        not shown and not filtered and not ApiKey.objects.for_tenant(visit.tenant).exists(),
        visit.url("keys-new") if visit.may(Permission.KEYS_WRITE) else "",
        _with(visit, before=str(shown[-1].pk)) if len(found) > SIZE else "",
        _with(visit) if before is not None else "",
    )


def with_use(rows: QuerySet[ApiKey]) -> QuerySet[ApiKey]:
    """Keys with what their rows show: when they were last used, their project and who made them."""
    return rows.select_related("project", "created_by").annotate(last_used=F("usage__last_used_at"))


def successors(visit: PageContext, keys: list[ApiKey]) -> set[int]:
    """Which of the keys were rotated: another that is not revoked replaces them."""
    rows = ApiKey.objects.for_tenant(visit.tenant).filter(replaces__in=[key.pk for key in keys], revoked_at=None)
    return set(rows.values_list("replaces_id", flat=True)) if keys else set()


def spending(visit: PageContext, group: Any) -> dict[int, dict[str, Any]]:
    """Return this month's usage of each key or project."""
    start, end = month_of(visit)
    found = sums(UsageReport(visit.tenant.pk, start=start, end=end), group_by=(group,))
    return {row[f"{group}_id"]: row for row in found}


def _row(
    visit: PageContext, key: ApiKey, bounds: tuple[Any, ...], spent: dict[str, Any] | None, replaced: bool
) -> KeyListRow:
    rows = [row_of(bound) for bound in bounds]
    label, kind = status(visit, key, rows, replaced=replaced)
    return KeyListRow(
        name=key.name,
        prefix=f"{key.prefix}…",
        url=visit.url("keys-detail", key.pk),
        project=key.project.name,
        owner=owner(key),
        scopes=", ".join(key.scopes),
        restrictions=restrictions(key),
        last_used=getattr(key, "last_used", None),
        bound=rows[0] if rows else None,
        others=max(0, len(rows) - 1),
        spend=Money(spent["cost_femto"] if spent else 0),
        status=label,
        status_kind=kind,
        expires_at=key.expires_at if key.revoked_at is None else None,
    )


def owner(key: ApiKey) -> str:
    """Who made it."""
    if key.created_by is None:
        return "former member"
    return key.created_by.name or key.created_by.email


def restrictions(key: ApiKey) -> str:
    """Return what it may not be used for, or from, in few words."""
    found = []
    if key.allowed_models is not None:
        found.append(f"{len(key.allowed_models)} model{'' if len(key.allowed_models) == 1 else 's'}")
    if key.allowed_ip_ranges is not None:
        found.append(f"{len(key.allowed_ip_ranges)} network{'' if len(key.allowed_ip_ranges) == 1 else 's'}")
    return f"only {' and '.join(found)}" if found else ""


def status(visit: PageContext, key: ApiKey, bounds: list[KeyBoundRow], *, replaced: bool) -> tuple[str, str]:
    """How it stands, and the kind of its badge."""
    if key.revoked_at is not None:
        return "Revoked", ""
    if key.expires_at is not None and key.expires_at <= visit.now:
        return "Expired", ""
    if any(bound.level == "full" for bound in bounds):
        return "Blocked", "bad"
    if replaced:
        return "Being replaced", "info"
    if key.expires_at is not None and key.expires_at <= visit.now + SOON:
        return "Expires soon", "warn"
    if any(bound.level == "near" for bound in bounds):
        return "Near limit", "warn"
    return "Active", "good"


def projects(visit: PageContext) -> KeyProjects:
    """Return the projects, with how many keys each has and what it spent."""
    works = Count(
        "keys", filter=Q(keys__revoked_at=None) & (Q(keys__expires_at=None) | Q(keys__expires_at__gt=visit.now))
    )
    rows = Project.objects.for_tenant(visit.tenant).annotate(live=works).order_by("name", "pk")[:MOST_PROJECTS]
    spent = spending(visit, "project")
    writes = visit.may(Permission.PROJECTS_WRITE)
    return KeyProjects(
        tuple(
            ProjectRow(
                row.name,
                row.slug,
                row.live,
                Money(spent[row.pk]["cost_femto"] if row.pk in spent else 0),
                spent[row.pk]["completed"] + spent[row.pk]["cancelled"] if row.pk in spent else 0,
                f"{visit.url('keys')}?{urlencode({'project': row.pk})}",
                visit.url("keys-project", row.pk) if writes else "",
                visit.url("keys-project-remove", row.pk) if writes else "",
            )
            for row in rows
        ),
        visit.url("keys-project-new") if writes else "",
    )


def number(text: str) -> int | None:
    """Return an id in the address; None if it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _typed(visit: PageContext) -> str:
    return visit.query.get("q", "").strip()[:100].replace("\0", "")


def _view(visit: PageContext) -> str:
    asked = visit.query.get("show", "")
    return asked if asked in dict((name, label) for name, label, _ in VIEWS) else ""


def _with(visit: PageContext, **changes: str) -> str:
    kept = {name: value for name, value in visit.query.items() if name in ("q", "project", "show")} | changes
    asked = urlencode({name: value for name, value in kept.items() if value})
    return f"{visit.url('keys')}?{asked}" if asked else visit.url("keys")
