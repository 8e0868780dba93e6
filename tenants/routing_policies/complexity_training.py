"""Training of the complexity classifier on labeled outcomes, and calibration of its threshold. No Django.

An outcome is a prompt with the success of a weak and of a strong model, or of one of them, if a random draw that does
not depend on the prompt has selected that model. Inverse propensity weights then replace the unknown success: the
success of the selected model is divided by the share of its draws, and that of the other model counts as 0. A linear
regression with an L2 penalty estimates the gain of the strong model: its success minus that of the weak model.

The threshold is the one with the smallest share of strong calls that a confidence bound allows: with a probability of
95%, the routed score is at least `quality` times the score of the strong model. Thresholds are tested in a fixed
sequence from "always strong" downward on outcomes that were not used for training, and testing stops at the first that
fails. So the probability that any passed threshold is wrong is at most 5%. The test of one threshold is the betting
test of Waudby-Smith and Ramdas (2020), which is valid for every sample size and distribution.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tenants.routing_policies.complexity import MAX_SCORE, ComplexityModel, buckets, length_features, score

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
BUCKETS = 512
PENALTY = 0.1
_STEEPNESS = 8.0  # factor of the estimated gain; the score is the logistic function of the product
_WORD_SCALE = 4.0  # so that the penalty weighs words less than lengths
ALPHA = 0.05  # probability that the quality is below the target
MIN_OUTCOMES = 200
STEPS = 100  # thresholds that are tested, at equal shares of strong calls
MIN_DRAWS = 0.05  # smallest share of each model among outcomes of one model
_TRAINING_SHARE = 0.6  # share of outcomes for training; the others calibrate the threshold


class Outcome(msgspec.Struct, frozen=True):
    """A prompt, and whether each model answered it well."""

    prompt: str
    weak_ok: bool | None = None
    strong_ok: bool | None = None


@dataclass(frozen=True)
class Calibration:
    """A threshold with its properties on the calibration data."""

    threshold: int | None  # requests of at least this complexity need the strong model; None: all do
    strong_share: float
    quality: float  # routed score divided by that of the strong model
    outcomes: int


def part_of(prompt: str) -> float:
    """Return a number from 0 to 1 that depends only on the prompt, by which outcomes are split."""
    return int.from_bytes(hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64


def train(outcomes: Sequence[Outcome], quality: float = 0.95) -> tuple[ComplexityModel, Calibration]:
    """Return a classifier and its threshold for a quality target.

    Raises:
        ValueError: there are too few outcomes.
    """
    if any(outcome.weak_ok is None and outcome.strong_ok is None for outcome in outcomes):
        raise ValueError("Each outcome needs `weak_ok` or `strong_ok`.")
    drawn = [outcome for outcome in outcomes if outcome.weak_ok is None or outcome.strong_ok is None]
    if drawn and not MIN_DRAWS <= _strong_draws(drawn) <= 1 - MIN_DRAWS:
        raise ValueError(f"Each model needs at least {MIN_DRAWS:.0%} of the outcomes that have one model only.")
    training = [outcome for outcome in outcomes if part_of(outcome.prompt) < _TRAINING_SHARE]
    # NOTE: the calibration needs outcomes in random order. Files are often sorted by task or time.
    rest = sorted(
        (outcome for outcome in outcomes if part_of(outcome.prompt) >= _TRAINING_SHARE),
        key=lambda outcome: part_of(outcome.prompt),
    )
    if min(len(training), len(rest)) < MIN_OUTCOMES:
        raise ValueError(f"Training and calibration need {MIN_OUTCOMES} different prompts each.")
    model = fit(training)
    scores = np.array([score(model, outcome.prompt) for outcome in rest], np.float64)
    return model, calibrate(scores, *successes(rest), quality)


def fit(outcomes: Sequence[Outcome]) -> ComplexityModel:
    """Return the classifier of these outcomes."""
    lengths = np.array([length_features(outcome.prompt) for outcome in outcomes])
    mean, deviation = lengths.mean(0), np.maximum(lengths.std(0), 1e-6)
    words = np.zeros((len(outcomes), BUCKETS))
    for row, outcome in enumerate(outcomes):
        found = list(buckets(outcome.prompt, BUCKETS))
        words[row, found] = 1 / np.sqrt(max(1, len(found)))
    features = np.hstack([_WORD_SCALE * words, (lengths - mean) / deviation, np.ones((len(outcomes), 1))])
    weak, strong = successes(outcomes)
    gain = _STEEPNESS * linear_regression(features, strong - weak, PENALTY)
    word_weights, length_weights = _WORD_SCALE * gain[:BUCKETS], gain[BUCKETS:-1] / deviation
    scale = float(max(np.abs(word_weights).max(), 1e-9) / 127)
    quantized = np.round(word_weights / scale).astype(np.int8)
    return ComplexityModel(
        base64.b64encode(quantized.tobytes()).decode(),
        float(f"{scale:.6g}"),
        tuple(float(f"{weight:.6g}") for weight in length_weights),
        float(f"{gain[-1] - length_weights @ mean:.6g}"),
        f"{len(outcomes):,} outcomes",
    )


def linear_regression(features: Matrix, values: Vector, penalty: float) -> Vector:
    """Return the weights of a linear regression. The last feature is constant and has no penalty."""
    ridge = np.full(features.shape[1], penalty)
    ridge[-1] = 0.0
    covariance = features.T @ features / len(values) + np.diag(ridge)
    return np.asarray(np.linalg.solve(covariance, features.T @ values / len(values)), np.float64)


def successes(outcomes: Sequence[Outcome]) -> tuple[Vector, Vector]:
    """Return the successes of the weak and of the strong model, weighted if only one of them is known."""
    drawn = [outcome for outcome in outcomes if outcome.weak_ok is None or outcome.strong_ok is None]
    share = _strong_draws(drawn) if drawn else 0.5
    pairs = []
    for outcome in outcomes:
        is_drawn = outcome.weak_ok is None or outcome.strong_ok is None
        weak, strong = float(outcome.weak_ok or 0), float(outcome.strong_ok or 0)
        pairs.append((weak / (1 - share), strong / share) if is_drawn else (weak, strong))
    found = np.array(pairs, np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _strong_draws(drawn: Sequence[Outcome]) -> float:
    """Return the share of the strong model among outcomes of one model."""
    return sum(outcome.strong_ok is not None for outcome in drawn) / len(drawn)


def calibrate(scores: Vector, weak: Vector, strong: Vector, quality: float, alpha: float = ALPHA) -> Calibration:
    """Return the highest threshold that passes, in the sequence from "always strong" downward.

    Args:
        scores: whole numbers from 0 to MAX_SCORE; higher ones need the strong model.
    """
    best = Calibration(None, 1.0, 1.0, len(scores))
    most = max(1.0, float(weak.max(initial=0)), float(strong.max(initial=0)))  # above 1 if successes are weighted
    low, high = -quality * most, most
    quantiles = np.quantile(scores, np.arange(1, STEPS) / STEPS)
    for threshold in np.unique(np.ceil(quantiles)).tolist():
        is_strong = scores >= threshold
        routed = np.where(is_strong, strong, weak)
        if not is_at_least(routed - quality * strong, low, high, 0.0, alpha):
            break
        share, kept = float(is_strong.mean()), float(routed.mean() / max(strong.mean(), 1e-9))
        best = Calibration(int(threshold), share, kept, len(scores))
    return best


def is_at_least(values: Vector, low: float, high: float, least: float, alpha: float = ALPHA) -> bool:
    """Return whether the mean of independent values in a range is at least `least`, with confidence 1 - alpha.

    The capital starts with 1 and is multiplied by 1 + bet * (value - least) for each value. The bet depends only on the
    values before. If the mean is below `least`, the capital ever reaches 1 / alpha with a probability of at most alpha.
    """
    scaled, bound = (values - low) / (high - low), (least - low) / (high - low)
    counts = np.arange(1, len(scaled) + 1)
    means = (0.5 + np.cumsum(scaled)) / (counts + 1)
    variances = (0.25 + np.cumsum((scaled - means) ** 2)) / (counts + 1)
    before = np.concatenate([[0.25], variances[:-1]])
    bets = np.minimum(np.sqrt(2 * np.log(1 / alpha) / (before * len(scaled))), 0.75 / max(bound, 1e-9))
    capital = np.cumsum(np.log1p(bets * (scaled - bound)))
    return bool(capital.max(initial=0.0) >= np.log(1 / alpha))


def policy_of(model: ComplexityModel, calibration: Calibration, weak: str, strong: str) -> dict[str, Any]:
    """Return the policy that routes with the classifier. Each model is the fallback of the other."""
    easy = {"strategy": "ordered", "targets": [{"model": weak}, {"model": strong}]}
    hard: dict[str, Any] = {"name": "Complex", "strategy": "ordered", "targets": [{"model": strong}, {"model": weak}]}
    if calibration.threshold is None:
        return {"rules": [hard]}
    hard["when"] = {"complexity": {"at_least": min(MAX_SCORE, calibration.threshold)}}
    return {"complexity": msgspec.to_builtins(model), "rules": [hard, easy]}
