"""What each leg cost, by the sheet its admission pinned: worked out once, when its event is settled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from billing import pricing
from billing.models import CompiledSheet
from billing.pricing import COMPONENTS, Component, PriceSheet, UnknownPriceError
from inference_worker.protocol import UsageEvent
from tenants.roles import SystemUse
from tenants.scoping import system

MOST_SHEETS = 10_000  # remembered; they are small and never change

_sheets: dict[int, PriceSheet] = {}


class Rated(NamedTuple):
    """What goes with the event: which row of the price book priced each component, and the sum."""

    price_ids: list[int | None] | None  # in the order of COMPONENTS; None: nobody pays for the leg
    cost_femto: int
    saved_femto: int


FREE = Rated(None, 0, 0)


def sheets(versions: Iterable[int]) -> dict[int, PriceSheet]:
    """The sheets of these versions; of one that there is none of, nothing."""
    wanted = set(versions)
    if missing := wanted - _sheets.keys():
        if len(_sheets) + len(missing) > MOST_SHEETS:
            _sheets.clear()
        with system(SystemUse.SETTLER):
            _sheets.update((row.pk, row.decoded()) for row in CompiledSheet.objects.filter(pk__in=wanted))
    return {version: _sheets[version] for version in wanted if version in _sheets}


def rate(events: Sequence[UsageEvent]) -> list[Rated | UnknownPriceError]:
    """What each event costs. One that has no price is told by a fault in its place.

    A failed leg costs nothing, nor does one that was admitted before there were prices.
    """
    known = sheets(event.envelope.price_version for event in events if event.envelope.price_version is not None)
    return [_rate(event, known) for event in events]


def _rate(event: UsageEvent, known: dict[int, PriceSheet]) -> Rated | UnknownPriceError:
    version = event.envelope.price_version
    if version is None or event.verdict == "failed":
        return FREE
    sheet = known.get(version)
    if sheet is None:
        return UnknownPriceError(f"there is no price version {version}")
    try:
        lines, saved = pricing.rate(sheet, tokens(event), event.envelope.admitted_at)
    except UnknownPriceError as fault:
        return fault
    price_of = {line.component: line.price_id for line in lines}
    return Rated([price_of.get(component) for component in COMPONENTS], sum([line.femto for line in lines]), saved)


def tokens(event: UsageEvent) -> dict[Component, int]:
    """The event's tokens by what they are priced as."""
    usage = event.usage
    counts = (
        usage.uncached,
        usage.cache_read,
        usage.cache_write_5m,
        usage.cache_write_1h,
        usage.output,
        event.answer_hit_input,
        event.answer_hit_output,
    )
    return dict(zip(COMPONENTS, counts, strict=True))
