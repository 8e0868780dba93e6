"""Differences of invoiced usage between the charged prices and the corrected prices of re-ratings.

A corrected price replaces a price of the same book (or of the same tenant's own prices), model, tier and component, for
its ranges of prompt lengths and times of day, in the time range of its re-rating. Other prices remain. If several
re-ratings replace a price, each one replaces the price of the one before it, in the order of their numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from django.db import connection

from billing.models import Invoice, Rerating
from billing.rates.metered import METERED, units_an_hour
from billing.rates.price_book import parse
from inference_worker.contract.request import PROMPT_CLASSES, TOKEN_COLUMNS


def _cost(nano: str) -> str:
    """Return SQL of the cost of usage, rounded half up to a femto-unit as when it was recorded."""
    return f"sign(tokens) * div(2 * abs(tokens) * {nano} + divisor, 2 * divisor)"


# Usage of a billing period with its adjustments of some billing periods, by charged price and pair of corrected ones.
_DIFFERENCES = """
WITH corrected AS (
    SELECT * FROM jsonb_to_recordset(%(corrected)s::jsonb) AS c(number int, book_id bigint, tenant_id bigint,
        starts_at timestamptz, ends_at timestamptz, model text, tier text, component text, nano_per_million bigint,
        from_tokens int, until_tokens int, from_minute int, until_minute int,
        from_weekday int, until_weekday int, time_zone text, has_metered boolean)
), changes AS (
    SELECT e.admitted_at, e.request_id, e.execution, {of_event}, e.price_ids, 1 AS events, {prompt} AS prompt
    FROM billing_usageevent e
    WHERE %(with_events)s AND tenant_id = %(tenant)s AND invoice_period = %(period)s
        AND admitted_at >= %(starts_at)s AND admitted_at < %(ends_at)s AND model = ANY(%(models)s)
    UNION ALL
    SELECT a.admitted_at, a.request_id, a.execution, {of_adjustment}, a.price_ids, 0, {prompt}
    FROM billing_adjustment a JOIN billing_usageevent e USING (admitted_at, request_id, execution)
    WHERE a.tenant_id = %(tenant)s AND e.invoice_period = %(period)s AND a.invoice_period = ANY(%(adjusted_in)s)
        AND a.admitted_at >= %(starts_at)s AND a.admitted_at < %(ends_at)s AND a.model = ANY(%(models)s)
), used AS (
    SELECT c.admitted_at, c.prompt, c.events, line.component, line.tokens::numeric, line.price_id, 1::numeric AS divisor
    FROM changes c CROSS JOIN LATERAL unnest(ARRAY[{names}], ARRAY[{of_change}], c.price_ids)
        AS line (component, tokens, price_id)
    WHERE line.price_id IS NOT NULL AND line.tokens <> 0
    UNION ALL
    SELECT m.started_at, 0, 0, m.component,
        m.amount * round(extract(epoch FROM m.ended_at - m.started_at) * 1000000), m.price_id, %(units_an_hour)s
    FROM billing_meteredusage m LEFT JOIN billing_meteredusage reversed ON reversed.id = m.reverses_id
    WHERE m.tenant_id = %(tenant)s AND m.component = ANY(%(metered)s) AND m.model = ANY(%(models)s)
        AND m.started_at >= %(starts_at)s AND m.started_at < %(ends_at)s
        AND (%(with_events)s AND m.reverses_id IS NULL AND m.invoice_period = %(period)s
            OR reversed.invoice_period = %(period)s AND m.invoice_period = ANY(%(adjusted_in)s))
), priced AS (
    SELECT u.*, p.model, p.tier, v.number AS version, new.from_tokens, new.from_minute, new.until_minute,
        new.from_weekday, new.until_weekday, new.time_zone, new.nano_per_million AS new_nano, coalesce((
            SELECT c.nano_per_million FROM corrected c
            WHERE c.number < %(number)s AND {matches} ORDER BY c.number DESC LIMIT 1
        ), p.nano_per_million) AS old_nano
    FROM used u JOIN billing_price p ON p.id = u.price_id JOIN billing_priceversion v ON v.id = p.version_id
    CROSS JOIN LATERAL (SELECT c.* FROM corrected c WHERE c.number = %(number)s AND {matches}) AS new
)
SELECT model, tier, component, from_tokens, from_minute, until_minute, price_id, version, old_nano, new_nano,
    sum(events)::bigint, sum(tokens), min(admitted_at), max(admitted_at),
    from_weekday, until_weekday, time_zone, sum({cost_at_new} - {cost_at_old})
FROM priced WHERE old_nano <> new_nano
GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 16, 17 HAVING sum(tokens) <> 0
ORDER BY 1, 2, 3, 4, 5, 6, 15, 16, 17, 8, 7, 9, 10
""".format(  # noqa: S608
    names=", ".join(f"'{name}'" for name in TOKEN_COLUMNS),
    of_event=", ".join(f"e.{name}" for name in TOKEN_COLUMNS),
    of_adjustment=", ".join(f"a.{name}" for name in TOKEN_COLUMNS),
    of_change=", ".join(f"c.{name}" for name in TOKEN_COLUMNS),
    prompt=" + ".join(f"e.{name}" for name in (*PROMPT_CLASSES, "answer_hit_input")),
    cost_at_new=_cost("new_nano"),
    cost_at_old=_cost("old_nano"),
    matches="""(c.has_metered OR u.divisor = 1)
                AND c.book_id = p.book_id AND c.tenant_id IS NOT DISTINCT FROM p.tenant_id
                AND c.model = p.model AND c.tier = p.tier AND c.component = p.component
                AND u.admitted_at >= c.starts_at AND u.admitted_at < c.ends_at
                AND u.prompt >= c.from_tokens AND u.prompt < c.until_tokens
                AND extract(epoch FROM (u.admitted_at AT TIME ZONE c.time_zone)::time)
                    BETWEEN c.from_minute * 60 AND c.until_minute * 60 - 0.000001
                AND extract(isodow FROM u.admitted_at AT TIME ZONE c.time_zone) > c.from_weekday
                AND extract(isodow FROM u.admitted_at AT TIME ZONE c.time_zone) <= c.until_weekday""",
)
_AFFECTED = """
SELECT i.id, i.tenant_id
FROM billing_invoice i JOIN billing_invoiceline l ON l.invoice_id = i.id JOIN billing_price p ON p.id = l.price_id
WHERE i.invoice_type = 'invoice' AND i.state IN ('open', 'paid', 'uncollectible')
    AND p.book_id = %(book)s AND p.tenant_id IS NOT DISTINCT FROM %(tenant)s
    AND (p.model, p.tier, p.component) IN (SELECT * FROM unnest(%(models)s::text[], %(tiers)s::text[],
        %(components)s::text[]))
    AND l.first_at < %(ends_at)s AND l.last_at >= %(starts_at)s
    AND (%(invoice)s::bigint IS NULL OR i.id = %(invoice)s)
    AND NOT EXISTS (SELECT FROM billing_reratedinvoice r WHERE r.rerating_id = %(rerating)s AND r.invoice_id = i.id)
UNION
SELECT i.id, i.tenant_id
FROM billing_meteredusage m JOIN billing_price p ON p.id = m.price_id
    JOIN billing_invoice i ON i.tenant_id = m.tenant_id AND i.period_id = m.invoice_period
WHERE i.invoice_type = 'invoice' AND i.state IN ('open', 'paid', 'uncollectible') AND %(has_metered)s
    AND m.reverses_id IS NULL AND p.book_id = %(book)s AND p.tenant_id IS NOT DISTINCT FROM %(tenant)s
    AND (p.model, p.tier, p.component) IN (SELECT * FROM unnest(%(models)s::text[], %(tiers)s::text[],
        %(components)s::text[]))
    AND m.started_at >= %(starts_at)s AND m.started_at < %(ends_at)s
    AND (%(invoice)s::bigint IS NULL OR i.id = %(invoice)s)
    AND NOT EXISTS (SELECT FROM billing_reratedinvoice r WHERE r.rerating_id = %(rerating)s AND r.invoice_id = i.id)
ORDER BY 2, 1
"""
_NEXT = 2**31 - 1  # the number of a draft: after all others


class RatedDifference(NamedTuple):
    """The usage of one charged price that a re-rating gives another price. `tokens` of metered usage are its units."""

    model: str
    tier: str
    component: str
    from_tokens: int
    from_minute: int
    until_minute: int
    price_id: int
    version: int
    old_nano: int
    new_nano: int
    events: int
    tokens: int
    first_at: datetime
    last_at: datetime
    from_weekday: int
    until_weekday: int
    time_zone: str
    femto: int  # the cost that the corrected price adds; negative: it costs less

    @property
    def is_metered(self) -> bool:
        return self.component in METERED


def differences(
    rerating: Rerating, invoice: Invoice, adjusted_in: Sequence[int], *, with_events: bool = True
) -> list[RatedDifference]:
    """Return the differences of an invoice's usage. An all-tenants scope must be open.

    Args:
        adjusted_in: the billing periods whose adjustments of the usage count.
        with_events: whether the usage itself counts, or only its adjustments.
    """
    number = rerating.number or _NEXT
    rows = [(number, rerating)]
    earlier = Rerating.objects.filter(
        state=Rerating.State.APPLIED,
        number__lt=number,
        book=rerating.book_id,
        tenant_id=rerating.tenant_id,
        starts_at__lt=rerating.ends_at,
        ends_at__gt=rerating.starts_at,
    )
    rows += [(row.number or 0, row) for row in earlier]
    corrected = [
        {
            **msgspec.structs.asdict(price),
            "number": place,
            "book_id": row.book_id,
            "tenant_id": row.tenant_id,
            "starts_at": row.starts_at.isoformat(),
            "ends_at": row.ends_at.isoformat(),
            "has_metered": row.has_metered,
        }
        for place, row in rows
        for price in parse(row.body).prices
    ]
    parameters: dict[str, Any] = {
        "corrected": json.dumps(corrected),
        "number": number,
        "tenant": invoice.tenant_id,
        "period": invoice.period_id,
        "adjusted_in": list(adjusted_in),
        "with_events": with_events,
        "starts_at": rerating.starts_at,
        "ends_at": rerating.ends_at,
        "models": sorted({price.model for price in parse(rerating.body).prices}),
        "metered": [component.value for component in METERED],
        "units_an_hour": units_an_hour(METERED[0]),
    }
    with connection.cursor() as cursor:
        cursor.execute(_DIFFERENCES, parameters)
        rows_found = [RatedDifference(*row) for row in cursor.fetchall()]
    return [item._replace(tokens=int(item.tokens), femto=int(item.femto)) for item in rows_found]


def affected_invoices(rerating: Rerating, invoice_id: int | None = None) -> list[tuple[int, int]]:
    """Return (invoice, tenant) of final invoices, or of one, with usage in question that have no row of it yet."""
    keys = sorted({(price.model, price.tier, price.component) for price in parse(rerating.body).prices})
    models, tiers, components = (list(column) for column in zip(*keys, strict=True))
    parameters: dict[str, Any] = {
        "rerating": rerating.pk,
        "invoice": invoice_id,
        "book": rerating.book_id,
        "tenant": rerating.tenant_id,
        "starts_at": rerating.starts_at,
        "ends_at": rerating.ends_at,
        "models": models,
        "tiers": tiers,
        "components": components,
        "has_metered": rerating.has_metered,
    }
    with connection.cursor() as cursor:
        cursor.execute(_AFFECTED, parameters)
        rows: list[tuple[int, int]] = cursor.fetchall()
    return rows
