"""The decision of semantic hits: margins, bands and bounds of the error rate that are valid at every time."""

from __future__ import annotations

import math
import random

import pytest

from millrace.apps.answer_caches.error_bounds import log_evidence, missing_checks, upper_bound
from millrace.apps.answer_caches.semantic_decision import (
    ALPHA_OF_BAND,
    BAND_STARTS,
    WRONG_PENALTY,
    Evidence,
    Neighbor,
    band_of,
    margin,
)


def test_bound_is_crossed_in_few_runs_although_it_is_read_after_every_check() -> None:
    chance, alpha, rate, runs = random.Random(7), 0.1, 0.08, 400
    crossed = 0
    for _ in range(runs):
        errors = correct = 0
        for _ in range(150):
            if chance.random() < rate:
                errors += 1
            else:
                correct += 1
            if log_evidence(errors, correct, rate) >= -math.log(alpha):
                assert upper_bound(errors, correct, alpha) <= rate + 1e-9
                crossed += 1
                break
    assert crossed / runs <= alpha
    assert crossed  # the bound is not so wide that it is never crossed


@pytest.mark.parametrize(("errors", "correct"), [(0, 50), (1, 50), (5, 95), (40, 60), (100, 10_000)])
def test_upper_bound_is_above_the_rate_and_falls_with_correct_checks(errors: int, correct: int) -> None:
    bound = upper_bound(errors, correct, 0.05)
    assert errors / (errors + correct) < bound < 1
    assert upper_bound(errors, correct * 2, 0.05) < bound < upper_bound(errors + 1, correct, 0.05)
    assert log_evidence(errors, correct, bound) == pytest.approx(2.9957, abs=1e-3)  # ln(1 / 0.05)


def test_missing_checks_are_exact() -> None:
    missing = missing_checks(2, 30, 0.05, 0.05)
    assert missing > 0
    assert upper_bound(2, 30 + missing, 0.05) <= 0.05 < upper_bound(2, 30 + missing - 1, 0.05)
    assert upper_bound(3, 0, 0.05) == 1.0


def test_margin_is_the_distance_to_the_nearest_entry_with_a_different_answer() -> None:
    near = [Neighbor(0.95, 1), Neighbor(0.93, 1), Neighbor(0.8, 2), Neighbor(0.7, 3)]
    assert margin(near, complete=False) == pytest.approx(0.15)
    assert margin(near[:2], complete=True) == 0.0  # nothing to compare with
    assert margin(near[:2], complete=False) == pytest.approx(0.02)  # the next entry may be as similar as the last
    assert margin([], complete=True) == 0.0
    lowered = [Neighbor(0.95, 1, wrong=1), *near[1:]]
    assert margin(lowered, complete=False) == pytest.approx(0.15 - WRONG_PENALTY)


def test_bands_cover_the_margins_from_the_least_one() -> None:
    assert band_of(BAND_STARTS[0] - 1e-9) is None
    assert [band_of(start) for start in BAND_STARTS] == list(range(len(BAND_STARTS)))
    assert band_of(2.0) == len(BAND_STARTS) - 1


def test_a_band_is_served_after_enough_correct_checks_and_stopped_by_errors() -> None:
    evidence, high, low = Evidence(), 0.5, BAND_STARTS[0]
    needed = missing_checks(0, 0, 0.05, ALPHA_OF_BAND)
    for _ in range(needed - 1):
        evidence.add(high, is_correct=True)
    assert not evidence.serves(high, 0.05)
    assert (evidence.count_missing(0.05), evidence.bound(0.05)) == (1, None)
    evidence.add(high, is_correct=True)
    assert evidence.serves(high, 0.05) and not evidence.serves(high, 0.02)
    assert not evidence.serves(low, 0.05) and not evidence.serves(0.0, 0.05)
    bound = evidence.bound(0.05)
    assert bound is not None and bound <= 0.05
    evidence.add(high, is_correct=False)
    assert not evidence.serves(high, 0.05)
    assert evidence.count_missing(0.05) > 0
    evidence.add(0.0, is_correct=False)  # below all bands: not evidence
    assert sum(band.wrong for band in evidence.bands) == 1
