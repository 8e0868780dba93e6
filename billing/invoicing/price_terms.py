"""Actions on price terms. A term never changes a month that is invoiced."""

from __future__ import annotations

import msgspec

from billing.ledger.booking import booking, require_bookable
from billing.models import Invoice, PriceTerm
from billing.pricing.currencies import currency_of
from billing.rates.terms import TermRule, check_term
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import check
from tenants.models import Tenant


def do_add_price_term(
    tenant: Tenant, rule: TermRule, *, description: str, first_month: str, last_month: str = ""
) -> PriceTerm:
    """Add a price term to a tenant, from one month, to another or without an end.

    Raises:
        ActionRefused: the term is not right. Conflict: the tenant's usage of the first month is invoiced.
    """
    try:
        check_term(rule)
    except ValueError as exc:
        raise ActionRefused(f"{exc}.") from exc
    if last_month and last_month < first_month:
        raise ActionRefused("last_month: Choose the first month or a later one.")
    with booking(tenant.pk) as locked:
        require_bookable(rule.cents, currency_of(locked.pk))
        _require_not_invoiced(locked.pk, "first_month", first_month)
        row = PriceTerm(
            tenant=locked,
            description=description,
            rule=msgspec.to_builtins(rule),
            first_month=first_month,
            last_month=last_month,
        )
        check(row)
        row.save(force_insert=True)
        audit.record("price_term.created", row, tenant_id=locked.pk, after=audit.serialize_for_audit(row))
    return row


def do_end_price_term(term: PriceTerm, last_month: str) -> PriceTerm:
    """End a price term after a month.

    Raises:
        ActionRefused: the month is before the first. Conflict: the usage of a later month is invoiced, or it ended.
    """
    with booking(term.tenant_id):
        row = PriceTerm.objects.for_tenant(term.tenant_id).select_for_update(no_key=True).get(pk=term.pk)
        if last_month < row.first_month:
            raise ActionRefused("last_month: Choose the first month or a later one.")
        if row.last_month and row.last_month <= last_month:
            raise Conflict(f"This price term ends after {row.last_month}.")
        newest = _newest_month(row.tenant_id)
        if newest > last_month:
            raise Conflict(f"last_month: Usage of {newest} is invoiced with this term. Choose {newest} or later.")
        before = audit.serialize_for_audit(row)
        row.last_month = last_month
        row.save(update_fields=["last_month"])
        after = audit.serialize_for_audit(row)
        audit.record("price_term.ended", row, tenant_id=row.tenant_id, before=before, after=after)
    return row


def _require_not_invoiced(tenant_id: int, name: str, month: str) -> None:
    newest = _newest_month(tenant_id)
    if newest >= month:
        raise Conflict(f"{name}: Usage of {newest} is invoiced or about to be. Choose a later month.")


def _newest_month(tenant_id: int) -> str:
    """Return the newest month with a complete invoice; empty without one."""
    rows = Invoice.objects.for_tenant(tenant_id).filter(invoice_type=Invoice.InvoiceType.INVOICE, complete=True)
    return rows.order_by("-period__label").values_list("period__label", flat=True).first() or ""
