"""Marks of charts: published policies, price changes, deployments, alerts and budget raises of a tenant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta

from django.db.models import Exists, Q
from django.utils.translation import gettext as _

from billing.models import PriceBook, PriceBookAssignment, PriceVersion
from frontend.core.backend_messages import translate_message
from frontend.core.charts import ChartMark
from frontend.core.date_ranges import date_range_of
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import share
from frontend.core.page_context import PageContext
from millrace.apps.alerts.models import AlertRule, RuleAlert
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, is_visible
from tenants.models import AuditEntry
from tenants.permissions import Permission

Period = tuple[datetime, datetime]
MAX_FOUND = 100  # newest of each sort
RECENT = timedelta(days=32)  # range of the charts that do not follow the page's date range: month, last hours
_DAY = timedelta(days=1)
_INCIDENTS = (AlertRule.Metric.ERROR_RATE, AlertRule.Metric.TTFT_P95, *AlertRule.OF_PLATFORM)
# The changes of a deployment after which its answers, latency or errors may differ.
_RELOADED = frozenset(
    {
        *("source", "revision", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "speculation"),
        *("draft_model", "sampling_defaults", "state", "engine", "upstream_model"),
    }
)
_DEPLOYMENT_TEXTS = {
    "deployment.created": _lazy("Deployment %(name)s added"),
    "deployment.updated": _lazy("Deployment %(name)s changed"),
    "deployment.removed": _lazy("Deployment %(name)s removed"),
}


def marks_of(ctx: PageContext) -> tuple[ChartMark, ...]:
    """Return the marks of the page's charts: of the date range, and of the last days.

    Call inside `ctx.scope()`. Marks of objects that the user may not see are left out.
    """

    def find() -> tuple[ChartMark, ...]:
        date_range = date_range_of(ctx, with_weeks=True)
        periods = [(date_range.start, date_range.end), (ctx.now - RECENT, ctx.now)]
        return find_marks(ctx, ctx.tenant.pk, periods)

    return ctx.once("chart marks", find)


def find_marks(ctx: PageContext, tenant_id: int, periods: Sequence[Period]) -> tuple[ChartMark, ...]:
    """Return the marks of a tenant in the UTC days of some periods."""
    days = [(_start_of_day(start), end + _DAY) for start, end in periods]
    found = [*_audited_marks(ctx, tenant_id, days), *_incident_marks(ctx, tenant_id, days)]
    with _platform_scope():
        found += [*_price_marks(tenant_id, days), *_deployment_marks(days)]
    return tuple(sorted(found, key=lambda mark: mark.at))


def find_deployment_marks(periods: Sequence[Period]) -> list[ChartMark]:
    """Return the marks of all deployments, whose names every tenant can see."""
    with _platform_scope():
        return list(_deployment_marks(periods))


def _platform_scope() -> AbstractContextManager[None]:
    """Return a scope of rows that no tenant can read, without a savepoint in that of an operator."""
    return nullcontext() if is_visible(None) else all_tenants_scope(BypassReason.CHARTS)


def _deployment_marks(periods: Sequence[Period]) -> Iterator[ChartMark]:
    rows = AuditEntry.objects.all_tenants().filter(
        _within("created_at", periods), tenant_id=None, object_type="deployment", action__in=_DEPLOYMENT_TEXTS
    )
    # Not by ID: the index of the tenant's entries by ID would be read from its end.
    for entry in rows.order_by("-created_at")[:MAX_FOUND]:
        if entry.action != "deployment.updated" or _RELOADED & set(entry.after or ()):
            yield ChartMark(entry.created_at, _DEPLOYMENT_TEXTS[entry.action] % {"name": entry.object_name})


def _audited_marks(ctx: PageContext, tenant_id: int, periods: Sequence[Period]) -> Iterator[ChartMark]:
    wanted = Q(pk=None)
    if ctx.may(Permission.POLICIES_READ):
        actions = ("policy.published", "policy.reverted", "policy.withdrawn")
        wanted |= Q(object_type="routingpolicy", action__in=actions)
    if ctx.may(Permission.LIMITS_READ):
        wanted |= Q(object_type="budget", action="budget.updated")
    rows = AuditEntry.objects.for_tenant(tenant_id).filter(wanted, _within("created_at", periods))
    for entry in rows.order_by("-created_at")[:MAX_FOUND]:
        text = _budget_text(entry) if entry.object_type == "budget" else _policy_text(entry)
        if text:
            yield ChartMark(entry.created_at, text)


def _policy_text(entry: AuditEntry) -> str:
    if entry.action == "policy.withdrawn":
        return _("Alias %(name)s unpublished") % {"name": entry.object_name.rpartition(", version ")[0]}
    after = entry.after or {}
    return _("Alias %(name)s: version %(version)s published") % {name: after.get(name) for name in ("name", "version")}


def _budget_text(entry: AuditEntry) -> str:
    """Return the text of a raise; empty for other changes."""
    before, after = entry.before or {}, entry.after or {}
    if (after.get("temporary_increase") or 0) > (before.get("temporary_increase") or 0):
        return _("Budget %(name)s raised for a while") % {"name": entry.object_name}
    old, new = before.get("amount") or 0, after.get("amount") or 0
    if new <= old:
        return ""
    if not old:
        return _("Budget %(name)s raised") % {"name": entry.object_name}
    return _("Budget %(name)s raised by %(share)s") % {"name": entry.object_name, "share": share(new - old, old)}


def _price_marks(tenant_id: int, periods: Sequence[Period]) -> Iterator[ChartMark]:
    """Yield the times from which versions of the tenant's price book, or of its own prices, are in effect."""
    assigned = PriceBookAssignment.objects.for_tenant(tenant_id)
    book = Q(book__in=assigned.values("book")) | Q(~Exists(assigned), book__name=PriceBook.LIST)
    rows = PriceVersion.objects.filter(
        Q(tenant_id=tenant_id) | Q(book, tenant_id=None),
        _within("effective_from", periods),
        state=PriceVersion.State.PUBLISHED,
    )
    for number, effective_from in rows.order_by("-pk").values_list("number", "effective_from")[:MAX_FOUND]:
        if effective_from is not None:
            yield ChartMark(effective_from, _("New prices: version %(number)s") % {"number": number})


def _incident_marks(ctx: PageContext, tenant_id: int, periods: Sequence[Period]) -> Iterator[ChartMark]:
    if not ctx.may(Permission.LIMITS_READ):
        return
    rows = RuleAlert.objects.for_tenant(tenant_id).filter(_within("created_at", periods), rule__metric__in=_INCIDENTS)
    for alert in rows.order_by("-pk")[:MAX_FOUND]:
        yield ChartMark(alert.created_at, _("Alert: %(summary)s") % {"summary": translate_message(alert.summary)})


def _within(field: str, periods: Sequence[Period]) -> Q:
    found = Q(pk=None)
    for start, end in periods:
        found |= Q(**{f"{field}__gte": start, f"{field}__lt": end})
    return found


def _start_of_day(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
