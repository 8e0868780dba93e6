"""Actions on budget alerts."""

from __future__ import annotations

from billing.models import BudgetAlert
from tenants.actions.common import acknowledge, locked_tenant


def do_acknowledge_alert(alert: BudgetAlert) -> bool:
    """Record that a user has seen the alert. Returns False if it was acknowledged before.

    Raises:
        Conflict: the alert no longer exists.
    """
    with locked_tenant(alert.tenant_id) as tenant:
        found = BudgetAlert.objects.for_tenant(tenant).filter(pk=alert.pk).select_related("budget")
        return acknowledge(found, tenant, "budget_alert.acknowledged")
