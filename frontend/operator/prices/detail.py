"""One version of a price book: its changes, and last month's usage at its prices."""

from __future__ import annotations

from typing import Any

from django.db.models import Q
from django.utils.translation import gettext as _

from billing.invoicing import repricing
from billing.models import Price, PriceVersion
from billing.rates.price_book import NewPrice, PriceRanges, parse
from billing.rates.pricing import Component, Tier
from frontend.core.backend_messages import translate_message
from frontend.core.numbers import Money, common_places, signed_share
from frontend.core.page_context import PageContext, first_or_404
from frontend.operator.prices.page import as_new, currency_in, tenant_names, version_row
from frontend.operator.prices.studio import project
from frontend.tenant.prices.page import COLUMNS, TIERS, condition_text, range_of
from tenants.actions import ActionRefused
from tenants.actions.sole_operators import find_sole_operator_obstacle

MAX_ROWS = 400
_LABELS = dict(COLUMNS)

Key = tuple[str, Tier, Component, PriceRanges]


def version_of(ctx: PageContext) -> PriceVersion:
    """Return the version in the URL, or raise Http404. Call inside `ctx.scope()`."""
    rows = PriceVersion.objects.select_related("book", "created_by", "decided_by", "cancelled_by")
    return ctx.once("operator-prices-detail", lambda: first_or_404(rows.filter(pk=ctx.arguments["version"])))


def header(ctx: PageContext) -> dict[str, Any]:
    """Return the version, and what its actions depend on.

    `is_late`: its effective time has passed. `is_sole`: its author may publish it without a second operator; `obstacle`
    is why not.
    """
    row = version_of(ctx)
    proposal = parse(row.body) if row.body else None
    is_draft = row.state == PriceVersion.State.DRAFT
    is_own = is_draft and row.created_by_id == ctx.user.pk
    obstacle = find_sole_operator_obstacle(ctx.user) if is_own else None
    return version_row(ctx, row, tenant_names([row.tenant_id])) | {
        "prices": len(proposal.prices) if proposal else 0,
        "models": len({model for model, _ in proposal.model_tiers}) if proposal else 0,
        "is_draft": is_draft,
        "is_scheduled": row.state == PriceVersion.State.SCHEDULED,
        "is_own": is_own,
        "is_sole": is_own and obstacle is None,
        "obstacle": "" if obstacle is None else translate_message(obstacle),
        "is_late": is_draft and row.effective_from is not None and row.effective_from < ctx.now,
    }


def diff(ctx: PageContext) -> dict[str, Any]:
    """Compare the version with the prices that are active before it takes effect."""
    row = version_of(ctx)
    if not row.body:
        return {"rows": (), "same": 0, "more": 0}
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
    currency = currency_in(row)
    changed = [key for key in keys if was.get(key) != to_be.get(key)]
    rows = [_change_of(key, was.get(key), to_be.get(key), currency) for key in changed[:MAX_ROWS]]
    return {"rows": rows, "same": len(keys) - len(changed), "more": len(changed) - len(rows)}


def _key(price: NewPrice) -> Key:
    return price.model, price.tier, price.component, range_of(price)


def _change_of(key: Key, was: int | None, to_be: int | None, currency: str) -> dict[str, Any]:
    """Return a price before and after. None: there was or is no price."""
    model, tier, component, place = key
    kind, change = "", ""
    if was is None:
        kind, change = "new", "new"
    elif to_be is None:
        kind, change = "ended", "ends"
    else:
        kind = "up" if to_be > was else "down"
        change = _percent(to_be - was, was)
    return {
        "model": model,
        "tier": TIERS[tier],
        "component": _LABELS[component],
        "when": condition_text(place),
        "was": None if was is None else Money.nano(was, currency),
        "to_be": None if to_be is None else Money.nano(to_be, currency),
        "change": change,
        "kind": kind,
    }


def _percent(part: int, whole: int) -> str:
    """Return a change in percent with its sign."""
    return signed_share(part, whole) if whole else _("from free")


def projection(ctx: PageContext) -> dict[str, Any]:
    """Return the last complete month at the version's prices."""
    row = version_of(ctx)
    return project(ctx, parse(row.body), row.book, row.tenant_id)


def preview(ctx: PageContext) -> dict[str, Any]:
    """Return last month's usage at the draft's prices, by tenant and model, largest difference first."""
    row = version_of(ctx)
    start, end = repricing.last_month(ctx.now)
    try:
        found = repricing.preview(row, start, end)
    except ActionRefused as exc:
        return {"refused": translate_message(exc), "month": start}
    found.sort(key=lambda comparison: -abs(comparison.would_be_femto - comparison.was_femto))
    currency = currency_in(row)
    names = tenant_names(comparison.tenant_id for comparison in found[:MAX_ROWS])
    was, would_be = (sum(getattr(row, name) for row in found) for name in ("was_femto", "would_be_femto"))
    return {
        "refused": "",
        "month": start,
        "rows": [
            (
                comparison,
                names.get(comparison.tenant_id, _("tenant %(tenant_id)s") % {"tenant_id": comparison.tenant_id}),
                Money(comparison.was_femto, currency),
                Money(comparison.would_be_femto, currency),
                Money(comparison.would_be_femto - comparison.was_femto, currency),
            )
            for comparison in found[:MAX_ROWS]
        ],
        "places": common_places(
            Money(amount, currency)
            for comparison in found[:MAX_ROWS]
            for amount in (comparison.was_femto, comparison.would_be_femto)
        ),
        "was": Money(was, currency),
        "would_be": Money(would_be, currency),
        "difference": Money(would_be - was, currency),
        "unpriced": sum(comparison.unpriced for comparison in found),
        "more": max(0, len(found) - MAX_ROWS),
    }
