"""The choice of drafts for each step. Does not import torch.

A draft costs the time that the step takes longer with one more token, and gains its chance of acceptance. The expected
tokens per second of the whole step decide how many drafts are verified, so the depth of a sequence follows its
acceptance and the batch's load.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from inference_worker.contract.engine_config import MAX_DRAFTING_SEQUENCES
from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.speculation.acceptance import AcceptanceRates
from inference_worker.engine.speculation.drafter import MAX_DEPTH, MODEL_DRAFTER, Drafter, DraftRequest, DraftToken
from inference_worker.engine.speculation.model_drafts import ModelDrafts
from inference_worker.engine.speculation.step_costs import StepCosts

if TYPE_CHECKING:
    from inference_worker.engine.speculation.draft_model import DraftModel

log = logging.getLogger(__name__)

MAX_STEP_TOKENS = 64  # a step with more tokens, such as those of prompts, verifies no drafts
MAX_STEP_SAMPLES = MAX_DRAFTING_SEQUENCES  # steps of more sequences have no drafts
_MIN_GAIN = 1.02  # expected tokens per second, relative to those without drafts


class DraftLimit(NamedTuple):
    """A sequence of the next step, and the number of draft tokens that fit."""

    seq: Sequence
    max_drafts: int


@dataclass(slots=True)
class DraftCounts:
    """The numbers of draft tokens since the engine's start."""

    verified: dict[str, int] = field(default_factory=dict)  # by drafter
    accepted: dict[str, int] = field(default_factory=dict)  # by drafter
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)  # by position in the draft
    depths: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))  # steps of sequences, by drafts


class Speculator:
    """The drafters of an engine, in the order of their precedence, and the measurements that choose the depth.

    Args:
        drafters: the first one that proposes a token for a position is used.
        end_token_ids: tokens that end an output. They are never drafts, because no token follows them.
        draft_model: drafts for sequences without other drafts.
    """

    def __init__(
        self, drafters: Items[Drafter], end_token_ids: Collection[int], draft_model: DraftModel | None = None
    ) -> None:
        self._drafters = drafters
        self._ends = frozenset(end_token_ids)
        self._proposals: WeakKeyDictionary[Sequence, list[DraftToken]] = WeakKeyDictionary()
        # Proposals that the draft model's drafts replaced. They are measured without verification.
        self._replaced: WeakKeyDictionary[Sequence, list[DraftToken]] = WeakKeyDictionary()
        self.rates = AcceptanceRates()
        self.costs = StepCosts()
        self._model_drafts = None if draft_model is None else ModelDrafts(draft_model, self.rates, self.costs)
        self.draft_seconds = 0.0  # time of the draft model in the last plan
        names = [drafter.name for drafter in drafters]
        if draft_model is not None:
            names.append(MODEL_DRAFTER)
        self.counts = DraftCounts(dict.fromkeys(names, 0), dict.fromkeys(names, 0))

    def plan(self, limits: Items[DraftLimit], num_samples: int, num_tokens: int) -> list[list[int]]:
        """Return the draft tokens of each sequence.

        Args:
            num_samples: sequences in the step that get a token.
            num_tokens: tokens in the step without drafts.
        """
        self.draft_seconds = 0.0
        plans: list[list[int]] = [[] for _ in limits]
        if num_tokens >= MAX_STEP_TOKENS or num_samples > MAX_STEP_SAMPLES or not limits:
            return plans
        base = num_samples / self.costs.estimate(num_tokens)
        least = base * _MIN_GAIN
        if (num_samples + len(limits)) / self.costs.estimate(num_tokens + len(limits)) < least:
            return plans  # even certain drafts cost too much
        gains: list[tuple[float, int, int]] = []
        for index, (seq, max_drafts) in enumerate(limits):
            chance = 1.0
            for depth, draft in enumerate(self._propose(seq, min(max_drafts, MAX_DEPTH))):
                chance *= self.rates.estimate(seq, draft)
                gains.append((-chance, index, depth))
        gains.sort()
        expected, best, count, best_expected = float(num_samples), least, 0, float(num_samples)
        for number, (negative_chance, _, _) in enumerate(gains[: MAX_STEP_TOKENS - num_tokens], 1):
            expected -= negative_chance
            rate = expected / self.costs.estimate(num_tokens + number)
            if rate > best:
                best, count, best_expected = rate, number, expected
        for _, index, depth in gains[:count]:
            plans[index].append(self._proposals[limits[index].seq][depth].token_id)
        if self._model_drafts is not None:
            self._add_model_drafts(self._model_drafts, limits, plans, best_expected, num_tokens + count)
        return plans

    def _add_model_drafts(
        self, drafts: ModelDrafts, limits: Items[DraftLimit], plans: list[list[int]], expected: float, num_tokens: int
    ) -> None:
        """Add drafts of the draft model to the plans of sequences without other drafts."""
        places = [index for index, limit in enumerate(limits) if limit.max_drafts > 0 and not plans[index]]
        requests = [DraftRequest(*limits[index]) for index in places]
        before = drafts.model.seconds
        try:
            found = drafts.plan(requests, expected, num_tokens, MAX_STEP_TOKENS - num_tokens)
        except Exception:  # requests do not depend on drafts
            log.exception("the draft model failed; it is not used any more")
            self._model_drafts = None
            return
        self.draft_seconds = drafts.model.seconds - before
        for index, (seq, _), proposal in zip(places, requests, found, strict=True):
            if seq.active_grammar is not None:
                proposal = proposal[: seq.active_grammar.count_allowed([draft.token_id for draft in proposal])]
            if proposal:
                self._replaced[seq] = self._proposals.pop(seq, [])
                self._proposals[seq] = proposal
                plans[index] = [draft.token_id for draft in proposal]

    @property
    def draft_model(self) -> DraftModel | None:
        """Return the draft model, unless it failed."""
        return None if self._model_drafts is None else self._model_drafts.model

    def release(self, seq: Sequence) -> None:
        """Release the draft model's blocks of a sequence that does not run any more."""
        if self._model_drafts is not None:
            self._model_drafts.model.release(seq)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Check the draft model's accounts.

        Raises:
            RuntimeError: an invariant is violated.
        """
        if self._model_drafts is not None:
            self._model_drafts.model.check_integrity(running)

    def record(self, seq: Sequence, num_drafts: int, tokens: Items[int]) -> int:
        """Record the tokens that a step sampled for a sequence with `num_drafts` drafts. Return the accepted drafts."""
        proposal, counts = self._proposals.pop(seq, []), self.counts
        for draft, token_id in zip(self._replaced.pop(seq, []), tokens, strict=False):
            self.rates.record(seq, draft, draft.token_id == token_id)
            if draft.token_id != token_id:
                break
        accepted = 0
        for draft, token_id in zip(proposal, tokens, strict=False):
            is_equal = draft.token_id == token_id
            self.rates.record(seq, draft, is_equal)
            if not is_equal:
                break
            if accepted < num_drafts:
                counts.accepted[draft.drafter] += 1
                counts.accepted_at[accepted] += 1
                accepted += 1
        for draft in proposal[:num_drafts]:
            counts.verified[draft.drafter] += 1
        counts.depths[num_drafts] += 1
        return accepted

    def _propose(self, seq: Sequence, limit: int) -> list[DraftToken]:
        drafts: list[DraftToken] = []
        while len(drafts) < limit:
            found = self._extend(seq, [draft.token_id for draft in drafts], limit - len(drafts))
            if not found:
                break
            drafts += found
        self._proposals[seq] = drafts
        return drafts

    def _extend(self, seq: Sequence, drafts: list[int], limit: int) -> list[DraftToken]:
        """Return the next drafts of the first drafter that has any that the grammar allows."""
        for drafter in self._drafters:
            found = drafter.propose(seq, drafts, limit)
            end = next((i for i, draft in enumerate(found) if draft.token_id in self._ends), len(found))
            found = found[:end]
            if found and seq.active_grammar is not None:
                token_ids = drafts + [draft.token_id for draft in found]
                found = found[: max(0, seq.active_grammar.count_allowed(token_ids) - len(drafts))]
            if found:
                return found
        return []
