"""One key's page."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from billing.metering.usage import count_accepted
from frontend.core.numbers import Money, common_places
from frontend.core.page_context import PageContext, first_or_404
from frontend.tenant.keys.key_limits import row_of
from frontend.tenant.keys.page import SCOPES, owner, spending, status, successors, with_last_used
from inference_worker.contract.request import TOKEN_CLASSES
from millrace.apps.policy_results.limiting_factor import binding
from millrace.apps.request_log.selectors import Filters, requests_page
from tenants.models import ApiKey, AuditEntry
from tenants.permissions import SCOPE_NEEDS, Permission

MAX_REQUESTS = 6
_WEEK = timedelta(days=7)


def key_of(ctx: PageContext) -> ApiKey:
    """Return the key in the URL, loaded once per page. Call inside `ctx.scope()`."""
    pk = ctx.arguments["key"]
    rows = with_last_used(ctx, ApiKey.objects.for_tenant(ctx.tenant)).filter(pk=pk)
    return ctx.once(("key", pk), lambda: first_or_404(rows))


def _limits(ctx: PageContext, key: ApiKey) -> list[dict[str, Any]]:
    found = ctx.once(("bounds", key.pk), lambda: binding(ctx.tenant.pk, [key])[key.pk])
    return [row_of(bound) for bound in found]


def header(ctx: PageContext) -> dict[str, Any]:
    """Return the title of the page, and what its actions depend on."""
    key = key_of(ctx)
    label, kind = status(ctx, key, _limits(ctx, key), replaced=bool(successors(ctx, [key])))
    return {
        "key": key,
        "state": label,
        "state_kind": kind,
        "writes": may_change(ctx, key),
        "successor": ApiKey.objects.for_tenant(ctx.tenant).filter(replaces=key, revoked_at=None).first(),
    }


def may_change(ctx: PageContext, key: ApiKey) -> bool:
    """Return whether the user may change the key. Some scopes need a permission of their own."""
    needed = {SCOPE_NEEDS[scope] for scope in key.scopes if scope in SCOPE_NEEDS}
    return all(map(ctx.may, needed | {Permission.KEYS_WRITE}))


def stats(ctx: PageContext) -> dict[str, Any]:
    key = key_of(ctx)
    spent = spending(ctx, "key", [key.pk], TOKEN_CLASSES).get(key.pk)
    return {
        "key": key,
        "spend": Money(spent["cost_femto"] if spent else 0),
        "accepted": count_accepted(spent) if spent else 0,
        "tokens": sum(spent[name] for name in TOKEN_CLASSES) if spent else 0,
    }


def limits(ctx: PageContext) -> dict[str, Any]:
    """Return all limits and budgets that apply to the key, least remaining first."""
    key = key_of(ctx)
    rows = _limits(ctx, key)
    own = any(row["bound"].scope == "key" for row in rows)
    return {"key": key, "rows": rows, "own": own, "writes": ctx.may(Permission.LIMITS_WRITE) and key.is_live}


def permissions(ctx: PageContext) -> dict[str, Any]:
    key = key_of(ctx)
    return {"key": key, "owner": owner(key), "scopes": [SCOPES.get(scope, scope) for scope in key.scopes]}


def latest_requests(ctx: PageContext) -> dict[str, Any]:
    """Return the newest requests of the key."""
    key = key_of(ctx)
    page = requests_page(Filters(ctx.tenant.pk, start=ctx.now - 4 * _WEEK, key_id=key.pk), size=MAX_REQUESTS)
    costs = (Money(listed.usage.cost_femto) for listed in page.rows if listed.usage)
    return {"key": key, "rows": page.rows, "cost_places": common_places(costs)}


def history(ctx: PageContext) -> list[tuple[AuditEntry, str]]:
    """Return the changes of the key from the audit log, with the names of the changed fields."""
    rows = AuditEntry.objects.for_tenant(ctx.tenant).filter(object_type="apikey", object_id=key_of(ctx).pk)
    return [(row, _describe_change(row)) for row in rows.order_by("-pk")[:MAX_REQUESTS]]


def _describe_change(row: AuditEntry) -> str:
    before, after = row.before or {}, row.after or {}
    if not before:
        return ""
    return ", ".join(sorted(name for name in {*before, *after} if before.get(name) != after.get(name)))
