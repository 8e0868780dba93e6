"""Signed Stripe events for tests, built from the resources in tests/data/stripe."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from stripe import WebhookSignature

RESOURCES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "stripe" / "resources.json").read_bytes()
)
SECRET, NOW = "whsec_tests", 1_793_000_000
PAYMENT, CHARGE = "pi_1", "ch_1"


def signed(body: bytes, age: int = 0, secret: str = SECRET) -> dict[str, str]:
    """Return the signature header of a body that was signed some seconds ago, after a signature of another secret."""
    header = WebhookSignature.generate_signature_header(body.decode(), secret, int(time.time()) - age)
    signed_at, _, proof = header.partition(",")
    return {"Stripe-Signature": f"{signed_at},v1={'0' * 64},{proof}"}


def event(event_type: str, item: dict[str, Any], reference: str = "evt_1") -> bytes:
    """Return the body of an event about an object."""
    fields = {"id": reference, "type": event_type, "created": NOW, "data": {"object": item}}
    return json.dumps(RESOURCES["event"] | fields).encode()


def resource(name: str, **fields: Any) -> dict[str, Any]:
    """Return a resource with other values of the given fields, which it must have."""
    assert fields.keys() <= RESOURCES[name].keys()
    return RESOURCES[name] | {"created": NOW} | fields


def payment(cents: int = 500, **fields: Any) -> bytes:
    """Return the event of a payment intent that succeeded, with the metadata of the tenant `acme`."""
    item = {"id": PAYMENT, "amount": cents, "amount_received": cents, "latest_charge": CHARGE, "status": "succeeded"}
    item |= {"metadata": {"tenant": "acme"}} | fields
    return event("payment_intent.succeeded", resource("payment_intent", **item), "evt_payment")


def session(cents: int = 500, **fields: Any) -> bytes:
    """Return the event of a paid checkout session with the metadata of the tenant `acme`."""
    item = {"amount_total": cents, "currency": "usd", "payment_intent": PAYMENT, "payment_status": "paid"}
    item |= {"metadata": {"tenant": "acme"}} | fields
    return event("checkout.session.completed", resource("checkout.session", **item), "evt_session")


def refund(event_type: str = "refund.created", cents: int = 200, **fields: Any) -> bytes:
    """Return an event of a refund that was made in Stripe's dashboard: without metadata."""
    item = {"id": "re_1", "amount": cents, "charge": CHARGE, "payment_intent": PAYMENT} | fields
    return event(event_type, resource("refund", **item), f"evt_{event_type}")


def dispute(name: str = "withdrawn", cents: int = 200, **fields: Any) -> bytes:
    """Return the event of a dispute whose funds were withdrawn or reinstated."""
    item = {"id": "dp_1", "amount": cents, "charge": CHARGE, "payment_intent": PAYMENT} | fields
    return event(f"charge.dispute.funds_{name}", resource("dispute", **item), f"evt_{name}")
