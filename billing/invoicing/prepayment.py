"""The gate of prepaid tenants: a hard budget whose limit follows the balance.

The limit is what the budget has used, plus the usage at list prices that the balance still pays at the tenant's own
prices. The balance is the credit, less what `month_charges` computes for the months without a final invoice. It changes
with the ledger, when credit starts or expires, and when a month begins. `booking` updates the limit in the transaction
that changes the ledger, and stores the time of the next change.

Settlement moves usage from the balance to what the budget has used. This never makes the limit too high: the balance is
converted at the highest price that usage may have. If usage may have a lower price, the limit is computed again
every REFRESH until the balance is used up.

The credit that commitments will grant counts before the month is drafted.

Credit counts from its start. After its expiration it counts only for the uninvoiced usage of its months, which it still
pays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from django.db import connection

from billing.currencies.amounts import FEMTO_A_NANO, MAX_BALANCE, PPM
from billing.invoicing.due_months import DueMonth, find_due_months, store_due_usage
from billing.invoicing.term_months import find_affordable
from billing.ledger.commitments import expected_grants, has_later_commitments
from billing.ledger.ledger import balance
from billing.models import Account, BillingProfile, Budget, BudgetPeriod
from billing.taxes.taxes import NoTaxRule, tax_for
from tenants.keys.key_snapshots import record_change
from tenants.models import ChangeEventRow, Tenant

NAME = "Prepaid balance"
REFRESH = timedelta(seconds=15)

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
_SUMS = f"""
WITH rest AS ({_REST}), active AS (
    SELECT * FROM rest WHERE starts_at <= %(now)s AND (expires_at IS NULL OR expires_at > %(now)s)
)
SELECT
    (SELECT coalesce(sum(nano), 0) FROM active WHERE is_payment),
    (SELECT coalesce(sum(nano), 0) FROM active WHERE NOT is_payment),
    EXISTS (SELECT FROM rest WHERE nano > 0 AND expires_at <= %(now)s),
    (SELECT min(moment) FROM (
        SELECT starts_at AS moment FROM rest WHERE nano > 0 UNION ALL SELECT expires_at FROM rest WHERE nano > 0
    ) change WHERE moment > %(now)s)
"""  # noqa: S608  (constants)
_GRANTS = f"""
SELECT is_payment, starts_at, expires_at, nano FROM ({_REST}) rest WHERE nano > 0 AND starts_at <= %(now)s
ORDER BY is_payment, priority, expires_at NULLS LAST, created_at, id
"""  # noqa: S608  (constants)
# NOTE: the lock delays settlements, which change the budget and the usage together, until the limit is stored. So the
# usage that is read afterwards is the usage that the budget has counted.
_USED = """
SELECT coalesce(sum(used), 0)
FROM (SELECT used FROM billing_budgetperiod WHERE budget_id = %s FOR NO KEY UPDATE) period
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
        changes_at = _set_limit(gate, tenant, profile, now or datetime.now(UTC))
        if profile.balance_changes_at != changes_at:
            profile.balance_changes_at = changes_at
            profile.save(update_fields=["balance_changes_at"])
    if (gate.amount, gate.active) != before or gate.amount == 0:
        gate.save(update_fields=["amount", "active"])
        record_change(tenant, ChangeEventRow.ChangeType.LIMITS)


def _set_limit(gate: Budget, tenant: Tenant, profile: BillingProfile, now: datetime) -> datetime | None:
    """Set the limit to what was used and what the balance still pays. Return when it changes next."""
    store_due_usage(tenant, profile, now)  # before the lock, since the events of a month may be many
    with connection.cursor() as cursor:
        cursor.execute(_USED, [gate.pk])
        used = int(cursor.fetchone()[0])
    found = _balance(tenant, profile, now)
    usage = find_affordable(found.available, tenant.pk, found.months, now)
    gate.amount = min(max(0, (used + usage.femto) // FEMTO_A_NANO), MAX_BALANCE)
    refresh_at = now + REFRESH if found.available > 0 and not usage.is_exact else None
    changes = [found.changes_at, usage.changes_at, refresh_at]
    return min((at for at in changes if at is not None), default=None)


def available_nano(tenant: Tenant, profile: BillingProfile, now: datetime) -> int:
    """Return what the balance still pays, in nano-USD before tax at the tenant's own prices."""
    return _balance(tenant, profile, now).available // FEMTO_A_NANO


class _Balance(NamedTuple):
    """What the balance still pays, in femto-USD before tax at the tenant's own prices."""

    available: int
    months: Sequence[DueMonth]
    changes_at: datetime | None  # the next time at which credit starts or expires, or a month of commitments begins


def _balance(tenant: Tenant, profile: BillingProfile, now: datetime) -> _Balance:
    months = find_due_months(tenant, profile, now)
    begun = [month.period for month in months if month.period.starts_at <= now]
    expected = json.dumps([grant._asdict() for grant in expected_grants(begun, tenant.pk)], default=str)
    parameters: dict[str, Any] = {"tenant": tenant.pk, "now": now, "expected": expected}
    with connection.cursor() as cursor:
        cursor.execute(_SUMS, parameters)
        payments, other, has_expired, credit_changes_at = cursor.fetchone()
    uninvoiced = sum(month.usage + month.other - month.corrected for month in months)
    money = int(payments) - balance(tenant.pk, Account.DEPOSITS) - balance(tenant.pk, Account.RECEIVABLE)
    taxed = PPM + _tax_rate(profile, now) if money > 0 or has_expired else PPM
    if money > 0:
        money = money * PPM // taxed
    if has_expired:
        uninvoiced -= _paid_by_expired(parameters, months, taxed)
    ends = [
        period.ends_at for period in begun if now < period.ends_at and has_later_commitments(tenant.pk, period.label)
    ]
    changes_at = min((at for at in (credit_changes_at, *ends) if at is not None), default=None)
    return _Balance((money + int(other)) * FEMTO_A_NANO - uninvoiced, months, changes_at)


def _paid_by_expired(parameters: dict[str, Any], months: Iterable[DueMonth], taxed: int) -> int:
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
    paid = 0
    for month in months:
        rest = month.usage
        for grant in grants:
            left, starts_at, expires_at = grant
            if starts_at < month.period.ends_at and (expires_at is None or expires_at > month.period.starts_at):
                part = max(0, min(rest, left))
                grant[0] -= part
                rest -= part
                paid += part if expires_at is not None and expires_at <= parameters["now"] else 0
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
