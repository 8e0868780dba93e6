"""Commitments and price terms of a tenant: the lists, and the forms that add and end them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db.models import Q, QuerySet
from django.http import HttpResponse
from django.utils.translation import gettext as _

from billing.accounting.charts import format_rate
from billing.invoicing.price_terms import do_add_price_term, do_end_price_term
from billing.ledger.credits import do_commit, do_end_commitment
from billing.models import Commitment, PriceTerm
from billing.pricing.currencies import currency_of
from billing.rates.terms import TermRule, TermType
from frontend.core.form_view import bound_data
from frontend.core.languages import localize
from frontend.core.numbers import Money, exact
from frontend.core.page_context import FORM, PageContext, first_or_404, operator_page
from frontend.operator.tenants import charge_forms as forms
from frontend.operator.tenants.detail import tenant_of
from frontend.operator.tenants.tenant_form import tenant_form_view
from frontend.tenant.prices.page import COLUMNS, TIERS
from tenants.models import Tenant

MAX_ROWS = 50
MAX_SHOWN_TIERS = 5
T = TypeVar("T", Commitment, PriceTerm)


@dataclass(frozen=True)
class ChargeRow:
    """A commitment or price term with its amounts as texts."""

    row: Commitment | PriceTerm
    details: tuple[str, ...]


def commitments(ctx: PageContext) -> dict[str, Any]:
    """Return the tenant's commitments of this month and later ones, oldest first."""
    return {"tenant": tenant_of(ctx), "rows": [_commitment_row(row) for row in _active(ctx, Commitment)[:MAX_ROWS]]}


def price_terms(ctx: PageContext) -> dict[str, Any]:
    """Return the tenant's price terms of this month and later ones, oldest first."""
    rows = [ChargeRow(row, _describe_rule(row.decode())) for row in _active(ctx, PriceTerm)[:MAX_ROWS]]
    return {"tenant": tenant_of(ctx), "rows": rows}


def _active(ctx: PageContext, model: type[T]) -> QuerySet[T]:
    rows: QuerySet[T] = model.objects.for_tenant(tenant_of(ctx)).order_by("pk")
    return rows.filter(Q(last_month="") | Q(last_month__gte=f"{ctx.now:%Y-%m}"))


def _commitment_row(row: Commitment) -> ChargeRow:
    return ChargeRow(row, (Money.cents(row.fee).text, Money.nano(row.included_nano).text))


def _describe_rule(rule: TermRule) -> tuple[str, ...]:
    """Return what a price term changes, and its first tiers."""
    if rule.term_type == TermType.MINIMUM:
        return (_("At least %(amount)s per month") % {"amount": Money.cents(rule.cents).text},)
    if rule.term_type == TermType.DISCOUNT:
        percent = localize(format_rate(rule.ppm))
        if rule.model:
            return (_("%(percent)s%% less for %(model)s") % {"percent": percent, "model": rule.model},)
        return (_("%(percent)s%% less for all models") % {"percent": percent},)
    component = next((label for each, label in COLUMNS if each == rule.component), "")
    parts = (forms.TIERED[rule.term_type], rule.model, TIERS[rule.tier], component)
    tiers = [
        _("from %(tokens)s tokens: %(price)s per 1M")
        % {"tokens": exact(tier.from_tokens), "price": Money.nano(tier.nano_per_million).exact_text}
        for tier in rule.tiers[:MAX_SHOWN_TIERS]
    ]
    if (more := len(rule.tiers) - MAX_SHOWN_TIERS) > 0:
        tiers.append(_("and %(number)s more") % {"number": more})
    return (" · ".join(str(part) for part in parts if part), *tiers)


@operator_page(methods=FORM, step_up=True)
def add_commitment(ctx: PageContext) -> HttpResponse:
    tenant, form = _new_form(ctx, forms.CommitmentForm)
    return tenant_form_view(
        ctx,
        tenant,
        _("New commitment of %(name)s") % {"name": tenant.name},
        form,
        lambda _data: do_commit(tenant, **form.values()),
        submit=_("Add commitment"),
        message=lambda row: _("“%(name)s” was added.") % {"name": row.name},
        effect=_("Each month is charged with the fee and has the included usage, until you end the commitment."),
    )


@operator_page(methods=FORM, step_up=True)
def end_commitment(ctx: PageContext) -> HttpResponse:
    tenant, row = _find(ctx, Commitment, "commitment")
    return _end_view(
        ctx,
        tenant,
        row,
        do_end_commitment,
        submit=_("End commitment"),
        effect=_("Later months have neither the fee nor the included usage. An ended commitment cannot be extended."),
    )


@operator_page(methods=FORM, step_up=True)
def add_minimum(ctx: PageContext) -> HttpResponse:
    effect = _("A month with less usage is charged with the difference. Of several minimums, the highest applies.")
    return _term_view(ctx, forms.MinimumForm, _("New minimum of %(name)s"), _("Add minimum"), effect)


@operator_page(methods=FORM, step_up=True)
def add_discount(ctx: PageContext) -> HttpResponse:
    effect = _("Reduces the usage on the invoices of these months, after graduated and volume prices.")
    return _term_view(ctx, forms.DiscountForm, _("New discount of %(name)s"), _("Add discount"), effect)


@operator_page(methods=FORM, step_up=True)
def add_tiered_price(ctx: PageContext) -> HttpResponse:
    effect = _("Replaces the prices of the price book on the invoices of these months. Budgets still use the book.")
    return _term_view(ctx, forms.TieredPriceForm, _("New tiered price of %(name)s"), _("Add tiered price"), effect)


@operator_page(methods=FORM, step_up=True)
def end_price_term(ctx: PageContext) -> HttpResponse:
    tenant, row = _find(ctx, PriceTerm, "price_term")
    effect = _("Invoices of later months do not have this price term. An ended price term cannot be extended.")
    return _end_view(ctx, tenant, row, do_end_price_term, submit=_("End price term"), effect=effect)


def _new_form(ctx: PageContext, form_class: Callable[..., Any]) -> tuple[Tenant, Any]:
    """Return the tenant and a form that starts with this month."""
    with ctx.scope():
        tenant = tenant_of(ctx)
        form = form_class(currency_of(tenant.pk), bound_data(ctx))
    form.initial = {"first_month": f"{ctx.now:%Y-%m}"}
    return tenant, form


def _term_view(ctx: PageContext, form_class: Callable[..., Any], title: str, submit: str, effect: str) -> HttpResponse:
    tenant, form = _new_form(ctx, form_class)
    return tenant_form_view(
        ctx,
        tenant,
        title % {"name": tenant.name},
        form,
        lambda data: do_add_price_term(tenant, form.rule(), description=data["description"], **form.months()),
        submit=submit,
        message=lambda row: _("“%(name)s” was added.") % {"name": row.description},
        effect=effect,
    )


def _find(ctx: PageContext, model: type[T], argument: str) -> tuple[Tenant, T]:
    with ctx.scope():
        return tenant_of(ctx), first_or_404(_active(ctx, model).filter(pk=ctx.arguments[argument]))


def _end_view(
    ctx: PageContext, tenant: Tenant, row: T, action: Callable[[T, str], T], *, submit: str, effect: str
) -> HttpResponse:
    return tenant_form_view(
        ctx,
        tenant,
        _("End “%(name)s”") % {"name": row},
        forms.EndChargeForm(bound_data(ctx), initial={"last_month": f"{ctx.now:%Y-%m}"}),
        lambda data: action(row, data["last_month"]),
        submit=submit,
        message=lambda ended: _("“%(name)s” ends after %(month)s.") % {"name": ended, "month": ended.last_month},
        effect=effect,
    )
