"""The form field of a day."""

from __future__ import annotations

from datetime import date

from django import forms
from django.core.validators import MaxValueValidator, MinValueValidator

from frontend.core.languages import lazy_text as _lazy

FIRST, LAST = date(2000, 1, 1), date(2199, 12, 31)  # the years of `billing.metering.usage.instant`
_OUT_OF_RANGE = _lazy("Enter a date from 2000 to 2199.")


class DayField(forms.DateField):
    """A day with the browser's date picker. The end of each allowed day is a time that Python and PostgreSQL have."""

    widget = forms.DateInput({"type": "date"}, format="%Y-%m-%d")
    default_validators = [MinValueValidator(FIRST, _OUT_OF_RANGE), MaxValueValidator(LAST, _OUT_OF_RANGE)]  # noqa: RUF012


def read_day(text: str) -> date | None:
    """Return the day of a query string, such as 2026-11-30; None if it is empty.

    Raises:
        ValueError: it is no day, or a `DayField` does not accept it.
    """
    if not text:
        return None
    day = date.fromisoformat(text)
    if not FIRST <= day <= LAST:
        raise ValueError(text)
    return day
