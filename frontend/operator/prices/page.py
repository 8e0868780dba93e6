"""The price books: active prices and versions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet
from django.http import Http404
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from billing.currencies.amounts import DEFAULT_CURRENCY, NANO_DIGITS, decimal
from billing.models import Price, PriceBook, PriceVersion, Rerating
from billing.pricing.currencies import currency_of
from billing.rates.price_book import MAX_NAME_LENGTH, NewPrice, PriceRanges, ranges_of
from billing.rates.price_files import CSV_COLUMNS, weekdays_text
from billing.rates.pricing import MINUTES_A_DAY, NO_END, UTC_ZONE, Component, Tier
from frontend.core.labels import choice_label
from frontend.core.lists import Choice, keyset_page
from frontend.core.page_context import PageContext
from frontend.core.screens import MAX_RESULTS_PER_KIND, SearchResult
from frontend.tenant.prices.page import COLUMNS, models_of
from tenants import csv_tables
from tenants.actions.sole_operators import find_sole_operator_obstacle
from tenants.models import Tenant

MAX_MODELS = 25
MAX_VERSIONS = 15
MAX_COPIED = 500  # models to copy prices from
_LEVELS = {"published": "good", "scheduled": "warn", "draft": "info"}


@dataclass(frozen=True)
class PriceBooksQuery:
    """The selected price book, or the tenant whose own prices are shown."""

    book: str
    tenant: Tenant | None
    typed: str
    currency: str

    @property
    def query(self) -> dict[str, str]:
        return {"tenant": self.tenant.slug} if self.tenant else {"book": self.book}

    @property
    def label(self) -> str:
        return _("%(name)s’s own prices") % {"name": self.tenant.name} if self.tenant else self.book


def query_of(ctx: PageContext) -> PriceBooksQuery:
    """Return the filters of the query string. Call inside `ctx.scope()`.

    Raises:
        Http404: the book or the tenant does not exist.
    """

    def find() -> PriceBooksQuery:
        typed, slug, book = (ctx.query.get(name, "").strip()[:128] for name in ("q", "tenant", "book"))
        tenant = Tenant.objects.all_tenants().filter(slug=slug).first() if slug else None
        if slug and tenant is None:
            raise Http404
        books = dict(PriceBook.objects.values_list("name", "currency"))
        if book and book not in {PriceBook.LIST, *books}:
            raise Http404
        if tenant:
            return PriceBooksQuery(PriceBook.LIST, tenant, typed, currency_of(tenant.pk))
        book = book or PriceBook.LIST
        return PriceBooksQuery(book, None, typed, books.get(book, DEFAULT_CURRENCY))

    return ctx.once("operator-prices", find)


def filters(ctx: PageContext) -> dict[str, Any]:
    now = query_of(ctx)
    names = [
        PriceBook.LIST,
        *PriceBook.objects.exclude(name=PriceBook.LIST).order_by("name").values_list("name", flat=True),
    ]
    choices = [Choice(name, _url(ctx, book=name), not now.tenant and name == now.book) for name in names]
    if now.tenant:
        choices.append(Choice(now.tenant.name, _url(ctx, tenant=now.tenant.slug), current=True))
    return {"choices": choices, "query": now}


def active_prices(ctx: PageContext) -> dict[str, Any]:
    """Return a page of the active prices, with the URL for new prices of each model."""
    now = query_of(ctx)
    rows = prices_at(now, ctx.now)
    if now.typed:
        rows = rows.filter(model__icontains=now.typed)
    models = list(rows.order_by("model").values_list("model", flat=True).distinct())
    after = ctx.query.get("after", "")
    shown = [model for model in models if model > after][:MAX_MODELS]
    found = as_new(rows.filter(model__in=shown))
    columns = [column for column in COLUMNS if any(price.component == column[0] for price in found)]
    query = now.query | ({"q": now.typed} if now.typed else {})
    return {
        "label": now.label,
        "currency": now.currency,
        "columns": [label for _, label in columns],
        "lines": [(model, _change(ctx, now, model.name, found)) for model in models_of(found, columns, now.currency)],
        "number": len(models),  # on all pages
        "more_url": _url(ctx, **query, after=shown[-1]) if shown and shown[-1] != models[-1] else "",
        "first_url": _url(ctx, **query) if after else "",
        "filtered": bool(now.typed),
    }


def _change(ctx: PageContext, now: PriceBooksQuery, model: str, found: Iterable[NewPrice]) -> str:
    """Return the URL of the form, or of the CSV import if the prices have bands or hours that the form lacks."""
    plain = all(is_plain(price) for price in found if price.model == model)
    url = ctx.url("operator-prices-model" if plain else "operator-prices-csv")
    return f"{url}?{urlencode(now.query | {'model': model})}"


def is_plain(price: NewPrice) -> bool:
    return price.ranges == PriceRanges()


def priced_models(ctx: PageContext) -> list[str]:
    """Return models whose active prices the form can copy. Call inside `ctx.scope()`."""
    rows = prices_at(_owner_of(ctx), ctx.now)
    return list(rows.order_by("model").values_list("model", flat=True).distinct()[:MAX_COPIED])


def plain_prices(ctx: PageContext, model: str, tier: str) -> list[NewPrice]:
    """Return the active prices of a model in a tier. Call inside `ctx.scope()`."""
    return as_new(prices_at(_owner_of(ctx), ctx.now).filter(model=model, tier=tier)) if model else []


def copy_prices(ctx: PageContext) -> dict[str, Any]:
    """Return what was typed into a model's form, with the prices of the model to copy from; empty without one."""
    source = ctx.query.get("copy_from", "")[:MAX_NAME_LENGTH]
    if not source:
        return {}
    with ctx.scope():
        prices = plain_prices(ctx, source, ctx.query.get("tier", Tier.STANDARD.value))
        prices = prices or plain_prices(ctx, source, Tier.STANDARD.value)
    typed = ("model", "tier", "copy_from", "book", "tenant", "since", "note")
    return {name: ctx.query.get(name, "") for name in typed} | usd_fields(prices)


def usd_fields(prices: Iterable[NewPrice]) -> dict[str, str]:
    """Return prices as initial values of a model's form, without those of ranges."""
    return {price.component.value: usd(price.nano_per_million) for price in prices if is_plain(price)}


def describe_draft(ctx: PageContext, *, is_new: bool) -> str:
    """Return the message after a draft was created or updated: whether another operator must publish it."""
    if find_sole_operator_obstacle(ctx.user) is None:
        return _("Draft created.") if is_new else _("Draft updated.")
    if is_new:
        return _("Draft created. Another operator must publish it.")
    return _("Draft updated. Another operator must publish it.")


def _owner_of(ctx: PageContext) -> PriceBooksQuery:
    """Return the selected price book or tenant; the list for a name that a user has typed and that does not exist."""
    try:
        return query_of(ctx)
    except Http404:
        return PriceBooksQuery(PriceBook.LIST, None, "", DEFAULT_CURRENCY)


def versions(ctx: PageContext) -> dict[str, Any]:
    """Return drafts and published versions of all books, newest first."""
    rows = PriceVersion.objects.select_related("book", "created_by", "decided_by").defer("body")
    drafts = rows.filter(state=PriceVersion.State.DRAFT).count()
    page = keyset_page(ctx, rows, ctx.url("operator-prices"), MAX_VERSIONS)
    names = tenant_names(row.tenant_id for row in page.rows)
    listed = [version_row(ctx, row, names) for row in page.rows]
    return {"rows": listed, "drafts": drafts, "older_url": page.older_url}


def currency_in(row: PriceVersion | Rerating) -> str:
    """Return the currency of the prices of a version or re-rating."""
    return row.book.currency if row.tenant_id is None else currency_of(row.tenant_id)


def version_row(ctx: PageContext, row: PriceVersion, names: dict[int, str]) -> dict[str, Any]:
    """Return a version with its title, the tenant or book it applies to, its state and the color of the state."""
    state, level = choice_label(row.get_state_display()), _LEVELS.get(row.state, "")
    if row.state == PriceVersion.State.PUBLISHED and row.effective_from and row.effective_from > ctx.now:
        state, level = _("Scheduled"), "warn"
    return {
        "version": row,
        "heading": _("Version %(number)s") % {"number": row.number}
        if row.number
        else _("Draft %(number)s") % {"number": row.pk},
        "owner": row.book.name
        if row.tenant_id is None
        else names.get(row.tenant_id, _("tenant %(tenant_id)s") % {"tenant_id": row.tenant_id}),
        "state": state,
        "level": level,
    }


def tenant_names(ids: Iterable[int | None]) -> dict[int, str]:
    tenant_ids = {pk for pk in ids if pk is not None}
    return dict(Tenant.objects.all_tenants().filter(pk__in=tenant_ids).values_list("pk", "name")) if tenant_ids else {}


def prices_at(owner: PriceBooksQuery, at: datetime) -> QuerySet[Price]:
    """Return the rows that are active at this time."""
    rows = Price.objects.filter(book__name=owner.book, tenant_id=owner.tenant.pk if owner.tenant else None)
    return rows.filter(Q(effective_until=None) | Q(effective_until__gt=at), effective_from__lte=at)


def as_new(rows: QuerySet[Price]) -> list[NewPrice]:
    """Return the prices as in a proposal, in table order."""
    order = {component: place for place, (component, _) in enumerate(COLUMNS)}
    found = [
        NewPrice(
            row.model,
            Tier(row.tier),
            Component(row.component),
            row.nano_per_million,
            *ranges_of(row),
        )
        for row in rows
    ]
    tiers = {tier: place for place, tier in enumerate(Tier)}
    return sorted(found, key=lambda price: (price.model, tiers[price.tier], order[price.component], price.from_tokens))


def usd(nano: int) -> str:
    """Return USD per 1M tokens with all digits."""
    return decimal(nano, NANO_DIGITS, 2)


def as_text(prices: Iterable[NewPrice]) -> str:
    """Return the prices in the format of `billing.rates.price_files.read_csv`."""
    rows = []
    for price in prices:
        until = "" if price.until_tokens == NO_END else price.until_tokens
        bands = (price.from_tokens or "", until, _time(price.from_minute, 0), _time(price.until_minute, MINUTES_A_DAY))
        schedule = (weekdays_text(price), "" if price.time_zone == UTC_ZONE else price.time_zone)
        rows.append(
            (price.model, price.tier.value, price.component.value, usd(price.nano_per_million), *bands, *schedule)
        )
    return csv_tables.as_csv(CSV_COLUMNS, rows)


def _time(minute: int, usual: int) -> str:
    return "" if minute == usual else f"{minute // 60:02}:{minute % 60:02}"


def _url(ctx: PageContext, **query: str) -> str:
    return f"{ctx.url('operator-prices')}?{urlencode(query)}"


def find_prices(ctx: PageContext, typed: str) -> Iterable[SearchResult]:
    """Yield models that have or had a price."""
    rows = Price.objects.filter(model__icontains=typed).order_by("model")
    for model in rows.values_list("model", flat=True).distinct()[:MAX_RESULTS_PER_KIND]:
        yield SearchResult(model, f"{ctx.url('operator-prices')}?{urlencode({'q': model})}", "prices", _("prices"))
