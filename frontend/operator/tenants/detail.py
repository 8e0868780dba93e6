"""View models of one tenant's page for operators, one for each panel."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
from django.db.models import Q
from django.http import Http404

from billing.actions.credits import with_rest
from billing.ledger import balance
from billing.metering.usage import UsageReport, sums, this_month
from billing.models import (
    Account,
    BillingProfile,
    CreditGrant,
    Invoice,
    Price,
    PriceBook,
    PriceBookAssignment,
    UsageQuarantine,
)
from frontend.core.charts import Chart, Series
from frontend.core.layout import initials
from frontend.core.numbers import Margin, Money, exact
from frontend.core.page_context import PageContext
from frontend.operator.tenants import spending
from frontend.operator.tenants.page import commitments
from inference_worker.contract.messages import decode_usage
from millrace.apps.operations.budget_usage import highest_budgets
from tenants.models import LIMITS, ApiKey, AuditEntry, Invitation, LimitSet, Membership, Tenant

MAX_ROWS = 8
MAX_CHANGES = 5
MAX_BUDGETS = 50
DAYS = 30
MAX_QUARANTINED = 500  # messages in quarantine that are searched


@dataclass(frozen=True)
class TenantDetailHeader:
    """The title of the page and its actions. Only one of `resume_url` and `suspend_url` is set."""

    tenant: Tenant
    status_label: str
    view_url: str
    suspend_url: str
    resume_url: str


@dataclass(frozen=True)
class TenantDetailStats:
    spend: Money
    before: Money  # in the same days of the previous month
    before_label: str
    requests: int
    tokens: int
    margin: Margin | None
    credit: Money
    owed: Money
    open_invoices: int
    month: datetime


@dataclass(frozen=True)
class TenantPlan:
    book: str
    book_url: str
    own_prices: int
    own_url: str
    commitments: str
    billed_as: str
    entity: str
    live_keys: int
    keeps: int


@dataclass(frozen=True)
class TenantDetailBudgetRow:
    budget: spending.BudgetText
    mode: str
    level: str  # color of the badge
    raise_url: str
    is_raised: bool


@dataclass(frozen=True)
class TenantDetailLimitRow:
    of: str
    model: str
    limits: str
    set_by_operator: bool
    is_dry: bool


@dataclass(frozen=True)
class TenantDetailLimits:
    budgets: tuple[TenantDetailBudgetRow, ...]
    limits: tuple[TenantDetailLimitRow, ...]
    budgets_url: str


@dataclass(frozen=True)
class TenantMemberRow:
    name: str
    email: str
    initials: str
    role: str
    last_login: datetime | None
    invited_until: datetime | None  # None for a member


@dataclass(frozen=True)
class TenantMembers:
    rows: tuple[TenantMemberRow, ...]
    more: int
    invite_url: str


@dataclass(frozen=True)
class CreditRow:
    name: str
    kind: str
    rest: Money
    nano: Money
    expires_at: datetime | None


@dataclass(frozen=True)
class TenantDetailCredits:
    rows: tuple[CreditRow, ...]
    left: Money
    give_url: str


@dataclass(frozen=True)
class InvoiceRow:
    number: str
    url: str
    month: str
    state: str
    level: str
    total: Money
    issued_at: datetime | None


@dataclass(frozen=True)
class TenantDetailDismissedIssue:
    received_at: datetime
    reason: str
    detail: str


@dataclass(frozen=True)
class TenantDetailChange:
    at: datetime
    action: str
    actor: str
    object: str
    url: str


@dataclass(frozen=True)
class TenantDetailChanges:
    rows: tuple[TenantDetailChange, ...]
    url: str


def tenant_of(ctx: PageContext) -> Tenant:
    """Return the tenant in the URL. Call inside `ctx.scope()`.

    Raises:
        Http404: the tenant does not exist.
    """

    def find() -> Tenant:
        found = Tenant.objects.all_tenants().filter(pk=ctx.arguments["tenant"]).first()
        if found is None:
            raise Http404
        return found

    return ctx.once("operator-tenant", find)


def header(ctx: PageContext) -> TenantDetailHeader:
    tenant = tenant_of(ctx)
    served, here = tenant.status == Tenant.Status.ACTIVE, tenant.status != Tenant.Status.PURGED
    return TenantDetailHeader(
        tenant,
        "Purge scheduled" if tenant.purge_after else tenant.get_status_display(),
        view_url=ctx.url("operator-tenants-view", tenant.pk) if here else "",
        suspend_url=ctx.url("operator-tenants-suspend", tenant.pk) if here and served else "",
        resume_url=ctx.url("operator-tenants-resume", tenant.pk) if here and not served else "",
    )


def stats(ctx: PageContext) -> TenantDetailStats:
    tenant = tenant_of(ctx)
    start, now = this_month(ctx.now)
    last = this_month(start - timedelta(days=1))[0]
    used = spending.spent(start).get(tenant.pk, spending.Spent())
    before = sums(UsageReport(tenant.pk, last, min(last + (now - start), start)))
    owed = Invoice.objects.for_tenant(tenant).filter(state=Invoice.State.OPEN, invoice_type=Invoice.InvoiceType.INVOICE)
    return TenantDetailStats(
        spend=Money(used.femto),
        before=Money(sum(row["cost_femto"] for row in before)),
        before_label=f"{last:%B}",
        requests=used.requests,
        tokens=used.all_tokens,
        margin=spending.margin(used, spending.token_costs(now)),
        credit=_credit_left(tenant, ctx.now),
        owed=Money.nano(max(0, balance(tenant.pk, Account.RECEIVABLE))),
        open_invoices=owed.count(),
        month=start,
    )


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
    of = f"Spend by day, last {DAYS} days: {total} in total"
    return Chart("spend", of, tuple(days), (Series("Spend", "spend", values, "area", total),), "usd", height=214)


def plan(ctx: PageContext) -> TenantPlan:
    tenant = tenant_of(ctx)
    assigned = PriceBookAssignment.objects.for_tenant(tenant).select_related("book").first()
    profile = BillingProfile.objects.for_tenant(tenant).select_related("entity").first()
    own = Price.objects.filter(Q(effective_until=None) | Q(effective_until__gt=ctx.now), tenant_id=tenant.pk)
    live = ApiKey.objects.for_tenant(tenant).filter(revoked_at=None)
    return TenantPlan(
        book=assigned.book.name if assigned else PriceBook.LIST,
        book_url=ctx.url("operator-tenants-book", tenant.pk),
        own_prices=own.count(),
        own_url=f"{ctx.url('operator-prices')}?tenant={tenant.slug}",
        commitments=", ".join(commitments(ctx.now).get(tenant.pk, ())),
        billed_as=profile.name if profile else tenant.name,
        entity=profile.entity.name if profile else "",
        live_keys=live.filter(Q(expires_at=None) | Q(expires_at__gt=ctx.now)).count(),
        keeps=tenant.content_retention_days,
    )


def limits(ctx: PageContext) -> TenantDetailLimits:
    """Return budgets, highest usage first, and rate limits."""
    tenant = tenant_of(ctx)
    budgets = highest_budgets(ctx.now, tenant.pk, MAX_BUDGETS).get(tenant.pk, [])
    modes = {"hard": "Blocks", "soft": "Alerts only", "dry_run": "Dry run"}
    rows = (
        LimitSet.objects.for_tenant(tenant).select_related("project", "key").order_by("project_id", "key_id", "model")
    )
    return TenantDetailLimits(
        tuple(
            TenantDetailBudgetRow(
                spending.BudgetText(budget),
                modes[budget.mode],
                "bad" if budget.is_at_limit else "warn" if budget.is_near else "",
                ctx.url("operator-tenants-raise", tenant.pk, budget.id),
                budget.increase_expires_at is not None and budget.increase_expires_at > ctx.now,
            )
            for budget in budgets
        ),
        tuple(_limits(row) for row in rows[:MAX_BUDGETS]),
        f"/t/{tenant.slug}/budgets/",
    )


def _limits(row: LimitSet) -> TenantDetailLimitRow:
    of = f"Key {row.key.name}" if row.key else f"Project {row.project.name}" if row.project else "The tenant"
    set_ = [(name, getattr(row, name)) for name in LIMITS]
    message = ", ".join(f"{exact(value)} {name.replace('_', ' ')}" for name, value in set_ if value is not None)
    return TenantDetailLimitRow(of, row.model, message, row.set_by_operator, row.dry_run)


def members(ctx: PageContext) -> TenantMembers:
    """Return the members, owners first, then the invitations."""
    tenant = tenant_of(ctx)
    rows = Membership.objects.for_tenant(tenant).select_related("user")
    ranks = {role: place for place, role in enumerate(Membership.Role.values)}
    found = sorted(rows, key=lambda row: (ranks[row.role], row.user.email))
    waiting = Invitation.objects.for_tenant(tenant).filter(accepted_at=None, revoked_at=None, expires_at__gt=ctx.now)
    persons = [
        TenantMemberRow(
            row.user.name,
            row.user.email,
            initials(row.user.name or row.user.email),
            row.get_role_display(),
            row.user.last_login,
            None,
        )
        for row in found
    ]
    persons += [
        TenantMemberRow("", row.email, initials(row.email), Membership.Role(row.role).label, None, row.expires_at)
        for row in waiting.order_by("email")
    ]
    return TenantMembers(
        tuple(persons[:MAX_ROWS]), max(0, len(persons) - MAX_ROWS), ctx.url("operator-tenants-invite", tenant.pk)
    )


def credits(ctx: PageContext) -> TenantDetailCredits:
    tenant = tenant_of(ctx)
    alive = CreditGrant.objects.for_tenant(tenant).filter(Q(expires_at=None) | Q(expires_at__gt=ctx.now))
    grants = [grant for grant in with_rest(alive.order_by("priority", "pk")) if grant.rest > 0]
    rows = (
        CreditRow(
            str(credit),
            credit.get_grant_type_display(),
            Money.nano(credit.rest),
            Money.nano(credit.nano),
            credit.expires_at,
        )
        for credit in grants[:MAX_ROWS]
    )
    left = Money.nano(sum(credit.rest for credit in grants))
    return TenantDetailCredits(tuple(rows), left, ctx.url("operator-billing-credit", tenant.slug))


def _credit_left(tenant: Tenant, now: datetime) -> Money:
    alive = CreditGrant.objects.for_tenant(tenant).filter(
        Q(expires_at=None) | Q(expires_at__gt=now), starts_at__lte=now
    )
    return Money.nano(sum(int(credit.rest) for credit in with_rest(alive)))


def invoices(ctx: PageContext) -> tuple[InvoiceRow, ...]:
    tenant = tenant_of(ctx)
    rows = Invoice.objects.for_tenant(tenant).select_related("period").order_by("-period__starts_at", "-pk")[:MAX_ROWS]
    levels = {"open": "info", "paid": "good", "uncollectible": "bad"}
    return tuple(
        InvoiceRow(
            number=row.number or "Draft",
            url=ctx.url("operator-billing-detail", row.pk),
            month=row.period.label,
            state=row.get_state_display()
            if row.invoice_type == Invoice.InvoiceType.INVOICE
            else row.get_invoice_type_display(),
            level=levels.get(row.state, ""),
            total=Money.cents(row.total if row.invoice_type == Invoice.InvoiceType.INVOICE else -row.total),
            issued_at=row.issued_at,
        )
        for row in rows
    )


def quarantine(ctx: PageContext) -> tuple[TenantDetailDismissedIssue, ...]:
    """Return the newest messages in quarantine that name this tenant."""
    tenant = tenant_of(ctx)
    waiting = UsageQuarantine.objects.filter(resolved_at=None).order_by("-received_at")[:MAX_QUARANTINED]
    own_messages = (row for row in waiting if _names(bytes(row.payload), tenant.pk))
    return tuple(
        TenantDetailDismissedIssue(row.received_at, row.get_reason_display(), row.detail) for row in own_messages
    )


def _names(payload: bytes, tenant_id: int) -> bool:
    try:
        return decode_usage(payload).billing_context.tenant_id == tenant_id
    except (msgspec.MsgspecError, ValueError):
        return False


def changes(ctx: PageContext) -> TenantDetailChanges:
    tenant = tenant_of(ctx)
    rows = AuditEntry.objects.for_tenant(tenant).order_by("-pk")[:MAX_CHANGES]
    changed = (
        TenantDetailChange(
            row.created_at, row.action, row.actor, row.object_name, ctx.url("operator-audit-detail", row.pk)
        )
        for row in rows
    )
    return TenantDetailChanges(tuple(changed), f"{ctx.url('operator-audit')}?tenant={tenant.slug}")
