"""Charts: what charts.js draws, and the table that says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any, Literal

from frontend.core import timezones
from frontend.core.numbers import Money, compact, duration, exact

Unit = Literal["usd", "tokens", "count", "decimal", "ms", "percent"]
Style = Literal["line", "area", "dash", "dots"]


@dataclass(frozen=True)
class Series:
    """One line of a chart. Values: femto-USD, tokens, microseconds ("ms"), hundredths ("decimal",
    "percent"); None: a gap.

    `kind` names its color in console.css: spend, forecast, limit, output, uncached, cached, written, p50, p95, goal.
    `total` stands in the legend, unless the series has no place there, like the edges of a band.
    """

    label: str
    kind: str
    values: tuple[int | None, ...]
    style: Style = "line"
    total: str = ""
    in_legend: bool = True


@dataclass(frozen=True)
class Chart:
    """Series over common instants.

    `stacked`: each series stands on those after it. `band`: the labels of the upper and lower edge of an interval.
    `of`: what the whole chart shows, in a sentence, for those who do not see it.
    """

    name: str  # unique in the page
    of: str
    at: tuple[datetime, ...]
    series: tuple[Series, ...]
    unit: Unit
    bucket: Literal["hour", "day"] = "day"
    zone: tzinfo = UTC  # of hours; days are those of UTC, as they are billed
    stacked: bool = False
    band: tuple[str, str] | None = None
    band_label: str = ""
    height: int = 236
    bare: bool = False  # without axes

    @property
    def script_id(self) -> str:
        return f"chart-{self.name}"

    @property
    def data(self) -> dict[str, Any]:
        """What charts.js reads."""
        return {
            "x": [int(at.timestamp()) for at in self.at],
            "series": [
                {
                    "label": one.label,
                    "kind": one.kind,
                    "style": one.style,
                    "y": [_drawn(value, self.unit) for value in one.values],
                }
                for one in self.series
            ],
            "unit": self.unit,
            "bucket": self.bucket,
            "zone": timezones.label(self.zone) if self.bucket == "hour" else "UTC",
            "stacked": self.stacked,
            "band": self.band,
            "height": self.height,
            "bare": self.bare,
        }

    @property
    def legend(self) -> tuple[Series, ...]:
        return tuple(one for one in self.series if one.in_legend)

    @property
    def rows(self) -> Sequence[tuple[str, list[str]]]:
        """The table twin: an instant and each series' exact value."""
        return [
            (self._when(at), ["–" if one.values[i] is None else told(one.values[i], self.unit) for one in self.series])
            for i, at in enumerate(self.at)
        ]

    def _when(self, at: datetime) -> str:
        if self.bucket == "day":
            return f"{at.astimezone(UTC):%-d %b %Y}"
        return f"{at.astimezone(self.zone):%-d %b, %H:%M}"


def told(value: int | None, unit: Unit) -> str:
    """Return a value in words, exact."""
    if value is None:
        return "–"
    if unit == "usd":
        return Money(value).text
    if unit == "ms":
        return duration(value)
    if unit in ("decimal", "percent"):
        return f"{value // 100}.{value % 100:02}{'%' if unit == 'percent' else ''}"
    return exact(value)


def _drawn(value: int | None, unit: Unit) -> float | int | None:
    """Return a value as a number of what the axis counts. Good enough to draw; the table has the exact one."""
    if value is None:
        return None
    if unit == "usd":
        return round(value / 10**15, 6)
    if unit == "ms":
        return value / 1000
    return value / 100 if unit in ("decimal", "percent") else value


def total(values: Sequence[int | None]) -> str:
    """Return what a legend says of a series that adds up."""
    return compact(sum(value or 0 for value in values))
