"""The complexity router on held-out outcomes, compared with simple baselines.

    python -m benchmarks.routing --data outcomes.jsonl.gz --json figures.json

Each line of the data has a prompt and whether a weak and a strong model answered it well (`prompt`, `weak_ok`,
`strong_ok`). The split depends only on the prompt: 30% are test data, and the router is trained and calibrated on the
others. Methods send the share of the requests with the highest score to the strong model:

- `router`: the classifier of `millrace router train`, on words and lengths
- `length regression`: a logistic regression on the length features only
- `prompt length`: longer prompts first
- `random mix`: each request with the same probability
- `embedding`: the regression of the router on sentence vectors of the embedded model and lengths, with --embeddings
- `oracle`: only requests that only the strong model answers well; no router can be better

The first table has the smallest share of strong calls with at least 95% of the strong model's score, and the area under
the curve of score by share. Bands are 95% percentile intervals of bootstrap samples of the test data, in which each
method's share is chosen again. The second table has the calibrated policy on the test data. The exit status is 1 if the
calibrated policy is below the quality target by more than the test data can explain.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.options import parse, write_figures
from tenants.routing_policies.complexity import length_features, score
from tenants.routing_policies.complexity_training import (
    PENALTY,
    Outcome,
    linear_regression,
    successes,
    train,
)

Vector = NDArray[np.float64]
TEST_SHARE = 0.3
BASELINES = ("length regression", "prompt length", "random mix")


def main() -> int:
    """Train, compare and print. Return 1 if the calibrated policy misses its target, else 0."""
    options = parse_arguments()
    outcomes = read(options.data)
    is_test = np.array([_in_test(outcome.prompt) for outcome in outcomes])
    training = [outcome for outcome, held_out in zip(outcomes, is_test, strict=True) if not held_out]
    test = [outcome for outcome, held_out in zip(outcomes, is_test, strict=True) if held_out]
    weak, strong = successes(test)
    print(f"{len(training):,} outcomes for training and calibration, {len(test):,} test outcomes")
    print(
        f"success: weak {weak.mean():.1%}, strong {strong.mean():.1%}, only strong {((1 - weak) * strong).mean():.1%}"
    )
    model, calibration = train(training, options.quality)
    scores = {"router": np.array([score(model, outcome.prompt) for outcome in test], np.float64)}
    scores |= baselines(training, test)
    if options.embeddings:
        scores["embedding"] = embedding_scores(outcomes, is_test, Path(options.embeddings))
    scores["oracle"] = (1 - weak) * strong
    rows = compare(scores, weak, strong, options)
    print(f"\n{'method':18} {'strong calls':>12}  {'95% band':>15} {'area':>7}  {'95% band':>15}")
    for name in scores:
        share, area = rows[name]["strong_share"], rows[name]["area"]
        print(f"{name:18} {share[0]:>12.1%}  {_band(share)} {area[0]:>7.3f}  {_band(area)}")
    calibrated = on_test(scores["router"], calibration.threshold, weak, strong, options)
    print(f"\ncalibrated for {options.quality:.0%}: {calibrated['strong_share']:.1%} strong calls,", end=" ")
    print(f"{calibrated['quality'][0]:.1%} of the strong model's score on test data, {_band(calibrated['quality'])}")
    comparison = {name: comparison_of(rows["difference"][name]) for name in BASELINES}
    for name, text in comparison.items():
        print(f"router and {name}: {text}")
    figures = {"methods": rows, "calibrated": calibrated, "comparison": comparison, "test_outcomes": len(test)}
    write_figures(options, figures)
    return int(not options.quick and calibrated["quality"][2] < options.quality)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="outcomes; default: made-up ones, to try the benchmark"
    )
    parser.add_argument("--quality", type=float, default=0.95, help="of the strong model's score (default %(default)s)")
    parser.add_argument("--samples", type=int, default=1000, help="bootstrap samples (default %(default)s)")
    parser.add_argument(
        "--embeddings", metavar="DIRECTORY", help="also compare sentence vectors, which are stored there"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    return parse(parser, {"samples": 20})


def read(path: Path | None) -> list[Outcome]:
    if path is None:
        return made_up(4000)
    decoder = msgspec.json.Decoder(Outcome)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        return [decoder.decode(line) for line in lines]


def made_up(count: int) -> list[Outcome]:
    """Return outcomes in which prompts with the word "prove" need the strong model more often."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        is_hard = rng.random() < 0.3
        prompt = f"{'prove' if is_hard else 'name'} number {number} {'please ' * int(rng.integers(9))}"
        found.append(Outcome(prompt, bool(rng.random() > (0.8 if is_hard else 0.1)), bool(rng.random() > 0.1)))
    return found


def _in_test(prompt: str) -> bool:
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), person=b"test").digest()
    return int.from_bytes(digest[:8], "big") < TEST_SHARE * 2**64


def baselines(training: list[Outcome], test: list[Outcome]) -> dict[str, Vector]:
    """Return the scores of the simple methods."""
    known = np.array([length_features(outcome.prompt) for outcome in training])
    new = np.array([length_features(outcome.prompt) for outcome in test])
    mean, deviation = known.mean(0), np.maximum(known.std(0), 1e-6)
    weak, strong = successes(training)
    weights = logistic_regression(_with_constant((known - mean) / deviation), (1 - weak) * strong)
    return {
        "length regression": _with_constant((new - mean) / deviation) @ weights,
        "prompt length": np.array([len(outcome.prompt) for outcome in test], np.float64),
        "random mix": np.random.default_rng(1).random(len(test)),
    }


def embedding_scores(outcomes: list[Outcome], is_test: NDArray[np.bool_], directory: Path) -> Vector:
    from benchmarks.sentence_vectors import sentence_vectors  # loads torch

    vectors = sentence_vectors([outcome.prompt for outcome in outcomes], directory).astype(np.float64)
    lengths = np.array([length_features(outcome.prompt) for outcome in outcomes])
    known = lengths[~is_test]
    lengths = (lengths - known.mean(0)) / np.maximum(known.std(0), 1e-6)
    features = _with_constant(np.hstack([8 * vectors, lengths]))
    weak, strong = successes([outcome for outcome, held_out in zip(outcomes, is_test, strict=True) if not held_out])
    weights = linear_regression(features[~is_test], strong - weak, PENALTY)
    found: Vector = features[is_test] @ weights
    return found


def logistic_regression(features: Vector, labels: Vector) -> Vector:
    """Return the weights of a logistic regression, fitted by Newton's method with a small penalty."""
    weights, ridge = np.zeros(features.shape[1]), np.full(features.shape[1], 1e-3)
    for _ in range(25):
        expected = 1 / (1 + np.exp(-features @ weights))
        gradient = features.T @ (expected - labels) / len(labels) + ridge * weights
        curvature = (features * (expected * (1 - expected))[:, None]).T @ features / len(labels) + np.diag(ridge)
        weights -= np.linalg.solve(curvature, gradient)
    return weights


def _with_constant(features: Vector) -> Vector:
    return np.hstack([features, np.ones((len(features), 1))])


def compare(scores: Mapping[str, Vector], weak: Vector, strong: Vector, options: argparse.Namespace) -> dict[str, Any]:
    """Return the strong share and the area of each method with their bands, and their differences to the router."""
    rng = np.random.default_rng(2)
    samples = [np.arange(len(weak)), *(rng.integers(len(weak), size=len(weak)) for _ in range(options.samples))]
    found = {
        name: np.array([curve(values[chosen], weak[chosen], strong[chosen], options.quality) for chosen in samples])
        for name, values in scores.items()
    }
    rows: dict[str, Any] = {
        name: {"strong_share": _interval(values[:, 0]), "area": _interval(values[:, 1])}
        for name, values in found.items()
    }
    rows["difference"] = {name: _interval(found["router"][:, 0] - found[name][:, 0]) for name in BASELINES}
    return rows


def curve(scores: Vector, weak: Vector, strong: Vector, quality: float) -> tuple[float, float]:
    """Return the smallest strong share that reaches the quality, and the area under the curve of score by share."""
    order = np.lexsort((np.random.default_rng(3).random(len(scores)), -scores))
    gains = np.concatenate([[0.0], np.cumsum(strong[order] - weak[order])])
    routed = (weak.sum() + gains) / len(scores)
    shares = np.arange(len(routed)) / len(scores)
    enough = shares[routed >= quality * strong.mean()]
    return float(enough.min()), float(np.trapezoid(routed, shares))


def on_test(
    scores: Vector, threshold: int | None, weak: Vector, strong: Vector, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the calibrated policy on the test data."""
    is_strong = np.ones(len(scores), bool) if threshold is None else scores >= threshold
    routed = np.where(is_strong, strong, weak)
    rng = np.random.default_rng(4)
    samples = [np.arange(len(weak)), *(rng.integers(len(weak), size=len(weak)) for _ in range(options.samples))]
    kept = np.array([routed[chosen].mean() / strong[chosen].mean() for chosen in samples])
    return {"threshold": threshold, "strong_share": float(is_strong.mean()), "quality": _interval(kept)}


def comparison_of(difference: tuple[float, float, float]) -> str:
    share, low, high = difference
    text = f"{share:+.1%} strong calls ({low:+.1%} to {high:+.1%})"
    return f"{text}, {'better' if high < 0 else 'worse' if low > 0 else 'no proven difference'}"


def _interval(values: Vector) -> tuple[float, float, float]:
    """Return the value of the data themselves, and the 95% percentile interval of the samples."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return float(values[0]), float(low), float(high)


def _band(values: tuple[float, float, float]) -> str:
    low, high = values[1:]
    return f"{low:>6.1%} to {high:>6.1%}" if high <= 1.5 else f"{low:.3f} to {high:.3f}"


if __name__ == "__main__":
    sys.exit(main())
