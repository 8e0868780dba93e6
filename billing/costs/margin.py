"""The margin: what tenants are charged for executions, less what the operator pays for them.

Revenue is the cost of usage at the tenants' prices with its adjustments, before credits, discounts of invoices and tax.
Months are in UTC, by the time of admission. Revenue in another currency is converted to USD at the newest exchange rate
of the selected months. Without a rate it counts as 0.

The cost of a tenant's usage of a deployment in a month is not known if none of its executions has a booked cost, or if
their tokens have no cost in a cost card. The margin does not include the revenue of such usage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Literal, get_args

from django.db import connection
from django.db.models import QuerySet, Sum

from billing.currencies.amounts import DEFAULT_CURRENCY
from billing.metering.usage import TooManyRows
from billing.models import ExecutionCost, UsageChange, UsageEvent
from billing.pricing.currencies import dollar_rates, other_currencies

Group = Literal["month", "tenant", "model"]
GROUPS: tuple[Group, ...] = get_args(Group)
MAX_ROWS = 10_000
_COLUMNS = {"month": "month", "tenant": "tenant_id", "model": "model"}
_AMOUNTS = (
    *("executions", "revenue_femto", "costed", "cost_femto", "failed_femto", "unbilled_femto"),
    *("uncosted_tokens", "estimated"),
)
_SUMS = (*_AMOUNTS, "uncosted_revenue_femto")
_CHARGED = ("revenue_femto", "unbilled_femto")  # in the currency of the tenant
_IN_DOLLARS = """CASE WHEN rates.tenant_id IS NULL THEN sum({0})
        ELSE coalesce(trunc(sum({0}) * 1000000 / micro), 0) END AS {0}"""
_FILTER = "(%(tenant)s::bigint IS NULL OR tenant_id = %(tenant)s) AND (%(model)s::text IS NULL OR model = %(model)s)"
# Months; while they are not complete, days.
_BUCKET = "billing_rollup_coarse('month', billing_rollup_bucket('day'))"
# NOTE: one statement, so that a concurrent run of the rollups does not count a change twice.
_MARGIN = f"""
WITH parts AS (
    SELECT to_char(start AT TIME ZONE 'UTC', 'YYYY-MM') AS month, tenant_id, model,
        completed + cancelled + failed AS executions, cost_femto AS revenue_femto, 0 AS costed, 0 AS cost_femto,
        0 AS failed_femto, 0 AS unbilled_femto, 0 AS uncosted_tokens, 0 AS estimated
    FROM billing_usagerollup
    WHERE bucket = {_BUCKET} AND start >= %(start)s AND start < %(end)s AND {_FILTER}
    UNION ALL
    SELECT to_char(admitted_at AT TIME ZONE 'UTC', 'YYYY-MM'), tenant_id, model, completed + cancelled + failed,
        cost_femto, 0, 0, 0, 0, 0, 0
    FROM billing_usagechange WHERE settled_at >= billing_rollup_settled_before()
        AND admitted_at >= %(start)s AND admitted_at < %(end)s AND {_FILTER}
    UNION ALL
    SELECT to_char(day, 'YYYY-MM'), tenant_id, model, 0, 0, executions, cost_femto, failed_femto, unbilled_femto,
        uncosted_tokens, estimated
    FROM billing_dailycost WHERE day >= %(first)s AND day < %(last)s AND {_FILTER}
), rates AS (
    SELECT assigned.tenant_id, (SELECT rate.micro_per_usd FROM billing_exchangerate rate
        WHERE rate.currency = book.currency AND rate."on" < %(last)s ORDER BY rate."on" DESC LIMIT 1) AS micro
    FROM billing_pricebookassignment assigned JOIN billing_pricebook book ON book.id = assigned.book_id
    WHERE book.currency <> 'USD'
), sums AS (
    SELECT month, tenant_id, model, {
    ", ".join(_IN_DOLLARS.format(name) if name in _CHARGED else f"sum({name}) AS {name}" for name in _AMOUNTS)
}
    FROM parts LEFT JOIN rates USING (tenant_id) GROUP BY month, tenant_id, model, micro, rates.tenant_id
)
SELECT {{columns}}{", ".join(f"sum({name})" for name in _AMOUNTS)},
    sum(revenue_femto) FILTER (WHERE costed = 0 OR cost_femto = 0 AND uncosted_tokens > 0)
FROM sums WHERE %(all)s OR costed > 0 {{group}}
LIMIT {MAX_ROWS + 1}
"""  # noqa: S608  (column names from above, nothing from outside)


@dataclass(frozen=True)
class MarginRow:
    """The sums of a group. A dimension that is not grouped by is None."""

    month: str | None
    tenant_id: int | None
    model: str | None
    executions: int
    revenue_femto: int
    costed: int  # executions with a booked cost
    cost_femto: int
    failed_femto: int  # part of the cost: executions that failed after tokens
    unbilled_femto: int  # the price of tokens above reservations, which is not in the revenue
    uncosted_tokens: int  # without a price in the cost card
    estimated: int  # executions whose tokens are estimated
    uncosted_revenue_femto: int  # part of the revenue: usage whose cost is not known

    @property
    def costed_revenue_femto(self) -> int:
        """The revenue of usage whose cost is known."""
        return self.revenue_femto - self.uncosted_revenue_femto

    @property
    def margin_femto(self) -> int:
        return self.costed_revenue_femto - self.cost_femto


@dataclass(frozen=True)
class MarginQuery:
    """A selection of months, from `first` to `last`, both included, as 2026-11."""

    first: str
    last: str
    tenant_id: int | None = None
    model: str | None = None
    group_by: tuple[Group, ...] = GROUPS
    with_uncosted: bool = False  # also deployments without a booked cost in the month

    @property
    def start(self) -> datetime:
        return _first_day(self.first)

    @property
    def end(self) -> datetime:
        return _first_day(self.last, 1)


def margins(query: MarginQuery) -> list[MarginRow]:
    """Return the margins of each group; inside `all_tenants_scope(…)`.

    Raises:
        TooManyRows
    """
    columns = [_COLUMNS[group] for group in GROUPS if group in query.group_by]
    names = ", ".join(columns)
    group = f"GROUP BY {names} ORDER BY {names}" if columns else ""
    parameters = {
        "start": query.start,
        "end": query.end,
        "first": query.start.date(),
        "last": query.end.date(),
        "tenant": query.tenant_id,
        "model": query.model,
        "all": query.with_uncosted,
    }
    with connection.cursor() as cursor:
        cursor.execute(_MARGIN.format(columns=f"{names}, " if columns else "", group=group), parameters)
        found = cursor.fetchall()
    if len(found) > MAX_ROWS:
        raise TooManyRows
    rows = []
    for values in found:
        fields: dict[str, Any] = dict.fromkeys(_COLUMNS.values()) | dict(zip(columns, values, strict=False))
        fields |= zip(_SUMS, map(_read_int, values[len(columns) :]), strict=True)
        rows.append(MarginRow(**fields))
    return rows


def total(rows: Iterable[MarginRow]) -> MarginRow:
    """Return the sum of rows."""
    found = list(rows)
    return MarginRow(None, None, None, *(sum(getattr(row, name) for row in found) for name in _SUMS))


def execution_costs(query: MarginQuery) -> QuerySet[ExecutionCost]:
    """Return the booked costs of the selection."""
    given = {"tenant_id": query.tenant_id, "model": query.model}
    return ExecutionCost.objects.filter(
        admitted_at__gte=query.start,
        admitted_at__lt=query.end,
        **{name: value for name, value in given.items() if value is not None},
    )


def revenues(costs: Sequence[ExecutionCost]) -> dict[tuple[str, int], int]:
    """Return what the tenants are charged for these executions in femto-USD, by request ID and execution.

    An execution whose usage is archived is left out. Other currencies are converted at the newest exchange rate.
    """
    if not costs:
        return {}
    times = [cost.admitted_at for cost in costs]
    rows = UsageChange.objects.all_tenants().filter(
        request_id__in={cost.request_id for cost in costs}, admitted_at__range=(min(times), max(times))
    )
    sums = rows.order_by().values_list("request_id", "execution").annotate(femto=Sum("cost_femto"))
    known = UsageEvent.objects.all_tenants().filter(
        request_id__in={cost.request_id for cost in costs}, admitted_at__range=(min(times), max(times))
    )
    tenants = {
        (request, number): pk for request, number, pk in known.values_list("request_id", "execution", "tenant_id")
    }
    currencies, rates = other_currencies(), dollar_rates(datetime.now(UTC).date())

    def dollars(tenant_id: int, femto: int) -> int:
        rate = rates.get(currencies.get(tenant_id, DEFAULT_CURRENCY))
        return 0 if rate is None else rate.convert(femto)

    return {
        (request, number): dollars(tenants[request, number], int(femto))
        for request, number, femto in sums
        if (request, number) in tenants
    }


def month_of(day: date) -> str:
    return f"{day:%Y-%m}"


def _first_day(month: str, later: int = 0) -> datetime:
    year, number = map(int, month.split("-"))
    years, index = divmod(year * 12 + number - 1 + later, 12)
    return datetime(years, index + 1, 1, tzinfo=UTC)


def _read_int(value: Any) -> int:
    return int(value or 0)
