"""Actions on one-off lines: charges on a tenant's next invoice that are not usage."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from billing.ledger.booking import booking, require_bookable
from billing.models import BillingProfile, OneOffLine
from billing.pricing.currencies import currency_of
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import check
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant


def do_add_one_off_line(tenant: Tenant, *, month: str, description: str, cents: int) -> OneOffLine:
    """Add a charge in cents before tax to the tenant's invoice of a month, or of the next month without an invoice.

    Raises:
        ActionRefused: nothing, or less.
    """
    if cents <= 0:
        raise ActionRefused(Text("cents: The amount must be greater than zero. Issue a credit note to return money."))
    with booking(tenant.pk) as locked:
        require_bookable(cents, currency_of(locked.pk))
        row = OneOffLine(tenant=locked, month=month, description=description, cents=cents)
        check(row)
        row.save(force_insert=True)
        audit.record("one_off_line.created", row, tenant_id=locked.pk, after=audit.serialize_for_audit(row))
    return row


def do_count_due_lines(now: datetime | None = None) -> int:
    """Let the gates of prepaid tenants follow the one-off lines whose month has begun. Return how many tenants."""
    latest = (now or datetime.now(UTC)) + timedelta(days=1)  # where clocks are ahead of UTC; `booking` is exact
    with all_tenants_scope(BypassReason.BILLING):
        prepaid = BillingProfile.objects.all_tenants().filter(is_prepaid=True).values("tenant_id")
        lines = OneOffLine.objects.all_tenants().filter(invoice=None, month__lte=f"{latest:%Y-%m}", tenant__in=prepaid)
        tenants = list(lines.order_by("tenant_id").values_list("tenant_id", flat=True).distinct())
    for tenant_id in tenants:
        with booking(tenant_id):  # which updates the gate at its end
            pass
    return len(tenants)


def do_remove_one_off_line(row: OneOffLine) -> None:
    """Remove a one-off line that no invoice has billed.

    Raises:
        Conflict: an invoice billed it.
    """
    with booking(row.tenant_id):
        locked = OneOffLine.objects.for_tenant(row.tenant_id).filter(pk=row.pk).select_related("invoice").first()
        if locked is None:
            return
        if locked.invoice is not None:
            raise Conflict(
                Text("Invoice %(number)s billed this line. Issue a credit note instead.", number=locked.invoice.number)
            )
        audit.record("one_off_line.removed", locked, tenant_id=row.tenant_id, before=audit.serialize_for_audit(locked))
        locked.delete()
