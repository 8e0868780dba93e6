"""Charts: the data that charts.js draws, and the table with the same values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import groupby
from typing import Any, Literal

from billing.currencies.amounts import FEMTO_A_NANO, MILLIONTHS, half_up
from frontend.core import timezones
from frontend.core.languages import day_text, localize
from frontend.core.numbers import Money, compact, duration, exact, share

Unit = Literal["usd", "tokens", "count", "decimal", "ms", "percent"]
Style = Literal["line", "area", "dash", "dots"]
MAX_MARKS = 10  # marks of one chart, newest first


@dataclass(frozen=True)
class Series:
    """One line of a chart. None is a gap.

    Values are tokens, microseconds ("ms"), hundredths ("decimal") or millionths of the whole ("percent"). With the unit
    "usd", they are in femto-units of the currency of the page.

    `kind` selects its color in console.css: spend, forecast, limit, output, uncached, cached, written, p50, p95, goal;
    in explorer.css: s0 to s10.
    The legend shows `total`, unless `in_legend` is false, as for the edges of a band.
    """

    label: str
    kind: str
    values: tuple[int | None, ...]
    style: Style = "line"
    total: str = ""
    in_legend: bool = True


@dataclass(frozen=True)
class ChartMark:
    """An event that may explain a change, such as the publication of a policy (frontend/core/chart_marks.py)."""

    at: datetime
    text: str


@dataclass(frozen=True)
class ChartRow:
    """A row of a chart's table: a time, the exact value of each series, and the marks until the next time."""

    when: str
    values: list[str]
    marks: list[str]


@dataclass(frozen=True)
class Chart:
    """Series over common times.

    `stacked` draws each series of the style "area" on top of the following ones; lines of other styles come last.
    `band` contains the labels of the upper and lower edge of an interval. `of` is a sentence that describes the chart
    to assistive technology.
    """

    name: str  # unique in the page
    of: str
    at: tuple[datetime, ...]
    series: tuple[Series, ...]
    unit: Unit
    bucket: Literal["hour", "day"] = "day"
    zone: tzinfo = UTC  # the time zone of hours; days are UTC days
    stacked: bool = False
    band: tuple[str, str] | None = None
    band_label: str = ""
    height: int = 236
    bare: bool = False  # without axes
    step: timedelta = timedelta(days=1)  # from the last time to its end
    marks: tuple[ChartMark, ...] = ()  # those outside of the chart are not shown
    requests_url: str = ""  # request log with the page's filters; a point opens the requests of its time
    selects: bool = False  # a click selects something else; Enter opens the requests

    @property
    def script_id(self) -> str:
        return f"chart-{self.name}"

    @property
    def data(self) -> dict[str, Any]:
        """The JSON that charts.js reads."""
        return {
            "x": [int(at.timestamp()) for at in self.at],
            "series": [
                {
                    "label": series.label,
                    "kind": series.kind,
                    "style": series.style,
                    "y": [_axis_value(value, self.unit) for value in series.values],
                }
                for series in self.series
            ],
            "unit": self.unit,
            **({"symbol": Money(0).symbol, "digits": Money(0).digits} if self.unit == "usd" else {}),
            "bucket": self.bucket,
            "zone": timezones.label(self.zone) if self.bucket == "hour" else "UTC",
            "stacked": self.stacked,
            "band": self.band,
            "height": self.height,
            "bare": self.bare,
            "step": int(self.step.total_seconds()),
            "marks": [[i, int(mark.at.timestamp()), mark.text] for i, mark in self.placed_marks],
            "requests": self.requests_url,
            "selects": self.selects,
        }

    @property
    def placed_marks(self) -> list[tuple[int, ChartMark]]:
        """The newest marks of the chart, oldest first, each with the number of the time that it follows."""
        if not self.at:
            return []
        end = self.at[-1] + self.step
        inside = sorted((mark for mark in self.marks if self.at[0] <= mark.at < end), key=lambda mark: mark.at)
        return [(bisect_right(self.at, mark.at) - 1, mark) for mark in inside[-MAX_MARKS:]]

    @property
    def legend(self) -> tuple[Series, ...]:
        return tuple(series for series in self.series if series.in_legend)

    @property
    def rows(self) -> Sequence[ChartRow]:
        """The rows of the chart's table."""
        by_time = groupby(self.placed_marks, key=lambda placed: placed[0])
        marks = {i: [mark.text for _i, mark in placed] for i, placed in by_time}
        return [
            ChartRow(
                self._when(at),
                [format_value(series.values[i], self.unit) for series in self.series],
                marks.get(i, []),
            )
            for i, at in enumerate(self.at)
        ]

    def _when(self, at: datetime) -> str:
        if self.bucket == "day":
            return day_text(at.astimezone(UTC))
        return day_text(at.astimezone(self.zone), "j M, H:i")


def format_value(value: int | None, unit: Unit) -> str:
    """Return an exact value with its unit."""
    if value is None:
        return "–"
    if unit == "usd":
        return Money(value).text
    if unit == "ms":
        return duration(value)
    if unit == "percent":
        return share(value, MILLIONTHS)
    if unit == "decimal":
        return localize(f"{value // 100:,}.{value % 100:02}")
    return exact(value)


def _axis_value(value: int | None, unit: Unit) -> float | int | None:
    """Return a value in the unit of the axis. It is rounded; the table has the exact value."""
    if value is None:
        return None
    if unit == "usd":
        return half_up(value, FEMTO_A_NANO * 1000) / 10**6
    if unit == "ms":
        return value / 1000
    if unit == "percent":
        return value / 10_000
    return value / 100 if unit == "decimal" else value


def legend_total(values: Sequence[int | None]) -> str:
    """Return the sum of a series for the legend."""
    return compact(sum(value or 0 for value in values))
