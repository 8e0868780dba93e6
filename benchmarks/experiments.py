"""False stops of experiments without a difference, and the stop of one with a planted harm.

    python -m benchmarks.experiments --runs 1000 --json figures.json

Simulated experiments have two equal arms and four guardrails: time to first token (TTFT), inter-token latency, success
and cost. After every 50 units the automatic stop is checked, as millrace.apps.experiments does. All requests of a unit
have the same arm.

- TTFT: lognormal, median 300 ms. The deviation of its logarithm is that of the prompt lengths in the Azure conversation
  trace (tests/data/traces, 2023), because the traces contain no latencies and prefill time grows with the prompt.
- Inter-token latency: lognormal, deviation 0.3. Cost: lognormal, deviation 1.2. Success: 95 %.

`false` is without a difference, with one request per unit and with 5, of which half of the variance is between units.
Each guardrail allows no harm at all, so every proven harm is a false stop. `harm` has a TTFT that is longer by 20 % in
the second arm, with a guardrail of 0 % and of 10 %. The exit status is 1 if more than 5 % of the runs stop without a
difference, or if fewer than 95 % stop with a harm.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import parse, write_figures
from millrace.apps.experiments.metrics import ALPHA, METRICS, MIN_UNITS, stop_alpha
from millrace.apps.experiments.statistics import Moments

TRACE = Path(__file__).parents[1] / "tests/data/traces/azure_conversation.csv.gz"
LOOK = 50  # units between checks
MEDIAN_TTFT_MS = 300.0
GUARDRAILS = ("ttft", "itl", "success", "cost")
SUCCESS = 0.95


@dataclass(frozen=True)
class Scenario:
    name: str
    ttft_factor: float
    allowed: float
    per_unit: int = 1


SCENARIOS = (
    Scenario("false", 1.0, 0.0),
    Scenario("false, 5 requests a unit", 1.0, 0.0, 5),
    Scenario("harm 20 %, allowed 0 %", 1.2, 0.0),
    Scenario("harm 20 %, allowed 10 %", 1.2, 0.1),
)


def main() -> int:
    """Simulate and print. Return 1 if a bound is missed, else 0."""
    options = parse_arguments()
    deviation = log_deviation(TRACE)
    print(f"TTFT: lognormal, median {MEDIAN_TTFT_MS:.0f} ms, deviation of the logarithm {deviation:.3f}")
    print(f"{options.runs} runs of {options.units} units, checked every {LOOK}, alpha {ALPHA}\n")
    print(f"{'scenario':26} {'stopped':>8} {'requests p50':>13} {'p95':>9} {'p99':>9}")
    rows = [simulate(scenario, options, deviation) for scenario in SCENARIOS]
    for row in rows:
        stops = "".join(f"{row[name]:>{width},}" for name, width in (("p50", 14), ("p95", 10), ("p99", 10)))
        print(f"{row['scenario']:26} {row['stopped']:>8.1%}{stops if row['stopped'] else ''}")
    write_figures(options, rows)
    if options.quick:
        return 0
    missed = [row for row in rows if (row["stopped"] > ALPHA if row["is_false"] else row["stopped"] < 1 - ALPHA)]
    return int(bool(missed))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="simulated experiments of each scenario (default 1000)")
    parser.add_argument("--units", type=int, default=20_000, help="units of an experiment (default 20000)")
    parser.add_argument("--seed", type=int, default=26, help="of the random numbers (default 26)")
    parser.add_argument("--json", help="write the figures to this file too")
    return parse(parser, {"runs": 20, "units": 3000})


def log_deviation(trace: Path) -> float:
    """Return the standard deviation of the logarithm of the trace's prompt lengths."""
    with gzip.open(trace, "rt", encoding="utf-8") as lines:
        lengths = [max(1, int(row["context_tokens"])) for row in csv.DictReader(lines)]
    return float(np.log(np.array(lengths)).std(ddof=1))


def simulate(scenario: Scenario, options: argparse.Namespace, deviation: float) -> dict[str, Any]:
    """Return the share of stopped runs, and the number of requests until the stop."""
    rng = np.random.default_rng(options.seed)
    stops = [stopped_after(rng, scenario, options.units, deviation) for _ in range(options.runs)]
    found = sorted(stop * scenario.per_unit for stop in stops if stop is not None)
    percentiles = {
        name: found[min(len(found) - 1, math.ceil(share * len(found)) - 1)] if found else 0
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }
    is_false = scenario.ttft_factor == 1.0
    return {"scenario": scenario.name, "is_false": is_false, "stopped": len(found) / options.runs, **percentiles}


def stopped_after(rng: np.random.Generator, scenario: Scenario, units: int, deviation: float) -> int | None:
    """Return the number of units after which a simulated experiment stops; None if it does not."""
    arms = rng.integers(0, 2, units)
    values = draw(rng, scenario, units, deviation)
    values["ttft"] = values["ttft"] + arms * scenario.per_unit * math.log(scenario.ttft_factor)
    looks = np.arange(LOOK - 1, units, LOOK)
    alpha = stop_alpha(len(GUARDRAILS), 1)
    stop: int | None = None
    enough = np.minimum(np.cumsum(arms == 0)[looks], np.cumsum(arms == 1)[looks]) >= MIN_UNITS
    for name in GUARDRAILS:
        control, treatment = (moments(values[name], arms == arm, scenario.per_unit, looks[enough]) for arm in (0, 1))
        interval = METRICS[name].interval(control, treatment, alpha)
        if interval is None:
            continue
        harm = METRICS[name].does_harm(interval, scenario.allowed)
        if harm.any():
            at = int(looks[enough][harm.argmax()]) + 1
            stop = at if stop is None else min(stop, at)
    return stop


def draw(rng: np.random.Generator, scenario: Scenario, units: int, deviation: float) -> dict[str, Any]:
    """Return the sums of each unit's requests. Half of the variance of several requests is between units."""
    shape = (units, scenario.per_unit)

    def normal(sigma: float) -> Any:
        if scenario.per_unit == 1:
            return rng.normal(0, sigma, shape)
        part = sigma / math.sqrt(2)
        return rng.normal(0, part, (units, 1)) + rng.normal(0, part, shape)

    return {
        "ttft": (math.log(MEDIAN_TTFT_MS) + normal(deviation)).sum(axis=1),
        "itl": (math.log(20.0) + normal(0.3)).sum(axis=1),
        "cost": np.exp(normal(1.2)).sum(axis=1),
        "success": (rng.random(shape) < SUCCESS).sum(axis=1).astype(float),
    }


def moments(x: Any, chosen: Any, weight: int, looks: Any) -> Moments:
    """Return the sums of an arm's units at each look."""
    n = np.cumsum(chosen)[looks].astype(float)
    total = np.cumsum(x * chosen)[looks]
    squares = np.cumsum(x * x * chosen)[looks]
    return Moments(n, n * weight, total, n * weight * weight, squares, total * weight)


if __name__ == "__main__":
    sys.exit(main())
