"""The statement that sums the usage of a billing period by price."""

from __future__ import annotations

from inference_worker.contract.request import TOKEN_COLUMNS

_COUNTS = ", ".join(TOKEN_COLUMNS)
_FIRST_COLUMNS = 4  # tenant, prices, billed period and month


def sum_usage(
    condition: str, owners: tuple[str, ...] = (), columns: tuple[str, ...] = (), join: str = "", *, known: str = ""
) -> str:
    """Return the tables of a statement up to `used`, which has the usage of each tenant and price.

    Usage of an earlier month has its month in `usage_month`, and usage that an earlier invoice billed its period in
    `billed_period`.

    Args:
        condition: of the events and adjustments, with `{row}` before their columns and `{settled_at}` for the time at
            which they were settled.
        owners: columns of events and adjustments that `join` needs.
        columns: further columns by which usage is summed, of `owners` or of `join`.
        known: a query of sums to which the usage is added.
    """
    groups = ", ".join(str(number + 1) for number in range(_FIRST_COLUMNS + len(columns)))
    of_event, of_adjustment = ("".join(f"{row}{name}, " for name in owners) for row in ("", "a."))
    more = "".join(f", {name}" for name in columns)
    # NOTE: events are summed by their array of prices before it is split, so that few rows are split instead of
    # millions. The result is the same: all events of an array have the same prices.
    return f"""
WITH change AS (
    SELECT {of_event}tenant_id, price_ids, admitted_at, NULL::bigint AS billed_period, {_COUNTS}
    FROM billing_usageevent
    WHERE invoice_period = %(period)s AND {condition.format(row="", settled_at="settled_at")}
    UNION ALL
    SELECT {of_adjustment}a.tenant_id, a.price_ids, a.admitted_at, nullif(e.invoice_period, %(period)s),
        {", ".join(f"a.{name}" for name in TOKEN_COLUMNS)}
    FROM billing_adjustment a LEFT JOIN billing_usageevent e USING (admitted_at, request_id, execution)
    WHERE a.invoice_period = %(period)s AND {condition.format(row="a.", settled_at="a.created_at")}
), summed AS (
    SELECT tenant_id, price_ids, billed_period, CASE WHEN admitted_at < %(starts_at)s
            THEN to_char(admitted_at AT TIME ZONE %(zone)s, 'YYYY-MM') ELSE '' END AS usage_month{more},
        count(*) AS events, min(admitted_at) AS first_at, max(admitted_at) AS last_at,
        {", ".join(f"sum({name}) AS {name}" for name in TOKEN_COLUMNS)}
    FROM change {join} GROUP BY {groups}
), part AS (
    SELECT tenant_id, line.price_id, usage_month, billed_period{more}, events, line.tokens, first_at, last_at
    FROM summed CROSS JOIN LATERAL unnest(ARRAY[{_COUNTS}], price_ids) AS line (tokens, price_id)
    WHERE line.price_id IS NOT NULL
    {f"UNION ALL {known}" if known else ""}
), used AS (
    SELECT tenant_id, price_id, usage_month, billed_period{more}, sum(events)::bigint AS events,
        sum(tokens)::bigint AS tokens, min(first_at) AS first_at, max(last_at) AS last_at
    FROM part GROUP BY {groups}
)
"""  # noqa: S608  (column names, nothing from outside)
