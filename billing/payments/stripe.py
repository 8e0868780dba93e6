"""Webhooks of Stripe: payments, refunds and disputes. Its SDK checks the signature.

The metadata of a payment intent or checkout session name the payer: `invoice` (a number) or `tenant` (a slug), and
`credit` if the payment buys credit. A refund or dispute names its payment, so its metadata may be empty.

Events may arrive repeatedly and in any order. Every booking therefore has a reference that is computed from the
identifiers in the event, and an event that reverses a refund also books that refund.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from billing.currencies.amounts import MAX_CENTS
from billing.currencies.iso_codes import CURRENCIES
from billing.currencies.stripe_amounts import from_stripe
from billing.payments import NotGenuine, Unreadable, buys_credit
from billing.payments.events import ProviderEvent
from billing.payments.recording import Received
from inference_worker.contract.texts import Text, text_of

TOLERANCE = 300  # seconds from the signature's time to the local clock
_ID = Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{1,150}\Z")]


class _Unused(Exception):
    """The event is valid and books nothing. The message is for operators."""


class _PaymentIntent(msgspec.Struct):
    id: _ID
    currency: str
    amount_received: int
    created: int
    latest_charge: _ID | None = None
    customer: _ID | None = None
    payment_method: _ID | None = None
    metadata: dict[str, str] | None = None


class _PaymentError(msgspec.Struct):
    message: str | None = None


class _FailedIntent(msgspec.Struct):
    id: _ID
    last_payment_error: _PaymentError | None = None
    metadata: dict[str, str] | None = None


class _CheckoutSession(msgspec.Struct):
    id: _ID
    created: int
    payment_status: str
    currency: str | None = None
    amount_total: int | None = None
    payment_intent: _ID | None = None
    metadata: dict[str, str] | None = None


class _Refund(msgspec.Struct):
    id: _ID
    amount: int
    currency: str
    created: int
    charge: _ID | None = None
    payment_intent: _ID | None = None
    status: str | None = None
    metadata: dict[str, str] | None = None


class _Refunds(msgspec.Struct):
    data: list[_Refund]


class _Charge(msgspec.Struct):
    id: _ID
    refunds: _Refunds | None = None  # included until version 2022-11-15 of Stripe's API


class _BalanceTransaction(msgspec.Struct):
    amount: int
    currency: str


class _Dispute(msgspec.Struct):
    id: _ID
    amount: int
    currency: str
    created: int
    charge: _ID | None = None
    payment_intent: _ID | None = None
    balance_transactions: list[_BalanceTransaction] = []


class _Data(msgspec.Struct):
    object: msgspec.Raw


class _Event(msgspec.Struct):
    id: _ID
    type: _ID
    created: int
    data: _Data


class Stripe:
    """A provider whose messages are signed with a shared secret."""

    name = "stripe"

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def event(self, body: bytes, headers: Mapping[str, str]) -> ProviderEvent:
        self._check(body, headers.get("Stripe-Signature", ""))
        message: _Event = _decode_message(body, _Event)
        event = ProviderEvent(self.name, message.id, message.type, _time(message.created))
        if message.type in _FAILURES:
            intent: _FailedIntent = _decode_message(message.data.object, _FailedIntent)
            reason = intent.last_payment_error and intent.last_payment_error.message
            tenant = (intent.metadata or {}).get("tenant", "")
            detail = reason or Text("The payment was not made.")
            return event._replace(failed_payment=intent.id, failed_tenant=tenant, detail=detail)
        if message.type not in _READERS:
            return event
        object_type, read = _READERS[message.type]
        try:
            return event._replace(payments=tuple(read(_decode_message(message.data.object, object_type), event)))
        except _Unused as exc:
            return event._replace(detail=text_of(exc))
        except Unreadable as exc:
            return event._replace(detail=text_of(exc), readable=False)

    def _check(self, body: bytes, header: str) -> None:
        from stripe import SignatureVerificationError, WebhookSignature  # few processes receive events

        try:
            WebhookSignature.verify_header(body, header, self._secret, TOLERANCE)
        except (SignatureVerificationError, ValueError, TypeError) as exc:  # the last two: not UTF-8, not ASCII
            raise NotGenuine from exc


def _payment(item: _PaymentIntent, event: ProviderEvent) -> list[Received]:
    cents = _cents(item.id, item.amount_received, item.currency)
    payer = _payer(item.metadata)
    if (item.metadata or {}).get("save_method") == "true" and item.customer and item.payment_method:
        payer |= {"customer": item.customer, "method": item.payment_method}
    payer |= {"charge": item.latest_charge or "", "currency": item.currency.upper()}
    return [Received(event.provider, item.id, cents, _time(item.created), **payer)]


def _session(item: _CheckoutSession, event: ProviderEvent) -> list[Received]:
    """Return the payment of the session's payment intent, whose own event has the same reference."""
    if item.payment_status != "paid":
        text = Text("The checkout session has the payment status %(status)s.", status=repr(item.payment_status))
        raise _Unused(text)
    if item.payment_intent is None:
        raise _Unused(Text("The checkout session has no payment intent."))
    cents = _cents(item.id, item.amount_total or 0, item.currency or "")
    payer = _payer(item.metadata) | {"currency": (item.currency or "").upper()}
    return [Received(event.provider, item.payment_intent, cents, event.created_at, **payer)]


def _charge(item: _Charge, event: ProviderEvent) -> list[Received]:
    if item.refunds is None:
        raise _Unused(Text("The charge does not include its refunds. Their own events book them."))
    return [payment for refund in item.refunds.data for payment in _refund(refund, event)]


def _refund(item: _Refund, event: ProviderEvent) -> list[Received]:
    cents = _cents(item.id, item.amount, item.currency)
    metadata = item.metadata or {}
    refund = Received(
        event.provider,
        item.id,
        -cents,
        _time(item.created),
        metadata.get("tenant", ""),
        metadata.get("invoice", ""),
        currency=item.currency.upper(),
        refund_of=item.payment_intent or item.charge or "",
    )
    if event.event_type != "refund.failed" and item.status not in ("failed", "canceled"):
        return [refund]
    return [refund, _reversal(refund, "failed", cents, event)]


def _withdrawal(item: _Dispute, event: ProviderEvent) -> list[Received]:
    cents = _cents(item.id, item.amount, item.currency)
    withdrawal = Received(event.provider, item.id, -cents, _time(item.created), note="Dispute")
    payment, currency = item.payment_intent or item.charge or "", item.currency.upper()
    return [withdrawal._replace(refund_of=payment, currency=currency)]


def _reinstatement(item: _Dispute, event: ProviderEvent) -> list[Received]:
    """Return the withdrawal and its reversal, which is smaller if a part of the amount was reinstated."""
    (withdrawal,) = _withdrawal(item, event)
    moved = [part for part in item.balance_transactions if part.currency.lower() == item.currency.lower()]
    parts = [part.amount for part in moved if part.amount > 0]
    cents = _cents(item.id, min(sum(parts) or item.amount, item.amount), item.currency)
    return [withdrawal, _reversal(withdrawal, "reinstated", cents, event)]


_READERS: dict[str, tuple[type[Any], Callable[[Any, ProviderEvent], list[Received]]]] = {
    "payment_intent.succeeded": (_PaymentIntent, _payment),
    "checkout.session.completed": (_CheckoutSession, _session),
    "checkout.session.async_payment_succeeded": (_CheckoutSession, _session),
    "charge.refunded": (_Charge, _charge),
    "charge.refund.updated": (_Refund, _refund),
    "refund.created": (_Refund, _refund),
    "refund.updated": (_Refund, _refund),
    "refund.failed": (_Refund, _refund),
    "charge.dispute.funds_withdrawn": (_Dispute, _withdrawal),
    "charge.dispute.funds_reinstated": (_Dispute, _reinstatement),
}


_FAILURES = ("payment_intent.payment_failed", "payment_intent.canceled")


def _reversal(refund: Received, name: str, cents: int, event: ProviderEvent) -> Received:
    reference, note = f"{refund.reference}:{name}", f"Reversal of {refund.reference}"
    return refund._replace(reference=reference, cents=cents, received_at=event.created_at, note=note)


def _payer(metadata: dict[str, str] | None) -> dict[str, Any]:
    given = metadata or {}
    payer = {name: given.get(name, "") for name in ("tenant", "invoice")}
    if not any(payer.values()):
        raise _Unused(Text("The metadata name no tenant or invoice."))
    return payer | {"as_credit": buys_credit(given.get("credit", ""))}


def _cents(name: str, amount: int, currency: str) -> int:
    """Return an amount of Stripe in cents."""
    if currency.upper() not in CURRENCIES:
        if not currency:
            raise _Unused(Text("%(name)s: The currency is missing.", name=name))
        text = Text("%(name)s: %(currency)s is no currency of bills.", name=name, currency=currency[:10].upper())
        raise _Unused(text)
    try:
        cents = from_stripe(amount, currency.upper())
    except ValueError as exc:
        raise Unreadable(Text("%(name)s: %(error)s", name=name, error=text_of(exc))) from exc
    if not 0 < cents <= MAX_CENTS:
        raise Unreadable(Text("%(name)s: %(amount)s is no amount", name=name, amount=str(amount)))
    return cents


def _time(created: int) -> datetime:
    try:
        return datetime.fromtimestamp(created, UTC)
    except (OverflowError, ValueError, OSError) as exc:
        raise Unreadable(Text("`created` is no time")) from exc


def _decode_message(body: bytes | msgspec.Raw, message_type: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=message_type)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise Unreadable(str(exc)) from exc
