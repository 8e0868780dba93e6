"""Actions on the events of payment providers: record, and remove old ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from billing.models import PaymentEvent
from billing.payments.recording import Received, do_record_payment
from billing.payments.top_up_results import fail_top_up
from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

RETENTION = timedelta(days=90)


class ProviderEvent(NamedTuple):
    """An event as a provider reports it. Without payments it books nothing, and `detail` is the reason if known."""

    provider: str
    reference: str  # the provider's identifier
    event_type: str
    created_at: datetime
    payments: tuple[Received, ...] = ()
    detail: str = ""
    failed_payment: str = ""  # the reference of a payment that will not succeed
    failed_tenant: str = ""  # the slug of its payer
    readable: bool = True


def do_record_event(event: ProviderEvent) -> PaymentEvent:
    """Book the payments of an event and store its result.

    Payments are booked once, so a repeated event is booked again without effect. A failed event changes if the
    provider sends it again and it succeeds; other results never change.

    Raises:
        ActionRefused: a payment could not be booked, or may be of a top-up that is being requested. The event is
            stored as failed.
    """
    try:
        for payment in event.payments:
            do_record_payment(payment)
        if event.failed_payment:
            fail_top_up(event.failed_payment, event.failed_tenant, event.detail)
    except ActionRefused as exc:
        _store(event, PaymentEvent.Status.FAILED, text_of(exc))
        raise
    done = PaymentEvent.Status.HANDLED if event.payments else PaymentEvent.Status.IGNORED
    return _store(event, done if event.readable else PaymentEvent.Status.FAILED, event.detail)


def _store(event: ProviderEvent, status: PaymentEvent.Status, detail: str) -> PaymentEvent:
    result = {"status": status, "detail": detail}
    with all_tenants_scope(BypassReason.BILLING):
        row, _ = PaymentEvent.objects.get_or_create(
            provider=event.provider,
            reference=event.reference,
            defaults=result | {"event_type": event.event_type, "created_at": event.created_at},
        )
        PaymentEvent.objects.filter(pk=row.pk, status=PaymentEvent.Status.FAILED).update(**result)
        row.refresh_from_db()
    return row


def do_dismiss_event(event: PaymentEvent) -> PaymentEvent:
    """Mark a failed event as ignored, after its payment was recorded manually or needs no booking.

    Raises:
        Conflict: it did not fail, or it was handled since.
    """
    with all_tenants_scope(BypassReason.BILLING):
        row = PaymentEvent.objects.select_for_update().get(pk=event.pk)
        if row.status != PaymentEvent.Status.FAILED:
            raise Conflict(Text("Only failed events can be dismissed."))
        row.status = PaymentEvent.Status.IGNORED
        row.save(update_fields=["status"])
        audit.record("payment_event.dismissed", row, tenant_id=None, after={"reference": row.reference})
    return row


def do_purge_events(now: datetime | None = None) -> int:
    """Remove events that were received before the retention time. Return how many."""
    before = (now or datetime.now(UTC)) - RETENTION
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        return PaymentEvent.objects.filter(received_at__lt=before).delete()[0]
