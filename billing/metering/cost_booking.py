"""Booking of execution costs, in the transaction that settles the executions.

The cost of an execution is booked once, with the first of its messages that has tokens. So an upstream's failure after
tokens has a cost, also if a gateway reported the failure first and without tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from billing.db_arrays import array, text_array
from billing.rates.pricing import Rate, RateCard, Tier, decode_rates, prices
from inference_worker.contract.messages import ExecutionUsage
from inference_worker.contract.request import TOKEN_CLASSES, TokenCounts

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CARDS = (
    "SELECT id, model, effective_from, rates FROM billing_costcard WHERE model = ANY(%s) ORDER BY effective_from, id"
)
_ARE_RESERVED = "SELECT EXISTS (SELECT FROM billing_spendreservation)"
_RELEASE = """
DELETE FROM billing_spendreservation r
USING unnest(%s::timestamptz[], %s::text[], %s::bigint[]) AS n (admitted_at, request_id, execution)
WHERE r.admitted_at = n.admitted_at AND r.request_id = n.request_id AND r.execution = n.execution
"""
_COLUMNS = {
    "admitted_at": "timestamptz",
    "request_id": "text",
    "execution": "bigint",
    "tenant_id": "bigint",
    "model": "text",
    "credential_id": "bigint",
    "is_tenant_credential": "boolean",
    "usage_source": "text",
    "outcome": "text",
    **dict.fromkeys(TOKEN_CLASSES, "bigint"),
    "cost_card_id": "bigint",
    "cost_femto": "numeric",
    "uncosted_tokens": "bigint",
    "unbilled_femto": "numeric",
}
_MAKERS = [text_array if column_type == "text" else array for column_type in _COLUMNS.values()]
_NAMES = ", ".join(_COLUMNS)
_ADDED = ("executions", "estimated", "cost_femto", "failed_femto", "uncosted_tokens", "unbilled_femto")
_BOOK = f"""
WITH booked AS (
    INSERT INTO billing_executioncost ({_NAMES}, booked_at)
    SELECT {_NAMES}, statement_timestamp()
    FROM unnest({", ".join(f"%s::{column_type}[]" for column_type in _COLUMNS.values())}) AS new ({_NAMES})
    ON CONFLICT DO NOTHING RETURNING *
)
INSERT INTO billing_dailycost AS d (day, tenant_id, model, credential_id, {", ".join(_ADDED)})
SELECT (admitted_at AT TIME ZONE 'UTC')::date, tenant_id, model, coalesce(credential_id, 0), count(*),
    count(*) FILTER (WHERE usage_source = 'estimated'), sum(cost_femto),
    coalesce(sum(cost_femto) FILTER (WHERE outcome = 'failed'), 0), sum(uncosted_tokens), sum(unbilled_femto)
FROM booked GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
ON CONFLICT (day, tenant_id, model, credential_id) DO UPDATE SET
    {", ".join(f"{name} = d.{name} + excluded.{name}" for name in _ADDED)}
"""  # noqa: S608  (column names from above, nothing from outside)


class BookedUsage(NamedTuple):
    """An execution's usage as reported, and the price of its tokens above the reservation."""

    event: ExecutionUsage
    unbilled_femto: int = 0


class Cost(NamedTuple):
    """The operator's cost of an execution."""

    cost_card_id: int | None
    cost_femto: int
    uncosted_tokens: int


class CostCards:
    """The cost cards of some deployments."""

    def __init__(self, cards: Iterable[RateCard]) -> None:
        """Create an index. The cards of each deployment are in the order of their effective time and ID."""
        self._by_model: dict[str, list[RateCard]] = {}
        for card in cards:
            self._by_model.setdefault(card.model, []).append(card)

    def has(self, model: str) -> bool:
        return model in self._by_model

    def find(self, model: str, at: int) -> RateCard | None:
        """Return the deployment's cost card at that microsecond."""
        cards = self._by_model.get(model, [])
        place = bisect_right(cards, at, key=lambda card: card.effective_from)
        return cards[place - 1] if place else None


def read_cards(cursor: Any, models: Iterable[str]) -> CostCards:
    """Return all cost cards of the deployments."""
    cursor.execute(_CARDS, [sorted(set(models))])
    return CostCards(
        RateCard(pk, None, model, Tier.STANDARD, (at - _EPOCH) // timedelta(microseconds=1), decode_rates(rates))
        for pk, model, at, rates in cursor.fetchall()
    )


def cost_of(card: RateCard | None, counts: TokenCounts, at: int) -> Cost:
    """Return the cost of tokens, admitted at that microsecond. Tokens of a class without a price are uncosted."""
    rates: dict[Any, Rate] = {} if card is None else prices(card, counts.prompt, at)
    cost = uncosted = 0
    for component in TOKEN_CLASSES:
        rate, count = rates.get(component), getattr(counts, component)
        if rate is None:
            uncosted += count
        else:
            cost += count * rate.nano_per_million
    return Cost(None if card is None else card.version, cost, uncosted)


def book(cursor: Any, usages: Sequence[BookedUsage]) -> None:
    """Book the cost of each execution once, and release what was reserved from its credential's daily limit.

    Executions of the engine have a cost only if their deployment has a cost card, or if the operator pays for them.
    """
    _release(cursor, [usage.event for usage in usages])
    cards = read_cards(cursor, {usage.event.billing_context.model for usage in usages})
    rows = [
        usage
        for usage in usages
        if usage.event.usage.total
        and (
            usage.event.usage_source != "engine"
            or usage.event.billing_context.is_operator_paid
            or cards.has(usage.event.billing_context.model)
        )
    ]
    if rows:
        columns = zip(*(_row(usage, cards) for usage in rows), strict=True)
        cursor.execute(_BOOK, [make(column) for make, column in zip(_MAKERS, columns, strict=True)])


def _release(cursor: Any, events: Sequence[ExecutionUsage]) -> None:
    cursor.execute(_ARE_RESERVED)
    if cursor.fetchone()[0]:
        contexts = [event.billing_context for event in events]
        times = [_EPOCH + timedelta(microseconds=context.admitted_at) for context in contexts]
        ids = [context.request_id for context in contexts]
        cursor.execute(_RELEASE, [array(times), text_array(ids), array([context.execution for context in contexts])])


def _row(usage: BookedUsage, cards: CostCards) -> tuple[Any, ...]:
    event, context = usage.event, usage.event.billing_context
    is_of_tenant = event.is_tenant_credential
    is_free = is_of_tenant or (event.usage_source == "engine" and not cards.has(context.model))
    card = None if is_free else cards.find(context.model, context.admitted_at)
    used = event.reported_usage or event.usage
    cost = Cost(None, 0, 0) if is_free else cost_of(card, used, context.admitted_at)
    return (
        _EPOCH + timedelta(microseconds=context.admitted_at),
        context.request_id,
        context.execution,
        context.tenant_id,
        context.model,
        event.credential,
        is_of_tenant,
        event.usage_source,
        event.outcome,
        *(getattr(used, name) for name in TOKEN_CLASSES),
        *cost,
        usage.unbilled_femto,
    )
