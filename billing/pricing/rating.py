"""What each execution cost, by the sheet its admission pinned: computed once, when its event is settled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from billing.models import CompiledSheet
from billing.pricing.pricing import Rated, Rater, UnknownPriceError
from inference_worker.contract.messages import ExecutionUsage
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

MAX_CACHED_RATE_CARDS = 10_000  # remembered; they are small and never change

_raters: dict[int, Rater] = {}


FREE = Rated(None, 0, 0)


def raters(versions: Iterable[int]) -> dict[int, Rater]:
    """By the sheets of these versions; of one that there is none of, nothing."""
    wanted = set(versions)
    known = {version: rater for version in wanted if (rater := _raters.get(version)) is not None}
    if missing := wanted - known.keys():
        with all_tenants_scope(BypassReason.SETTLER):
            read = {row.pk: Rater(row.decoded()) for row in CompiledSheet.objects.filter(pk__in=missing)}
        if len(_raters) + len(read) > MAX_CACHED_RATE_CARDS:
            _raters.clear()  # other threads go on with what they have in hand
        _raters.update(read)
        known |= read
    return known


def rate(events: Sequence[ExecutionUsage]) -> list[Rated | UnknownPriceError]:
    """Return what each event costs. One that has no price is told by a fault in its place.

    A failed execution costs nothing, nor does one that was admitted before there were prices.
    """
    known = raters(
        event.billing_context.price_version for event in events if event.billing_context.price_version is not None
    )
    return [_rate(event, known) for event in events]


def _rate(event: ExecutionUsage, known: dict[int, Rater]) -> Rated | UnknownPriceError:
    version = event.billing_context.price_version
    if version is None or event.outcome == "failed":
        return FREE
    rater = known.get(version)
    if rater is None:
        return UnknownPriceError(f"there is no price version {version}")
    try:
        return rater.rate(tokens(event), event.billing_context.admitted_at)
    except UnknownPriceError as exc:
        return exc


def tokens(event: ExecutionUsage) -> tuple[int, ...]:
    """Return the event's tokens by what they are priced as, in the order of COMPONENTS."""
    usage = event.usage
    return (
        usage.uncached,
        usage.cache_read,
        usage.cache_write_5m,
        usage.cache_write_1h,
        usage.output,
        event.answer_hit_input,
        event.answer_hit_output,
    )
