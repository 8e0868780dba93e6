"""Preview of the current month's invoice, which is not saved."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from billing.invoicing.drafts import address, fill_draft, total
from billing.invoicing.line_sources import read_month
from billing.invoicing.month_charges import month_charges, number_lines
from billing.ledger import credits
from billing.ledger.commitments import commitments_of, granted_commitments
from billing.models import BillingEntity, BillingProfile, CreditGrant, Invoice, InvoiceLine, Period
from billing.pricing.currencies import currency_of
from billing.taxes.taxes import NoTaxRule
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

_NEVER = datetime.max.replace(tzinfo=UTC)


def period_at(tenant: Tenant, at: datetime) -> Period | None:
    """Return the billing period of that time. None: it has no usage yet."""
    profile = BillingProfile.objects.for_tenant(tenant).select_related("entity").first()
    entity = profile.entity if profile else BillingEntity.objects.filter(slug="default").first()
    return Period.objects.select_related("entity").filter(entity=entity, starts_at__lte=at, ends_at__gt=at).first()


def preview(tenant: Tenant, now: datetime) -> tuple[Invoice, list[InvoiceLine]] | None:
    """Return the unsaved invoice of the current month and its lines. None: the month has no period yet."""
    with all_tenants_scope(BypassReason.BILLING):
        period = period_at(tenant, now)
        if period is None:
            return None
        draft = fill_draft(
            Invoice(tenant=tenant, entity=period.entity, period=period, currency=currency_of(tenant.pk)),
            read_month(period, tenant.pk),
        )
        invoice, lines = draft.invoice, number_lines(month_charges(draft))
        address(invoice)
        with suppress(NoTaxRule):
            total(invoice, lines, _usable(period, tenant.pk))
    return invoice, lines


def _usable(period: Period, tenant_id: int) -> list[Any]:
    """Return the credit that the month may use, with the credit of commitments that its draft will grant."""
    grants = credits.usable(tenant_id, period)
    granted = granted_commitments(period, tenant_id)
    for each in commitments_of(period, tenant_id):
        if each.pk not in granted:
            grant: Any = CreditGrant(priority=each.priority, expires_at=period.ends_at, note=each.name)
            grant.rest = each.included_in(period.label)
            grants.append(grant)
    return sorted(grants, key=lambda grant: (grant.priority, grant.expires_at or _NEVER))
