"""Estimates of the acceptance of drafts. Does not import torch."""

from __future__ import annotations

from collections import defaultdict
from weakref import WeakKeyDictionary

from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.speculation.drafter import MAX_EVIDENCE, DraftToken

# The shares that are assumed before any measurement, by evidence: for a lookup, the length of the match.
_FIRST_GUESSES = (0.1, 0.15, 0.3, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8)
_GUESS_TRIALS = 8.0  # trials that a first guess counts as
_SHARED_TRIALS = 2.0  # trials of a sequence that the engine's measurements count as
_SHARED_DECAY, _OWN_DECAY = 0.995, 0.95


class _Trials:
    """A decaying count of trials and of their successes."""

    __slots__ = ("accepted", "count")

    def __init__(self, accepted: float = 0.0, count: float = 0.0) -> None:
        self.accepted = accepted
        self.count = count

    def add(self, is_accepted: bool, decay: float) -> None:
        self.accepted = self.accepted * decay + is_accepted
        self.count = self.count * decay + 1.0


class AcceptanceRates:
    """The measured acceptance by drafter and evidence, of the engine and of each sequence.

    Drafts that were not verified count too: their first token is compared with the sampled one. So a sequence whose
    depth is 0 is measured without cost.
    """

    def __init__(self) -> None:
        self._shared = {
            evidence: _Trials(guess * _GUESS_TRIALS, _GUESS_TRIALS) for evidence, guess in enumerate(_FIRST_GUESSES)
        }
        self._by_drafter: dict[tuple[str, int], _Trials] = {}
        self._own: WeakKeyDictionary[Sequence, defaultdict[tuple[str, int], _Trials]] = WeakKeyDictionary()

    def estimate(self, seq: Sequence, draft: DraftToken) -> float:
        """Return the probability that the draft is accepted if all drafts before it are."""
        shared = self._shared_trials(draft)
        share = shared.accepted / shared.count
        own = self._own.get(seq)
        trials = own.get(_group(draft)) if own is not None else None
        if trials is None:
            return share
        return (trials.accepted + _SHARED_TRIALS * share) / (trials.count + _SHARED_TRIALS)

    def record(self, seq: Sequence, draft: DraftToken, is_accepted: bool) -> None:
        self._shared_trials(draft).add(is_accepted, _SHARED_DECAY)
        own = self._own.get(seq)
        if own is None:
            own = self._own[seq] = defaultdict(_Trials)
        own[_group(draft)].add(is_accepted, _OWN_DECAY)

    def _shared_trials(self, draft: DraftToken) -> _Trials:
        key = draft.drafter, draft.evidence
        trials = self._by_drafter.get(key)
        if trials is None:
            guess = self._shared[draft.evidence]
            trials = self._by_drafter[key] = _Trials(guess.accepted, guess.count)
        return trials


def _group(draft: DraftToken) -> tuple[str, int]:
    """Return the drafter and the group of evidence that a sequence's trials are counted in: 2, 3, 4 to 5, 6 to 7, 8."""
    evidence = draft.evidence
    return draft.drafter, evidence if evidence <= 3 or evidence >= MAX_EVIDENCE else evidence & ~1
