"""Statistical forecast of daily usage from past days. Does not import Django.

The model is simple exponential smoothing with weekdays: an innovations state space model with errors proportional to
the weekday. Day t is expected to be level x factor(weekday). The error of a day changes the level by the share `alpha`,
which is chosen to minimize the error on past days. So the error of a sum of future days has a closed form: the error of
each day counts once and, by `alpha`, for every later day. The interval is the middle 80% of a log-normal distribution
with that mean and error, because usage is not negative and is skewed. It uses Student's quantile, because the error is
an estimate. The same days always give the same numbers.

Only the estimate uses floats. Inputs and results are integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date, timedelta
from typing import NamedTuple

FEWEST_DAYS = 3  # days of history that a forecast needs
_ALPHAS = (0.03, 0.1, 0.2, 0.3, 0.5, 0.7)
_USUAL_ALPHA = 0.3  # with too few days to choose one
_MIN_DAYS_TO_CHOOSE = 10
_WEEKS_FOR_WEEKDAYS = 2
_SHRINKING = 0.25  # days of "no different from the others" in each weekday's factor
_MIN_WEEKDAY_SHARE = 0.25  # a weekday without use may still surprise by so much of an average day
_UNKNOWN_WEEKDAYS = 0.2  # share of the forecast: the error of unknown weekday factors
_Z = 1.2815515655446004  # the normal distribution's 90 % quantile


class ProjectionPoint(NamedTuple):
    """The forecast usage from now to the end of a day."""

    day: date
    point: int
    low: int
    high: int


class Fitted(NamedTuple):
    """The model fitted to past days."""

    level: float
    alpha: float
    error: float  # error per day, as a share of what its weekday weighs
    factors: tuple[float, ...]  # by weekday, Monday first; 1 on average
    days: int

    @property
    def unknown(self) -> float:
        return 0.0 if self.days >= 7 * _WEEKS_FOR_WEEKDAYS else _UNKNOWN_WEEKDAYS


def fit(first: date, used: Sequence[int]) -> Fitted | None:
    """Fit the model to complete days without gaps, oldest first. None: fewer than FEWEST_DAYS."""
    if len(used) < FEWEST_DAYS:
        return None
    factors = _factors(first, used)
    shares = [factors[(first + timedelta(days=number)).weekday()] for number in range(len(used))]
    alphas = _ALPHAS if len(used) >= _MIN_DAYS_TO_CHOOSE else (_USUAL_ALPHA,)
    squares, alpha, level = min(_smooth_levels(used, shares, alpha) for alpha in alphas)
    return Fitted(level, alpha, math.sqrt(squares / (len(used) - 1)), factors, len(used))


def project(fitted: Fitted, today: date, rest_of_today: float, days: int) -> list[ProjectionPoint]:
    """Return the forecast usage from now, summed up to the end of today and of each of the `days` - 1 days after.

    `rest_of_today`: the remaining share of today.
    """
    parts = [rest_of_today, *[1.0] * (days - 1)]
    shares = [fitted.factors[(today + timedelta(days=number)).weekday()] for number in range(days)]
    weights = [share * part for share, part in zip(shares, parts, strict=True)]
    own = [_floor_share(share) * math.sqrt(part) for share, part in zip(shares, parts, strict=True)]
    points = []
    for ahead in range(1, days + 1):
        total, after, squares = sum(weights[:ahead]), 0.0, 0.0
        for weight, surprise in zip(reversed(weights[:ahead]), reversed(own[:ahead]), strict=True):
            squares += (surprise + fitted.alpha * after) ** 2
            after += weight
        squares += total**2 / fitted.days  # the initial level is an estimate, too
        error = math.hypot(fitted.error * math.sqrt(squares), fitted.level * total * fitted.unknown)
        low, high = _band(fitted.level * total, error, fitted.days - 1)
        day = today + timedelta(days=ahead - 1)
        points.append(ProjectionPoint(day, round(fitted.level * total), math.floor(low), math.ceil(high)))
    return points


def _factors(first: date, used: Sequence[int]) -> tuple[float, ...]:
    """Return the factor of each weekday: its share of an average day."""
    mean = sum(used) / len(used)
    if len(used) < 7 * _WEEKS_FOR_WEEKDAYS or mean == 0:
        return (1.0,) * 7
    sums, counts = [0.0] * 7, [0] * 7
    for number, value in enumerate(used):
        weekday = (first + timedelta(days=number)).weekday()
        sums[weekday] += value / mean
        counts[weekday] += 1
    found = [(total + _SHRINKING) / (count + _SHRINKING) for total, count in zip(sums, counts, strict=True)]
    return tuple(7 * factor / sum(found) for factor in found)


def _smooth_levels(used: Sequence[int], shares: Sequence[float], alpha: float) -> tuple[float, float, float]:
    """Return the sum of the squared errors, alpha, and the current level."""
    start = used[:7]
    level = sum(start) / sum(shares[: len(start)])
    squares = 0.0
    for value, share in zip(used, shares, strict=True):
        surprise = (value - level * share) / _floor_share(share)
        squares += surprise**2
        level = max(0.0, level + alpha * surprise * min(1.0, share))
    return squares, alpha, level


def _floor_share(share: float) -> float:
    return max(share, _MIN_WEEKDAY_SHARE)


def _band(mean: float, error: float, freedom: int) -> tuple[float, float]:
    """Return the middle 80%."""
    if mean < 0.5:  # less than the least there is
        return 0.0, max(mean, error * _student(freedom))
    width = math.log1p((error / mean) ** 2)
    reach = _student(freedom) * math.sqrt(width)
    return min(mean, mean * math.exp(-width / 2 - reach)), max(mean, mean * math.exp(-width / 2 + reach))


def _student(freedom: int) -> float:
    """Return Student's 90% quantile, by the Cornish-Fisher expansion."""
    z = _Z
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
