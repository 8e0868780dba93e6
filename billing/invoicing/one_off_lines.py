"""Actions on one-off lines: charges on a tenant's next invoice that are not usage."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.db.models import Q

from billing.ledger.booking import booking, require_bookable
from billing.ledger.open_months import end_after, newest_invoiced_month, require_open_months
from billing.models import BillingProfile, OneOffLine
from billing.pricing.currencies import currency_of
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import check
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

MAX_MONTHS = 120  # months on whose invoices a line repeats


def do_add_one_off_line(
    tenant: Tenant, *, month: str, description: str, cents: int, last_month: str = "", months: int | None = None
) -> OneOffLine:
    """Add a charge in cents before tax to the tenant's invoice of a month, or of the next month without an invoice.

    Args:
        last_month: the charge repeats on the invoice of each month until this one.
        months: the same, as the number of months.

    Raises:
        ActionRefused: nothing, or less, or a wrong number of months. Conflict: the line repeats, and its first month
            is closed.
    """
    if months is not None:
        if last_month or not 1 <= months <= MAX_MONTHS:
            raise ActionRefused(
                Text("months: Enter 1 to %(max_months)s months, or a last month.", max_months=MAX_MONTHS)
            )
        last_month = _add_months(month, months - 1)
    if cents <= 0:
        raise ActionRefused(Text("cents: The amount must be greater than zero. Issue a credit note to return money."))
    with booking(tenant.pk) as locked:
        require_bookable(cents, currency_of(locked.pk))
        if last_month:
            require_open_months(locked, month, last_month, "month")
        row = OneOffLine(tenant=locked, month=month, last_month=last_month, description=description, cents=cents)
        check(row)
        row.save(force_insert=True)
        audit.record("one_off_line.created", row, tenant_id=locked.pk, after=audit.serialize_for_audit(row))
    return row


def _add_months(month: str, more: int) -> str:
    year, number = map(int, month.split("-"))
    number += more - 1
    return f"{year + number // 12:04}-{number % 12 + 1:02}"


def do_end_one_off_line(row: OneOffLine, last_month: str) -> OneOffLine:
    """End a one-off line that repeats after a month.

    Raises:
        ActionRefused: the month is before the first.
        Conflict: a later month is invoiced, or the line does not repeat or ends by then.
    """
    with booking(row.tenant_id):
        locked = OneOffLine.objects.for_tenant(row.tenant_id).filter(pk=row.pk).first()
        if locked is None or not locked.last_month:
            raise Conflict(Text("This line does not repeat."))
        end_after(locked, last_month, newest_invoiced_month(row.tenant_id))
    return locked


def do_count_due_lines(now: datetime | None = None) -> int:
    """Let the gates of prepaid tenants follow the one-off lines whose month has begun. Return how many tenants."""
    now = now or datetime.now(UTC)
    # Where clocks are ahead of UTC or behind it; `booking` is exact.
    latest, earliest = (f"{now + timedelta(days=days):%Y-%m}" for days in (1, -1))
    is_due = Q(invoice=None, last_month="") | Q(last_month__gte=earliest)
    with all_tenants_scope(BypassReason.BILLING):
        prepaid = BillingProfile.objects.all_tenants().filter(is_prepaid=True).values("tenant_id")
        lines = OneOffLine.objects.all_tenants().filter(is_due, month__lte=latest, tenant__in=prepaid)
        tenants = list(lines.order_by("tenant_id").values_list("tenant_id", flat=True).distinct())
    for tenant_id in tenants:
        with booking(tenant_id):  # which updates the gate at its end
            pass
    return len(tenants)


def do_remove_one_off_line(row: OneOffLine) -> None:
    """Remove a one-off line that no invoice has billed.

    Raises:
        Conflict: an invoice billed it, or its first month is invoiced.
    """
    with booking(row.tenant_id):
        locked = OneOffLine.objects.for_tenant(row.tenant_id).filter(pk=row.pk).select_related("invoice").first()
        if locked is None:
            return
        if locked.invoice is not None:
            raise Conflict(
                Text("Invoice %(number)s billed this line. Issue a credit note instead.", number=locked.invoice.number)
            )
        if locked.last_month and (newest := newest_invoiced_month(row.tenant_id)) >= locked.month:
            raise Conflict(Text("%(newest)s is invoiced with this line. End it instead.", newest=newest))
        audit.record("one_off_line.removed", locked, tenant_id=row.tenant_id, before=audit.serialize_for_audit(locked))
        locked.delete()
