"""Always-valid intervals, their coverage, and the sample-ratio check."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.apps.experiments import statistics
from millrace.apps.experiments.statistics import Moments

ALPHA = 0.05


def moments(pairs: list[tuple[int, int]]) -> Moments:
    total = Moments()
    for pair in pairs:
        total = total.replace_pair((0, 0), pair)
    return total


def test_moments_are_the_same_in_any_order_and_after_corrections() -> None:
    rng = np.random.default_rng(1)
    pairs = [(int(w), int(x)) for w, x in rng.integers(1, 10**9, (50, 2))]
    late = moments(pairs[:-1]).replace_pair((0, 0), (1, 7)).replace_pair((1, 7), pairs[-1])
    assert moments(pairs) == moments(pairs[::-1]) == late
    assert late.replace_pair(pairs[0], (0, 0)) == moments(pairs[1:])
    w, x = np.array(pairs, dtype=object).T
    assert late.as_list() == [50, w.sum(), x.sum(), (w * w).sum(), (x * x).sum(), (w * x).sum()]


def test_an_interval_is_that_of_the_paper_and_contains_its_estimate() -> None:
    # Theorem 2.2 at n=400 of both arms, with variance 1 per observation of each arm and t=800, for this rho.
    a, b = moments([(1, 0), (1, 2)] * 200), moments([(1, 10), (1, 12)] * 200)
    found = statistics.difference(a, b, ALPHA)
    log_alpha = -2 * np.log(ALPHA)
    rho2 = (log_alpha + np.log(log_alpha) + 1) / statistics.TUNED_UNITS
    sigma2 = 800 * 2 * (400 / 399) / 400
    width = np.sqrt(sigma2 * 2 * (800 * rho2 + 1) / (800**2 * rho2) * np.log(np.sqrt(800 * rho2 + 1) / ALPHA))
    assert found.estimate == 10
    assert found.high - found.estimate == pytest.approx(width)
    ratio = statistics.log_ratio(a, b, ALPHA)
    assert ratio is not None and ratio.low < np.log(11) < ratio.high
    assert statistics.log_ratio(moments([(1, 0)]), b, ALPHA) is None


def test_similar_requests_of_a_unit_do_not_narrow_an_interval() -> None:
    rng = np.random.default_rng(2)
    values = rng.integers(0, 1000, 400)
    one = moments([(1, int(x)) for x in values])
    same = moments([(20, 20 * int(x)) for x in values])
    first, second = statistics.difference(one, one, ALPHA), statistics.difference(same, same, ALPHA)
    assert second.high == pytest.approx(first.high)


def test_equal_proportions_have_an_interval() -> None:
    arm = moments([(1, 1)] * 200)
    found = statistics.proportions(arm, arm, ALPHA)
    assert found.low < -0.005 and found.high > 0.005


def test_every_look_together_misses_the_truth_seldom() -> None:
    """300 runs of 4,000 observations with a look after each: at most 5 % of the runs may ever miss."""
    rng = np.random.default_rng(3)
    x = rng.lognormal(0, 1, (300, 2, 2000)).cumsum(axis=2)[:, :, 99:], None
    rng = np.random.default_rng(3)
    squares = (rng.lognormal(0, 1, (300, 2, 2000)) ** 2).cumsum(axis=2)[:, :, 99:]
    n = np.arange(100.0, 2001.0)
    a, b = (Moments(n, n, x[0][:, arm], n, squares[:, arm], x[0][:, arm]) for arm in (0, 1))
    found = statistics.difference(a, b, ALPHA)
    missed = ((found.low > 0) | (found.high < 0)).any(axis=1).mean()
    assert missed <= 0.05
    narrow = statistics.difference(a, b, 0.5)  # the check can fail
    assert ((narrow.low > 0) | (narrow.high < 0)).any(axis=1).mean() > 0.05


@pytest.mark.parametrize(
    ("units", "is_wrong"), [([500, 500], False), ([480, 520], False), ([400, 600], True), ([0, 40], True)]
)
def test_a_wrong_sample_ratio_is_found(units: list[int], is_wrong: bool) -> None:
    assert (statistics.sample_ratio_p(units, [50, 50]) < 0.01) is is_wrong


def test_shares_need_not_be_equal() -> None:
    assert statistics.sample_ratio_p([900, 100], [90, 10]) > 0.5
    assert statistics.sample_ratio_p([500, 500], [90, 10]) < 1e-9
