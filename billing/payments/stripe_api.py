"""Requests to Stripe's API with its SDK: hosted payment pages, and payments with a saved payment method.

A hosted page (Checkout) offers the payment methods that the operator enabled in Stripe for the currency: cards, and in
EUR SEPA direct debit. Card numbers and bank accounts never reach the platform.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from django.conf import settings

from billing.currencies.amounts import dollars
from billing.currencies.stripe_amounts import to_stripe
from inference_worker.contract.texts import Text, text_of
from tenants.actions import ActionRefused, Conflict

if TYPE_CHECKING:
    from stripe import StripeClient

TIMEOUT_SECONDS = 20
_UNAVAILABLE = (409, 429)  # 409: the same request is running


class HostedPage(NamedTuple):
    """A page of the provider on which a tenant pays."""

    id: str
    url: str


class SavedPayment(NamedTuple):
    """A payment with a saved payment method. `status` is `succeeded`, `processing`, or needs the payer."""

    id: str
    status: str
    created: int


class Declined(ActionRefused):
    """The payment method was declined, or requires the payer."""


class Charge(NamedTuple):
    """An amount to pay, and the metadata by which its webhook books it."""

    cents: int
    currency: str
    description: str
    metadata: Mapping[str, str]


def create_page(charge: Charge, return_url: str, *, save_method: bool, idempotency_key: str) -> HostedPage:
    """Create a hosted page.

    Args:
        save_method: save the payment method for automatic top-ups.
        idempotency_key: a repeated request with the same key returns the same page.

    Raises:
        Conflict: payments are not configured, or Stripe could not be reached. ActionRefused: Stripe rejected it.
    """
    intent: dict[str, Any] = {"metadata": dict(charge.metadata), "description": charge.description}
    product = {"name": charge.description}
    price = {"currency": charge.currency.lower(), "unit_amount": _amount(charge), "product_data": product}
    params: Any = {
        "mode": "payment",
        "success_url": return_url,
        "cancel_url": return_url,
        "metadata": dict(charge.metadata),
        "payment_intent_data": intent,
        "line_items": [{"quantity": 1, "price_data": price}],
    }
    if save_method:
        params["customer_creation"] = "always"
        intent["setup_future_usage"] = "off_session"
    with _requests() as client:
        session = client.v1.checkout.sessions.create(params, {"idempotency_key": idempotency_key})
    return HostedPage(session.id, session.url or "")


def charge_saved_method(charge: Charge, customer: str, method: str, idempotency_key: str) -> SavedPayment:
    """Pay with a saved payment method, without the payer.

    Raises:
        Declined: the method was declined, or requires the payer. Conflict: Stripe could not be reached. ActionRefused:
            Stripe rejected the request.
    """
    params: Any = {
        "amount": _amount(charge),
        "currency": charge.currency.lower(),
        "customer": customer,
        "payment_method": method,
        "off_session": True,
        "confirm": True,
        "description": charge.description,
        "metadata": dict(charge.metadata),
    }
    with _requests() as client:
        intent = client.v1.payment_intents.create(params, {"idempotency_key": idempotency_key})
    return SavedPayment(intent.id, intent.status, intent.created)


def _amount(charge: Charge) -> int:
    try:
        return to_stripe(charge.cents, charge.currency)
    except ValueError as exc:
        raise ActionRefused(
            Text(
                "The payment provider cannot charge %(amount)s: %(error)s.",
                amount=dollars(charge.cents, charge.currency),
                error=text_of(exc),
            )
        ) from exc


@contextmanager
def _requests() -> Iterator[StripeClient]:
    """Provide Stripe's client, and convert its errors. A request is sent once: the caller repeats it with its key."""
    import stripe  # few processes send requests

    platform = settings.MILLRACE
    if not platform.stripe_api_key:
        raise Conflict(Text("Online payments are not configured. Contact the operator."))
    stripe.enable_telemetry = False
    client = stripe.StripeClient(
        platform.stripe_api_key,
        base_addresses={"api": platform.stripe_api_url},
        max_network_retries=0,
        http_client=stripe.RequestsClient(timeout=TIMEOUT_SECONDS),
    )
    try:
        yield client
    except stripe.APIConnectionError as exc:
        raise Conflict(Text("The payment provider could not be reached. Try again later.")) from exc
    except stripe.CardError as exc:
        raise Declined(exc.user_message or "The payment method was declined.") from exc
    except stripe.StripeError as exc:
        status = exc.http_status or 500
        if status < 400 or status >= 500 or status in _UNAVAILABLE:
            raise Conflict(Text("The payment provider is unavailable. Try again later.")) from exc
        raise ActionRefused(
            Text("The payment provider rejected the request: %(reason)s", reason=exc.user_message or status)
        ) from exc
