"""One version of a price book: its changes, and last month's usage at its prices."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q
from django.http import Http404

from billing.models import Price, PriceVersion
from billing.pricing import rerating
from billing.pricing.price_book import NewPrice, parse
from billing.pricing.pricing import Component, Tier
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from frontend.operator.prices.page import PriceBooksVersion, as_new, tenant_names, version_row
from frontend.tenant.prices.page import COLUMNS, TIERS, PriceRange, condition_text, range_of
from tenants.actions import ActionRefused

MAX_ROWS = 400
_LABELS = dict(COLUMNS)

Key = tuple[str, Tier, Component, PriceRange]


@dataclass(frozen=True)
class PriceBookDetailHeader:
    version: PriceBooksVersion
    prices: int
    models: int
    publish_url: str  # empty unless it is another user's draft
    discard_url: str
    copy_url: str
    is_own: bool  # a draft of the current user
    is_late: bool  # a draft whose effective time has passed


@dataclass(frozen=True)
class PriceDifference:
    """A price before and after. None: there was or is no price."""

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
    rows: tuple[PriceDifference, ...]
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
    """Last month's usage at the new prices. `refused`: the reason why there is no preview."""

    rows: tuple[Rerated, ...]
    was: Money
    would_be: Money
    difference: Money
    unpriced: int
    month: datetime
    more: int
    refused: str


def version_of(ctx: PageContext) -> PriceVersion:
    """Return the version in the URL. Call inside `ctx.scope()`.

    Raises:
        Http404: the version does not exist.
    """

    def ask() -> PriceVersion:
        rows = PriceVersion.objects.select_related("book", "created_by", "decided_by")
        row = rows.filter(pk=ctx.arguments["version"]).first()
        if row is None:
            raise Http404
        return row

    return ctx.once("operator-prices-detail", ask)


def header(ctx: PageContext) -> PriceBookDetailHeader:
    row = version_of(ctx)
    proposal = parse(row.body) if row.body else None
    is_draft = row.state == PriceVersion.State.DRAFT
    is_own = is_draft and row.created_by_id == ctx.user.pk
    is_late = is_draft and row.effective_from is not None and row.effective_from < ctx.now
    return PriceBookDetailHeader(
        version_row(ctx, row, tenant_names([row.tenant_id])),
        prices=len(proposal.prices) if proposal else 0,
        models=len({model for model, _ in proposal.model_tiers}) if proposal else 0,
        publish_url=ctx.url("operator-prices-publish", row.pk) if is_draft and not is_own and not is_late else "",
        discard_url=ctx.url("operator-prices-discard", row.pk) if is_draft else "",
        copy_url=f"{ctx.url('operator-prices-csv')}?copy={row.pk}",
        is_own=is_own,
        is_late=is_late,
    )


def diff(ctx: PageContext) -> Diff:
    """Compare the version with the prices that are active before it takes effect."""
    row = version_of(ctx)
    if not row.body:
        return Diff((), 0, 0)
    proposal, at = parse(row.body), row.effective_from or ctx.now
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
    rows = tuple(_change_of(key, was.get(key), to_be.get(key)) for key in changed[:MAX_ROWS])
    return Diff(rows, len(keys) - len(changed), len(changed) - len(rows))


def _key(price: NewPrice) -> Key:
    return price.model, price.tier, price.component, range_of(price)


def _change_of(key: Key, was: int | None, to_be: int | None) -> PriceDifference:
    model, tier, component, place = key
    kind, change = "", ""
    if was is None:
        kind, change = "new", "new"
    elif to_be is None:
        kind, change = "ended", "ends"
    else:
        kind = "up" if to_be > was else "down"
        change = _percent(to_be - was, was)
    return PriceDifference(
        model,
        TIERS[tier],
        _LABELS[component],
        condition_text(place),
        None if was is None else Money.nano(was),
        None if to_be is None else Money.nano(to_be),
        change,
        kind,
    )


def _percent(part: int, whole: int) -> str:
    """Return a change in percent with its sign and one decimal, truncated."""
    if not whole:
        return "from free"
    tenths = abs(part) * 1000 // whole
    return f"{'+' if part > 0 else '−'}{tenths // 10:,}.{tenths % 10}%"


def preview(ctx: PageContext) -> Preview:
    """Return last month's usage at the draft's prices, by tenant and model, largest difference first."""
    row = version_of(ctx)
    start, end = rerating.last_month(ctx.now)
    none = Money(0)
    try:
        found = rerating.preview(row, start, end)
    except ActionRefused as exc:
        return Preview((), none, none, none, 0, start, 0, str(exc))
    found.sort(key=lambda comparison: -abs(comparison.would_be_femto - comparison.was_femto))
    names = tenant_names(comparison.tenant_id for comparison in found[:MAX_ROWS])
    rows = tuple(
        Rerated(
            names.get(comparison.tenant_id, f"tenant {comparison.tenant_id}"),
            comparison.model,
            comparison.events,
            Money(comparison.was_femto),
            Money(comparison.would_be_femto),
            Money(comparison.would_be_femto - comparison.was_femto),
            comparison.unpriced,
        )
        for comparison in found[:MAX_ROWS]
    )
    was, would_be = (
        Money(sum(comparison.was_femto for comparison in found)),
        Money(sum(comparison.would_be_femto for comparison in found)),
    )
    unpriced = sum(comparison.unpriced for comparison in found)
    return Preview(rows, was, would_be, would_be - was, unpriced, start, len(found) - len(rows), "")
