"""Actions on budgets and quotas.

A new or changed budget applies in every live gateway when its action returns, except in `pending_gateways`. In an outer
transaction it applies after the commit.
"""

from __future__ import annotations

from datetime import UTC
from functools import partial
from typing import Any

from billing.currencies.amounts import MAX_BUDGET
from billing.models import Budget
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions.common import ActionRefused, Conflict, check, locked_tenant
from tenants.keys.key_snapshots import record_change
from tenants.models import ApiKey, ChangeEventRow, Membership, Project, Tenant, User
from tenants.outbox.propagation import Pending, after_commit

CHANGEABLE = (
    *("name", "amount", "mode", "reduce_max_tokens", "temporary_increase", "increase_expires_at", "rollover_limit"),
    *("thresholds", "alert_forecast", "alerts_muted_until"),
)
MAX_THRESHOLDS = 10
MAX_THRESHOLD_PERCENT = 1000


def do_make_budget(
    tenant: Tenant,
    *,
    project: Project | None = None,
    key: ApiKey | None = None,
    member: User | None = None,
    **fields: Any,
) -> Budget:
    """Create a budget of the tenant, or of one project, key or member. Earlier usage does not count.

    Raises:
        ActionRefused: a value is wrong, or more than one of project, key and member is named.
    """
    if sum(owner is not None for owner in (project, key, member)) > 1:
        raise ActionRefused(Text("Choose one project, key or member."))
    with locked_tenant(tenant) as locked:
        _check_owner(locked, project, key, member)
        budget = Budget(tenant=locked, project=project, key=key, member=member, **fields)
        _check(budget)
        budget.save(force_insert=True)
        audit.record("budget.created", budget, tenant_id=locked.pk, after=audit.serialize_for_audit(budget))
        after_commit(record_change(locked, ChangeEventRow.ChangeType.LIMITS), partial(_report, budget))
    return budget


def do_change_budget(budget: Budget, **fields: Any) -> Budget:
    """Change a budget, including its current period. Its scope, unit and period cannot change.

    Raises:
        Conflict: it was removed. ActionRefused: a value is wrong.
    """
    if fixed := sorted(set(fields) - set(CHANGEABLE)):
        raise ActionRefused(Text("%(fixed)s cannot be changed. Create a new budget instead.", fixed=", ".join(fixed)))
    with locked_tenant(budget.tenant_id) as tenant:
        row = _active(tenant, budget)
        _check_changeable(row)
        before = audit.serialize_for_audit(row)
        for name, value in fields.items():
            setattr(row, name, value)
        _check(row)
        row.save(update_fields=list(fields))
        audit.record("budget.updated", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
        after_commit(record_change(tenant, ChangeEventRow.ChangeType.LIMITS), partial(_report, row))
    return row


def do_remove_budget(budget: Budget) -> bool:
    """Deactivate a budget. Its budget periods are retained. Return False if it was inactive."""
    with locked_tenant(budget.tenant_id) as tenant:
        row = Budget.objects.for_tenant(tenant).filter(pk=budget.pk, active=True).first()
        if row is None:
            return False
        _check_changeable(row)
        before = audit.serialize_for_audit(row)
        row.active = False
        row.save(update_fields=["active"])
        audit.record("budget.deleted", row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
        record_change(tenant, ChangeEventRow.ChangeType.LIMITS)
    return True


def _report(budget: Budget, pending: Pending) -> None:
    budget.pending_gateways = pending


def _active(tenant: Tenant, budget: Budget) -> Budget:
    row = Budget.objects.for_tenant(tenant).filter(pk=budget.pk, active=True).first()
    if row is None:
        raise Conflict(Text("This budget was removed."))
    return row


def _check_changeable(budget: Budget) -> None:
    if budget.is_balance:
        raise Conflict(Text("This budget follows the prepaid balance. Buy credit to raise it."))


def _check(budget: Budget) -> None:
    check(budget)
    amounts = budget.amount, budget.temporary_increase, budget.rollover_limit
    if min(amounts) < 0:
        raise ActionRefused(Text("The amount must not be negative."))
    if max(amounts) > MAX_BUDGET:
        raise ActionRefused(Text("The largest amount of a budget is %(max_budget)s.", max_budget=MAX_BUDGET))
    if bool(budget.temporary_increase) != (budget.increase_expires_at is not None):
        raise ActionRefused(Text("Set temporary_increase and increase_expires_at together."))
    budget.thresholds = sorted(set(budget.thresholds))
    if len(budget.thresholds) > MAX_THRESHOLDS or not all(
        0 < percent <= MAX_THRESHOLD_PERCENT for percent in budget.thresholds
    ):
        raise ActionRefused(
            Text(
                "Enter up to %(max_thresholds)s thresholds from 1 to %(max_threshold_percent)s%%.",
                max_thresholds=MAX_THRESHOLDS,
                max_threshold_percent=MAX_THRESHOLD_PERCENT,
            )
        )
    if budget.increase_expires_at is not None and budget.increase_expires_at.tzinfo is None:
        budget.increase_expires_at = budget.increase_expires_at.replace(tzinfo=UTC)
    if budget.rollover_limit and budget.period == Budget.Period.LIFETIME:
        raise ActionRefused(Text("A budget that never resets cannot roll over. Choose a daily or monthly period."))
    if budget.reduce_max_tokens and budget.unit == "requests":
        raise ActionRefused(Text("max_tokens can only be reduced for money and token budgets."))


def _check_owner(tenant: Tenant, project: Project | None, key: ApiKey | None, member: User | None) -> None:
    for row in (project, key):
        if row is not None and row.tenant_id != tenant.pk:
            raise ActionRefused(Text("%(row)s is not this tenant's.", row=row))
    if member is not None and not Membership.objects.for_tenant(tenant).filter(user=member).exists():
        raise ActionRefused(Text("%(member)s is not a member of this tenant.", member=member))
