"""Corrections of charges that the provider's counts do not justify. A correction only ever lowers a charge."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from billing.metering.duplicate_events import (
    PRECEDENCE,
    RECONCILED,
    ExecutionKey,
    lock_requests,
    read_executions,
    tokens_of,
    write_adjustment,
)
from billing.models import Price, UsageEvent
from billing.pricing.rating import rate_cards
from billing.rates.pricing import COMPONENTS, PLAIN, Component
from billing.rates.pricing import prices as applying_rates
from billing.reservations import reservations
from billing.reservations.reservations import ReservationUse
from inference_worker.contract.messages import BillingContext
from inference_worker.contract.request import PROMPT_CLASSES, TOKEN_CLASSES, TokenCounts

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNCACHED, _CACHE_READ = (COMPONENTS.index(component) for component in (Component.UNCACHED, Component.CACHE_READ))


class LoweredCharge(NamedTuple):
    """The part of an execution's charge that the provider's counts do not justify."""

    femto: int  # 0: the charge stays
    is_written: bool  # as an adjustment, now or earlier


def lower_charge(cursor: Any, key: ExecutionKey, counts: TokenCounts, *, apply: bool) -> LoweredCharge:
    """Compare an execution's charge with these counts, at the prices of its event. With `apply`, write the adjustment.

    A charge never rises, no class of tokens but cache reads grows, and an execution is lowered at most once.
    """
    if apply:
        lock_requests(cursor, [key[1]])
    execution = read_executions(cursor, [key]).get(key)
    if execution is None or execution.rank < PRECEDENCE["cancelled"]:
        return LoweredCharge(0, False)
    if RECONCILED in execution.outcomes:
        return LoweredCharge(0, True)
    event = UsageEvent.objects.all_tenants().get(admitted_at=key[0], request_id=key[1], execution=key[2])
    prices = _prices(event)
    change = _change(execution.sums, counts, has_read_price=prices[_CACHE_READ] is not None)
    femto = sum(count * _nano(price) for count, price in zip(change, prices, strict=True))
    if femto >= 0:
        return LoweredCharge(0, False)
    if apply:
        plain = [prices[COMPONENTS.index(PLAIN[name])] for name in COMPONENTS]
        saved = sum(count * _nano(price) for count, price in zip(change, plain, strict=True)) - femto
        context = BillingContext(
            0, key[1], key[2], event.tenant_id, event.project_id, event.key_id, event.model, event.price_version
        )
        price_ids = [
            price.pk if price is not None and count else None for price, count in zip(prices, change, strict=True)
        ]
        lease = execution.lease
        lease_id = None if lease is None else lease.id
        write_adjustment(cursor, key, context, RECONCILED, (*change, femto, saved), price_ids, lease_id)
        tokens, before = tokens_of(change), tokens_of(execution.sums)
        requests = min(before + tokens, 1) - min(before, 1)
        reservations.adjust(cursor, lease, ReservationUse(femto, tokens, requests))
    return LoweredCharge(-femto, apply)


def _change(charged: Sequence[int], counts: TokenCounts, *, has_read_price: bool) -> tuple[int, ...]:
    """Return the change of each component. Cache reads may grow by what the uncached tokens lose."""
    change = [
        min(0, getattr(counts, component) - own) if component in TOKEN_CLASSES else 0
        for component, own in zip(COMPONENTS, charged, strict=False)
    ]
    moved = min(-change[_UNCACHED], max(0, counts.cache_read - charged[_CACHE_READ]))
    change[_CACHE_READ if has_read_price else _UNCACHED] += moved
    return tuple(change)


def _prices(event: UsageEvent) -> list[Price | None]:
    """Return the price of each component: the event's, else that of its rate card for the same prompt."""
    card = None if event.price_version is None else rate_cards([event.price_version]).get(event.price_version)
    prompt = sum(getattr(event, name) for name in PROMPT_CLASSES) + event.answer_hit_input
    at = (event.admitted_at - _EPOCH) // timedelta(microseconds=1)
    rates = {} if card is None else applying_rates(card, prompt, at)
    ids: list[int | None] = list(event.price_ids or ())
    ids += [None] * (len(COMPONENTS) - len(ids))  # events of earlier releases have no searches
    for place, component in enumerate(COMPONENTS):
        if ids[place] is None and component in rates:
            ids[place] = rates[component].price_id
    known = Price.objects.in_bulk([pk for pk in ids if pk is not None])
    return [None if pk is None else known[pk] for pk in ids]


def _nano(price: Price | None) -> int:
    return 0 if price is None else price.nano_per_million
