"""Actions on cost cards: the import of the operator's prices, with their changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from django.db import connection

from billing.metering.cost_booking import read_cards
from billing.models import CostCard
from billing.rates.price_book import MAX_NAME_LENGTH, NewPrice, PriceRanges, Proposal, ranges_of
from billing.rates.price_book import check as check_prices
from billing.rates.pricing import Component, Rate, Tier, encode_rates
from inference_worker.contract.request import TOKEN_CLASSES
from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions.common import ActionRefused, check
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

_LOCK = 0x636F7374  # an arbitrary advisory lock, used only here


class CostChange(NamedTuple):
    """A change of what the operator pays for a component. None: without a cost."""

    model: str
    component: Component
    ranges: PriceRanges
    before: int | None  # nano-USD per million tokens
    after: int | None


def deployment_prices(prices: Iterable[NewPrice], models: Mapping[str, str] | None) -> dict[str, list[NewPrice]]:
    """Return the standard prices of a file by deployment.

    Args:
        models: deployment -> the model's name in the file. None: deployments have the file's names.

    Raises:
        ActionRefused: the file has no price of a model.
    """
    by_name: dict[str, list[NewPrice]] = {}
    for price in prices:
        if price.tier == Tier.STANDARD and price.component in TOKEN_CLASSES:
            by_name.setdefault(price.model, []).append(price)
    if models is None:
        return by_name
    if missing := sorted({name for name in models.values() if name not in by_name}):
        raise ActionRefused(Text("models: the file has no price for %(missing)s.", missing=", ".join(missing)))
    return {deployment: by_name[name] for deployment, name in models.items()}


def do_import_costs(
    prices: Mapping[str, Sequence[NewPrice]],
    *,
    effective_from: datetime | None = None,
    note: str = "",
    dry_run: bool = False,
) -> list[CostChange]:
    """Add a cost card for each deployment whose costs change, and return the changes. A dry run only returns them.

    Raises:
        ActionRefused: a price is invalid, or the time is in the past.
    """
    with all_tenants_scope(BypassReason.PRICES), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        cursor.execute("SELECT clock_timestamp()")
        now: datetime = cursor.fetchone()[0]
        at = effective_from or now
        if at < now:
            raise ActionRefused(Text("effective_from: executions of this time may be booked. Choose a later time."))
        cards = read_cards(cursor, prices)
        changes: list[CostChange] = []
        for model, rows in sorted(prices.items()):
            if not 0 < len(model) <= MAX_NAME_LENGTH:
                raise ActionRefused(
                    Text(
                        "models: use names of 1 to %(max_length)s characters, not %(model)s.",
                        max_length=MAX_NAME_LENGTH,
                        model=repr(model),
                    )
                )
            try:
                check_prices(Proposal(tuple(rows)))
            except ValueError as exc:
                raise ActionRefused(Text("prices: %(error)s.", error=text_of(exc))) from exc
            current = cards.find(model, round(at.timestamp() * 1e6))
            changed = _changes(model, () if current is None else current.rates, rows)
            changes += changed
            if changed and not dry_run:
                _add(CostCard(model=model, effective_from=at, rates=encode_rates(_rates(rows)), note=note))
    return changes


def _changes(model: str, rates: Iterable[Rate], prices: Iterable[NewPrice]) -> list[CostChange]:
    before = {(rate.component, ranges_of(rate)): rate.nano_per_million for rate in rates}
    after = {(price.component, ranges_of(price)): price.nano_per_million for price in prices}
    order = {component: place for place, component in enumerate(Component)}
    keys = sorted(before.keys() | after.keys(), key=lambda key: (order[key[0]], key[1]))
    return [
        CostChange(model, *key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    ]


def _rates(prices: Iterable[NewPrice]) -> tuple[Rate, ...]:
    return tuple(
        Rate(place, price.component, price.nano_per_million, *ranges_of(price)) for place, price in enumerate(prices)
    )


def _add(card: CostCard) -> None:
    check(card)
    card.save(force_insert=True)
    audit.record("cost_card.created", card, tenant_id=None, after=audit.serialize_for_audit(card))
