"""The number grammar of the console, without floats. The exact value is kept next to each rounded one.

Every number is rounded half up. `numbers.js` has the same grammar for charts and the playground;
`tests/support/frontend/number_cases.py` has the cases that both must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

from django.utils.translation import gettext as _

from billing.currencies.amounts import (
    DEFAULT_CURRENCY,
    FEMTO_A_NANO,
    FEMTO_DIGITS,
    decimal,
    half_up,
    minor_digits,
    symbol,
)
from frontend.core.languages import is_german, localize

_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
MAX_EXACT_COUNT = 99_999  # a higher count is shown with three digits
_SMALLEST = 1000 * FEMTO_A_NANO  # amounts below a cent are shown to the millionth of a dollar
_MAX_PLACES = 9  # decimals of a column: up to nano-dollars


def _default_currency() -> str:
    return DEFAULT_CURRENCY


_SHOWN: ContextVar[Callable[[], str]] = ContextVar("currency of the page", default=_default_currency)


@contextmanager
def shown_currency(find: Callable[[], str]) -> Iterator[None]:
    """Show all amounts in the currency in which the tenant of the page is billed.

    `find` returns it. It is called for the first amount, so that pages without amounts do not need it.
    """
    token = _SHOWN.set(cache(find))
    try:
        yield
    finally:
        _SHOWN.reset(token)


def page_currency() -> str:
    """Return the currency of the page's amounts."""
    return _SHOWN.get()()


@dataclass(frozen=True, order=True)
class Money:
    """An amount in femto-USD, or in another currency. Sums are exact; the caller chooses the number of digits."""

    femto: int
    currency: str = field(default="", compare=False)  # empty: that of the page

    @classmethod
    def nano(cls, amount: int, currency: str = "") -> Money:
        return cls(amount * FEMTO_A_NANO, currency)

    @classmethod
    def cents(cls, amount: int, currency: str = "") -> Money:
        return cls(amount * cls(0, currency).femto_a_cent, currency)

    def __add__(self, other: Money) -> Money:
        return Money(self.femto + other.femto, self.currency)

    def __sub__(self, other: Money) -> Money:
        return Money(self.femto - other.femto, self.currency)

    @property
    def symbol(self) -> str:
        return symbol(self.currency or page_currency())

    @property
    def digits(self) -> int:
        """The decimals of the minor unit: 2 of USD, 0 of JPY."""
        return minor_digits(self.currency or page_currency())

    @property
    def femto_a_cent(self) -> int:
        """The minor unit in femto-units."""
        return int(10 ** (FEMTO_DIGITS - self.digits))

    @property
    def exact(self) -> str:
        """All digits as a decimal number: 8587.3012."""
        return decimal(self.femto, FEMTO_DIGITS, self.digits)

    @property
    def exact_text(self) -> str:
        """All digits with the currency: $8587.3012."""
        whole, _, rest = self.exact.partition(".")
        return "".join(self._format_parts("", whole, rest))

    @property
    def text(self) -> str:
        """Dollars and cents, $8,587.30, with a minus sign; below a cent up to six decimals: $0.0042."""
        whole, rest = self.parts
        return whole + rest

    @property
    def parts(self) -> tuple[str, str]:
        """The dollars and the cents: ("$8,587", ".30")."""
        sign = "−" if self.femto < 0 else ""
        amount = abs(self.femto)
        digits, unit = self.digits, self.femto_a_cent
        if 0 < amount < unit:
            millionths = half_up(amount, _SMALLEST)
            whole, _, rest = decimal(max(1, millionths), 6, digits).partition(".")
            return self._format_parts(sign if millionths else f"{sign}<", whole, rest)
        dollars, cents = divmod(half_up(amount, unit), 10**digits)
        return self._format_parts(sign, f"{dollars:,}", f"{cents:0{digits}}" if digits else "")

    def parts_at(self, places: int) -> tuple[str, str]:
        """Return the dollars and exactly `places` decimals: ("$0", ".0042"). A smaller amount: ("<$0", ".0001")."""
        sign, amount = "−" if self.femto < 0 else "", abs(self.femto)
        shown = half_up(amount, 10 ** (FEMTO_DIGITS - places))
        if amount and not shown:
            sign, shown = f"{sign}<", 1
        whole, rest = divmod(shown, 10**places)
        return self._format_parts(sign, f"{whole:,}", f"{rest:0{places}}" if places else "")

    def _format_parts(self, sign: str, whole: str, rest: str) -> tuple[str, str]:
        """Return the parts of an amount in the language: ("$1,234", ".56"), or ("1.234", ",56 $") in German."""
        if is_german():
            fraction = f",{rest}" if rest else ""
            return f"{sign}{localize(whole)}", f"{fraction}\N{NO-BREAK SPACE}{self.symbol.strip()}"
        return f"{sign}{self.symbol}{whole}", f".{rest}" if rest else ""


def common_places(amounts: Iterable[Money | None]) -> int:
    """Return the number of decimals for all amounts of a column: two digits of the smallest amount below a cent.

    At least those of the minor unit, at most 9. Amounts of 0 do not count.
    """
    known = [amount for amount in amounts if amount]
    unit = known[0] if known else Money(0)
    places = unit.digits
    smallest = min((abs(amount.femto) for amount in known if amount.femto), default=unit.femto_a_cent)
    if smallest < unit.femto_a_cent:
        while places < _MAX_PLACES and smallest < 10 ** (FEMTO_DIGITS - places + 1):
            places += 1
    return places


def exact_places(amounts: Iterable[Money]) -> int:
    """Return the number of decimals, at least those of the minor unit, that shows all digits of every amount."""
    return max((len(amount.exact.partition(".")[2]) for amount in amounts), default=Money(0).digits)


@dataclass(frozen=True)
class Margin:
    """A price and its cost in femto-USD, on any page. The console shows every margin in percent of the price."""

    price: int
    cost: int

    @property
    def amount(self) -> Money:
        return Money(self.price - self.cost, DEFAULT_CURRENCY)

    @property
    def is_loss(self) -> bool:
        return self.cost > self.price

    @property
    def share(self) -> str:
        """The margin in percent of the price: 62.4%, −1,850%. Empty without a price."""
        return share(self.price - self.cost, self.price) if self.price > 0 else ""


def exact(value: int) -> str:
    """Return all digits in groups of three: 12,510,000."""
    return localize(f"{value:,}")


def compact(value: int) -> str:
    """Return a count: exact up to 99,999, and three digits above: 12,510, 125K, 9.49M."""
    if value <= MAX_EXACT_COUNT:
        return exact(value)
    unit, name = next((unit, name) for unit, name in _UNITS if half_up(value, unit // 1000) >= 1000)  # 999,999 is 1.00M
    places = next((places for places in (2, 1) if half_up(value * 10**places, unit) < 1000), 0)
    whole, rest = divmod(half_up(value * 10**places, unit), 10**places)
    return localize(f"{whole:,}.{rest:0{places}}{name}" if places else f"{whole:,}{name}")


def share(part: int, whole: int) -> str:
    """Return a part in percent: one decimal, two below 1%, none from 1,000%. A dash if the whole is 0.

    What is not 0 and less than half of the last decimal is shown as "<0.01%".
    """
    if whole <= 0:
        return "–"
    sign, part = "−" if part < 0 else "", abs(part)
    hundredths, tenths = half_up(part * 10_000, whole), half_up(part * 1000, whole)
    if hundredths < 100:
        text = f"0.{hundredths:02}" if hundredths or not part else "<0.01"
        return localize(f"{sign}{text}%")
    if tenths < 10_000:
        return localize(f"{sign}{tenths // 10}.{tenths % 10}%")
    return localize(f"{sign}{half_up(part * 100, whole):,}%")


def signed_share(part: int, whole: int) -> str:
    """Return a change in percent of the whole with its sign: +12.4%, −0.52%."""
    text = share(part, whole)
    return f"+{text}" if part > 0 and whole > 0 else text


def percent(ratio: float) -> str:
    """Return a ratio in percent, as `share` does: 0.1234 is 12.3%."""
    exact_ratio = Fraction(str(ratio))
    return share(exact_ratio.numerator, exact_ratio.denominator)


def decimals(ratio: float, places: int = 1) -> str:
    """Return a number with this number of decimals: 1,234.5."""
    exact_ratio = Fraction(str(ratio))
    shown = half_up(exact_ratio.numerator * 10**places, exact_ratio.denominator)
    whole, rest = divmod(abs(shown), 10**places)
    return localize(f"{'−' if shown < 0 else ''}{whole:,}" + (f".{rest:0{places}}" if places else ""))


def points(text: str) -> str:
    """Return a difference of two percentages in points: 1.2 points."""
    return _("%(number)s points") % {"number": text}


def duration(microseconds: int) -> str:
    """Return a time in milliseconds or seconds: 184 ms, 2.31 s."""
    milliseconds = half_up(microseconds, 1000)
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    hundredths = half_up(microseconds, 10_000)
    return localize(f"{hundredths // 100:,}.{hundredths % 100:02} s")
