"""The price book: what is active, and its versions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q, QuerySet
from django.http import Http404
from django.utils.http import urlencode

from billing.amounts import decimal
from billing.models import Price, PriceBook, PriceVersion
from billing.pricing.price_book import NewPrice
from billing.pricing.price_files import CSV_COLUMNS
from billing.pricing.pricing import MINUTES_A_DAY, NO_END, Component, Tier
from frontend.core.page_context import PageContext
from frontend.tenant.prices.page import COLUMNS, PriceModel, models_of
from tenants import csv_tables
from tenants.models import Tenant

MODELS = 25
VERSIONS = 15


@dataclass(frozen=True)
class PriceBooksQuery:
    """Whose prices: a book's, or one tenant's own."""

    book: str
    tenant: Tenant | None
    typed: str

    @property
    def query(self) -> dict[str, str]:
        return {"tenant": self.tenant.slug} if self.tenant else {"book": self.book}

    @property
    def label(self) -> str:
        return f"{self.tenant.name}’s own prices" if self.tenant else self.book


@dataclass(frozen=True)
class PriceBooksChoice:
    label: str
    url: str
    is_chosen: bool


@dataclass(frozen=True)
class PriceBooksFilters:
    choices: tuple[PriceBooksChoice, ...]
    asked: PriceBooksQuery


@dataclass(frozen=True)
class PriceBooksLineItem:
    """A model with active prices, and where to draft other prices of it."""

    model: PriceModel
    change_url: str


@dataclass(frozen=True)
class InForce:
    label: str
    columns: tuple[str, ...]
    lines: tuple[PriceBooksLineItem, ...]
    number: int  # of models, on all pages
    more_url: str
    first_url: str
    filtered: bool


@dataclass(frozen=True)
class PriceBooksVersion:
    title: str
    url: str
    whose: str
    state: str
    level: str
    since: datetime | None  # None: when it is published
    note: str
    by: str
    created_at: datetime
    decided_by: str
    decided_at: datetime | None


@dataclass(frozen=True)
class Versions:
    rows: tuple[PriceBooksVersion, ...]
    drafts: int
    older_url: str


def asked(visit: PageContext) -> PriceBooksQuery:
    """Return what the address asks for, in the visit's scope.

    Raises:
        Http404: there is no such book or tenant.
    """

    def find() -> PriceBooksQuery:
        typed, slug, book = (visit.query.get(name, "").strip()[:128] for name in ("q", "tenant", "book"))
        tenant = Tenant.objects.all_tenants().filter(slug=slug).first() if slug else None
        if slug and tenant is None:
            raise Http404
        if book and book != PriceBook.LIST and not PriceBook.objects.filter(name=book).exists():
            raise Http404
        return PriceBooksQuery(PriceBook.LIST if tenant else book or PriceBook.LIST, tenant, typed)

    return visit.once("operator-prices", find)


def fields(visit: PageContext) -> PriceBooksFilters:
    now = asked(visit)
    names = [
        PriceBook.LIST,
        *PriceBook.objects.exclude(name=PriceBook.LIST).order_by("name").values_list("name", flat=True),
    ]
    choices = [
        PriceBooksChoice(name, _address(visit, book=name), not now.tenant and name == now.book) for name in names
    ]
    if now.tenant:
        choices.append(PriceBooksChoice(now.tenant.name, _address(visit, tenant=now.tenant.slug), is_chosen=True))
    return PriceBooksFilters(tuple(choices), now)


def in_force(visit: PageContext) -> InForce:
    """Return a page of the current prices."""
    now = asked(visit)
    rows = prices_at(now, visit.now)
    if now.typed:
        rows = rows.filter(model__icontains=now.typed)
    models = list(rows.order_by("model").values_list("model", flat=True).distinct())
    after = visit.query.get("after", "")
    shown = [model for model in models if model > after][:MODELS]
    found = as_new(rows.filter(model__in=shown))
    columns = [column for column in COLUMNS if any(price.component == column[0] for price in found)]
    query = now.query | ({"q": now.typed} if now.typed else {})
    return InForce(
        now.label,
        tuple(label for _, label in columns),
        tuple(PriceBooksLineItem(model, _change(visit, now, model.name, found)) for model in models_of(found, columns)),
        len(models),
        more_url=_address(visit, **query, after=shown[-1]) if shown and shown[-1] != models[-1] else "",
        first_url=_address(visit, **query) if after else "",
        filtered=bool(now.typed),
    )


def _change(visit: PageContext, now: PriceBooksQuery, model: str, found: Iterable[NewPrice]) -> str:
    """To the form, or to the CSV if a band or window makes it more than the form can say."""
    plain = all(is_plain(price) for price in found if price.model == model)
    url = visit.url("operator-prices-model" if plain else "operator-prices-csv")
    return f"{url}?{urlencode(now.query | {'model': model})}"


def is_plain(price: NewPrice) -> bool:
    return (price.from_tokens, price.until_tokens, price.from_minute, price.until_minute) == (
        *(0, NO_END),
        *(0, MINUTES_A_DAY),
    )


def versions(visit: PageContext) -> Versions:
    """Drafts and what was published, of every book, newest first."""
    rows = PriceVersion.objects.select_related("book", "created_by", "decided_by").defer("body").order_by("-pk")
    drafts = rows.filter(state=PriceVersion.State.DRAFT).count()
    before = visit.query.get("before", "")
    if before.isascii() and before.isdigit() and len(before) < 18:
        rows = rows.filter(pk__lt=int(before))
    found = list(rows[: VERSIONS + 1])
    names = tenant_names(row.tenant_id for row in found)
    shown = tuple(version_of(visit, row, names) for row in found[:VERSIONS])
    older = _address(visit, before=str(found[VERSIONS - 1].pk)) if len(found) > VERSIONS else ""
    return Versions(shown, drafts, older)


def version_of(visit: PageContext, row: PriceVersion, names: dict[int, str]) -> PriceBooksVersion:
    state, level = row.get_state_display(), {"published": "good", "draft": "info"}.get(row.state, "")
    if row.state == PriceVersion.State.PUBLISHED and row.effective_from and row.effective_from > visit.now:
        state, level = "Scheduled", "warn"
    return PriceBooksVersion(
        title=f"Version {row.number}" if row.number else f"Draft {row.pk}",
        url=visit.url("operator-prices-detail", row.pk),
        whose=row.book.name if row.tenant_id is None else names.get(row.tenant_id, f"tenant {row.tenant_id}"),
        state=state,
        level=level,
        since=row.effective_from,
        note=row.note,
        by=row.created_by.email if row.created_by else "System",
        created_at=row.created_at,
        decided_by=row.decided_by.email if row.decided_by else "System",
        decided_at=row.decided_at,
    )


def tenant_names(ids: Iterable[int | None]) -> dict[int, str]:
    wanted = {each for each in ids if each is not None}
    return dict(Tenant.objects.all_tenants().filter(pk__in=wanted).values_list("pk", "name")) if wanted else {}


def prices_at(whose: PriceBooksQuery, at: datetime) -> QuerySet[Price]:
    """Return the rows active at that instant."""
    rows = Price.objects.filter(book__name=whose.book, tenant_id=whose.tenant.pk if whose.tenant else None)
    return rows.filter(Q(effective_until=None) | Q(effective_until__gt=at), effective_from__lte=at)


def as_new(rows: QuerySet[Price]) -> list[NewPrice]:
    """Return the prices as a proposal has them, in the order of their tables."""
    order = {component: place for place, (component, _) in enumerate(COLUMNS)}
    found = [
        NewPrice(
            row.model,
            Tier(row.tier),
            Component(row.component),
            row.nano_per_million,
            row.from_tokens,
            row.until_tokens,
            row.from_minute,
            row.until_minute,
        )
        for row in rows
    ]
    tiers = {tier: place for place, tier in enumerate(Tier)}
    return sorted(found, key=lambda one: (one.model, tiers[one.tier], order[one.component], one.from_tokens))


def usd(nano: int) -> str:
    """USD a million tokens, every digit."""
    return decimal(nano, 9, 2)


def as_text(prices: Iterable[NewPrice]) -> str:
    """Return the prices as `billing.pricing.price_files.read_csv` takes them."""
    rows = []
    for one in prices:
        until = "" if one.until_tokens == NO_END else one.until_tokens
        bands = (one.from_tokens or "", until, _time(one.from_minute, 0), _time(one.until_minute, MINUTES_A_DAY))
        rows.append((one.model, one.tier.value, one.component.value, usd(one.nano_per_million), *bands))
    return csv_tables.as_csv(CSV_COLUMNS, rows)


def _time(minute: int, usual: int) -> str:
    return "" if minute == usual else f"{minute // 60:02}:{minute % 60:02}"


def _address(visit: PageContext, **query: str) -> str:
    return f"{visit.url('operator-prices')}?{urlencode(query)}"
