"""A replay of a tenant's questions through the semantic decision, beside static thresholds.

The answer of a question is its intent, so a hit is correct if the cached question has the same intent. A question that
is not served is computed: its answer is compared with that of the nearest entry, and it becomes an entry.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.sentence_vectors import Matrix
from millrace.apps.answer_caches.semantic_decision import BAND_STARTS, Evidence, Neighbor, margin
from millrace.gateway.answer_cache.guards import differences

VERIFIED_SHARE = 0.05
SIMILARITIES = (0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98)


@dataclass(frozen=True)
class Stream:
    """Questions of one tenant in the order of their arrival."""

    texts: Sequence[str]
    answers: NDArray[np.int64]  # equal numbers: the same answer
    vectors: Matrix


@dataclass
class HitCounts:
    """Results until one point of the stream."""

    questions: int = 0
    hits: int = 0
    errors: int = 0
    verifications: int = 0  # hits that were computed too
    guarded: int = 0  # nearest entries that a guard refused
    upper_bound: float | None = None
    missing: int = 0  # correct checks until the first band is served


@dataclass
class StreamReplay:
    """A stream replayed under one maximum error rate."""

    max_error: float
    total: HitCounts = field(default_factory=HitCounts)
    over_time: list[HitCounts] = field(default_factory=list)
    bands: list[dict[str, float]] = field(default_factory=list)

    @property
    def error_rate(self) -> float:
        return self.total.errors / self.total.hits if self.total.hits else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "error_rate": self.error_rate, "is_kept": self.error_rate <= self.max_error}


class Entries:
    """The cached questions."""

    def __init__(self, stream: Stream) -> None:
        self._vectors = np.empty_like(stream.vectors)
        self._groups = np.empty_like(stream.answers)
        self._numbers = np.empty_like(stream.answers)
        self._wrong: dict[int, int] = {}
        self._size = 0

    def add(self, number: int, vector: Matrix, group: int) -> None:
        """Add a question of the stream."""
        self._vectors[self._size], self._groups[self._size], self._numbers[self._size] = vector, group, number
        self._size += 1

    def find_nearest(self, vector: Matrix) -> tuple[int, list[Neighbor]]:
        """Return the nearest entry's number in the stream, and it with the nearest entry of another answer."""
        if not self._size:
            return -1, []
        similarities = self._vectors[: self._size] @ vector
        groups = self._groups[: self._size]
        place = int(similarities.argmax())
        group = int(groups[place])
        found = [Neighbor(float(similarities[place]), group, self._wrong.get(int(self._numbers[place]), 0))]
        others = np.where(groups != group, similarities, -np.inf)
        other = int(others.argmax())
        if np.isfinite(others[other]):
            found.append(Neighbor(float(others[other]), int(groups[other])))
        return int(self._numbers[place]), found

    def mark_wrong(self, number: int) -> None:
        """Record that the entry's answer was wrong."""
        self._wrong[number] = self._wrong.get(number, 0) + 1


def replay(stream: Stream, max_error: float, *, seed: int = 0, points: int = 13, guards: bool = True) -> StreamReplay:
    """Replay the stream under a maximum error rate. A share of the hits is verified."""
    chance = random.Random(seed)  # noqa: S311  (a simulation)
    evidence, entries, result = Evidence(), Entries(stream), StreamReplay(max_error)
    total, every = result.total, max(1, len(stream.texts) // points)
    for number, text in enumerate(stream.texts):
        source, neighbors = entries.find_nearest(stream.vectors[number])
        answer = int(stream.answers[number])
        is_guarded = bool(neighbors) and guards and bool(differences(stream.texts[source], text))
        total.questions += 1
        total.guarded += is_guarded
        value = 0.0 if is_guarded else margin(neighbors, complete=True)
        is_hit = evidence.serves(value, max_error)
        is_computed = not is_hit or chance.random() < VERIFIED_SHARE
        is_correct = bool(neighbors) and neighbors[0].group == answer
        if is_hit:
            total.hits += 1
            total.errors += not is_correct
            total.verifications += is_computed
        if is_computed:
            evidence.add(value, is_correct=is_correct)
            if is_hit and not is_correct:
                entries.mark_wrong(source)
            entries.add(number, stream.vectors[number], answer)
        if (number + 1) % every == 0 or number + 1 == len(stream.texts):
            total.upper_bound, total.count_missing = evidence.bound(max_error), evidence.count_missing(max_error)
            result.over_time.append(HitCounts(**asdict(total)))
    result.bands = [
        {"from": start, "correct": band.correct, "wrong": band.wrong, "upper_bound": band.bound}
        for start, band in zip(BAND_STARTS, evidence.bands, strict=True)
    ]
    return result


def static_thresholds(stream: Stream) -> list[dict[str, float]]:
    """Return hits and errors of fixed similarities. Their error rate is not known while they serve."""
    return [_static(stream, least) for least in SIMILARITIES]


def _static(stream: Stream, least: float) -> dict[str, float]:
    entries = Entries(stream)
    hits = errors = 0
    for number in range(len(stream.texts)):
        _, neighbors = entries.find_nearest(stream.vectors[number])
        if neighbors and neighbors[0].similarity >= least:
            hits += 1
            errors += int(neighbors[0].group != int(stream.answers[number]))
        else:
            entries.add(number, stream.vectors[number], int(stream.answers[number]))
    return {"similarity": least, "hits": hits, "errors": errors, "error_rate": errors / hits if hits else 0.0}


def best_static(rows: Sequence[Mapping[str, float]], max_error: float) -> Mapping[str, float] | None:
    """Return the fixed similarity with the most hits whose error rate, known afterwards, was at most `max_error`."""
    kept = [row for row in rows if row["hits"] and row["error_rate"] <= max_error]
    return max(kept, key=lambda row: row["hits"], default=None)
