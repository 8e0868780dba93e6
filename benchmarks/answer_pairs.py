"""Precision and recall of similarity and guards on pairs of questions with the same or another answer.

A pair is a hit if its similarity is at least a threshold and no guard finds a difference. Pairs are split by a digest
of their texts: thresholds may be chosen on one half and are reported for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.sentence_vectors import Matrix
from millrace.gateway.answer_cache.guards import GUARDS, differences

SIMILARITIES = (0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
HALVES = ("tuning", "test")


@dataclass(frozen=True)
class Pair:
    """Two questions. `is_same`: one answer is correct for both."""

    first: str
    second: str
    is_same: bool

    @property
    def half(self) -> str:
        digest = hashlib.sha256(f"{self.first}\0{self.second}".encode()).digest()
        return HALVES[digest[0] % 2]


def pair_of(row: dict[str, Any]) -> Pair:
    """Return the pair of a row of gptcache_paraphrase (all positive) or of banking77's pairs."""
    if "origin" in row:
        return Pair(str(row["origin"]), str(row["similar"]), is_same=True)
    return Pair(str(row["a"]), str(row["b"]), is_same=bool(row["same_intent"]))


def measure_pairs(pairs: Sequence[Pair], vectors: Matrix) -> dict[str, Any]:
    """Return the figures of both halves. `vectors` has those of all first texts, then those of all second texts."""
    similarities = np.einsum("ij,ij->i", vectors[: len(pairs)], vectors[len(pairs) :])
    found = [differences(pair.first, pair.second) for pair in pairs]
    halves = {}
    for half in HALVES:
        numbers = [number for number, pair in enumerate(pairs) if pair.half == half]
        rows = [(pairs[n].is_same, float(similarities[n]), found[n]) for n in numbers]
        halves[half] = _measure(rows)
    return halves


def _measure(rows: Sequence[tuple[bool, float, list[str]]]) -> dict[str, Any]:
    positives = sum(is_same for is_same, _, _ in rows)
    by_similarity = []
    for least in SIMILARITIES:
        near = [(is_same, guards) for is_same, similarity, guards in rows if similarity >= least]
        by_similarity.append(
            {
                "similarity": least,
                **_rates([is_same for is_same, _ in near], positives, len(rows)),
                "with_guards": _rates([is_same for is_same, guards in near if not guards], positives, len(rows)),
            }
        )
    by_guard = {}
    for name in (*GUARDS, "any"):
        stopped = [is_same for is_same, _, guards in rows if (guards if name == "any" else name in guards)]
        wrong = len(stopped) - sum(stopped)
        by_guard[name] = {
            "pairs": len(stopped),
            "precision": wrong / len(stopped) if stopped and positives < len(rows) else None,
            "recall": wrong / (len(rows) - positives) if positives < len(rows) else None,
            "same_answer_lost": sum(stopped) / positives if positives else None,
        }
    return {"pairs": len(rows), "same_answer": positives, "by_similarity": by_similarity, "by_guard": by_guard}


def _rates(hits: Sequence[bool], positives: int, pairs: int) -> dict[str, float | None]:
    """Return precision and recall of hits. Without pairs of another answer, there is no precision."""
    return {
        "hits": len(hits),
        "precision": sum(hits) / len(hits) if hits and positives < pairs else None,
        "recall": sum(hits) / positives if positives else None,
    }
