"""One version of the price book: what it changes, and what last month would have cost by it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q
from django.http import Http404

from billing.models import Price, PriceVersion
from billing.pricing.price_book import NewPrice, parse
from billing.pricing.pricing import Component, Tier
from billing.pricing.rerating import last_month, preview
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.operator.prices.page import PriceBooksVersion, as_new, tenant_names, version_of
from frontend.tenant.prices.page import COLUMNS, TIERS, Place, range_of, said_of
from tenants.actions import ActionRefused

SHOWN = 400
_LABELS = dict(COLUMNS)

Key = tuple[str, Tier, Component, Place]


@dataclass(frozen=True)
class PriceBookDetailHeader:
    version: PriceBooksVersion
    prices: int
    models: int
    publish_url: str  # "": it is no draft, or one's own
    discard_url: str
    copy_url: str
    is_own: bool  # a draft of the person who looks
    is_late: bool  # a draft whose moment has passed


@dataclass(frozen=True)
class PriceBookDetailChanged:
    """A price before and after. None: there was, or is, none."""

    model: str
    tier: str
    component: str
    when: str
    was: Money | None
    to_be: Money | None
    change: str
    kind: str  # "new", "ended", "up", "down" or ""


@dataclass(frozen=True)
class Diff:
    rows: tuple[PriceBookDetailChanged, ...]
    same: int
    more: int


@dataclass(frozen=True)
class Rerated:
    tenant: str
    model: str
    events: int
    was: Money
    would_be: Money
    difference: Money
    unpriced: int


@dataclass(frozen=True)
class Preview:
    """`refused`: why there is none."""

    rows: tuple[Rerated, ...]
    was: Money
    would_be: Money
    difference: Money
    unpriced: int
    month: datetime
    more: int
    refused: str


def find(visit: PageContext) -> PriceVersion:
    """Return the version that the address names, in the visit's scope.

    Raises:
        Http404: there is none such.
    """

    def ask() -> PriceVersion:
        rows = PriceVersion.objects.select_related("book", "created_by", "decided_by")
        row = rows.filter(pk=visit.arguments["version"]).first()
        if row is None:
            raise Http404
        return row

    return visit.once("operator-prices-detail", ask)


def head(visit: PageContext) -> PriceBookDetailHeader:
    row = find(visit)
    proposal = parse(row.body) if row.body else None
    is_draft = row.state == PriceVersion.State.DRAFT
    is_own = is_draft and row.created_by_id == visit.user.pk
    is_late = is_draft and row.effective_from is not None and row.effective_from < visit.now
    return PriceBookDetailHeader(
        version_of(visit, row, tenant_names([row.tenant_id])),
        prices=len(proposal.prices) if proposal else 0,
        models=len({model for model, _ in proposal.model_tiers}) if proposal else 0,
        publish_url=visit.url("operator-prices-publish", row.pk) if is_draft and not is_own and not is_late else "",
        discard_url=visit.url("operator-prices-discard", row.pk) if is_draft else "",
        copy_url=f"{visit.url('operator-prices-csv')}?copy={row.pk}",
        is_own=is_own,
        is_late=is_late,
    )


def diff(visit: PageContext) -> Diff:
    """Against what is active before it: of a draft at its moment, of what was published then."""
    row = find(visit)
    if not row.body:
        return Diff((), 0, 0)
    proposal, at = parse(row.body), row.effective_from or visit.now
    models = {model for model, _ in proposal.model_tiers}
    there = Price.objects.filter(book=row.book, tenant_id=row.tenant_id, model__in=models, effective_from__lt=at)
    there = there.filter(Q(effective_until=None) | Q(effective_until__gte=at))
    model_tiers = proposal.model_tiers
    was = {_key(price): price.nano_per_million for price in as_new(there) if price.model_tier in model_tiers}
    to_be = {_key(price): price.nano_per_million for price in proposal.prices}
    tiers = {tier: place for place, tier in enumerate(TIERS)}
    order = {component: place for place, component in enumerate(_LABELS)}
    keys = sorted(was.keys() | to_be.keys(), key=lambda key: (key[0], tiers[key[1]], order[key[2]], key[3]))
    changed = [key for key in keys if was.get(key) != to_be.get(key)]
    rows = tuple(_changed(key, was.get(key), to_be.get(key)) for key in changed[:SHOWN])
    return Diff(rows, len(keys) - len(changed), len(changed) - len(rows))


def _key(price: NewPrice) -> Key:
    return price.model, price.tier, price.component, range_of(price)


def _changed(key: Key, was: int | None, to_be: int | None) -> PriceBookDetailChanged:
    model, tier, component, place = key
    kind, change = "", ""
    if was is None:
        kind, change = "new", "new"
    elif to_be is None:
        kind, change = "ended", "ends"
    else:
        kind = "up" if to_be > was else "down"
        change = _percent(to_be - was, was)
    return PriceBookDetailChanged(
        model,
        TIERS[tier],
        _LABELS[component],
        said_of(place),
        None if was is None else Money.nano(was),
        None if to_be is None else Money.nano(to_be),
        change,
        kind,
    )


def _percent(part: int, whole: int) -> str:
    """With its sign, to a tenth, cut; from nothing there is none."""
    if not whole:
        return "from free"
    tenths = abs(part) * 1000 // whole
    return f"{'+' if part > 0 else '−'}{tenths // 10:,}.{tenths % 10}%"


def rerated(visit: PageContext) -> Preview:
    """Last month's usage at the draft's prices, by tenant and model, the largest difference first."""
    row = find(visit)
    start, end = last_month(visit.now)
    none = Money(0)
    try:
        found = preview(row, start, end)
    except ActionRefused as exc:
        return Preview((), none, none, none, 0, start, 0, str(exc))
    found.sort(key=lambda one: -abs(one.would_be_femto - one.was_femto))
    names = tenant_names(one.tenant_id for one in found[:SHOWN])
    rows = tuple(
        Rerated(
            names.get(one.tenant_id, f"tenant {one.tenant_id}"),
            one.model,
            one.events,
            Money(one.was_femto),
            Money(one.would_be_femto),
            Money(one.would_be_femto - one.was_femto),
            one.unpriced,
        )
        for one in found[:SHOWN]
    )
    was, would_be = Money(sum(one.was_femto for one in found)), Money(sum(one.would_be_femto for one in found))
    unpriced = sum(one.unpriced for one in found)
    return Preview(rows, was, would_be, would_be - was, unpriced, start, len(found) - len(rows), "")
