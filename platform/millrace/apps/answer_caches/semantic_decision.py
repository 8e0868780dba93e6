"""The decision whether a cached answer to a similar question is served, with a bound of the error rate.

A lookup finds the cached questions that are nearest to the new one. Its margin is the similarity of the nearest entry
minus the similarity of the nearest entry with a different answer. Margins are grouped in bands.

The model of the evidence: within one tenant, the probability that the nearest entry's answer is wrong depends only on
the band of the margin, and does not increase over time. Under this model all entries of the tenant share one evidence:
the numbers of correct and wrong checks of each band. A check compares the nearest entry's answer with the answer that
the model has computed. Each computed request is a check without extra cost; a share of the hits is computed again.

A band is served while the upper confidence bound of its own error rate is at most the tenant's maximum. So the bound
is valid for each served band, and for every mix of them. The confidence is divided equally among the bands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.apps.answer_caches.error_bounds import missing_checks, upper_bound

BAND_STARTS = (0.05, 0.08, 0.12, 0.2)  # least margins; smaller margins are never served
ALPHA = 0.05  # probability that a bound of any band is ever wrong
ALPHA_OF_BAND = ALPHA / len(BAND_STARTS)
WRONG_PENALTY = 0.1  # reduction of an entry's margin by each of its wrong answers


@dataclass(frozen=True, slots=True)
class Neighbor:
    """A cached entry near the question. Entries with the same answer have the same group."""

    similarity: float
    group: int
    wrong: int = 0  # number of checks in which its answer was wrong


def margin(neighbors: Sequence[Neighbor], *, complete: bool) -> float:
    """Return the margin of a lookup; 0 if no entry with a different answer is known.

    Args:
        neighbors: nearest first.
        complete: whether these are all entries. Otherwise the others are at most as similar as the last one.
    """
    if not neighbors:
        return 0.0
    nearest = neighbors[0]
    other = next((each for each in neighbors if each.group != nearest.group), None)
    if other is None:
        if complete:
            return 0.0
        other = neighbors[-1]
    return nearest.similarity - other.similarity - WRONG_PENALTY * nearest.wrong


def band_of(margin_: float) -> int | None:
    """Return the band of a margin; None if it is too small."""
    position = bisect_right(BAND_STARTS, margin_)
    return position - 1 if position else None


@dataclass(slots=True)
class Band:
    """The checks of the lookups whose margins are in one band."""

    correct: int = 0
    wrong: int = 0

    @property
    def bound(self) -> float:
        """Return the upper confidence bound of the error rate."""
        return upper_bound(self.wrong, self.correct, ALPHA_OF_BAND)

    def count_missing(self, max_error: float) -> int:
        """Return how many more correct checks are missing until the band is served."""
        return missing_checks(self.wrong, self.correct, max_error, ALPHA_OF_BAND)


@dataclass(slots=True)
class Evidence:
    """The checks of one tenant, by band."""

    bands: list[Band] = field(default_factory=lambda: [Band() for _ in BAND_STARTS])

    def serves(self, margin_: float, max_error: float) -> bool:
        """Return whether an answer with this margin may be served."""
        number = band_of(margin_)
        return number is not None and not self.bands[number].count_missing(max_error)

    def add(self, margin_: float, *, is_correct: bool) -> None:
        """Add a check of a lookup with this margin."""
        number = band_of(margin_)
        if number is None:
            return
        if is_correct:
            self.bands[number].correct += 1
        else:
            self.bands[number].wrong += 1

    def served_bands(self, max_error: float) -> list[int]:
        """Return the numbers of the bands that are served."""
        return [number for number, band in enumerate(self.bands) if not band.count_missing(max_error)]

    def bound(self, max_error: float) -> float | None:
        """Return the upper bound of the error rate of hits; None if no band is served."""
        return max((self.bands[number].bound for number in self.served_bands(max_error)), default=None)

    def count_missing(self, max_error: float) -> int:
        """Return how many more correct checks are missing until the first band is served; 0 if one is."""
        return min(band.count_missing(max_error) for band in self.bands)
