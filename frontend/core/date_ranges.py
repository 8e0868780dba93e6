"""The date range of a report, which is part of the URL."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from django.utils.translation import gettext as _

from billing.metering.usage import instant, this_month
from billing.periods import billing_zone
from frontend.core.languages import day_text
from frontend.core.languages import lazy_text as _lazy
from frontend.core.lists import CURSORS, Choice
from frontend.core.page_context import PageContext

_DAY = timedelta(days=1)
_MAX_RANGE = timedelta(days=366)
_LABELS = {
    "today": _lazy("Today"),
    "24h": _lazy("Last 24 hours"),
    "7d": _lazy("Last 7 days"),
    "30d": _lazy("Last 30 days"),
    "month": _lazy("Month to date"),
    "last-month": _lazy("Last month"),
    "custom": _lazy("Custom"),
}
_WEEKS = {"12w": (12, _lazy("Last 12 weeks")), "26w": (26, _lazy("Last 26 weeks"))}  # until now, from a Monday


@dataclass(frozen=True)
class DateRange:
    """A half-open range of time. Days are UTC days, like the sums of usage; the month is in `zone`, the billing time
    zone.

    `choices` are the ranges that the user can select.
    """

    name: str  # today, 24h, 7d, 30d, 12w, 26w, month, last-month, custom, or times
    start: datetime
    end: datetime
    label: str
    choices: tuple[Choice, ...]
    first: str  # dates for the custom form
    last: str
    zone: tzinfo = UTC
    error: str = ""  # the error message of invalid dates
    hidden: tuple[tuple[str, str], ...] = ()  # the other parameters of the page, for the custom form

    @property
    def preset(self) -> str:
        """The label of the selected range."""
        return next(choice.label for choice in self.choices if choice.current)

    @property
    def previous(self) -> tuple[datetime, datetime]:
        """The range to compare with: the same days of the previous month, or the same length directly before.

        Weeks are compared with the weeks directly before, so that both start on a Monday.
        """
        length = self.end - self.start
        if self.name in ("month", "last-month"):
            start = this_month(self.start - _DAY, self.zone)[0]
            return start, self.start if self.name == "last-month" else min(start + length, self.start)
        if self.is_weeks:
            weeks = 7 * _WEEKS[self.name][0] * _DAY
            return self.start - weeks, self.end - weeks
        return self.start - length, self.start

    @property
    def is_custom(self) -> bool:
        return self.name == "custom"

    @property
    def is_weeks(self) -> bool:
        return self.name in _WEEKS


def date_range_of(ctx: PageContext, *, with_weeks: bool = False) -> DateRange:
    """Return the range in the query string. `with_weeks`: ranges of weeks can be selected, too.

    The default is this month, also for invalid input, with a message in `error`.
    """
    name = ctx.query.get("range", "month")
    start: datetime | None = None
    zone: tzinfo = UTC
    end, error = ctx.now, ""
    if name in ("7d", "30d"):
        today = ctx.now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        start = today - (6 if name == "7d" else 29) * _DAY
    elif name == "today":
        start = ctx.now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    elif name == "24h":
        start = ctx.now - _DAY
    elif with_weeks and name in _WEEKS:
        today = ctx.now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        start = today - (today.weekday() + 7 * (_WEEKS[name][0] - 1)) * _DAY
    elif name == "last-month":
        zone = billing_time_zone_of(ctx)
        end = month_of(ctx)[0]
        start = this_month(end - _DAY, zone)[0]
    elif name in ("custom", "times"):
        try:
            start, end = _dates(ctx) if name == "custom" else _times(ctx)
        except ValueError as exc:
            error = str(exc)
    else:
        name = "month"
    if start is None:
        name = "month" if name == "times" else name
        (start, end), zone = month_of(ctx), billing_time_zone_of(ctx)
    first, last = start.astimezone(zone).date(), (end - timedelta(microseconds=1)).astimezone(zone).date()
    label = day_text(last, "j F Y")
    if first != last:
        label = f"{day_text(first, _first_form(first, last))} – {label}"
    if name in ("24h", "times"):
        opens, closes = start.astimezone(zone), end.astimezone(zone)
        label = f"{day_text(opens, 'j F')}, {opens:%H:%M} – {day_text(closes, 'j F Y')}, {closes:%H:%M}"
    labels = _LABELS if not with_weeks else {**_LABELS, **{week: text for week, (_count, text) in _WEEKS.items()}}
    choices = tuple(Choice(text, _url(ctx, option, first, last), option == name) for option, text in labels.items())
    if name == "times":
        choices = (*choices, Choice(_("Selected time"), f"?{urlencode(ctx.query)}", current=True))
    return DateRange(name, start, end, label, choices, first.isoformat(), last.isoformat(), zone, error, _others(ctx))


def billing_time_zone_of(ctx: PageContext) -> ZoneInfo:
    """Return the time zone of the entity that bills the tenant."""
    return ctx.once("billing zone", lambda: billing_zone(ctx.tenant.pk))


def month_of(ctx: PageContext) -> tuple[datetime, datetime]:
    """Return the start of the current billing month, and now."""
    return this_month(ctx.now, billing_time_zone_of(ctx))


def days_of(start: datetime, end: datetime) -> list[datetime]:
    """Return the UTC days from start to end. The first and the last may be partial."""
    first = start.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return [first + i * _DAY for i in range(-(-(end - first) // _DAY))]


def _first_form(first: object, last: object) -> str:
    same_year = getattr(first, "year", None) == getattr(last, "year", None)
    same_month = same_year and getattr(first, "month", None) == getattr(last, "month", None)
    return "j" if same_month else "j F" if same_year else "j F Y"


def _dates(ctx: PageContext) -> tuple[datetime, datetime]:
    try:
        start = instant(ctx.query.get("from", ""))
        end = instant(ctx.query.get("to", "")) + _DAY
    except ValueError as exc:
        raise ValueError(_("Enter both dates as YYYY-MM-DD.")) from exc
    if start >= end:
        raise ValueError(_("The start date is after the end date."))
    if end - start > _MAX_RANGE:
        raise ValueError(_("Choose a range of one year or less."))
    return start, min(end, max(ctx.now, start + _DAY))


def _times(ctx: PageContext) -> tuple[datetime, datetime]:
    """Return the times that were selected in a histogram."""
    try:
        start, end = instant(ctx.query.get("from", "")), instant(ctx.query.get("to", ""))
    except ValueError as exc:
        raise ValueError(_("Select the times again.")) from exc
    if not timedelta() < end - start <= _MAX_RANGE:
        raise ValueError(_("Choose a range of one year or less."))
    return start, end


def _url(ctx: PageContext, name: str, first: object, last: object) -> str:
    chosen = {} if name == "month" else {"range": name}
    if name == "custom":
        chosen |= {"from": str(first), "to": str(last)}
    return f"?{urlencode(dict(_others(ctx)) | chosen)}"


def _others(ctx: PageContext) -> tuple[tuple[str, str], ...]:
    """Return the page's parameters without the range and the position in a list."""
    return tuple((name, value) for name, value in ctx.query.items() if name not in ("range", "from", "to", *CURSORS))
