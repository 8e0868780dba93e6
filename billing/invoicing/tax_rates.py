"""The currencies of an invoice and of its tax, and why a draft cannot be finalized."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from billing.invoicing.drafts import address, zone
from billing.models import BillingEntity, Invoice, InvoiceLine, Price
from billing.pricing.currencies import DatedRate, dated_rate
from billing.taxes.taxes import NoTaxRule, tax_for
from inference_worker.contract.texts import Text, text_of
from tenants.actions import Conflict


def find_tax_rate(
    entity: BillingEntity, currency: str, taxes: Iterable[Mapping[str, Any]], today: date
) -> DatedRate | None:
    """Return the rate from a document's currency to the entity's tax currency. None: the document needs none.

    Raises:
        Conflict: there is no rate, or it is older than the entity's `max_rate_age_days`.
    """
    if entity.tax_currency in ("", currency) or all(tax["category"] == "O" for tax in taxes):
        return None
    rate = dated_rate(currency, entity.tax_currency, today)
    if rate is None:
        raise Conflict(
            Text(
                "There is no exchange rate of %(tax_currency)s, the tax currency. Add one for %(today)s or before.",
                tax_currency=entity.tax_currency,
                today=today,
            )
        )
    if rate.on < today - timedelta(days=entity.max_rate_age_days):
        raise Conflict(
            Text(
                "The newest exchange rate of %(tax_currency)s, the tax currency, is of %(on)s. It may be"
                " %(max_rate_age_days)s days old. Import a newer one.",
                tax_currency=entity.tax_currency,
                on=rate.on,
                max_rate_age_days=entity.max_rate_age_days,
            )
        )
    return rate


def require_one_currency(invoice: Invoice, price_ids: Collection[int] | QuerySet[InvoiceLine, Any]) -> None:
    """Check that the prices of the usage are in the invoice's currency. A tenant's own prices are in its currency.

    Args:
        price_ids: of the invoice's lines, or a query of them.

    Raises:
        Conflict: requests were admitted before the tenant was assigned to a price book of another currency.
    """
    if not isinstance(price_ids, QuerySet) and not price_ids:
        return
    shared = Price.objects.filter(pk__in=price_ids, tenant_id=None)
    other = shared.exclude(book__currency=invoice.currency).order_by().first()
    if other is not None:
        raise Conflict(
            Text(
                "Usage of %(model)s has a price in another currency than %(currency)s.",
                model=other.model,
                currency=invoice.currency,
            )
        )


def find_problem(draft: Invoice, now: datetime | None = None) -> str:
    """Return why a draft of an invoice cannot be finalized with its prices and today's tax rules; empty: it can.

    The scope of all tenants must be open.
    """
    if draft.invoice_type != Invoice.InvoiceType.INVOICE or draft.state != Invoice.State.DRAFT:
        return ""
    current = copy.copy(draft)
    address(current)
    last_day = (draft.period.ends_at - timedelta(microseconds=1)).astimezone(zone(draft)).date()
    today = (now or datetime.now(UTC)).astimezone(zone(draft)).date()
    lines = InvoiceLine.objects.for_tenant(draft.tenant_id).filter(invoice=draft, price_id__isnull=False)
    try:
        require_one_currency(draft, lines.order_by().values("price_id"))
        rule = tax_for(draft.entity_id, current.seller, current.buyer, last_day)
        find_tax_rate(draft.entity, draft.currency, [rule], today)
    except (NoTaxRule, Conflict) as exc:
        return text_of(exc)
    return ""
