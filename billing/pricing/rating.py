"""Pricing of executions by the rate card that admission pinned, once, when the event is settled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from billing.models import CompiledRateCard
from billing.rates.pricing import RateCard, Rated, UnknownPriceError, price
from inference_worker.contract.messages import ExecutionUsage
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

MAX_CACHED_RATE_CARDS = 10_000  # cached; they are small and never change

_rate_cards: dict[int, RateCard] = {}


FREE = Rated(None, 0, 0)


def rate_cards(versions: Iterable[int]) -> dict[int, RateCard]:
    """Return the rate cards of these versions; missing versions are left out."""
    wanted = set(versions)
    known = {version: rate_card for version in wanted if (rate_card := _rate_cards.get(version)) is not None}
    if missing := wanted - known.keys():
        with all_tenants_scope(BypassReason.SETTLER):
            read = {row.pk: row.decode() for row in CompiledRateCard.objects.filter(pk__in=missing)}
        if len(_rate_cards) + len(read) > MAX_CACHED_RATE_CARDS:
            _rate_cards.clear()  # other threads keep their references
        _rate_cards.update(read)
        known |= read
    return known


def rate(events: Sequence[ExecutionUsage]) -> list[Rated | UnknownPriceError]:
    """Return the cost of each event, or an error if it has no price.

    Failed executions, and those admitted before there were prices, cost nothing.
    """
    known = rate_cards(
        event.billing_context.price_version for event in events if event.billing_context.price_version is not None
    )
    return [_rate(event, known) for event in events]


def _rate(event: ExecutionUsage, known: dict[int, RateCard]) -> Rated | UnknownPriceError:
    version = event.billing_context.price_version
    if version is None or event.outcome == "failed":
        return FREE
    rate_card = known.get(version)
    if rate_card is None:
        return UnknownPriceError(f"there is no price version {version}")
    try:
        return price(rate_card, event.usage, event.billing_context.admitted_at)
    except UnknownPriceError as exc:
        return exc
