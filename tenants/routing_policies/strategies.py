"""The order of a rule's targets for a request: the first is used, the others are fallbacks. Does not import Django."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Strategy = Literal["weighted", "ordered", "cheapest", "lowest_latency", "least_busy"]
STRATEGIES: tuple[Strategy, ...] = ("weighted", "ordered", "cheapest", "lowest_latency", "least_busy")
PROBE_PERCENT = 5  # requests that measure another target than the fastest


class TargetMeasures(NamedTuple):
    """What is known about a target for a request. None: unknown."""

    fits: bool = True  # prompt and completion fit its context, and it takes the request's images
    cost_nano: int | None = None  # estimated cost of the request by the target's rate card
    ttft_ms: float | None = None  # decayed mean time to the first token
    load: float | None = None  # requests per slot of its replicas; None: no replica is ready


class TargetOrder(NamedTuple):
    """The targets of a rule in the order of attempts."""

    models: tuple[str, ...]
    draw: int = 0  # the drawn number of a weighted choice
    is_probe: bool = False  # the first target is measured, although another is faster


Measure = Callable[[str], TargetMeasures]


def unknown_measures(_: str) -> TargetMeasures:
    """Return the measures of a target that nothing is known about."""
    return TargetMeasures()


def order_targets(
    strategy: Strategy, targets: Sequence[tuple[str, int]], request_id: str, measure: Measure
) -> TargetOrder:
    """Return the order of targets, which are given as (model, weight).

    Targets of weight 0 are only fallbacks, after the others. Unknown measures follow the known ones.
    """
    if strategy == "weighted":
        first, draw = _draw(targets, request_id)
        return TargetOrder((first, *(model for model, _ in targets if model != first)), draw)
    models = [model for model, weight in targets if weight]
    fallbacks = [model for model, weight in targets if not weight]
    if strategy == "ordered":
        return TargetOrder((*models, *fallbacks))
    measures = {model: measure(model) for model in models}
    ordered = sorted(models, key=lambda model: _rank(strategy, measures[model]))
    best = first = ordered[0]
    if strategy == "lowest_latency":
        first = _choose_probed(ordered, request_id)
    others = (model for model in ordered if model != first)
    return TargetOrder((first, *others, *fallbacks), is_probe=first != best)


def _rank(strategy: Strategy, measures: TargetMeasures) -> tuple[bool, bool, float]:
    value: float | None = {
        "cheapest": measures.cost_nano,
        "lowest_latency": measures.ttft_ms,
        "least_busy": measures.load,
    }[strategy]
    return not measures.fits, value is None, value or 0


def _choose_probed(ordered: Sequence[str], request_id: str) -> str:
    """Return the target to use: for a few requests another one than the fastest, so that its latency is measured."""
    number = _number(request_id, b"probe")
    if len(ordered) < 2 or number % 100 >= PROBE_PERCENT:
        return ordered[0]
    return ordered[1 + number // 100 % (len(ordered) - 1)]


def _draw(targets: Sequence[tuple[str, int]], request_id: str) -> tuple[str, int]:
    total = sum(weight for _, weight in targets)
    drawn = _number(request_id) % total
    upto = 0
    for model, weight in targets:
        upto += weight
        if drawn < upto:
            return model, drawn
    raise AssertionError("weights add up")


def _number(request_id: str, person: bytes = b"") -> int:
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8, person=person).digest(), "big")
