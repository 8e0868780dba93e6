"""Upper confidence bounds of an error rate that are valid at every time, however often they are read.

The bound inverts a test by betting (an e-process). Against the hypothesis "each check is wrong with at least the
probability p", the likelihood ratios of five lower error rates (0, 10, 25, 50 and 75 % of p) are averaged. If the
hypothesis is true, the average is a nonnegative supermartingale with start 1. By Ville's inequality it ever exceeds
1 / alpha with at most the probability alpha. So the checks may be read after each one, and the order of their results
may depend on earlier results.
"""

from __future__ import annotations

import math

RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75)  # alternatives, as parts of the tested error rate
MAX_CHECKS = 10**9  # the most that `missing_checks` returns
_STEPS = 40  # steps of the bisection: the bound is exact to 1e-12


def log_evidence(errors: int, correct: int, rate: float) -> float:
    """Return the logarithm of the evidence that the error rate is below `rate`, which is between 0 and 1."""
    logs = []
    for ratio in RATIOS:
        if errors and not ratio:
            continue
        gain = correct * (math.log1p(-ratio * rate) - math.log1p(-rate))
        logs.append(gain + (errors * math.log(ratio) if errors else 0.0))
    most = max(logs)
    return most + math.log(sum(math.exp(each - most) for each in logs) / len(RATIOS))


def upper_bound(errors: int, correct: int, alpha: float) -> float:
    """Return the upper bound of the error rate with the confidence 1 - alpha; 1.0 without correct checks."""
    wanted = -math.log(alpha)
    low, high = 0.0, 1.0
    if not correct:
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if log_evidence(errors, correct, middle) >= wanted:
            high = middle
        else:
            low = middle
    return high


def missing_checks(errors: int, correct: int, rate: float, alpha: float) -> int:
    """Return how many more correct checks, without an error, give an upper bound of at most `rate`."""
    wanted = -math.log(alpha)
    low, high = 0, 1
    if log_evidence(errors, correct, rate) >= wanted:
        return 0
    while log_evidence(errors, correct + high, rate) < wanted:
        low, high = high, high * 2
        if high > MAX_CHECKS:
            return MAX_CHECKS
    while high - low > 1:
        middle = (low + high) // 2
        if log_evidence(errors, correct + middle, rate) >= wanted:
            high = middle
        else:
            low = middle
    return high
