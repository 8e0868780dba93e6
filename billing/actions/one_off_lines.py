"""Actions on one-off lines: charges on a tenant's next invoice that are not usage."""

from __future__ import annotations

from billing.actions.common import booking
from billing.models import OneOffLine
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import check
from tenants.models import Tenant


def do_add_one_off_line(tenant: Tenant, *, month: str, description: str, cents: int) -> OneOffLine:
    """Add a charge in cents before tax to the tenant's invoice of a month, or of the next month without an invoice.

    Raises:
        ActionRefused: nothing, or less.
    """
    if cents <= 0:
        raise ActionRefused("cents: The amount must be greater than zero. Issue a credit note to return money.")
    with booking(tenant.pk) as locked:
        row = OneOffLine(tenant=locked, month=month, description=description, cents=cents)
        check(row)
        row.save(force_insert=True)
        audit.record("one_off_line.created", row, tenant_id=locked.pk, after=audit.serialize_for_audit(row))
    return row


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
            raise Conflict(f"Invoice {locked.invoice.number} billed this line. Issue a credit note instead.")
        audit.record("one_off_line.removed", locked, tenant_id=row.tenant_id, before=audit.serialize_for_audit(locked))
        locked.delete()
