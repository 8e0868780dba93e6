"""How the platform learns of payments: a provider turns what it is sent into `Received`, and the verb books it.

A provider of one's own is a class with these two members, named in billing/payments/providers.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from billing.actions.payments import Received

_AMOUNT = re.compile(r"(-?)([0-9]{1,15})(?:\.([0-9]{1,2}))?")


class NotGenuine(Exception):
    """The message is not the provider's."""


class Unreadable(Exception):
    """The message is the provider's, but not what was agreed on; says what is wrong."""


class Provider(Protocol):
    """What tells of payments."""

    name: str

    def received(self, body: bytes, headers: Mapping[str, str]) -> list[Received]:
        """Return the payments that a message tells of, none if it is about something else.

        Raises:
            NotGenuine, Unreadable: see there.
        """
        ...


def cents(amount: str) -> int:
    """Dollars in decimal, for example 12.50, as cents.

    Raises:
        Unreadable: it is no amount.
    """
    found = _AMOUNT.fullmatch(amount.strip())
    if found is None:
        raise Unreadable(f"{amount!r} is no amount: give dollars, for example 12.50")
    sign, whole, fraction = found.groups()
    value = int(whole) * 100 + int((fraction or "").ljust(2, "0"))
    return -value if sign else value
