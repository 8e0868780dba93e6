"""Gauges and meters: widths in percent of inline SVG, so that pages need no inline style."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Mark:
    """A tick below a gauge: an alert threshold or the limit."""

    at: str  # percent of the width
    label: str
    is_limit: bool = False

    @property
    def anchor(self) -> str:
        """The text anchor that keeps the label inside the drawing."""
        place = float(self.at)
        return "start" if place < 8 else "end" if place > 93 else "middle"


@dataclass(frozen=True)
class Gauge:
    """The used part and the forecast, on a scale that ends above the limit."""

    spent: str  # percent of the width
    forecast: str | None
    marks: tuple[Mark, ...]
    label: str  # for assistive technology


def percent(part: int, whole: int) -> str:
    """Return a width for SVG, from 0 to 100, with two decimals."""
    if whole <= 0:
        return "0"
    hundredths = min(max(part, 0) * 10_000 // whole, 10_000)
    return f"{hundredths // 100}.{hundredths % 100:02}"


def line_points(values: Sequence[int]) -> str:
    """Return the points of a line through values from 0, in a square of 100; empty if all are 0."""
    top = max(values, default=0)
    if top <= 0 or len(values) < 2:
        return ""
    return " ".join(
        f"{index * 100 // (len(values) - 1)},{96 - value * 92 // top}" for index, value in enumerate(values)
    )


def level(part: int, whole: int) -> Literal["", "near", "over"]:
    """Return "near" from 80 % and "over" from 100 % of the limit, else an empty string."""
    if whole <= 0:
        return ""
    return "over" if part >= whole else "near" if part * 10 >= whole * 8 else ""
