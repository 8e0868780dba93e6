"""Verbs on usage records in quarantine: settle one again, or decide that it shall not count."""

from __future__ import annotations

from datetime import UTC, datetime

from billing.metering.ingest import UsageMessage, settle
from billing.models import UsageQuarantine
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope


def do_replay_quarantined(pk: int) -> UsageQuarantine:
    """Settle the record after all, now that what was wrong is mended: a price is there, or the month's partition.

    Call it outside of any transaction. If it ends half-way the record is settled and still here; once more is no harm.

    Raises:
        Conflict: nobody waits for it any more. ActionRefused: it cannot be settled as things are.
    """
    row = _open(pk)
    result = settle([UsageMessage(row.stream_id, bytes(row.payload))])
    if not (result.settled or result.repeated):
        raise ActionRefused(f"The record still cannot be settled: {row.detail}.")
    return _resolve(row, "quarantine.replayed", {})


def do_dismiss_quarantined(pk: int, why: str) -> UsageQuarantine:
    """Decide that the record never counts. It is kept, with the reason in the audit log.

    Raises:
        Conflict: nobody waits for it any more. ActionRefused: there is no reason.
    """
    if not why.strip() or len(why) > 200:
        raise ActionRefused("Enter a reason of up to 200 characters.")
    return _resolve(_open(pk), "quarantine.dismissed", {"why": why.strip()})


def _open(pk: int) -> UsageQuarantine:
    with all_tenants_scope(BypassReason.BILLING):
        row = UsageQuarantine.objects.filter(pk=pk, resolved_at__isnull=True).first()
    if row is None:
        raise Conflict("This record is no longer in quarantine.")
    return row


def _resolve(row: UsageQuarantine, verb: str, more: dict[str, str]) -> UsageQuarantine:
    before = audit.described(row)
    row.resolved_at = datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        open_still = UsageQuarantine.objects.filter(pk=row.pk, resolved_at__isnull=True)
        if not open_still.update(resolved_at=row.resolved_at):
            raise Conflict("This record was already handled by another operator.")
        audit.record(verb, row, tenant_id=None, before=before, after=audit.described(row) | more)
    return row
