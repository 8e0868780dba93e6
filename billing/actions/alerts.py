"""Actions on budget alerts."""

from __future__ import annotations

from datetime import UTC, datetime

from billing.models import BudgetAlert
from tenants import audit
from tenants.actions.common import Conflict, locked_tenant


def do_acknowledge_alert(alert: BudgetAlert) -> bool:
    """Record that a user has seen the alert. Returns False if it was acknowledged before.

    Raises:
        Conflict: the alert no longer exists.
    """
    with locked_tenant(alert.tenant_id) as tenant:
        row = BudgetAlert.objects.for_tenant(tenant).filter(pk=alert.pk).select_related("budget").first()
        if row is None:
            raise Conflict("This alert no longer exists.")
        if row.acknowledged_at is not None:
            return False
        before = audit.serialize_for_audit(row)
        row.acknowledged_at, row.acknowledged_by = datetime.now(UTC), audit.current_actor().name[:254]
        row.save(update_fields=["acknowledged_at", "acknowledged_by"])
        after = audit.serialize_for_audit(row)
        audit.record("budget_alert.acknowledged", row, tenant_id=tenant.pk, before=before, after=after)
    return True
