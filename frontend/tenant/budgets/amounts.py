"""Amounts of money, tokens or requests, as text and as exact integers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from django.utils.translation import gettext as _

from billing.currencies.amounts import MAX_BUDGET, MILLIONTHS, NANO_A_DOLLAR, NANO_DIGITS, decimal, whole_units
from frontend.core.languages import is_german, localize
from frontend.core.numbers import Money, exact

_DECIMAL = re.compile(r"([0-9]{1,9})(?:\.([0-9]{0,9}))?", re.ASCII)
_WHOLE = re.compile(r"[0-9]{1,18}", re.ASCII)
_GROUPED = {
    ",": re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+", re.ASCII),
    ".": re.compile(r"[1-9][0-9]{0,2}(?:\.[0-9]{3})+", re.ASCII),
}


@dataclass(frozen=True)
class BudgetAmount:
    """An amount in millionths of a unit: femto-USD, or millionths of a token or request."""

    unit: str  # money, tokens or requests
    millionths: int

    @classmethod
    def from_units(cls, unit: str, value: int) -> BudgetAmount:
        """Build an amount from nano-USD, tokens or requests."""
        return cls(unit, value * MILLIONTHS)

    @property
    def money(self) -> Money | None:
        return Money(self.millionths) if self.unit == "money" else None

    @property
    def number(self) -> int:
        """The number of tokens or requests, rounded up."""
        return whole_units(self.millionths)

    @property
    def text(self) -> str:
        return Money(self.millionths).text if self.unit == "money" else f"{exact(self.number)} {_(self.unit)}"


def parse(text: str, unit: str) -> int:
    """Parse an amount that a user typed, such as $1,200.50 or 1,000,000, into nano-USD, tokens or requests.

    In German, it is 1.200,50 or 1.000.000. A currency's sign may precede or follow an amount of money.

    Raises:
        ValueError: the text is not an amount, or the amount is too large. The message is shown to the user.
    """
    value: int
    bare = re.sub(r"[_\s]", "", text)
    if unit == "money":
        bare = re.sub(r"^[$€£]|(?<=[0-9.,])[$€£]$", "", bare)
    bare = _in_digits(bare)
    if unit == "money":
        if not (found := _DECIMAL.fullmatch(bare)):
            raise ValueError(_("Enter a positive amount, e.g. 12.50"))
        value = int(found[1]) * NANO_A_DOLLAR + int((found[2] or "").ljust(NANO_DIGITS, "0"))
    else:
        if not _WHOLE.fullmatch(bare):
            raise ValueError(_("Enter a whole number, e.g. 1,000,000"))
        value = int(bare)
    if value > MAX_BUDGET:
        raise ValueError(_("Enter %(limit)s or less.") % {"limit": BudgetAmount.from_units(unit, MAX_BUDGET).text})
    return value


def _in_digits(text: str) -> str:
    """Return a number without the marks between its groups of three digits, and with a decimal point."""
    group, point = (".", ",") if is_german() else (",", ".")
    whole, mark, rest = text.partition(point)
    if _GROUPED[group].fullmatch(whole):
        whole = whole.replace(group, "")
    return f"{whole}.{rest}" if mark else whole


def input_text(value: int, unit: str) -> str:
    """Return an amount as a user would type it: 1200.50, or 1200,50 in German; 1000000."""
    return localize(decimal(value, NANO_DIGITS, 2)) if unit == "money" else str(value)
