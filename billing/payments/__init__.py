"""Interface of payment providers: a provider converts its messages to `ProviderEvent`, which an action books.

To add a provider, write a class with these two members and name it in billing/payments/providers.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from billing.actions.payment_events import ProviderEvent

_AMOUNT = re.compile(r"(-?)([0-9]{1,15})(?:\.([0-9]{1,2}))?")


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


def cents(amount: str) -> int:
    """Convert decimal dollars, such as 12.50, to cents.

    Raises:
        Unreadable: it is no amount.
    """
    match = _AMOUNT.fullmatch(amount.strip())
    if match is None:
        raise Unreadable(f"{amount!r} is no amount: give dollars, for example 12.50")
    sign, whole, fraction = match.groups()
    value = int(whole) * 100 + int((fraction or "").ljust(2, "0"))
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
