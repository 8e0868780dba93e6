"""Actions on price terms. A term never changes a month that is invoiced."""

from __future__ import annotations

from datetime import date

import msgspec

from billing.ledger.booking import booking, require_bookable
from billing.ledger.open_months import end_after, newest_invoiced_month, require_first_month, require_open_months
from billing.models import PriceTerm
from billing.pricing.currencies import currency_of
from billing.rates.proration import day_share
from billing.rates.terms import TermRule, TermType, check_term
from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions import ActionRefused
from tenants.actions.common import check
from tenants.models import Tenant

MAX_DESCRIPTION_LENGTH = 200  # characters of a line


def do_add_price_term(
    tenant: Tenant,
    rule: TermRule,
    *,
    description: str,
    first_month: str,
    last_month: str = "",
    starts_on: date | None = None,
) -> PriceTerm:
    """Add a price term to a tenant, from one month, to another or without an end.

    Args:
        starts_on: a day of the first month. The minimum of this month is that of the days from it on.

    Raises:
        ActionRefused: the term is not right. Conflict: the first month is closed.
    """
    try:
        check_term(rule)
    except ValueError as exc:
        raise ActionRefused(Text("%(error)s.", error=text_of(exc))) from exc
    if starts_on is not None:
        if rule.term_type != TermType.MINIMUM:
            raise ActionRefused(Text("starts_on: Only a minimum can be charged for a part of the first month."))
        require_first_month(starts_on, first_month)
        if len(day_share(starts_on, first_month).describe(description)) > MAX_DESCRIPTION_LENGTH:
            raise ActionRefused(
                Text("description: Use fewer characters, since the charged days are printed after them.")
            )
    with booking(tenant.pk) as locked:
        require_bookable(rule.cents, currency_of(locked.pk))
        require_open_months(locked, first_month, last_month)
        row = PriceTerm(
            tenant=locked,
            description=description,
            rule=msgspec.to_builtins(rule),
            first_month=first_month,
            last_month=last_month,
            starts_on=starts_on,
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
        end_after(row, last_month, newest_invoiced_month(row.tenant_id))
    return row
