"""Invoice lines from rated usage: one statement for all tenants of a period.

A line is the use of one price in one month of admission. Which events belong to the period is said by their stamp
alone. A price whose use sums to less than nothing (adjustments of an earlier month) stands on a credit note.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from typing import NamedTuple

from django.db import connection

from billing.amounts import cents
from billing.models import Invoice, InvoiceLine, Period
from billing.pricing import COMPONENTS

_WITHOUT_CACHE = """
SELECT max(u.nano_per_million) FROM billing_price u
WHERE p.component = 'cache_read' AND u.component = 'uncached' AND u.version_id = p.version_id
    AND u.tenant_id IS NOT DISTINCT FROM p.tenant_id AND u.model = p.model AND u.tier = p.tier
    AND u.from_tokens = p.from_tokens AND u.from_minute = p.from_minute AND u.effective_from = p.effective_from
"""
_USED = f"""
WITH used AS (
    SELECT tenant_id, price_id, late_from, count(*) AS events, sum(tokens)::bigint AS tokens, sum(femto) AS femto,
        min(admitted_at) AS first_at, max(admitted_at) AS last_at
    FROM (
        SELECT tenant_id, price_id, tokens, femto, admitted_at, CASE WHEN admitted_at < %(starts_at)s
            THEN to_char(admitted_at AT TIME ZONE %(zone)s, 'YYYY-MM') ELSE '' END AS late_from
        FROM billing_rated_line
        WHERE invoice_period = %(period)s AND (%(tenant)s::bigint IS NULL OR tenant_id = %(tenant)s)
    ) line GROUP BY tenant_id, price_id, late_from
)
SELECT used.*, p.model, p.tier, p.component, p.from_tokens AS band, p.from_minute, p.until_minute, p.nano_per_million,
    v.number AS version, ({_WITHOUT_CACHE}) AS without_cache
FROM used JOIN billing_price p ON p.id = used.price_id JOIN billing_priceversion v ON v.id = p.version_id
"""  # noqa: S608  (constants from above)
_COUNT = """
SELECT tenant_id, count(*) FROM billing_usageevent
WHERE invoice_period = %s AND (%s::bigint IS NULL OR tenant_id = %s) GROUP BY tenant_id
"""


class Use(NamedTuple):
    """What a tenant used of one price in one month."""

    tenant_id: int
    price_id: int
    late_from: str
    events: int
    tokens: int
    femto: int
    first_at: datetime
    last_at: datetime
    model: str
    tier: str
    component: str
    band: int
    from_minute: int
    until_minute: int
    nano_per_million: int
    version: int
    without_cache: int | None

    @property
    def place(self) -> tuple[object, ...]:
        """Where it stands among the lines: together with those of its model."""
        component = [item.value for item in COMPONENTS].index(self.component)
        return (
            self.model,
            self.tier,
            self.late_from,
            component,
            self.band,
            self.from_minute,
            self.version,
            self.price_id,
        )

    @property
    def window(self) -> str:
        """The hours of the day that the price is for; empty: all."""
        if (self.from_minute, self.until_minute) == (0, 1440):
            return ""
        return " – ".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.from_minute, self.until_minute))


def used(period: Period, tenant_id: int | None = None) -> dict[int, list[Use]]:
    """What each tenant, or one, is billed for in the period, in the order of lines."""
    asked = {
        "period": period.pk,
        "starts_at": period.starts_at,
        "zone": period.entity.time_zone,
        "tenant": tenant_id,
    }
    found = defaultdict(list)
    with connection.cursor() as cursor:
        cursor.execute(_USED, asked)
        for row in cursor.fetchall():
            use = Use(*row)
            found[use.tenant_id].append(use._replace(femto=int(use.femto)))
    return {tenant: sorted(uses, key=lambda use: use.place) for tenant, uses in found.items()}


def counted(period: Period, tenant_id: int | None = None) -> dict[int, int]:
    """How many usage events each tenant, or one, has in the period."""
    with connection.cursor() as cursor:
        cursor.execute(_COUNT, [period.pk, tenant_id, tenant_id])
        return dict(cursor.fetchall())


def line(invoice: Invoice, position: int, use: Use) -> InvoiceLine:
    """The line of an invoice, or of a credit note, where what is given back is positive."""
    given_back = invoice.kind == Invoice.Kind.CREDIT_NOTE
    sign = -1 if given_back else 1
    saved = 0 if use.without_cache is None else (use.without_cache - use.nano_per_million) * use.tokens
    return InvoiceLine(
        invoice=invoice,
        tenant_id=invoice.tenant_id,
        position=position,
        kind=InvoiceLine.Kind.CREDIT if given_back else InvoiceLine.Kind.USAGE,
        model=use.model,
        tier=use.tier,
        component=use.component,
        band=use.band,
        window=use.window,
        price_version=use.version,
        price_id=use.price_id,
        nano_per_million=use.nano_per_million,
        late_from=use.late_from,
        first_at=use.first_at,
        last_at=use.last_at,
        events=use.events,
        tokens=sign * use.tokens,
        femto=sign * use.femto,
        cents=cents(sign * use.femto),
        saved_femto=max(0, saved),
    )
