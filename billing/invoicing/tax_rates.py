"""The exchange rate of an invoice's tax currency, and why a draft cannot be finalized."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from billing.invoicing.drafts import address, zone
from billing.models import BillingEntity, Invoice
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


def find_problem(draft: Invoice, now: datetime | None = None) -> str:
    """Return why a draft of an invoice cannot be finalized with today's tax rules and exchange rates; empty: it can.

    The scope of all tenants must be open.
    """
    if draft.invoice_type != Invoice.InvoiceType.INVOICE or draft.state != Invoice.State.DRAFT:
        return ""
    current = copy.copy(draft)
    address(current)
    last_day = (draft.period.ends_at - timedelta(microseconds=1)).astimezone(zone(draft)).date()
    today = (now or datetime.now(UTC)).astimezone(zone(draft)).date()
    try:
        rule = tax_for(draft.entity_id, current.seller, current.buyer, last_day)
        find_tax_rate(draft.entity, draft.currency, [rule], today)
    except (NoTaxRule, Conflict) as exc:
        return text_of(exc)
    return ""
