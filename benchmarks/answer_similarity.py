"""The reports of `benchmarks.answer_caches` for recorded questions: a stream of one tenant, and pairs.

No platform is started. The sentence vectors are those of the embedded model.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.answer_pairs import measure_pairs, pair_of
from benchmarks.answer_stream import VERIFIED_SHARE, Stream, best_static, replay, static_thresholds
from benchmarks.sentence_vectors import sentence_vectors
from millrace.apps.answer_caches.semantic_decision import ALPHA

ORDER_SEED = 20


def measure_stream(path: Path, max_errors: list[float], orders: int, directory: Path | None) -> dict[str, Any]:
    """Replay the questions of a file under each maximum error rate. The first order is that of the file."""
    rows = _rows(path)
    texts = [str(row["text"]) for row in rows]
    intents = {intent: number for number, intent in enumerate(sorted({str(row["intent"]) for row in rows}))}
    answers = np.array([intents[str(row["intent"])] for row in rows])
    vectors = sentence_vectors(texts, directory)
    results = []
    for order in range(orders):
        places = list(range(len(texts)))
        if order:
            random.Random(ORDER_SEED + order).shuffle(places)  # noqa: S311  (a simulation)
        stream = Stream([texts[place] for place in places], answers[places], vectors[places])
        static = static_thresholds(stream)
        for max_error in max_errors:
            result = replay(stream, max_error, seed=order)
            without = replay(stream, max_error, seed=order, guards=False)
            results.append(
                {
                    "order": order,
                    **result.as_dict(),
                    "without_guards": {"hits": without.total.hits, "errors": without.total.errors},
                    "static_at_max_error": best_static(static, max_error),
                    "static_at_same_error": best_static(static, result.error_rate),
                    "static": static,
                }
            )
    common = {"questions": len(texts), "answers": len(intents), "verified_share": VERIFIED_SHARE}
    return {**common, "confidence": 1 - ALPHA, "replays": results}


def measure_pair_files(paths: list[Path], directory: Path | None) -> dict[str, Any]:
    """Return the figures of the pairs of each file."""
    figures = {}
    for path in paths:
        pairs = [pair_of(row) for row in _rows(path)]
        vectors = sentence_vectors([pair.first for pair in pairs] + [pair.second for pair in pairs], directory)
        figures[f"{path.parent.name}/{path.name}"] = measure_pairs(pairs, vectors)
    return figures


def print_stream(figures: dict[str, Any]) -> None:
    """Print the replays as tables."""
    print(f"{figures['questions']} questions, {figures['answers']} answers")
    for result in figures["replays"]:
        print(f"\nmaximum error {result['max_error']:.0%}, order {result['order']}")
        print("questions     hits   errors  verified   upper bound   checks missing")
        for point in result["over_time"]:
            bound = "none" if point["upper_bound"] is None else f"{point['upper_bound']:.2%}"
            print(
                f"{point['questions']:9} {point['hits']:8} {point['errors']:8} {point['verifications']:9} {bound:>13}"
                f" {point['missing']:16}"
            )
        kept = "kept" if result["is_kept"] else "EXCEEDED"
        print(f"error rate of the hits {result['error_rate']:.2%}: bound {kept}")
        for name in ("static_at_max_error", "static_at_same_error"):
            row = result[name]
            text = "none" if row is None else f"similarity {row['similarity']}, {row['hits']} hits"
            print(f"{name.replace('_', ' ')} (known only afterwards): {text}")


def print_pairs(figures: dict[str, Any]) -> None:
    """Print precision and recall of the pairs."""
    for name, halves in figures.items():
        for half, result in halves.items():
            print(f"\n{name}, {half}: {result['pairs']} pairs, {result['same_answer']} with the same answer")
            print("similarity    hits  precision  recall   with guards: hits  precision  recall")
            for row in result["by_similarity"]:
                guarded = row["with_guards"]
                print(f"{row['similarity']:10} {_rates(row)}                  {_rates(guarded)}")
            print("guard         pairs  precision  recall  same answer lost")
            for guard, row in result["by_guard"].items():
                print(
                    f"{guard:12} {row['pairs']:6} {_percent(row['precision']):>10} {_percent(row['recall']):>7}"
                    f" {_percent(row['same_answer_lost']):>17}"
                )


def _rates(row: dict[str, Any]) -> str:
    return f"{row['hits']:6} {_percent(row['precision']):>10} {_percent(row['recall']):>7}"


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.1%}"


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with JSON lines, which may be compressed.

    Raises:
        SystemExit: there is no such file.
    """
    if not path.is_file():
        raise SystemExit(f"no such file: {path}")
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]
