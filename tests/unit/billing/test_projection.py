"""Forecasts compared with later days: four of five lie in the interval, for real and for generated clients."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.budgets.projection import FEWEST_DAYS, fit, project

MONDAY = date(2026, 1, 5)
REAL = Path(__file__).resolve().parents[2] / "data" / "traces" / "servegen_daily.json"
WEEK = (1.2, 1.2, 1.1, 1.2, 1.0, 0.3, 0.25)


def share_inside(series: Sequence[Sequence[int]], history: int, ahead: int) -> float:
    """Return how often the sum of the next days was in the interval, with at least this much history (to 8 weeks)."""
    hits = []
    for used in series:
        for cut in range(history, len(used) - ahead + 1, 3):
            start = max(0, cut - 56)
            fitted = fit(MONDAY + timedelta(days=start), used[start:cut])
            assert fitted is not None
            last = project(fitted, MONDAY + timedelta(days=cut), 1.0, ahead)[-1]
            hits.append(last.low <= sum(used[cut : cut + ahead]) <= last.high)
    assert len(hits) > 80
    return sum(hits) / len(hits)


def made_up(seed: int, *, week: bool, noise: float, walk: float = 0.0) -> list[int]:
    chance, level, used = random.Random(seed), 10**9, []
    for day in range(100):
        level = round(level * math.exp(chance.gauss(0, walk)))
        used.append(round(level * (WEEK[day % 7] if week else 1) * math.exp(chance.gauss(0, noise))))
    return used


@pytest.mark.parametrize(("history", "ahead"), [(3, 1), (3, 4), (4, 1), (4, 3), (5, 2)])
def test_real_clients(history, ahead):
    """The data is one week of 105 clients, too short to estimate weekdays."""
    series = json.loads(REAL.read_text(encoding="utf-8"))
    assert 0.7 <= share_inside(series, history, ahead) <= 0.92


@pytest.mark.parametrize("week", [False, True])
@pytest.mark.parametrize(("noise", "walk"), [(0.15, 0.0), (0.6, 0.0), (0.15, 0.03)])
@pytest.mark.parametrize(("history", "ahead"), [(14, 15), (40, 25)])
def test_generated_clients(week, noise, walk, history, ahead):
    series = [made_up(seed, week=week, noise=noise, walk=walk) for seed in range(30)]
    assert 0.68 <= share_inside(series, history, ahead) <= 0.92


def test_weekdays_are_estimated_after_two_weeks():
    used = [round(1000 * WEEK[day % 7]) for day in range(28)]
    fitted = fit(MONDAY, used)
    points = project(fitted, MONDAY + timedelta(days=28), 1.0, 7)
    days = [b - a for a, b in pairwise([0, *(point.point for point in points)])]
    assert days[5] < days[0] / 3
    assert abs(points[-1].point - sum(used[:7])) < sum(used[:7]) * 0.06


def test_too_few_days_have_no_forecast():
    assert fit(MONDAY, [5] * (FEWEST_DAYS - 1)) is None


def test_a_forecast_of_no_usage_is_zero():
    points = project(fit(MONDAY, [0] * 20), MONDAY, 0.5, 10)
    assert {point[1:] for point in points} == {(0, 0, 0)}


@given(
    used=st.lists(st.integers(0, 10**17), min_size=3, max_size=60),
    rest=st.floats(0, 1),
    days=st.integers(1, 31),
)
def test_an_interval_contains_its_point_and_sums_never_decrease(used, rest, days):
    fitted = fit(MONDAY, used)
    points = project(fitted, MONDAY, rest, days)
    assert len(points) == days
    assert all(0 <= point.low <= point.point <= point.high for point in points)
    assert all(a.point <= b.point for a, b in pairwise(points))
    assert points == project(fit(MONDAY, used), MONDAY, rest, days)
