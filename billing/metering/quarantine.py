"""Actions on usage messages in quarantine: settle again, or dismiss."""

from __future__ import annotations

from datetime import UTC, datetime

from billing.metering.ingest import UsageMessage, settle
from billing.models import UsageQuarantine
from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope


def do_replay_quarantined(pk: int) -> UsageQuarantine:
    """Settle a message again after its cause was fixed, such as a missing price or partition.

    Call it outside of any transaction. If it fails halfway, the message may be settled and still in quarantine; run it
    again.

    Raises: Conflict if it was handled before; ActionRefused if it still cannot be settled.
    """
    row = _open(pk)
    result = settle([UsageMessage(row.stream_id, bytes(row.payload))])
    if not (result.settled or result.repeated):
        raise ActionRefused(Text("The record still cannot be settled: %(detail)s.", detail=row.detail))
    return _resolve(row, "quarantine.replayed", {})


def do_dismiss_quarantined(pk: int, reason: str) -> UsageQuarantine:
    """Dismiss a message, so that it is never settled. The row is retained, with the reason in the audit log.

    Raises: Conflict if it was handled before; ActionRefused without a reason.
    """
    if not reason.strip() or len(reason) > 200:
        raise ActionRefused(Text("Enter a reason of up to 200 characters."))
    return _resolve(_open(pk), "quarantine.dismissed", {"why": reason.strip()})


def _open(pk: int) -> UsageQuarantine:
    with all_tenants_scope(BypassReason.BILLING):
        row = UsageQuarantine.objects.filter(pk=pk, resolved_at__isnull=True).first()
    if row is None:
        raise Conflict(Text("This record is no longer in quarantine."))
    return row


def _resolve(row: UsageQuarantine, action: str, more: dict[str, str]) -> UsageQuarantine:
    before = audit.serialize_for_audit(row)
    row.resolved_at = datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        open_still = UsageQuarantine.objects.filter(pk=row.pk, resolved_at__isnull=True)
        if not open_still.update(resolved_at=row.resolved_at):
            raise Conflict(Text("This record was already handled by another operator."))
        audit.record(action, row, tenant_id=None, before=before, after=audit.serialize_for_audit(row) | more)
    return row
