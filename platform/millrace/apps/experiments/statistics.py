"""Always-valid confidence intervals and sample-ratio checks. Does not import Django.

An interval here may be read after every request, and an experiment may stop at any time: the probability that a true
value is ever outside of its intervals is at most alpha. Sources:

- Intervals of differences: asymptotic confidence sequences, theorem 2.2 of I. Waudby-Smith, D. Arbour, R. Sinha,
  E. H. Kennedy and A. Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", arXiv
  2103.06476. They need no distribution, only a variance, and hold from a few hundred units on.
- Sample ratio: M. Lindon and A. Malek, "Anytime-valid inference for multinomial count data", arXiv 2011.03567.

Arms are assigned by unit (an end user, a conversation, a key), and requests of one unit are similar. So a unit is one
observation: a pair of a sum and a count. An arm's estimate is the ratio of the sums of all units, and its variance is
that of a ratio (the delta method).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np

TUNED_UNITS = 2_000  # the intervals are narrowest at about this number of units in both arms
PRIOR_STRENGTH = 100.0  # weight of the planned shares in the sample-ratio check, in units


@dataclass(frozen=True)
class Moments:
    """Sums over the units of an arm; of each unit, `x` is the sum and `w` the count of its requests.

    Exact integers. The simulation uses arrays of floats instead.
    """

    units: Any = 0
    w: Any = 0
    x: Any = 0
    ww: Any = 0
    xx: Any = 0
    xw: Any = 0

    def replace_pair(self, old: tuple[int, int], new: tuple[int, int]) -> Moments:
        """Return the sums after the pair (w, x) of a unit has changed. A unit without requests is not counted."""
        (w, x), (v, y) = old, new
        return Moments(
            self.units + (v > 0) - (w > 0),
            self.w + v - w,
            self.x + y - x,
            self.ww + v * v - w * w,
            self.xx + y * y - x * x,
            self.xw + y * v - x * w,
        )

    def as_list(self) -> list[int]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class Interval:
    """An estimate and its always-valid interval."""

    estimate: Any
    low: Any
    high: Any


def half_width(variance: Any, units: Any, alpha: float) -> Any:
    """Return half the width of the interval of an estimate with this variance, after `units` observations."""
    log_alpha = -2 * math.log(alpha)
    rho2 = (log_alpha + math.log(log_alpha) + 1) / TUNED_UNITS
    scale = units * rho2 + 1
    return np.sqrt(variance * 2 * scale / (units * rho2) * np.log(np.sqrt(scale) / alpha))


def difference(control: Moments, treatment: Moments, alpha: float) -> Interval:
    """Return the difference of the means of two arms. Of logarithms, it is the logarithm of the ratio."""
    (mean, variance), (other, other_variance) = _ratio(control), _ratio(treatment)
    return _around(other - mean, variance + other_variance, control, treatment, alpha)


def log_ratio(control: Moments, treatment: Moments, alpha: float) -> Interval | None:
    """Return the logarithm of the ratio of the means; None if a mean is not positive."""
    (mean, variance), (other, other_variance) = _ratio(control), _ratio(treatment)
    if not np.all(mean > 0) or not np.all(other > 0):
        return None
    variance = variance / mean**2 + other_variance / other**2
    return _around(np.log(other / mean), variance, control, treatment, alpha)


def proportions(control: Moments, treatment: Moments, alpha: float) -> Interval:
    """Return the difference of two proportions.

    The variance has a lower bound, so that the interval is not empty as long as all requests of an arm are equal.
    """
    (mean, variance), (other, other_variance) = _ratio(control), _ratio(treatment)
    variance = np.maximum(variance, _least_variance(control))
    other_variance = np.maximum(other_variance, _least_variance(treatment))
    return _around(other - mean, variance + other_variance, control, treatment, alpha)


def mean(arm: Moments) -> float | None:
    """Return the estimate of an arm; None without requests."""
    return float(Fraction(arm.x, arm.w)) if arm.w else None


def sample_ratio_p(units: Sequence[int], shares: Sequence[int]) -> float:
    """Return the p-value of the hypothesis that units were assigned by these shares.

    Its minimum over all times is a valid p-value at any time. The test compares the planned shares with unknown shares
    under a Dirichlet prior around the planned ones.
    """
    total, whole = sum(units), sum(shares)
    log_factor = math.lgamma(PRIOR_STRENGTH) - math.lgamma(PRIOR_STRENGTH + total)
    for count, share in zip(units, shares, strict=True):
        planned = share / whole
        prior = PRIOR_STRENGTH * planned
        log_factor += math.lgamma(prior + count) - math.lgamma(prior) - count * math.log(planned)
    return math.exp(min(0.0, -log_factor))


def _around(estimate: Any, variance: Any, control: Moments, treatment: Moments, alpha: float) -> Interval:
    half = half_width(variance, control.units + treatment.units, alpha)
    return Interval(estimate, estimate - half, estimate + half)


def _ratio(arm: Moments) -> tuple[Any, Any]:
    """Return the ratio of the sums, and the variance of this estimate."""
    if isinstance(arm.x, int):  # exact, because the squares nearly cancel
        ratio = Fraction(arm.x, arm.w)
        squares = float((arm.xx - 2 * ratio * arm.xw + ratio * ratio * arm.ww) / (arm.w * arm.w))
        return float(ratio), squares * arm.units / max(1, arm.units - 1)
    ratio = arm.x / arm.w
    squares = (arm.xx - 2 * ratio * arm.xw + ratio * ratio * arm.ww) / (arm.w * arm.w)
    return ratio, squares * arm.units / (arm.units - 1)


def _least_variance(arm: Moments) -> Any:
    smoothed = (arm.x + 1) / (arm.w + 2)
    return smoothed * (1 - smoothed) * arm.ww / (arm.w * arm.w)
