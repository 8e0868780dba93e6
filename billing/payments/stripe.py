"""Webhooks in Stripe's format and signature: payments and refunds in dollars.

The payment's metadata name its owner: `invoice` (a number) or `tenant` (a slug), and `credit` if it buys credit.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from billing.actions.payments import Received
from billing.amounts import MAX_CENTS
from billing.payments import NotGenuine, Unreadable

TOLERANCE = 300  # seconds between the signature's time and the local clock


class _Object(msgspec.Struct):
    id: str
    currency: str = ""
    amount: int = 0
    amount_received: int = 0
    created: int = 0
    metadata: dict[str, str] = {}


class _Data(msgspec.Struct):
    object: _Object


class _Event(msgspec.Struct):
    type: str
    data: _Data


class _AnyEvent(msgspec.Struct):
    type: str


class Stripe:
    """A provider whose messages are signed with a shared secret."""

    name = "stripe"

    def __init__(self, secret: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret.encode()
        self._clock = clock

    def received(self, body: bytes, headers: Mapping[str, str]) -> list[Received]:
        self._check(body, headers.get("Stripe-Signature", ""))
        sign = {"payment_intent.succeeded": 1, "refund.created": -1}.get(_decoded(body, _AnyEvent).type)
        if sign is None:
            return []
        item: _Object = _decoded(body, _Event).data.object
        if item.currency.lower() != "usd":
            raise Unreadable(f"{item.id}: the ledger is in USD, not {item.currency or 'nothing'}")
        amount = sign * (item.amount_received or item.amount)
        try:
            at = datetime.fromtimestamp(item.created, UTC)
        except (OverflowError, ValueError, OSError) as exc:
            raise Unreadable(f"{item.id}: `created` is no time") from exc
        if not amount or abs(amount) > MAX_CENTS:
            raise Unreadable(f"{item.id}: {amount} is no amount")
        owner = {name: item.metadata.get(name, "") for name in ("tenant", "invoice")}
        return [Received(self.name, item.id, amount, at, as_credit="credit" in item.metadata, **owner)]

    def _check(self, body: bytes, header: str) -> None:
        parts = [part.partition("=") for part in header.split(",")]
        times = [value for name, _, value in parts if name.strip() == "t" and value.isdecimal() and len(value) < 20]
        if not self._secret or len(times) != 1 or abs(self._clock() - int(times[0])) > TOLERANCE:
            raise NotGenuine
        expected = hmac.new(self._secret, times[0].encode() + b"." + body, hashlib.sha256).hexdigest()
        given = [value for name, _, value in parts if name.strip() == "v1"]
        if not any(hmac.compare_digest(expected.encode(), value.encode()) for value in given):
            raise NotGenuine


def _decoded(body: bytes, message_type: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=message_type)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise Unreadable(str(exc)) from exc
