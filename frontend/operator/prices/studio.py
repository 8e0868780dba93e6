"""The price studio: the prices of a model by tier and token type, with new ones, cost, margin and a past month."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django import forms
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from billing.currencies.amounts import DEFAULT_CURRENCY, FEMTO_A_NANO
from billing.invoicing.price_projection import Projection, month_before, project_month
from billing.models import Price, PriceBook
from billing.pricing.currencies import CrossRate, exchange_rate
from billing.rates.price_book import NewPrice, PriceRanges, Proposal, nano_per_million, ranges_of
from billing.rates.pricing import Component, Tier
from frontend.core.backend_messages import translate_message
from frontend.core.languages import month_text
from frontend.core.numbers import Margin, Money, percent, signed_share
from frontend.core.page_context import PageContext
from frontend.core.plain_text_field import PLAIN_TEXT
from frontend.operator.margin.page import current_card, is_deployment
from frontend.operator.prices.forms import PriceDraftForm
from frontend.operator.prices.page import MAX_COPIED, PriceBooksQuery, prices_at, query_of, usd
from frontend.tenant.prices.page import COLUMNS, TIERS, condition_text
from inference_worker.contract.request import TOKEN_CLASSES
from millrace.apps.deployments.served_deployments import served_specs
from millrace.apps.health.costs import costs
from tenants.actions import ActionRefused

MACHINE_PERIOD = timedelta(days=30)  # time over which the machine cost is averaged
MAX_AFFECTED = 5  # tenants named
MAX_CELLS = 400  # prices of one model; others are changed as CSV
_LABELS = dict(COLUMNS)


@dataclass(frozen=True)
class StudioCosts:
    """What the operator pays per 1M tokens of a model, in nano-USD: by token type, or for all from its machines."""

    by_component: Mapping[Component, int]
    machine: int | None = None

    def find(self, component: Component) -> int | None:
        if component not in TOKEN_CLASSES:
            return None
        return self.by_component.get(component, self.machine)


@dataclass(frozen=True)
class StudioCell:
    """A price that the studio can change. `current` is None for a token type without one."""

    name: str
    tier: Tier
    component: Component
    ranges: PriceRanges
    current: int | None
    cost: int | None  # in nano-USD

    @property
    def tier_label(self) -> str:
        return str(TIERS[self.tier])

    @property
    def label(self) -> str:
        return str(_LABELS[self.component])

    @property
    def when(self) -> str:
        return condition_text(self.ranges)

    @property
    def label_in_full(self) -> str:
        return ", ".join(part for part in (self.tier_label, self.label, self.when) if part)

    def price_of(self, model: str, nano: int) -> NewPrice:
        return NewPrice(model, self.tier, self.component, nano, *self.ranges)


@dataclass(frozen=True)
class Studio:
    """A model of a price book, or of a tenant's own prices, with its cells."""

    owner: PriceBooksQuery
    model: str
    cells: tuple[StudioCell, ...]
    version: str  # changes with the active prices
    rate: CrossRate | None  # USD per unit of the currency of the prices


def find_studio(ctx: PageContext, model: str) -> Studio:
    """Return the model's cells: its active prices, and the token types without one. Call inside `ctx.scope()`."""
    owner = query_of(ctx)
    rows = list(prices_at(owner, ctx.now).filter(model=model).order_by("pk")[: MAX_CELLS + 1]) if model else []
    paid = find_costs(ctx, model)
    cells = []
    for tier in TIERS:
        for component, _label in COLUMNS:
            there = sorted(
                (row for row in rows if (row.tier, row.component) == (tier, component)), key=lambda row: ranges_of(row)
            )
            known = [(ranges_of(row), row.nano_per_million) for row in there]
            if not known and component in TOKEN_CLASSES:
                known = [(PriceRanges(), None)]  # type: ignore[list-item]  # no price
            cells += [
                StudioCell(f"{tier}-{component}-{place}", tier, component, ranges, nano, paid.find(component))
                for place, (ranges, nano) in enumerate(known)
            ]
    rate = exchange_rate(owner.currency, DEFAULT_CURRENCY, ctx.now.date())
    return Studio(owner, model, tuple(cells), _version_of(rows), rate)


def _version_of(rows: Iterable[Price]) -> str:
    pks = [row.pk for row in rows]
    return f"{len(pks)}-{max(pks, default=0)}"


def find_costs(ctx: PageContext, model: str) -> StudioCosts:
    """Return the costs of the model's cost card, or else those of its machines. Call inside `ctx.scope()`."""
    card = current_card(model, ctx.now)
    rates: dict[Component, int] = {}
    for rate in () if card is None else card.decode().rates:
        rates.setdefault(rate.component, rate.nano_per_million)
    machine = None
    if not rates:
        for found in costs(ctx.now - MACHINE_PERIOD, ctx.now):
            if found.model == model and found.cost_per_million is not None:
                machine = found.cost_per_million // FEMTO_A_NANO
    return StudioCosts(rates, machine)


class StudioForm(PriceDraftForm):
    """New prices of a model, in all tiers."""

    def __init__(self, studio: Studio, data: Any = None, *, is_draft: bool = True) -> None:
        """Build the form. With `is_draft`, it is valid only if a price changes."""
        super().__init__(data)
        self.studio, self.is_draft = studio, is_draft
        self.fields["version"] = forms.CharField(widget=forms.HiddenInput, initial=studio.version)
        del self.fields["book"], self.fields["tenant"]  # those of the page
        for cell in studio.cells:
            box = forms.TextInput(
                attrs=PLAIN_TEXT | {"inputmode": "decimal", "aria-label": cell.label_in_full, "size": "9"}
            )
            shown = "" if cell.current is None else usd(cell.current)
            self.fields[cell.name] = forms.CharField(max_length=30, required=False, widget=box, initial=shown)
        self.changes: dict[str, int | None] = {}  # by name of the cell; None: without a price

    @property
    def rows(self) -> list[tuple[StudioCell, Any, dict[str, Any]]]:
        """Return each cell with its field, and with what the template shows of it."""
        return [(cell, self[cell.name], self.show(cell)) for cell in self.studio.cells]

    @property
    def draft_fields(self) -> list[Any]:
        return [self["since"], self["note"]]

    def clean(self) -> dict[str, Any]:
        context = super().clean()
        new: dict[str, int | None] = {}
        for cell in self.studio.cells:
            text = (context.get(cell.name) or "").strip()
            try:
                new[cell.name] = nano_per_million(text) if text else None
            except ValueError as exc:
                self.add_error(cell.name, f"{translate_message(exc)}.")
        if len(self.studio.cells) > MAX_CELLS:
            raise forms.ValidationError(_("This model has too many prices for this page. Change them as CSV."))
        if self.errors:
            return context
        self.changes = {cell.name: new[cell.name] for cell in self.studio.cells if new[cell.name] != cell.current}
        if context["version"] != self.studio.version:
            raise forms.ValidationError(
                _("The active prices have changed. Reload the page and enter the new prices again.")
            )
        if self.is_draft and not self.changes:
            raise forms.ValidationError(_("Change at least one price."))
        return context | {"proposal": self._propose(new)}

    def _propose(self, new: Mapping[str, int | None]) -> Proposal:
        """Return the prices of the tiers that change. A tier without prices is withdrawn."""
        model = self.studio.model
        tiers = {cell.tier for cell in self.studio.cells if cell.name in self.changes}
        prices = [
            cell.price_of(model, nano)
            for cell in self.studio.cells
            if cell.tier in tiers and (nano := new[cell.name]) is not None
        ]
        priced = {price.tier for price in prices}
        return Proposal(tuple(prices), tuple((model, tier) for tier in TIERS if tier in tiers - priced))

    def show(self, cell: StudioCell) -> dict[str, Any]:
        """Return a price's change, and its margin at the new price or else at the current one."""
        new = self.changes.get(cell.name, cell.current)
        change, kind = "", ""
        if cell.name in self.changes:
            if new is None:
                change, kind = _("ends"), "warn"
            elif cell.current is None:
                change, kind = _("new"), "info"
            else:
                change = signed_share(new - cell.current, cell.current) if cell.current else _("from free")
                kind = "warn" if new > cell.current else "good"
        margin = None
        if new is not None and cell.cost is not None and self.studio.rate is not None:
            margin = Margin(self.studio.rate.convert(Money.nano(new).femto), Money.nano(cell.cost).femto)
        return {
            "change": change,
            "kind": kind,
            "margin": margin,
            "current": None if cell.current is None else Money.nano(cell.current, self.studio.owner.currency),
            "cost": None if cell.cost is None else Money.nano(cell.cost, DEFAULT_CURRENCY),
        }


def page_data(ctx: PageContext, studio: Studio) -> dict[str, Any]:
    """Return the models to choose from, and what the page shows beside the table. Call inside `ctx.scope()`."""
    names = set(prices_at(studio.owner, ctx.now).values_list("model", flat=True).distinct()[:MAX_COPIED])
    names |= {spec.name for spec in served_specs()}
    origin = urlencode({"studio": "1"} | studio.owner.query)
    has_costs = bool(studio.model) and is_deployment(studio.model)
    is_served = studio.model in {spec.name for spec in served_specs()}
    return {
        "studio": studio,
        "models": sorted(names),
        "cost_url": f"{ctx.url('operator-margin-cost', studio.model)}?{origin}" if has_costs else "",
        "hour_url": f"{ctx.url('operator-fleet-cost', studio.model)}?{origin}" if is_served else "",
        "month": month_text(month_before(ctx.now)),
        "is_too_large": len(studio.cells) > MAX_CELLS,
    }


def find_return_url(ctx: PageContext, model: str, other: str) -> str:
    """Return the page to go back to from a form of costs: the studio that has opened it, or another page."""
    if "studio" not in ctx.query:
        return other
    owner = {name: ctx.query[name] for name in ("book", "tenant") if ctx.query.get(name)}
    return f"{ctx.url('operator-prices-studio')}?{urlencode(owner | {'model': model})}"


def project(ctx: PageContext, proposal: Proposal, book: PriceBook, tenant_id: int | None) -> dict[str, Any]:
    """Return the last complete month at proposed prices, with the tenants that change most."""
    month = month_before(ctx.now)
    try:
        found = project_month(proposal, book, tenant_id, month)
    except ActionRefused as exc:
        return {"month": month_text(month), "refused": translate_message(exc)}
    return {"month": month_text(month), "refused": "", **_show_projection(found)}


def _show_projection(found: Projection) -> dict[str, Any]:
    changed = [row for row in found.tenants if row.change]
    return {
        "change": _format_signed(Money.cents(found.change, found.currency)),
        "share": signed_share(found.change, found.was) if found.was else "",
        "was": Money.cents(found.was, found.currency),
        "would_be": Money.cents(found.would_be, found.currency),
        "affected": [
            (
                row.tenant.name,
                _format_signed(Money.cents(row.change, found.currency)),
                signed_share(row.change, row.was),
            )
            for row in changed[:MAX_AFFECTED]
        ],
        "more": max(0, len(changed) - MAX_AFFECTED),
        "tenants": len(found.tenants),
        "others": found.others,
        "covered": percent(round(found.covered, 4)),
        "unpriced": found.unpriced,
        "kept": found.kept,
    }


def _format_signed(amount: Money) -> str:
    return f"+{amount.text}" if amount.femto > 0 else amount.text
