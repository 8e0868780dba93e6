"""Actions on credits and commitments."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import Any

from django.db.models import BigIntegerField, F, Q, QuerySet, Sum, Value
from django.db.models.functions import Cast, Coalesce

from billing.currencies.amounts import nano_a_cent
from billing.ledger.booking import booking, require_bookable
from billing.ledger.commitments import commitments_of, granted_commitments
from billing.ledger.ledger import PostedEntry, post
from billing.ledger.open_months import end_after, newest_invoiced_month, require_first_month, require_open_months
from billing.models import (
    Account,
    BillingProfile,
    Commitment,
    CreditApplication,
    CreditGrant,
    Invoice,
    Period,
)
from billing.pricing.currencies import currency_of
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import ActionRefused
from tenants.actions.common import check
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

_SOURCE = {
    CreditGrant.GrantType.PREPAID: Account.DEPOSITS,
    CreditGrant.GrantType.PROMOTIONAL: Account.PROMOTIONS,
    CreditGrant.GrantType.COMMITMENT: Account.COMMITMENTS,
}
_GONE_TO = {**_SOURCE, CreditGrant.GrantType.PREPAID: Account.BREAKAGE}


def do_grant_credit(
    tenant: Tenant | int,
    grant_type: CreditGrant.GrantType,
    nano: int,
    *,
    priority: int = 100,
    starts_at: datetime | None = None,
    expires_at: datetime | None = None,
    note: str = "",
) -> CreditGrant:
    """Grant credit in nano-USD that the tenant does not buy. `purchases.do_sell_credit` sells prepaid credit.

    Raises:
        ActionRefused: nothing, or no time to use it.
    """
    starts_at = starts_at or datetime.now(UTC)
    if nano <= 0:
        raise ActionRefused(Text("The credit must be greater than zero."))
    if expires_at is not None and expires_at <= starts_at:
        raise ActionRefused(Text("The expiration date is in the past. Choose a later date."))
    if grant_type == CreditGrant.GrantType.PREPAID:
        raise ActionRefused(
            Text("Prepaid credit is sold. Record the payment with credit=true, or sell it from deposits.")
        )
    with booking(tenant if isinstance(tenant, int) else tenant.pk) as locked:
        grant = CreditGrant(
            tenant=locked,
            grant_type=grant_type,
            nano=nano,
            priority=priority,
            starts_at=starts_at,
            expires_at=expires_at,
            note=note,
        )
        grant_credit(grant)
        audit.record("credit.created", grant, tenant_id=locked.pk, after=audit.serialize_for_audit(grant))
    return grant


def grant_credit(grant: CreditGrant, source: Account | None = None) -> None:
    """Save a new grant and book it from `source`; without one, from the account of its type."""
    check(grant)
    grant.save(force_insert=True)
    source = source or _SOURCE[CreditGrant.GrantType(grant.grant_type)]
    post(
        grant.tenant_id,
        f"grant:{grant.pk}",
        [PostedEntry(source, grant.nano), PostedEntry(Account.CREDITS, -grant.nano)],
    )


def grant_commitments(period: Period, tenant_id: int) -> list[Commitment]:
    """Grant the credit of the active commitments in the period, if it is missing. Return the commitments."""
    active = commitments_of(period, tenant_id)
    if not active:
        return []
    granted = granted_commitments(period, tenant_id)
    for commitment in active:
        nano = commitment.included_in(period.label)
        if commitment.pk not in granted and nano:
            grant_credit(
                CreditGrant(
                    tenant_id=tenant_id,
                    grant_type=CreditGrant.GrantType.COMMITMENT,
                    nano=nano,
                    priority=commitment.priority,
                    starts_at=period.starts_at,
                    expires_at=period.ends_at,
                    note=commitment.name,
                    commitment=commitment,
                    period=period,
                )
            )
    return active


def with_rest(grants: QuerySet[CreditGrant]) -> Any:
    """Return the grants with `rest`, the unused credit of each in nano-USD."""
    return grants.annotate(rest=Cast(F("nano") - Coalesce(Sum("applications__nano"), Value(0)), BigIntegerField()))


def usable(tenant_id: int, period: Period) -> list[Any]:
    """Return the credits that were valid in the period, in the order of use, each with its `rest`."""
    alive = CreditGrant.objects.for_tenant(tenant_id).filter(
        Q(expires_at__isnull=True) | Q(expires_at__gt=period.starts_at), starts_at__lt=period.ends_at
    )
    order = ("priority", F("expires_at").asc(nulls_last=True), "created_at", "pk")
    return list(with_rest(alive).filter(rest__gt=0).select_related("purchase").order_by(*order))


def applied_credit(grants: Iterable[Any], cents: int, currency: str) -> list[tuple[CreditGrant, int]]:
    """Return how much of each grant, in order, is applied to the cents. Fractions of a cent are carried forward."""
    applied, unit = [], nano_a_cent(currency)
    for grant in grants:
        part = min(cents, grant.rest // unit)
        if part > 0:
            applied.append((grant, part))
            cents -= part
    return applied


def apply_credit(invoice: Invoice, applied: Iterable[tuple[CreditGrant, int]]) -> None:
    """Apply the credit permanently."""
    unit = nano_a_cent(invoice.currency)
    CreditApplication.objects.all_tenants().bulk_create(
        CreditApplication(grant=grant, tenant_id=invoice.tenant_id, invoice=invoice, nano=cents * unit)
        for grant, cents in applied
    )


def return_credit(invoice: Invoice, cents: int, returned_before: int, note: str, *, paid: bool = False) -> None:
    """Grant the credit that a credit note returns: prepaid as prepaid, other credit as promotional, without an end.

    Args:
        invoice: the invoice to which the credit was applied. The credit applied last is returned first.
        returned_before: cents that earlier credit notes returned.
        paid: return credit that paid the total, instead of credit that was deducted before tax.
    """
    unit = nano_a_cent(invoice.currency)
    skip, rest = returned_before * unit, cents * unit
    parts: dict[tuple[CreditGrant.GrantType, bool, int | None], int] = {}
    uses = CreditApplication.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice).select_related("grant")
    for use in uses.order_by("-pk"):
        # Earlier releases deducted all credit before tax.
        if paid != (use.grant.is_payment and invoice.prepaid > 0):
            continue
        left = max(0, use.nano - skip)
        skip -= use.nano - left
        is_prepaid = use.grant.grant_type == CreditGrant.GrantType.PREPAID
        grant_type = CreditGrant.GrantType.PREPAID if is_prepaid else CreditGrant.GrantType.PROMOTIONAL
        kept = (grant_type, use.grant.is_taxed, use.grant.purchase_id)
        parts[kept] = parts.get(kept, 0) + min(left, rest)
        rest -= min(left, rest)
    for (grant_type, is_taxed, purchase_id), nano in parts.items():
        if nano:
            grant = CreditGrant(
                tenant_id=invoice.tenant_id,
                grant_type=grant_type,
                nano=nano,
                starts_at=datetime.now(UTC),
                note=note,
                is_taxed=is_taxed,
                purchase_id=purchase_id,
            )
            grant_credit(grant, Account.DEPOSITS if paid else Account.REVENUE)
            audit.record("credit.returned", grant, tenant_id=invoice.tenant_id, after=audit.serialize_for_audit(grant))


def do_give_back(invoice: Invoice) -> int:
    """Restore the credit applied to the invoice. Return its nano-USD."""
    uses = CreditApplication.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice)
    applied = uses.order_by("grant_id").values_list("grant_id").annotate(sum=Sum("nano")).filter(sum__gt=0)
    sums = [(grant_id, int(nano)) for grant_id, nano in applied]
    CreditApplication.objects.all_tenants().bulk_create(
        CreditApplication(grant_id=grant_id, tenant_id=invoice.tenant_id, invoice=invoice, nano=-nano)
        for grant_id, nano in sums
    )
    return sum(nano for _, nano in sums)


def do_expire_credits(now: datetime | None = None) -> int:
    """Expire the unused credit of grants whose months are all invoiced."""
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        rows = CreditGrant.objects.all_tenants().filter(expires_at__lte=now)
        due = list(with_rest(rows).filter(rest__gt=0).order_by("pk").values_list("pk", "tenant_id"))
    return sum(_expire(pk, tenant_id) for pk, tenant_id in due)


def _expire(pk: int, tenant_id: int) -> bool:
    with booking(tenant_id):
        grant = with_rest(CreditGrant.objects.for_tenant(tenant_id).filter(pk=pk)).get()
        rest: int = grant.rest
        if rest <= 0 or _still_wanted(grant):
            return False
        # A void restores credit of an expired grant, which then expires again.
        earlier = CreditApplication.objects.for_tenant(tenant_id).filter(grant=grant, invoice=None).count()
        key = f"expiry:{grant.pk}:{earlier}" if earlier else f"expiry:{grant.pk}"
        CreditApplication.objects.create(grant=grant, tenant_id=tenant_id, invoice=None, nano=rest)
        gone_to = _GONE_TO[CreditGrant.GrantType(grant.grant_type)]
        post(tenant_id, key, [PostedEntry(Account.CREDITS, rest), PostedEntry(gone_to, -rest)])
        audit.record("credit.expired", grant, tenant_id=tenant_id, before=audit.serialize_for_audit(grant))
    return True


def _still_wanted(grant: CreditGrant) -> bool:
    """Return whether a later invoice may still use the grant."""
    within = {"starts_at__lt": grant.expires_at, "ends_at__gt": grant.starts_at}
    drafts = Invoice.objects.for_tenant(grant.tenant_id).filter(
        state=Invoice.State.DRAFT, **{f"period__{name}": value for name, value in within.items()}
    )
    return drafts.exists() or Period.objects.filter(closed_at__isnull=True, **within).exists()


def do_follow_credits(now: datetime | None = None) -> int:
    """Update the gate of each prepaid tenant whose credit has started or expired. Return how many."""
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        profiles = BillingProfile.objects.all_tenants().filter(is_prepaid=True, balance_changes_at__lte=now)
        alive = profiles.exclude(tenant__status=Tenant.Status.PURGED)
        due = list(alive.order_by("tenant_id").values_list("tenant_id", flat=True))
    for tenant_id in due:
        with booking(tenant_id):
            pass  # its end updates the gate
    return len(due)


def do_commit(
    tenant: Tenant,
    name: str,
    *,
    fee: int,
    included_nano: int,
    first_month: str,
    last_month: str = "",
    priority: int = 50,
    starts_on: date | None = None,
) -> Commitment:
    """Create a commitment: included usage (`included_nano`) for a monthly fee in cents, from one month, to another or
    without an end.

    Args:
        starts_on: a day of the first month. Fee and included usage of this month are those of the days from it on.

    Raises:
        ActionRefused: the amounts or months make no sense. Conflict: the first month is closed.
    """
    if fee < 0 or included_nano <= 0:
        raise ActionRefused(Text("The included usage must be greater than zero, and the fee must not be negative."))
    with booking(tenant.pk) as locked:
        require_bookable(fee, currency_of(locked.pk))
        require_open_months(locked, first_month, last_month)
        require_first_month(starts_on, first_month)
        row = Commitment(
            tenant=locked,
            name=name,
            fee=fee,
            included_nano=included_nano,
            priority=priority,
            first_month=first_month,
            last_month=last_month,
            starts_on=starts_on,
        )
        check(row)
        row.save(force_insert=True)
        audit.record("commitment.created", row, tenant_id=locked.pk, after=audit.serialize_for_audit(row))
    return row


def do_end_commitment(commitment: Commitment, last_month: str) -> Commitment:
    """End a commitment after a month.

    Raises:
        ActionRefused: the month is before the first.
        Conflict: a later month is invoiced or its credit is granted, or the commitment ended.
    """
    with booking(commitment.tenant_id) as locked:
        row = Commitment.objects.for_tenant(locked).select_for_update(no_key=True).get(pk=commitment.pk)
        granted = CreditGrant.objects.for_tenant(locked).filter(commitment=row)
        months = granted.order_by("-period__label").values_list("period__label", flat=True)
        end_after(row, last_month, max(newest_invoiced_month(locked.pk), months.first() or ""))
    return row
