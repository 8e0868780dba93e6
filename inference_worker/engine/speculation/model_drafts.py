"""The choice of sequences that get drafts of the draft model, and of their depths. Does not import torch.

Unlike other drafters, a draft model takes time for each draft, and for the tokens before the first one. So its drafts
are computed only if the expected tokens per second of the step increase with the draft model's time included. Drafts
that are not computed cannot be compared with the sampled tokens. Trials measure their acceptance again, in TRIAL_SHARE
of the time.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.speculation.acceptance import AcceptanceRates
from inference_worker.engine.speculation.drafter import MAX_DEPTH, DraftRequest, DraftToken, model_draft
from inference_worker.engine.speculation.step_costs import StepCosts

if TYPE_CHECKING:
    from inference_worker.engine.speculation.draft_model import DraftModel

TRIAL_SHARE = 0.005  # share of the time of steps
CATCH_UP_TOKENS = 64  # computed by the draft model in one step, apart from drafts; more would delay the step
_MIN_GAIN = 1.02  # expected tokens per second, relative to those without the drafts
_MAX_MISSING = MAX_DEPTH + 1  # tokens that are computed with the first draft; a sequence that lacks more catches up
_TRIAL_STEPS = 8  # with one draft each
_FIRST_CREDIT, _MAX_CREDIT = 10.0, 50.0  # for trials, in steps
_HORIZON = 128  # assumed maximum of an output's further tokens


class ModelDrafts:
    """The use of a draft model.

    Args:
        rates: the acceptance by drafter.
        costs: the duration of the model's steps.
    """

    def __init__(self, model: DraftModel, rates: AcceptanceRates, costs: StepCosts) -> None:
        self.model = model
        self._rates = rates
        self._costs = costs
        self._credit = _FIRST_CREDIT
        self._trials: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # remaining steps

    def plan(
        self, candidates: Items[DraftRequest], num_expected: float, num_tokens: int, limit: int
    ) -> list[list[DraftToken]]:
        """Return the drafts of each candidate.

        Args:
            candidates: sequences without other drafts, with their maximum depths.
            num_expected: expected output tokens of the step without these drafts.
            num_tokens: tokens of the step without these drafts.
            limit: maximum number of drafts.
        """
        self._credit = min(self._credit + TRIAL_SHARE, _MAX_CREDIT)
        possible = [DraftRequest(seq, min(depth, MAX_DEPTH, self.model.room(seq))) for seq, depth in candidates]
        missing = [self.model.num_missing(seq) for seq, _ in possible]
        ready = [
            DraftRequest(seq, depth if count <= _MAX_MISSING else 0)
            for (seq, depth), count in zip(possible, missing, strict=True)
        ]
        depths, _ = self._choose(ready, missing, num_expected, num_tokens, limit)
        if not any(depths):
            self._start_trial(possible, missing, num_tokens)
            depths = self._continue_trials(ready)
        self._catch_up(possible, missing, num_expected, num_tokens, limit)
        if not any(depths):
            return [[] for _ in candidates]
        return self.model.propose(
            [DraftRequest(seq, depth) for (seq, _), depth in zip(candidates, depths, strict=True)]
        )

    def _choose(
        self, requests: Items[DraftRequest], missing: Items[int], num_expected: float, num_tokens: int, limit: int
    ) -> tuple[list[int], float]:
        """Return the depths with the most expected tokens per second, and this rate.

        Args:
            missing: tokens of each sequence that the first draft computes.
        """
        gains: list[tuple[float, int, int]] = []
        for index, (seq, depth) in enumerate(requests):
            rate, chance = self._rates.estimate(seq, model_draft(0)), 1.0
            for place in range(depth):
                chance *= rate
                gains.append((-chance, index, place))
        gains.sort()
        best = num_expected / self._costs.estimate(num_tokens)
        least, count, draft_time = best * _MIN_GAIN, 0, 0.0
        sizes = [0] * MAX_DEPTH  # tokens of the draft model's steps
        for number, (negative_chance, index, place) in enumerate(gains[: max(0, limit)], 1):
            num_expected -= negative_chance
            before = self._draft_cost(sizes[place]) if sizes[place] else 0.0
            sizes[place] += 1 if place else missing[index]
            draft_time += self._draft_cost(sizes[place]) - before
            rate = num_expected / (self._costs.estimate(num_tokens + number) + draft_time)
            if rate > max(best, least):
                best, count = rate, number
        depths = [0] * len(requests)
        for _, index, _ in gains[:count]:
            depths[index] += 1
        return depths, best

    def _catch_up(
        self, requests: Items[DraftRequest], missing: Items[int], num_expected: float, num_tokens: int, limit: int
    ) -> None:
        """Compute tokens of sequences that lack too many for a draft, if their drafts will save more time."""
        left = CATCH_UP_TOKENS
        for (seq, depth), count in zip(requests, missing, strict=True):
            if left <= 0:
                break
            if not depth or count <= _MAX_MISSING:
                continue
            if self._trials.get(seq) or self._pays(seq, count, num_expected, num_tokens, limit):
                left -= self.model.catch_up(seq, left)

    def _pays(self, seq: Sequence, missing: int, num_expected: float, num_tokens: int, limit: int) -> bool:
        """Return whether the drafts of a sequence are expected to save more time than computing its missing tokens."""
        _, rate = self._choose([DraftRequest(seq, MAX_DEPTH)], [2], num_expected, num_tokens, limit)
        further = min(seq.params.max_tokens - seq.num_output_tokens, _HORIZON) / 2
        saved = self._costs.estimate(num_tokens) / num_expected - 1 / rate
        return saved * further > self._catch_up_cost(missing)

    def _start_trial(self, requests: Items[DraftRequest], missing: Items[int], num_tokens: int) -> None:
        """Start a trial of the sequence with the fewest missing tokens, if the credit suffices."""
        counts = [(count, index) for index, count in enumerate(missing) if requests[index].depth]
        if not counts or any(self._trials.get(seq) for seq, _ in requests):
            return
        count, index = min(counts)
        step = self._costs.estimate(num_tokens)
        cost = self._costs.estimate(num_tokens + 1) - step + self._draft_cost(2)
        needed = (_TRIAL_STEPS * cost + self._catch_up_cost(count)) / step
        if needed <= self._credit:
            self._credit -= needed
            self._trials[requests[index].seq] = _TRIAL_STEPS

    def _continue_trials(self, ready: Items[DraftRequest]) -> list[int]:
        """Return depth 1 for the sequence of a trial."""
        depths = [0] * len(ready)
        for index, (seq, depth) in enumerate(ready):
            if depth and (steps := self._trials.get(seq, 0)):
                self._trials[seq] = steps - 1
                depths[index] = 1
                break
        return depths

    def _catch_up_cost(self, missing: int) -> float:
        return missing / CATCH_UP_TOKENS * self._draft_cost(CATCH_UP_TOKENS)

    def _draft_cost(self, num_tokens: int) -> float:
        """Return the duration of a step of the draft model, in the unit of the model's costs."""
        if self.model.costs.is_measured and self._costs.is_measured:
            return self.model.costs.estimate(num_tokens)
        return self.model.cost_ratio * self._costs.estimate(num_tokens)
