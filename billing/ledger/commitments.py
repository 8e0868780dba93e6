"""Commitments of a month, and the included usage of those whose month is not drafted yet."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from django.db.models import Q, QuerySet

from billing.ledger.open_months import active_in
from billing.models import Commitment, CreditGrant, Period
from tenants.deletions import deleted_throughout, was_deleted_throughout


class ExpectedGrant(NamedTuple):
    """The credit that the draft of a month will grant for a commitment."""

    priority: int
    starts_at: datetime
    expires_at: datetime
    nano: int


def active_commitments(period: Period) -> QuerySet[Commitment]:
    """Return the commitments of all tenants that are active in the period.

    A tenant that was deleted for the whole period has none.
    """
    rows = Commitment.objects.all_tenants().filter(active_in(period.label))
    return rows.exclude(deleted_throughout(period.starts_at, period.ends_at)).order_by("pk")


def commitments_of(period: Period, tenant_id: int) -> list[Commitment]:
    """Return the commitments of a tenant that are active in the period.

    A tenant that was deleted for the whole period has none.
    """
    rows = list(Commitment.objects.for_tenant(tenant_id).filter(active_in(period.label)).order_by("pk"))
    if rows and was_deleted_throughout(tenant_id, period.starts_at, period.ends_at):
        return []
    return rows


def granted_commitments(period: Period, tenant_id: int) -> set[int | None]:
    """Return the IDs of the commitments whose credit of the period is granted."""
    grants = CreditGrant.objects.for_tenant(tenant_id).filter(period=period, commitment__isnull=False)
    return set(grants.values_list("commitment_id", flat=True))


def expected_grants(periods: Iterable[Period], tenant_id: int) -> list[ExpectedGrant]:
    """Return the credit that the drafts of a tenant's months will grant for its commitments."""
    if not Commitment.objects.for_tenant(tenant_id).exists():
        return []
    grants = []
    for period in periods:
        granted = granted_commitments(period, tenant_id)
        for row in commitments_of(period, tenant_id):
            if row.pk not in granted:
                nano = row.included_in(period.label)
                grants.append(ExpectedGrant(row.priority, period.starts_at, period.ends_at, nano))
    return grants


def has_later_commitments(tenant_id: int, month: str) -> bool:
    """Return whether a commitment of the tenant may be active after a month."""
    return Commitment.objects.for_tenant(tenant_id).filter(Q(last_month="") | Q(last_month__gt=month)).exists()
