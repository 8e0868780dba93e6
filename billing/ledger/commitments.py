"""The fees and the included usage of commitments in months that are not invoiced yet."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from django.db.models import Exists, OuterRef, Q, QuerySet

from billing.models import BillingProfile, Commitment, CreditGrant, Invoice, Period
from billing.periods import ensure_periods
from tenants.deletions import deleted_throughout


class ExpectedGrant(NamedTuple):
    """The credit that the draft of a month will grant for a commitment."""

    priority: int
    starts_at: datetime
    expires_at: datetime
    nano: int


class ExpectedCommitments(NamedTuple):
    """What commitments charge and grant in the months of a tenant that are not invoiced yet."""

    fees: int  # cents before tax
    grants: list[ExpectedGrant]
    changes_at: datetime | None  # the end of the current month, if a commitment may continue


def active_commitments(period: Period, tenant_id: int | None = None) -> QuerySet[Commitment]:
    """Return the commitments that are active in the period, of one tenant or all.

    A tenant that was deleted for the whole period has none.
    """
    rows = Commitment.objects.all_tenants() if tenant_id is None else Commitment.objects.for_tenant(tenant_id)
    active = rows.filter(Q(last_month="") | Q(last_month__gte=period.label), first_month__lte=period.label)
    return active.exclude(deleted_throughout(period.starts_at, period.ends_at)).order_by("pk")


def granted_commitments(period: Period, tenant_id: int) -> set[int | None]:
    """Return the IDs of the commitments whose credit of the period is granted."""
    grants = CreditGrant.objects.for_tenant(tenant_id).filter(period=period, commitment__isnull=False)
    return set(grants.values_list("commitment_id", flat=True))


def expected_commitments(profile: BillingProfile, now: datetime) -> ExpectedCommitments:
    """Return the expected fees and credit of a tenant's months up to now that are open or drafted."""
    tenant_id = profile.tenant_id
    if not Commitment.objects.for_tenant(tenant_id).exists():
        return ExpectedCommitments(0, [], None)
    ensure_periods(profile.entity, now, now)
    invoices = Invoice.objects.for_tenant(tenant_id).filter(
        period=OuterRef("pk"), invoice_type=Invoice.InvoiceType.INVOICE
    )
    is_final = Exists(invoices.exclude(state__in=[Invoice.State.DRAFT, Invoice.State.VOID]))
    is_drafted = Exists(invoices.filter(state=Invoice.State.DRAFT))
    due = Period.objects.filter(~is_final, Q(closed_at=None) | is_drafted, entity=profile.entity, starts_at__lte=now)
    fees, grants, changes_at = 0, [], None
    for period in due.order_by("starts_at"):
        granted = granted_commitments(period, tenant_id)
        for row in active_commitments(period, tenant_id):
            fees += row.fee
            if row.pk not in granted:
                grants.append(ExpectedGrant(row.priority, period.starts_at, period.ends_at, row.included_nano))
    current = Period.objects.filter(entity=profile.entity, starts_at__lte=now, ends_at__gt=now).get()
    later = Commitment.objects.for_tenant(tenant_id).filter(Q(last_month="") | Q(last_month__gt=current.label))
    if later.exists():
        changes_at = current.ends_at
    return ExpectedCommitments(fees, grants, changes_at)
