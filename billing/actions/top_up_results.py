"""Results of automatic top-ups, from the response of the provider or from its webhook."""

from __future__ import annotations

from billing.actions.common import booking
from billing.models import BillingProfile, TopUp
from tenants import audit
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope


def fail_top_up(reference: str, detail: str) -> None:
    """Mark a pending top-up as failed after the provider reported that its payment failed."""
    with all_tenants_scope(BypassReason.BILLING):
        row = TopUp.objects.all_tenants().filter(reference=reference, state=TopUp.State.PENDING).first()
    if row is not None:
        end_top_up(row, TopUp.State.FAILED, detail=detail, reference=reference)


def end_top_up(top_up: TopUp, state: TopUp.State, *, detail: str = "", reference: str = "") -> None:
    """Store the result of a request, unless it has one. A failure stops automatic top-ups until they are set again."""
    with booking(top_up.tenant_id):
        row = TopUp.objects.for_tenant(top_up.tenant_id).get(pk=top_up.pk)
        if row.state != TopUp.State.PENDING:
            return
        row.state, row.detail, row.reference = state, detail[:200], reference
        row.save(update_fields=["state", "detail", "reference"])
        if state == TopUp.State.FAILED:
            BillingProfile.objects.for_tenant(top_up.tenant_id).update(top_up_below=None, top_up_cents=None)
            audit.record(
                "top_up.failed", row, tenant_id=row.tenant_id, after={"cents": row.cents, "detail": row.detail}
            )
