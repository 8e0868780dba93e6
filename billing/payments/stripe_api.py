"""Requests to Stripe's API: hosted payment pages, and payments with a saved payment method.

A hosted page (Checkout) offers the payment methods that the operator enabled in Stripe for the currency: cards, and in
EUR SEPA direct debit. Card numbers and bank accounts never reach the platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx2
import msgspec
from django.conf import settings

from tenants.actions import ActionRefused, Conflict

TIMEOUT_SECONDS = 20


class _Failure(msgspec.Struct):
    message: str = ""
    type: str = ""
    code: str | None = None


class _Failed(msgspec.Struct):
    error: _Failure


class HostedPage(msgspec.Struct):
    """A page of the provider on which a tenant pays."""

    id: str
    url: str


class SavedPayment(msgspec.Struct):
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
    intent: dict[str, Any] = {"metadata": charge.metadata, "description": charge.description}
    fields: dict[str, Any] = {
        "mode": "payment",
        "success_url": return_url,
        "cancel_url": return_url,
        "metadata": charge.metadata,
        "payment_intent_data": intent,
        "line_items": [
            {
                "quantity": 1,
                "price_data": {
                    "currency": charge.currency.lower(),
                    "unit_amount": charge.cents,
                    "product_data": {"name": charge.description},
                },
            }
        ],
    }
    if save_method:
        fields["customer_creation"] = "always"
        intent["setup_future_usage"] = "off_session"
    return msgspec.json.decode(_post("checkout/sessions", fields, idempotency_key), type=HostedPage)


def charge_saved_method(charge: Charge, customer: str, method: str, idempotency_key: str) -> SavedPayment:
    """Pay with a saved payment method, without the payer.

    Raises:
        Declined: the method was declined, or requires the payer. Conflict: Stripe could not be reached. ActionRefused:
            Stripe rejected the request.
    """
    fields = {
        "amount": charge.cents,
        "currency": charge.currency.lower(),
        "customer": customer,
        "payment_method": method,
        "off_session": True,
        "confirm": True,
        "description": charge.description,
        "metadata": charge.metadata,
    }
    return msgspec.json.decode(_post("payment_intents", fields, idempotency_key), type=SavedPayment)


def _post(path: str, fields: Mapping[str, Any], idempotency_key: str) -> bytes:
    platform = settings.MILLRACE
    if not platform.stripe_api_key:
        raise Conflict("Online payments are not configured. Contact the operator.")
    headers = {"Authorization": f"Bearer {platform.stripe_api_key}", "Idempotency-Key": idempotency_key}
    try:
        response = httpx2.post(
            f"{platform.stripe_api_url}/v1/{path}", data=dict(_flat(fields)), headers=headers, timeout=TIMEOUT_SECONDS
        )
    except httpx2.HTTPError as exc:
        raise Conflict("The payment provider could not be reached. Try again later.") from exc
    if response.status_code < 300:
        return response.content
    try:
        failure = msgspec.json.decode(response.content, type=_Failed).error
    except msgspec.MsgspecError:
        failure = _Failure()
    if response.status_code >= 500 or response.status_code in (409, 429):  # 409: the same request is running
        raise Conflict("The payment provider is unavailable. Try again later.")
    if response.status_code == 402:
        raise Declined(failure.message or "The payment method was declined.")
    raise ActionRefused(f"The payment provider rejected the request: {failure.message or response.status_code}")


def _flat(fields: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return nested fields as form fields, such as `line_items[0][quantity]`."""
    if isinstance(fields, Mapping):
        items = [(f"{prefix}[{name}]" if prefix else name, value) for name, value in fields.items()]
    elif isinstance(fields, list):
        items = [(f"{prefix}[{number}]", value) for number, value in enumerate(fields)]
    else:
        return [(prefix, str(fields).lower() if isinstance(fields, bool) else str(fields))]
    return [pair for name, value in items for pair in _flat(value, name)]
