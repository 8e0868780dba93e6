"""Transactions of billing's actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from django.db.models import QuerySet

from billing.currencies.amounts import MAX_NANO, dollars, nano_a_cent
from billing.models import CHARGES, BillingProfile, Invoice
from inference_worker.contract.texts import Text
from tenants.actions import ActionRefused, do_resume_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

_BOOKED: ContextVar[frozenset[int]] = ContextVar("tenants with an open booking", default=frozenset())
_followers: list[Callable[[Tenant, BillingProfile], None]] = []


def follow_bookings(follower: Callable[[Tenant, BillingProfile], None]) -> None:
    """Call a function at the end of each booking of a tenant with a billing profile, in its transaction."""
    _followers.append(follower)


@contextmanager
def booking(tenant_id: int) -> Iterator[Tenant]:
    """Open a transaction that changes the tenant's ledger, after any other such transaction.

    Unlike `locked_tenant`, it accepts a deleted tenant, whose last invoice is still to be issued and paid. At the end
    of the outermost booking, the gate of a prepaid tenant follows its balance, and a paid debt ends its suspension.
    """
    with all_tenants_scope(BypassReason.BILLING):
        tenant = Tenant.objects.all_tenants().select_for_update(no_key=True).get(pk=tenant_id)
        outer = _BOOKED.get()
        token = _BOOKED.set(outer | {tenant_id})
        try:
            yield tenant
        finally:
            _BOOKED.reset(token)
        if tenant_id not in outer:
            _follow_balance(tenant)


def _follow_balance(tenant: Tenant) -> None:
    profile = BillingProfile.objects.for_tenant(tenant).select_related("entity").first()
    if profile is None or tenant.status == Tenant.Status.PURGED:
        return
    for follow in _followers:
        follow(tenant, profile)
    if profile.suspended_at is None:
        return
    if not overdue_invoices(profile, max(datetime.now(UTC), profile.suspended_at)).exists():
        profile.suspended_at = None
        profile.save(update_fields=["suspended_at"])
        do_resume_tenant(tenant)


def require_bookable(cents: int, currency: str) -> None:
    """Check that the ledger can book an amount of one line or payment.

    Raises:
        ActionRefused: it is too large.
    """
    if abs(cents) * nano_a_cent(currency) > MAX_NANO:
        most = dollars(MAX_NANO // nano_a_cent(currency), currency)
        raise ActionRefused(Text("cents: The largest amount is %(most)s. Divide it into several.", most=most))


def overdue_invoices(profile: BillingProfile, now: datetime) -> QuerySet[Invoice]:
    """Return the tenant's invoices that are overdue for its entity's time of suspension, the oldest first."""
    today = now.astimezone(ZoneInfo(profile.entity.time_zone)).date()
    days = profile.entity.suspend_after_days
    rows = Invoice.objects.for_tenant(profile.tenant_id)
    if days is None:
        return rows.none()
    late = rows.filter(state=Invoice.State.OPEN, invoice_type__in=CHARGES, due_on__lte=today - timedelta(days=days))
    return late.order_by("due_on", "pk")
