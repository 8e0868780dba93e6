"""One tenant's page for operators, one function for each panel."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from billing.ledger.credits import with_rest
from billing.ledger.ledger import balance
from billing.metering.usage import UsageReport, sums, this_month
from billing.models import (
    CHARGES,
    Account,
    BillingProfile,
    CreditGrant,
    Invoice,
    Price,
    PriceBook,
    PriceBookAssignment,
    UsageQuarantine,
)
from billing.pricing.currencies import exchange_rate
from frontend.core.chart_marks import find_marks
from frontend.core.charts import Chart, Series
from frontend.core.labels import choice_label
from frontend.core.languages import day_text, in_sentence
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money, exact, page_currency
from frontend.core.page_context import PageContext, first_or_404
from frontend.operator.tenants import spending
from frontend.tenant.keys.key_limits import NAMES
from inference_worker.contract.messages import decode_usage
from millrace.apps.health.budget_usage import highest_budgets
from tenants.models import LIMITS, ApiKey, AuditEntry, Invitation, LimitSet, Membership, Tenant, User

MAX_ROWS = 8
MAX_CHANGES = 5
MAX_BUDGETS = 50
DAYS = 30
MODES = {"hard": _lazy("Blocks"), "soft": _lazy("Alerts only"), "dry_run": _lazy("Dry run")}
MAX_QUARANTINED = 500  # messages in quarantine that are searched


def tenant_of(ctx: PageContext) -> Tenant:
    """Return the tenant in the URL, or raise Http404. Call inside `ctx.scope()`."""
    rows = Tenant.objects.all_tenants().filter(pk=ctx.arguments["tenant"])
    return ctx.once("operator-tenant", lambda: first_or_404(rows))


def stats(ctx: PageContext) -> dict[str, Any]:
    tenant = tenant_of(ctx)
    start, now = this_month(ctx.now)
    last = this_month(start - timedelta(days=1))[0]
    used = spending.sum_usage(start, tenant.pk).get(tenant.pk, spending.Spent())
    before = sums(UsageReport(tenant.pk, last, min(last + (now - start), start)))
    owed = Invoice.objects.for_tenant(tenant).filter(state=Invoice.State.OPEN, invoice_type__in=CHARGES)
    return {
        "used": used,
        "before": Money(sum(row["cost_femto"] for row in before)),  # in the same days of the previous month
        "before_label": day_text(last, "F"),
        "margin": spending.margin(used, spending.token_costs(now), exchange_rate(page_currency(), "USD", now.date())),
        "credit": sum(int(credit.rest) for credit in with_rest(_alive(ctx).filter(starts_at__lte=ctx.now))),
        "owed": max(0, balance(tenant.pk, Account.RECEIVABLE)),
        "open_invoices": owed.count(),
        "month": start,
    }


def spend(ctx: PageContext) -> Chart | None:
    """Return the spend of each of the last 30 days; None without spend."""
    tenant = tenant_of(ctx)
    today = datetime.combine(ctx.now.astimezone(UTC).date(), datetime.min.time(), UTC)
    days = [today - timedelta(days=ago) for ago in reversed(range(DAYS))]
    found = {row["start"]: row["cost_femto"] for row in sums(UsageReport(tenant.pk, days[0], ctx.now), bucket="day")}
    values = tuple(int(found.get(day, 0)) for day in days)
    if not any(values):
        return None
    total = Money(sum(values)).text
    of = _("Spend by day, last %(days)s days: %(total)s in total") % {"days": DAYS, "total": total}
    marks = find_marks(ctx, tenant.pk, [(days[0], ctx.now)])
    series = (Series(_("Spend"), "spend", values, "area", total),)
    return Chart("spend", of, tuple(days), series, "usd", height=214, marks=marks)


def plan(ctx: PageContext) -> dict[str, Any]:
    tenant = tenant_of(ctx)
    assigned = PriceBookAssignment.objects.for_tenant(tenant).select_related("book").first()
    own = Price.objects.filter(Q(effective_until=None) | Q(effective_until__gt=ctx.now), tenant_id=tenant.pk)
    live = ApiKey.objects.for_tenant(tenant).filter(revoked_at=None)
    return {
        "tenant": tenant,
        "book": assigned.book.name if assigned else PriceBook.LIST,
        "own_prices": own.count(),
        "profile": BillingProfile.objects.for_tenant(tenant).select_related("entity").first(),
        "live_keys": live.filter(Q(expires_at=None) | Q(expires_at__gt=ctx.now)).count(),
    }


def limits(ctx: PageContext) -> dict[str, Any]:
    """Return budgets, highest usage first, and rate limits."""
    tenant = tenant_of(ctx)
    budgets = highest_budgets(ctx.now, tenant.pk, MAX_BUDGETS).get(tenant.pk, [])
    rows = (
        LimitSet.objects.for_tenant(tenant).select_related("project", "key").order_by("project_id", "key_id", "model")
    )
    return {
        "tenant": tenant,
        "budgets": [(spending.BudgetText(budget), MODES[budget.mode]) for budget in budgets],
        "limits": [(row, _owner(row), _limits(row)) for row in rows[:MAX_BUDGETS]],
    }


def _owner(row: LimitSet) -> str:
    return (
        _("Key %(name)s") % {"name": row.key.name}
        if row.key
        else _("Project %(name)s") % {"name": row.project.name}
        if row.project
        else _("The tenant")
    )


def _limits(row: LimitSet) -> str:
    set_ = [(name, getattr(row, name)) for name in LIMITS]
    return ", ".join(f"{in_sentence(NAMES[name])}: {exact(value)}" for name, value in set_ if value is not None)


def members(ctx: PageContext) -> dict[str, Any]:
    """Return the members, owners first, then the invitations."""
    tenant = tenant_of(ctx)
    rows = Membership.objects.for_tenant(tenant).select_related("user")
    ranks = {role: place for place, role in enumerate(Membership.Role.values)}
    found = sorted(rows, key=lambda row: (ranks[row.role], row.user.email))
    waiting = Invitation.objects.for_tenant(tenant).filter(accepted_at=None, revoked_at=None, expires_at__gt=ctx.now)
    persons = [(row.user, choice_label(row.get_role_display()), False) for row in found]
    persons += [
        (User(email=row.email), choice_label(row.get_role_display()), True) for row in waiting.order_by("email")
    ]
    return {"tenant": tenant, "rows": persons[:MAX_ROWS], "more": max(0, len(persons) - MAX_ROWS)}


def credits(ctx: PageContext) -> dict[str, Any]:
    """Return the credits that are not used up, in the order in which they are applied."""
    grants = [grant for grant in with_rest(_alive(ctx).order_by("priority", "pk")) if grant.rest > 0]
    return {"tenant": tenant_of(ctx), "rows": grants[:MAX_ROWS], "left": Money.nano(sum(row.rest for row in grants))}


def _alive(ctx: PageContext) -> QuerySet[CreditGrant]:
    rows = CreditGrant.objects.for_tenant(tenant_of(ctx))
    alive: QuerySet[CreditGrant] = rows.filter(Q(expires_at=None) | Q(expires_at__gt=ctx.now))
    return alive


def invoices(ctx: PageContext) -> list[tuple[Invoice, str]]:
    """Return the latest invoices and the colors of their states."""
    rows = Invoice.objects.for_tenant(tenant_of(ctx)).select_related("period").order_by("-period__starts_at", "-pk")
    levels = {"open": "info", "paid": "good", "uncollectible": "bad"}
    return [(row, levels.get(row.state, "")) for row in rows[:MAX_ROWS]]


def quarantine(ctx: PageContext) -> list[UsageQuarantine]:
    """Return the newest messages in quarantine that name this tenant."""
    tenant = tenant_of(ctx)
    waiting = UsageQuarantine.objects.filter(resolved_at=None).order_by("-received_at")[:MAX_QUARANTINED]
    return [row for row in waiting if _names(bytes(row.payload), tenant.pk)]


def _names(payload: bytes, tenant_id: int) -> bool:
    try:
        return decode_usage(payload).billing_context.tenant_id == tenant_id
    except (msgspec.MsgspecError, ValueError):
        return False


def changes(ctx: PageContext) -> dict[str, Any]:
    tenant = tenant_of(ctx)
    return {"tenant": tenant, "rows": list(AuditEntry.objects.for_tenant(tenant).order_by("-pk")[:MAX_CHANGES])}
