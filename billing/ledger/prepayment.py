"""The gate of prepaid tenants: a hard budget whose limit follows the balance.

The limit is what the budget has used, plus what the balance still pays. Settlement moves usage from the one to the
other and does not change the limit, so the limit changes only with the ledger, and when credit starts or expires.
`booking` updates it in the transaction that changes the ledger, and stores the time of the next start or expiry.

The fees of commitments and the credit that they will grant count before the month is drafted.

Credit counts from its start. After its expiration it counts only for the uninvoiced usage of its months, which it still
pays.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from django.db import connection

from billing.currencies.amounts import FEMTO_A_NANO, MAX_BALANCE, PPM, femto_a_cent
from billing.ledger.commitments import expected_commitments
from billing.ledger.ledger import balance
from billing.models import Account, BillingProfile, Budget, BudgetPeriod
from billing.pricing.currencies import currency_of
from billing.taxes.taxes import NoTaxRule, tax_for
from tenants.keys.key_snapshots import record_change
from tenants.models import ChangeEventRow, Tenant

NAME = "Prepaid balance"

# Unused credit, with the credit that commitments will grant.
_REST = """
    SELECT g.id, g.priority, g.created_at, g.starts_at, g.expires_at,
        g.grant_type = 'prepaid' AND NOT g.is_taxed AS is_payment, g.nano - coalesce(sum(a.nano), 0) AS nano
    FROM billing_creditgrant g LEFT JOIN billing_creditapplication a ON a.grant_id = g.id
    WHERE g.tenant_id = %(tenant)s GROUP BY g.id
    UNION ALL
    SELECT NULL, priority, starts_at, starts_at, expires_at, false, nano
    FROM jsonb_to_recordset(%(expected)s::jsonb)
        AS expected (priority smallint, starts_at timestamptz, expires_at timestamptz, nano bigint)
"""
_DUE = """
    SELECT p.id, p.starts_at, p.ends_at FROM billing_period p WHERE p.entity_id = %(entity)s AND NOT EXISTS (
        SELECT FROM billing_invoice i WHERE i.tenant_id = %(tenant)s AND i.period_id = p.id
            AND i.invoice_type = 'invoice' AND i.state NOT IN ('draft', 'void'))
"""
# One statement, so that all sums are of one snapshot. Usage counts from the billing periods without a final invoice.
_SUMS = f"""
WITH rest AS ({_REST}), active AS (
    SELECT * FROM rest WHERE starts_at <= %(now)s AND (expires_at IS NULL OR expires_at > %(now)s)
), due AS ({_DUE}), uninvoiced AS (
    SELECT cost_femto FROM billing_usageevent
    WHERE tenant_id = %(tenant)s AND invoice_period = ANY(ARRAY(SELECT id FROM due))
    UNION ALL
    SELECT cost_femto FROM billing_adjustment
    WHERE tenant_id = %(tenant)s AND invoice_period = ANY(ARRAY(SELECT id FROM due))
    UNION ALL
    SELECT cost_femto FROM billing_meteredusage
    WHERE tenant_id = %(tenant)s AND invoice_period = ANY(ARRAY(SELECT id FROM due))
    UNION ALL
    SELECT cents * %(femto_a_cent)s::numeric FROM billing_oneoffline
    WHERE tenant_id = %(tenant)s AND invoice_id IS NULL AND month <= %(month)s
    UNION ALL
    SELECT %(fees)s * %(femto_a_cent)s::numeric
)
SELECT
    (SELECT coalesce(sum(nano), 0) FROM active WHERE is_payment),
    (SELECT coalesce(sum(nano), 0) FROM active WHERE NOT is_payment),
    (SELECT coalesce(sum(cost_femto), 0) FROM uninvoiced),
    (SELECT coalesce(sum(used), 0) FROM billing_budgetperiod WHERE budget_id = %(budget)s),
    EXISTS (SELECT FROM rest WHERE nano > 0 AND expires_at <= %(now)s),
    (SELECT min(moment) FROM (
        SELECT starts_at AS moment FROM rest WHERE nano > 0 UNION ALL SELECT expires_at FROM rest WHERE nano > 0
    ) change WHERE moment > %(now)s)
"""  # noqa: S608  (constants)
# The uninvoiced usage that credit can pay, by billing period.
_DUE_USAGE = f"""
WITH due AS ({_DUE}), uninvoiced AS (
    SELECT invoice_period, cost_femto FROM billing_usageevent
    WHERE tenant_id = %(tenant)s AND invoice_period = ANY(ARRAY(SELECT id FROM due))
    UNION ALL
    SELECT invoice_period, cost_femto FROM billing_adjustment
    WHERE tenant_id = %(tenant)s AND invoice_period = ANY(ARRAY(SELECT id FROM due))
    UNION ALL
    SELECT invoice_period, cost_femto FROM billing_meteredusage
    WHERE tenant_id = %(tenant)s AND invoice_period = ANY(ARRAY(SELECT id FROM due))
)
SELECT due.starts_at, due.ends_at, sum(cost_femto)
FROM uninvoiced JOIN due ON due.id = invoice_period GROUP BY due.id, due.starts_at, due.ends_at ORDER BY due.starts_at
"""  # noqa: S608  (constants)
_GRANTS = f"""
SELECT is_payment, starts_at, expires_at, nano FROM ({_REST}) rest WHERE nano > 0 AND starts_at <= %(now)s
ORDER BY is_payment, priority, expires_at NULLS LAST, created_at, id
"""  # noqa: S608  (constants)


def update_gate(tenant: Tenant, profile: BillingProfile, now: datetime | None = None) -> None:
    """Set the limit of a prepaid tenant's gate to its balance, or remove the gate of another tenant."""
    gate = Budget.objects.for_tenant(tenant).filter(is_balance=True, active=True).first()
    if not profile.is_prepaid and gate is None:
        return
    if gate is None:
        gate = Budget(
            tenant=tenant,
            name=NAME,
            unit=BudgetPeriod.Unit.MONEY,
            period=Budget.Period.LIFETIME,
            amount=0,
            alert_forecast=False,
            is_balance=True,
        )
        gate.save(force_insert=True)
    before = gate.amount, gate.active
    gate.active = profile.is_prepaid
    if gate.active:
        found = _balance(tenant, profile, gate.pk, now or datetime.now(UTC))
        gate.amount = min(max(0, (found.used + found.available) // FEMTO_A_NANO), MAX_BALANCE)
        if profile.balance_changes_at != found.changes_at:
            profile.balance_changes_at = found.changes_at
            profile.save(update_fields=["balance_changes_at"])
    if (gate.amount, gate.active) != before or gate.amount == 0:
        gate.save(update_fields=["amount", "active"])
        record_change(tenant, ChangeEventRow.ChangeType.LIMITS)


def available_nano(tenant: Tenant, profile: BillingProfile, now: datetime) -> int:
    """Return the usage that the balance still pays, in nano-USD before tax. Call inside `booking`."""
    return _balance(tenant, profile, None, now).available // FEMTO_A_NANO


class _Balance(NamedTuple):
    """The usage that the balance still pays, and what the budget has used, in femto-USD before tax."""

    available: int
    used: int
    changes_at: datetime | None  # the next time at which credit starts or expires, or a month of commitments begins


def _balance(tenant: Tenant, profile: BillingProfile, budget_id: int | None, now: datetime) -> _Balance:
    month = f"{now.astimezone(ZoneInfo(profile.entity.time_zone)):%Y-%m}"
    parameters = {"tenant": tenant.pk, "entity": profile.entity_id, "budget": budget_id, "now": now, "month": month}
    parameters["femto_a_cent"] = femto_a_cent(currency_of(tenant.pk))
    commitments = expected_commitments(profile, now)
    parameters["fees"] = commitments.fees
    parameters["expected"] = json.dumps([grant._asdict() for grant in commitments.grants], default=str)
    with connection.cursor() as cursor:
        cursor.execute(_SUMS, parameters)
        *sums, has_expired, changes_at = cursor.fetchone()
    changes_at = min((at for at in (changes_at, commitments.changes_at) if at is not None), default=None)
    payments, other, uninvoiced, used = map(int, sums)
    money = payments - balance(tenant.pk, Account.DEPOSITS) - balance(tenant.pk, Account.RECEIVABLE)
    taxed = PPM + _tax_rate(profile, now) if money > 0 or has_expired else PPM
    if money > 0:
        money = money * PPM // taxed
    if has_expired:
        uninvoiced -= min(uninvoiced, _paid_by_expired(parameters, taxed, now))
    return _Balance((money + other) * FEMTO_A_NANO - uninvoiced, used, changes_at)


def _paid_by_expired(parameters: dict[str, Any], taxed: int, now: datetime) -> int:
    """Return the uninvoiced usage that expired credit pays, in femto-USD: credit is applied as on an invoice.

    Args:
        taxed: the amount with tax of PPM units before tax. Prepaid credit that is not taxed yet pays the tax as well.
    """
    with connection.cursor() as cursor:
        cursor.execute(_GRANTS, parameters)
        grants = [
            [int(nano) * FEMTO_A_NANO * PPM // (taxed if is_payment else PPM), starts_at, expires_at]
            for is_payment, starts_at, expires_at, nano in cursor.fetchall()
        ]
        cursor.execute(_DUE_USAGE, parameters)
        months = cursor.fetchall()
    paid = 0
    for month_start, month_end, usage in months:
        rest = int(usage)
        for grant in grants:
            left, starts_at, expires_at = grant
            if starts_at < month_end and (expires_at is None or expires_at > month_start):
                part = max(0, min(rest, left))
                grant[0] -= part
                rest -= part
                paid += part if expires_at is not None and expires_at <= now else 0
    return paid


def _tax_rate(profile: BillingProfile, now: datetime) -> int:
    """Return the rate of the tenant's tax. Without a matching rule no invoice is issued, so no tax is expected."""
    entity = profile.entity
    try:
        rule: dict[str, Any] = tax_for(
            entity.pk, entity.party(), profile.party(), now.astimezone(ZoneInfo(entity.time_zone)).date()
        )
    except NoTaxRule:
        return 0
    return int(rule["rate_ppm"])
