"""Results of automatic top-ups, from the response of the provider or from its webhook."""

from __future__ import annotations

from billing.ledger.booking import booking
from billing.models import BillingProfile, TopUp
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope


def fail_top_up(reference: str, slug: str, detail: str) -> None:
    """Mark a pending top-up of a tenant as failed after the provider reported that its payment failed.

    Raises:
        Conflict: no top-up has this reference, but one of the tenant waits for the response that names it.
    """
    with all_tenants_scope(BypassReason.BILLING):
        top_ups = TopUp.objects.all_tenants().filter(state=TopUp.State.PENDING)
        is_requested = top_ups.filter(reference="", tenant__slug=slug).exists()  # first: the reference may arrive now
        row = top_ups.filter(reference=reference).first()
    if row is not None:
        end_top_up(row, TopUp.State.FAILED, detail=detail, reference=reference)
    elif is_requested:
        raise Conflict(
            Text(
                "Payment %(reference)s may be the top-up that is being requested. Send this event again.",
                reference=reference,
            )
        )


def end_top_up(top_up: TopUp, state: TopUp.State, *, detail: str = "", reference: str = "") -> None:
    """Store the result of a request, unless it has one. A failure stops automatic top-ups until they are set again."""
    with booking(top_up.tenant_id):
        row = TopUp.objects.for_tenant(top_up.tenant_id).get(pk=top_up.pk)
        if row.state != TopUp.State.PENDING:
            return
        row.state, row.detail, row.reference = state, detail, reference
        row.save(update_fields=["state", "detail", "reference"])
        if state == TopUp.State.FAILED:
            BillingProfile.objects.for_tenant(top_up.tenant_id).update(top_up_below=None, top_up_cents=None)
            audit.record(
                "top_up.failed", row, tenant_id=row.tenant_id, after={"cents": row.cents, "detail": row.detail}
            )
