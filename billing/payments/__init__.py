"""Interface of payment providers: a provider converts its messages to `ProviderEvent`, which an action books.

To add a provider, write a class with these two members and name it in billing/payments/providers.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from billing.currencies.amounts import DEFAULT_CURRENCY, decimal_cents, minor_digits
from billing.payments.events import ProviderEvent

_AMOUNT = re.compile(r"(-?)([0-9]{1,15})(?:\.([0-9]{1,3}))?")


class NotGenuine(Exception):
    """The message does not come from the provider."""


class Unreadable(Exception):
    """The message comes from the provider, but cannot be interpreted."""


class Provider(Protocol):
    """A source of payment messages."""

    name: str

    def event(self, body: bytes, headers: Mapping[str, str]) -> ProviderEvent:
        """Return the event in a message, without payments if it books nothing.

        Raises:
            NotGenuine, Unreadable: see there.
        """
        ...


def cents(amount: str, currency: str = DEFAULT_CURRENCY) -> int:
    """Convert an amount in dollars or another currency, such as 12.50, to cents.

    Raises:
        Unreadable: it is no amount.
    """
    digits = minor_digits(currency)
    match = _AMOUNT.fullmatch(amount.strip())
    if match is None or len(match[3] or "") > digits:
        example = decimal_cents(1250, digits)
        raise Unreadable(f"{amount!r} is no amount in {currency}: give a number, for example {example}")
    sign, whole, fraction = match.groups()
    value = int(whole + (fraction or "").ljust(digits, "0"))
    return -value if sign else value


def buys_credit(text: str) -> bool:
    """Return whether a text means that the payment buys credit.

    Raises:
        Unreadable: it means neither yes nor no.
    """
    value = text.strip().lower()
    if value in ("true", "yes", "1"):
        return True
    if value in ("", "false", "no", "0"):
        return False
    raise Unreadable(f"credit is {text[:50]!r}: give true or false")
