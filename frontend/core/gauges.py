"""Gauges and meters: widths in percent, drawn as inline SVG, so that no page needs an inline style."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Mark:
    """A tick below a gauge: an alert, or the limit itself."""

    at: str  # percent of the width
    label: str
    is_limit: bool = False

    @property
    def anchor(self) -> str:
        """So that the label stays within the drawing."""
        place = float(self.at)
        return "start" if place < 8 else "end" if place > 93 else "middle"


@dataclass(frozen=True)
class Gauge:
    """Spent, and what will be, of a scale that reaches a little past the limit."""

    spent: str  # percent of the width
    forecast: str | None
    marks: tuple[Mark, ...]
    label: str  # for those who do not see it


def percent(part: int, whole: int) -> str:
    """Return a width for SVG, from 0 to 100, with two places."""
    if whole <= 0:
        return "0"
    hundredths = min(max(part, 0) * 10_000 // whole, 10_000)
    return f"{hundredths // 100}.{hundredths % 100:02}"


def level(part: int, whole: int) -> Literal["", "near", "over"]:
    """How near to its limit something is: from 80 % on, and from 100 % on."""
    if whole <= 0:
        return ""
    return "over" if part >= whole else "near" if part * 10 >= whole * 8 else ""
