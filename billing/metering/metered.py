"""Actions that record and reverse metered usage. A reference is recorded once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.db import connection
from django.db.models import Q

from billing.ledger.booking import booking
from billing.models import CompiledRateCard, MeteredUsage
from billing.periods import stamps
from billing.rates.metered import MAX_AMOUNT, MAX_TIME, METERED, metered_cost, metered_units
from billing.rates.pricing import Component, PriceIndex, Rate, Tier, prices
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import check
from tenants.models import Tenant

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def do_record_metered_usage(
    tenant: Tenant,
    component: Component,
    model: str,
    amount: int,
    started_at: datetime,
    ended_at: datetime,
    *,
    reference: str,
) -> tuple[MeteredUsage, bool]:
    """Record an amount of stored tokens or machines over a time. Return the row and whether it is new.

    The price is the one at the start. The cost is on the invoice of that month, or of the next open month.

    Raises:
        ActionRefused: the component, amount or times are not right, or there is no price.
        Conflict: the reference was recorded with other values.
    """
    if component not in METERED:
        raise ActionRefused(Text("component: Choose one of %(metered)s.", metered=", ".join(METERED)))
    if not 0 < amount <= MAX_AMOUNT:
        raise ActionRefused(Text("amount: Choose a number from 1 to %(max_amount)s.", max_amount=MAX_AMOUNT))
    if not started_at < ended_at <= started_at + MAX_TIME:
        raise ActionRefused(
            Text("ended_at: Choose a time after started_at, at most %(days)s days later.", days=MAX_TIME.days)
        )
    if ended_at > datetime.now(UTC) + timedelta(days=1):
        raise ActionRefused(Text("ended_at: Choose a time that has passed."))
    with booking(tenant.pk) as locked, connection.cursor() as cursor:
        known = MeteredUsage.objects.for_tenant(locked).filter(reference=reference).first()
        if known is not None:
            values = (known.component, known.model, known.amount, known.started_at, known.ended_at)
            if values != (component, model, amount, started_at, ended_at):
                raise Conflict(
                    Text("reference: %(reference)s was already recorded with other values.", reference=reference)
                )
            return known, False
        rate = _rate(locked.pk, model, component, started_at)
        (period,) = stamps(cursor, [(locked.pk, started_at)])
        row = MeteredUsage(
            tenant=locked,
            reference=reference,
            component=component.value,
            model=model,
            amount=amount,
            started_at=started_at,
            ended_at=ended_at,
            price_id=rate.price_id,
            nano_per_million=rate.nano_per_million,
            cost_femto=metered_cost(
                component, metered_units(component, amount, started_at, ended_at), rate.nano_per_million
            ),
            invoice_period=period,
        )
        check(row)
        row.save(force_insert=True)
        audit.record("metered_usage.recorded", row, tenant_id=locked.pk, after=audit.serialize_for_audit(row))
    return row, True


def do_reverse_metered_usage(usage: MeteredUsage) -> MeteredUsage:
    """Reverse metered usage that was recorded by mistake, and return the reversal. It is reversed once.

    If its month is invoiced, the run of the next month credits it. Record the right amount with another reference.

    Raises:
        Conflict: it is a reversal itself.
    """
    with booking(usage.tenant_id) as locked, connection.cursor() as cursor:
        row = MeteredUsage.objects.for_tenant(locked).get(pk=usage.pk)
        if row.reverses_id is not None:
            raise Conflict(Text("This is a reversal. Record the usage again with another reference."))
        known: MeteredUsage | None = MeteredUsage.objects.for_tenant(locked).filter(reverses=row).first()
        if known is not None:
            return known
        (period,) = stamps(cursor, [(locked.pk, row.started_at)])
        reversal = MeteredUsage(
            **{name: getattr(row, name) for name in ("component", "model", "started_at", "ended_at", "price_id")},
            tenant=locked,
            reference=f"reversal:{row.pk}",
            amount=-row.amount,
            nano_per_million=row.nano_per_million,
            cost_femto=-row.cost_femto,
            invoice_period=period,
            reverses=row,
        )
        check(reversal)
        reversal.save(force_insert=True)
        audit.record("metered_usage.reversed", reversal, tenant_id=locked.pk, after=audit.serialize_for_audit(reversal))
    return reversal


def _rate(tenant_id: int, model: str, component: Component, at: datetime) -> Rate:
    index = PriceIndex()
    owners = Q(tenant_id=tenant_id) | Q(tenant_id=None)
    index.add(row.decode() for row in CompiledRateCard.objects.filter(owners, model=model).order_by("pk"))
    moment = (at - _EPOCH) // timedelta(microseconds=1)
    rate_card = index.find(tenant_id, model, Tier.STANDARD, moment)
    rate = None if rate_card is None else prices(rate_card, 0, moment).get(component)
    if rate is None:
        raise ActionRefused(
            Text(
                "model: %(model)s has no price for %(component)s at that time. Publish one.",
                model=model,
                component=component,
            )
        )
    return rate
