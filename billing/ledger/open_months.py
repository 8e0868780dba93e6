"""Months of recurring charges: commitments and price terms apply to whole months that are not invoiced yet."""

from __future__ import annotations

from datetime import date
from typing import TypeVar

from django.db import connection
from django.db.models import Q

from billing.models import BillingProfile, Commitment, Invoice, OneOffLine, Period, PriceTerm
from billing.periods import default_entity
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.models import Tenant

R = TypeVar("R", Commitment, OneOffLine, PriceTerm)
_AUDIT_NAMES = {Commitment: "commitment", OneOffLine: "one_off_line", PriceTerm: "price_term"}
_OPEN = "SELECT id FROM billing_period WHERE entity_id = %s AND closed_at IS NULL ORDER BY id FOR SHARE"


def active_in(month: str) -> Q:
    """Return the condition that a commitment or price term is active in a month."""
    return Q(first_month__lte=month) & (Q(last_month="") | Q(last_month__gte=month))


def require_open_months(tenant: Tenant, first_month: str, last_month: str, field: str = "first_month") -> None:
    """Check the months of a new charge. Open months remain open until the transaction ends. Call inside `booking`.

    A closed month is invoiced or about to be, also if the tenant has no invoice. It would never bill the charge.

    Args:
        field: the name of the first month in messages.

    Raises:
        ActionRefused: the last month is before the first.
        Conflict: the first month, or a later one, is closed, or the tenant is purged.
    """
    if tenant.status == Tenant.Status.PURGED:
        raise Conflict(Text("This tenant no longer exists."))
    if last_month and last_month < first_month:
        raise ActionRefused(Text("last_month: Choose the first month or a later one."))
    profile = BillingProfile.objects.for_tenant(tenant).first()
    entity_id = default_entity().pk if profile is None else profile.entity_id
    with connection.cursor() as cursor:
        cursor.execute(_OPEN, [entity_id])
    closed = Period.objects.filter(entity=entity_id, closed_at__isnull=False, label__gte=first_month)
    newest = closed.order_by("-label").values_list("label", flat=True).first()
    if newest is not None:
        raise Conflict(
            Text("%(field)s: %(newest)s is invoiced or about to be. Choose a later month.", field=field, newest=newest)
        )


def require_first_month(starts_on: date | None, first_month: str) -> None:
    """Check that the day from which a charge's first month is charged is in this month.

    Raises:
        ActionRefused: it is in another month.
    """
    if starts_on is not None and f"{starts_on:%Y-%m}" != first_month:
        raise ActionRefused(
            Text("starts_on: Choose a day of the first month, %(first_month)s.", first_month=first_month)
        )


def end_after(row: R, last_month: str, newest: str) -> None:
    """End a charge after a month, with an audit entry. Call inside `booking` with the locked row.

    Args:
        newest: the newest month that is invoiced with the charge; empty without one.

    Raises:
        ActionRefused: the month is before the first. Conflict: a later month is invoiced, or the charge ended.
    """
    if last_month < row.first_month:
        raise ActionRefused(Text("last_month: Choose the first month or a later one."))
    if row.last_month and row.last_month <= last_month:
        raise Conflict(
            Text("last_month: %(row)s already ends after %(last_month)s.", row=row, last_month=row.last_month)
        )
    if newest > last_month:
        raise Conflict(
            Text("last_month: %(newest)s is invoiced with %(row)s. Choose %(newest)s or later.", newest=newest, row=row)
        )
    before = audit.serialize_for_audit(row)
    row.last_month = last_month
    row.save(update_fields=["last_month"])
    after = audit.serialize_for_audit(row)
    audit.record(f"{_AUDIT_NAMES[type(row)]}.ended", row, tenant_id=row.tenant_id, before=before, after=after)


def newest_invoiced_month(tenant_id: int) -> str:
    """Return the newest month with a complete invoice of the tenant, also a draft; empty without one."""
    rows = Invoice.objects.for_tenant(tenant_id).filter(invoice_type=Invoice.InvoiceType.INVOICE, complete=True)
    return rows.order_by("-period__label").values_list("period__label", flat=True).first() or ""
