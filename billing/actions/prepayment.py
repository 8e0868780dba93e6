"""The gate of prepaid tenants: a hard budget whose limit follows the balance.

The limit is what the budget has used, plus what the balance still pays. Settlement moves usage from the one to the
other and does not change the limit, so the limit changes only with the ledger. `booking` updates it in the transaction
that changes the ledger.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from django.db import connection

from billing.amounts import FEMTO_A_NANO, MAX_BUDGET, PPM
from billing.invoicing.taxes import NoTaxRule, tax_for
from billing.ledger import balance
from billing.models import Account, BillingProfile, Budget, BudgetPeriod
from tenants.keys.key_snapshots import record_change
from tenants.models import ChangeEventRow, Tenant

NAME = "Prepaid balance"

# One statement, so that all sums are of one snapshot. Usage counts from the billing periods without a final invoice.
_SUMS = """
WITH rest AS (
    SELECT g.grant_type = 'prepaid' AND NOT g.is_taxed AS is_payment, g.nano - coalesce(sum(a.nano), 0) AS nano
    FROM billing_creditgrant g LEFT JOIN billing_creditapplication a ON a.grant_id = g.id
    WHERE g.tenant_id = %(tenant)s AND g.starts_at <= %(now)s AND (g.expires_at IS NULL OR g.expires_at > %(now)s)
    GROUP BY g.id
), due AS (
    SELECT p.id FROM billing_period p WHERE p.entity_id = %(entity)s AND NOT EXISTS (
        SELECT FROM billing_invoice i WHERE i.tenant_id = %(tenant)s AND i.period_id = p.id
            AND i.invoice_type = 'invoice' AND i.state NOT IN ('draft', 'void'))
), uninvoiced AS (
    SELECT cost_femto FROM billing_usageevent
    WHERE tenant_id = %(tenant)s AND invoice_period = ANY(ARRAY(SELECT id FROM due))
    UNION ALL
    SELECT cost_femto FROM billing_adjustment
    WHERE tenant_id = %(tenant)s AND invoice_period = ANY(ARRAY(SELECT id FROM due))
    UNION ALL
    SELECT cost_femto FROM billing_meteredusage
    WHERE tenant_id = %(tenant)s AND invoice_period = ANY(ARRAY(SELECT id FROM due))
    UNION ALL
    SELECT cents * 10000000000000::numeric FROM billing_oneoffline
    WHERE tenant_id = %(tenant)s AND invoice_id IS NULL AND month <= %(month)s
)
SELECT
    (SELECT coalesce(sum(nano), 0) FROM rest WHERE is_payment),
    (SELECT coalesce(sum(nano), 0) FROM rest WHERE NOT is_payment),
    (SELECT coalesce(sum(cost_femto), 0) FROM uninvoiced),
    (SELECT coalesce(sum(used), 0) FROM billing_budgetperiod WHERE budget_id = %(budget)s)
"""


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
        available, used = _balance(tenant, profile, gate.pk, now or datetime.now(UTC))
        gate.amount = min(max(0, (used + available) // FEMTO_A_NANO), MAX_BUDGET)
    if (gate.amount, gate.active) != before or gate.amount == 0:
        gate.save(update_fields=["amount", "active"])
        record_change(tenant, ChangeEventRow.ChangeType.LIMITS)


def available_nano(tenant: Tenant, profile: BillingProfile, now: datetime) -> int:
    """Return the usage that the balance still pays, in nano-USD before tax. Call inside `booking`."""
    return _balance(tenant, profile, None, now)[0] // FEMTO_A_NANO


def _balance(tenant: Tenant, profile: BillingProfile, budget_id: int | None, now: datetime) -> tuple[int, int]:
    """Return the usage that the balance still pays, and what the budget has used, in femto-USD before tax."""
    month = f"{now.astimezone(ZoneInfo(profile.entity.time_zone)):%Y-%m}"
    parameters = {"tenant": tenant.pk, "entity": profile.entity_id, "budget": budget_id, "now": now, "month": month}
    with connection.cursor() as cursor:
        cursor.execute(_SUMS, parameters)
        payments, other, uninvoiced, used = (int(value) for value in cursor.fetchone())
    money = payments - balance(tenant.pk, Account.DEPOSITS) - balance(tenant.pk, Account.RECEIVABLE)
    if money > 0:
        money = money * PPM // (PPM + _tax_rate(profile, now))
    return (money + other) * FEMTO_A_NANO - uninvoiced, used


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
