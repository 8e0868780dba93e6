"""Which span of time a page shows: said in its address, so that it can be kept and sent."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from billing.metering.usage import instant, this_month
from billing.periods import billing_zone
from frontend.core.page_context import PageContext

_DAY = timedelta(days=1)
_MAX_RANGE = timedelta(days=366)


@dataclass(frozen=True)
class DateRangeChoice:
    label: str
    url: str
    current: bool


@dataclass(frozen=True)
class DateRange:
    """Half-open. Days are UTC's, as usage is summed; the month is that of `zone`, the clocks of who bills the tenant.

    `choices`: what one may look at instead.
    """

    name: str  # month, 7d, 30d, or custom
    start: datetime
    end: datetime
    label: str
    choices: tuple[DateRangeChoice, ...]
    first: str  # dates for the custom form
    last: str
    zone: tzinfo = UTC
    fault: str = ""  # what is wrong with the dates that were asked for

    @property
    def is_custom(self) -> bool:
        return self.name == "custom"


def span_of(visit: PageContext) -> DateRange:
    """Return the span the address asks for; this month if it asks for none, or for nonsense, which `fault` says."""
    name = visit.query.get("range", "month")
    start: datetime | None = None
    zone: tzinfo = UTC
    end, fault = visit.now, ""
    if name in ("7d", "30d"):
        today = visit.now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        start = today - (6 if name == "7d" else 29) * _DAY
    elif name == "custom":
        try:
            start, end = _dates(visit)
        except ValueError as exc:
            fault = str(exc)
    else:
        name = "month"
    if start is None:
        (start, end), zone = month_of(visit), zone_billed(visit)
    first, last = start.astimezone(zone).date(), (end - timedelta(microseconds=1)).astimezone(zone).date()
    label = f"{first:%-d %B %Y}" if first == last else f"{first:{_first_form(first, last)}} – {last:%-d %B %Y}"
    labels = (("month", "Month to date"), ("7d", "7 days"), ("30d", "30 days"), ("custom", "Custom"))
    choices = tuple(DateRangeChoice(text, _with(visit, one, first, last), one == name) for one, text in labels)
    return DateRange(name, start, end, label, choices, first.isoformat(), last.isoformat(), zone, fault)


def zone_billed(visit: PageContext) -> ZoneInfo:
    """Return the clocks of who bills the tenant."""
    return visit.once("billing zone", lambda: billing_zone(visit.tenant.pk))


def month_of(visit: PageContext) -> tuple[datetime, datetime]:
    """From the first instant of the month that is billed, until now."""
    return this_month(visit.now, zone_billed(visit))


def days_of(start: datetime, end: datetime) -> list[datetime]:
    """Return the UTC days from start to end, of which the first and the last may lie there in part."""
    first = start.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return [first + i * _DAY for i in range(-(-(end - first) // _DAY))]


def _first_form(first: object, last: object) -> str:
    same_year = getattr(first, "year", None) == getattr(last, "year", None)
    same_month = same_year and getattr(first, "month", None) == getattr(last, "month", None)
    return "%-d" if same_month else "%-d %B" if same_year else "%-d %B %Y"


def _dates(visit: PageContext) -> tuple[datetime, datetime]:
    try:
        start = instant(visit.query.get("from", ""))
        end = instant(visit.query.get("to", "")) + _DAY
    except ValueError as exc:
        raise ValueError("Enter both dates as YYYY-MM-DD.") from exc
    if start >= end:
        raise ValueError("The start date is after the end date.")
    if end - start > _MAX_RANGE:
        raise ValueError("Choose a range of one year or less.")
    return start, min(end, max(visit.now, start + _DAY))


def _with(visit: PageContext, name: str, first: object, last: object) -> str:
    kept = {key: value for key, value in visit.query.items() if key not in ("range", "from", "to")}
    chosen = {} if name == "month" else {"range": name}
    if name == "custom":
        chosen |= {"from": str(first), "to": str(last)}
    return f"?{urlencode(kept | chosen)}"
