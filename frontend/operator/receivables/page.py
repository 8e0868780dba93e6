"""The aging of receivables of a billing entity on a day."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

from django.utils.translation import gettext as _

from billing.accounting.aging import AgingRow, report_aging
from billing.accounting.booking_days import today_of
from billing.models import BillingEntity
from billing.periods import default_entity
from frontend.core.backend_messages import translate_message
from frontend.core.day_field import read_day
from frontend.core.lists import Choice, changed_url
from frontend.core.numbers import Money
from frontend.core.page_context import PageContext
from tenants.actions import ActionRefused


@dataclass(frozen=True)
class Aging:
    """The rows of a day. With an error, they are those of today."""

    entity: BillingEntity
    on: date
    rows: list[AgingRow]
    error: str


def entity_of(ctx: PageContext) -> BillingEntity:
    """Return the billing entity in the query string, or the default one. Call inside `ctx.scope()`."""
    return ctx.once("billing_entity", lambda: _find_entity(ctx.query.get("entity", "")))


def _find_entity(slug: str) -> BillingEntity:
    return BillingEntity.objects.filter(slug=slug).first() or default_entity()


def aging_of(ctx: PageContext) -> Aging:
    """Return the aging on the day in the query string. Call inside `ctx.scope()`."""
    return ctx.once("aging", lambda: _read(ctx))


def _read(ctx: PageContext) -> Aging:
    entity, error = entity_of(ctx), ""
    today = on = today_of(entity, ctx.now)
    try:
        on = read_day(ctx.query.get("date", "")) or today
        return Aging(entity, on, report_aging(entity, on, ctx.now), "")
    except ValueError:
        error = _("Enter the date as YYYY-MM-DD.")
    except ActionRefused as exc:
        error = translate_message(exc)
    return Aging(entity, today, report_aging(entity, today, ctx.now), error)


def filters(ctx: PageContext) -> dict[str, Any]:
    """Return the entities, the day and the URL of the file. Call inside `ctx.scope()`."""
    shown, url = aging_of(ctx), ctx.url("operator-receivables")
    entities = BillingEntity.objects.order_by("name", "pk")
    file_url = f"{ctx.url('operator-receivables-file')}?entity={shown.entity.slug}&date={shown.on}"
    return {
        "entities": [
            Choice(row.name, changed_url(ctx, url, entity=row.slug), row.pk == shown.entity.pk) for row in entities
        ],
        "entity": shown.entity,
        "on": shown.on,
        "date": shown.on.isoformat(),
        "error": shown.error,
        "file_url": file_url,
    }


def aging(ctx: PageContext) -> dict[str, Any]:
    """Return the amounts of each tenant and of all tenants, by currency."""
    shown = aging_of(ctx)
    rows = []
    for row in shown.rows:
        classes = (row.not_due, row.days_1_30, row.days_31_60, row.days_61_90, row.over_90_days, row.total)
        url = ctx.url("operator-billing-statement", row.tenant) if row.tenant else ""
        rows.append((row, url, [_money(amount, row.currency) for amount in classes]))
    return {"rows": rows, "entity": shown.entity}


def _money(amount: str, currency: str) -> Money:
    return Money.cents(int(Decimal(amount).scaleb(Money(0, currency).digits)), currency)
