"""A replacement for Stripe's API."""

from __future__ import annotations

from typing import Any

from tests.support.billing import stripe_events as stripe


class FakeStripe:
    """Stripe's API: answers from its public resources, repeated for the same idempotency key."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], str]] = []
        self.charges: dict[str, dict[str, Any]] = {}
        self.failure: tuple[int, dict[str, Any]] | None = None
        self.is_lost = False  # the answer does not arrive
        self.status = "succeeded"

    def answer(self, path: str, fields: dict[str, str], headers: Any) -> tuple[int, dict[str, Any]]:
        key = headers["Idempotency-Key"]
        if headers["Authorization"] != "Bearer sk_test_1":
            return 401, {"error": {"type": "invalid_request_error", "message": "Invalid API Key provided"}}
        self.requests.append((path, fields, key))
        if self.failure is not None:
            return self.failure
        if path == "/v1/checkout/sessions":
            return 200, stripe.RESOURCES["checkout.session"] | {"url": "https://checkout.stripe.com/c/pay/cs_test_1"}
        intent = {"id": f"pi_top_up_{len(self.charges) + 1}", "amount": int(fields["amount"]), "status": self.status}
        return 200, self.charges.setdefault(
            key, stripe.RESOURCES["payment_intent"] | intent | {"created": 1_793_000_000}
        )
