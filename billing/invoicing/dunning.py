"""Dunning: suspends tenants whose invoices stay unpaid, and resumes them when nothing overdue is left.

Only a suspension by dunning ends with a payment. If an operator suspended the tenant, or resumed it in spite of its
debt, dunning changes nothing until the debt is paid.
"""

from __future__ import annotations

from datetime import UTC, datetime

from django.db.models import Q

from billing.ledger.booking import booking, overdue_invoices
from billing.models import BillingProfile, Invoice, InvoiceEmail
from tenants.actions import do_suspend_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant


def suspend_overdue(now: datetime | None = None) -> int:
    """Suspend the tenants that have an invoice overdue for their entity's `suspend_after_days`. Return how many.

    Each invoice that keeps a tenant suspended has an email about the suspension.
    """
    now = now or datetime.now(UTC)
    active = Q(suspended_at=None, tenant__status=Tenant.Status.ACTIVE)
    suspended = Q(suspended_at__isnull=False, tenant__status=Tenant.Status.SUSPENDED)
    with all_tenants_scope(BypassReason.BILLING):
        profiles = BillingProfile.objects.all_tenants().filter(
            active | suspended, entity__suspend_after_days__isnull=False
        )
        due = [profile for profile in profiles.select_related("entity").order_by("pk") if _needs_dunning(profile, now)]
    return sum(_suspend(profile.tenant_id, now) for profile in due)


def _needs_dunning(profile: BillingProfile, now: datetime) -> bool:
    """Return whether an invoice is overdue that suspends the tenant, or that joins a suspension without an email."""
    overdue = overdue_invoices(profile, now)
    if profile.suspended_at is not None:
        overdue = overdue.exclude(invoice_emails__email_type=InvoiceEmail.EmailType.SUSPENSION)
    return bool(overdue.exists())


def _suspend(tenant_id: int, now: datetime) -> bool:
    with booking(tenant_id) as tenant:
        profile = BillingProfile.objects.for_tenant(tenant).select_related("entity").get()
        overdue = list(overdue_invoices(profile, now))
        if not overdue or tenant.purge_after is not None:
            return False
        is_new = profile.suspended_at is None
        if is_new and not do_suspend_tenant(tenant):
            return False
        if is_new:
            profile.suspended_at = now
            profile.save(update_fields=["suspended_at"])
        elif tenant.status != Tenant.Status.SUSPENDED:  # an operator resumed it in spite of the debt
            return False
        for invoice in overdue:
            _email_suspension(invoice, is_new=is_new)
    return is_new


def _email_suspension(invoice: Invoice, *, is_new: bool) -> None:
    """Create the email about a suspension, if it is new or has none for this invoice. Inside `booking`."""
    kind = InvoiceEmail.EmailType.SUSPENSION
    sent = InvoiceEmail.objects.for_tenant(invoice.tenant_id).filter(invoice=invoice, email_type=kind).count()
    if is_new or not sent:
        InvoiceEmail.objects.create(invoice=invoice, tenant_id=invoice.tenant_id, email_type=kind, number=sent + 1)
