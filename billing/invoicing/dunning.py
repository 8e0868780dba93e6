"""Dunning: suspends tenants whose invoices stay unpaid, and resumes them when nothing overdue is left.

Only a suspension by dunning ends with a payment. If an operator suspended the tenant, or resumed it in spite of its
debt, dunning changes nothing until the debt is paid.
"""

from __future__ import annotations

from datetime import UTC, datetime

from billing.ledger.booking import booking, overdue_invoice
from billing.models import BillingProfile, InvoiceEmail
from tenants.actions import do_suspend_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant


def suspend_overdue(now: datetime | None = None) -> int:
    """Suspend the tenants that have an invoice overdue for their entity's `suspend_after_days`. Return how many."""
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        profiles = BillingProfile.objects.all_tenants().filter(
            suspended_at=None, entity__suspend_after_days__isnull=False, tenant__status=Tenant.Status.ACTIVE
        )
        due = [
            profile.tenant_id
            for profile in profiles.select_related("entity").order_by("pk")
            if overdue_invoice(profile, now) is not None
        ]
    return sum(_suspend(tenant_id, now) for tenant_id in due)


def _suspend(tenant_id: int, now: datetime) -> bool:
    with booking(tenant_id) as tenant:
        profile = BillingProfile.objects.for_tenant(tenant).select_related("entity").get()
        invoice = overdue_invoice(profile, now)
        if invoice is None or profile.suspended_at is not None or tenant.purge_after is not None:
            return False
        if not do_suspend_tenant(tenant):
            return False
        profile.suspended_at = now
        profile.save(update_fields=["suspended_at"])
        InvoiceEmail.objects.all_tenants().get_or_create(
            invoice=invoice, tenant_id=tenant_id, email_type=InvoiceEmail.EmailType.SUSPENSION, number=1
        )
    return True
