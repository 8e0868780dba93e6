"""Drafts of a second model with the same vocabulary. Does not import torch.

The draft model samples with the parameters, the seed and the positions of the sequence. So if both models have the same
distribution, the draft is the token that the model samples, at any temperature.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

from inference_worker.contract.request import Request, TokenCounts
from inference_worker.engine.kv_cache.kv_cache import KVCacheManager
from inference_worker.engine.sequences.sequence import Sequence, SequenceStatus
from inference_worker.engine.sequences.step import ScheduledSequence, SchedulerOutput
from inference_worker.engine.speculation.drafter import DraftRequest, DraftToken, model_draft
from inference_worker.engine.speculation.step_costs import StepCosts

if TYPE_CHECKING:
    from inference_worker.engine.sequences.runner import Runner


@dataclass(slots=True)
class _Copy:
    """A sequence in the draft model's cache.

    Its tokens are those of the sequence, and drafts after them. Its blocks are those of the draft model.
    """

    seq: Sequence
    num_known: int  # tokens that are not drafts


class DraftModel:
    """A draft model with its own KV cache. Only running sequences have blocks in the cache.

    Args:
        runner: computes the steps of the draft model.
        cache: of the draft model.
        cost_ratio: assumed duration of a step relative to the model's, before a measurement.
        max_model_len: tokens of the longest sequence.
        vocab_size: sequences with other token ids get no drafts.
        end_token_ids: tokens that end an output. They are never drafts.
        timer: seconds.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KVCacheManager,
        *,
        cost_ratio: float,
        max_model_len: int,
        vocab_size: int,
        end_token_ids: Collection[int] = (),
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self.cache = cache
        self.cost_ratio = cost_ratio
        self.max_model_len = max_model_len
        self.costs = StepCosts()  # by tokens
        self.seconds = 0.0  # seconds of all steps
        self._vocab_size = vocab_size
        self._ends = frozenset(end_token_ids)
        self._timer = timer
        self._copies: dict[Sequence, _Copy] = {}
        self._unsupported: WeakSet[Sequence] = WeakSet()

    def room(self, seq: Sequence) -> int:
        """Return how many of the sequence's next tokens can be drafted."""
        return 0 if seq in self._unsupported else max(0, self.max_model_len - len(seq.tokens))

    def num_missing(self, seq: Sequence) -> int:
        """Return how many of the sequence's tokens the draft model has not computed; at least 1."""
        copy = self._copies.get(seq)
        return len(seq.tokens) - (self._count_computed(seq, copy) if copy is not None else 0)

    def catch_up(self, seq: Sequence, limit: int) -> int:
        """Compute at most `limit` of the sequence's tokens, all but the last. Return the number of computed tokens."""
        copied = self._update(seq)
        if copied is None:
            return 0
        count = min(limit, len(seq.tokens) - 1 - copied.num_computed_tokens)
        if count <= 0 or not self.cache.grow(copied, copied.num_computed_tokens + count):
            return 0
        self._compute([_Part(copied, count, samples=False)])
        self.cache.publish(copied, copied.num_computed_tokens)
        return count

    def propose(self, requests: Items[DraftRequest]) -> list[list[DraftToken]]:
        """Return drafts of the next tokens of each sequence."""
        found: list[list[DraftToken]] = [[] for _ in requests]
        active: list[tuple[int, Sequence]] = []
        for index, request in enumerate(requests):
            copied = self._update(request.seq) if request.depth else None
            if copied is not None and self.cache.grow(copied, len(copied.tokens)):
                active.append((index, copied))
        while active:
            parts = [_Part(copied, len(copied.tokens) - copied.num_computed_tokens) for _, copied in active]
            following: list[tuple[int, Sequence]] = []
            for (index, copied), token_id in zip(active, self._compute(parts), strict=True):
                if token_id in self._ends or token_id >= self._vocab_size:
                    continue
                found[index].append(model_draft(token_id))
                if len(found[index]) < requests[index].depth:
                    copied.tokens.append(token_id)
                    if self.cache.grow(copied, len(copied.tokens)):
                        following.append((index, copied))
                    else:
                        copied.tokens.pop()
            active = following
        return found

    def release(self, seq: Sequence) -> None:
        """Release the blocks of a sequence that does not run any more."""
        copy = self._copies.pop(seq, None)
        if copy is not None:
            self.cache.release(copy.seq)
            copy.seq.status = SequenceStatus.FINISHED

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Check that only running sequences have blocks, and that all blocks are accounted for.

        Raises:
            RuntimeError: an invariant is violated.
        """
        if not self._copies.keys() <= set(running):
            raise RuntimeError("draft model integrity: a sequence that does not run has blocks")
        self.cache.check_integrity(copy.seq for copy in self._copies.values())

    def _update(self, seq: Sequence) -> Sequence | None:
        """Return the sequence's copy with its current tokens. None if there is no room, or a token is unknown."""
        copy = self._copies.get(seq)
        if copy is None:
            return self._start(seq)
        new = seq.tokens[copy.num_known :]
        if new and max(new) >= self._vocab_size:
            self._refuse(seq)
            return None
        copied = copy.seq
        copied.num_computed_tokens = self._count_computed(seq, copy)
        copied.tokens[copy.num_known :] = new
        copy.num_known = len(seq.tokens)
        self.cache.shrink(copied, copied.num_computed_tokens)
        self.cache.publish(copied, copied.num_computed_tokens)
        return copied

    def _count_computed(self, seq: Sequence, copy: _Copy) -> int:
        """Return how many of the sequence's tokens are computed: those before the first rejected draft."""
        drafts = copy.seq.tokens[copy.num_known :]
        accepted = 0
        for draft, token_id in zip(drafts, seq.tokens[copy.num_known :], strict=False):
            if draft != token_id:
                break
            accepted += 1
        return min(copy.seq.num_computed_tokens, copy.num_known + accepted, len(seq.tokens) - 1)

    def _start(self, seq: Sequence) -> Sequence | None:
        if max(seq.tokens) >= self._vocab_size:
            self._refuse(seq)
            return None
        # Penalties need the tokens before, which change when drafts are rejected.
        params = seq.params.replace(
            n=1, seed=seq.seed, logprobs=None, prompt_logprobs=None, presence_penalty=0.0, frequency_penalty=0.0,
            repetition_penalty=1.0,
        )  # fmt: skip
        copied = Sequence(Request(seq.request_id, seq.tokens, params, seq.request.cache_salt), None)
        copied.num_prompt_tokens = seq.num_prompt_tokens
        copied.group.prompt_usage = TokenCounts()  # not accounted
        hit = self.cache.lookup(copied)
        if self.cache.shortage(copied, hit, 0) > 0:
            return None
        self.cache.start(copied, hit)
        copied.status = SequenceStatus.RUNNING
        self._copies[seq] = _Copy(copied, len(seq.tokens))
        return copied

    def _refuse(self, seq: Sequence) -> None:
        self.release(seq)
        self._unsupported.add(seq)

    def _compute(self, parts: Items[_Part]) -> list[int]:
        """Compute the parts in one step. Return the tokens of those that sample."""
        order = sorted(range(len(parts)), key=lambda index: parts[index].num_tokens != 1)  # decodes first
        scheduled = [
            ScheduledSequence(part.seq, part.seq.num_computed_tokens, part.num_tokens, part.samples, part.seq.epoch)
            for part in (parts[index] for index in order)
        ]
        num_tokens = sum(part.num_tokens for part in parts)
        started = self._timer()
        step = self._runner.launch(SchedulerOutput(scheduled, num_tokens, self.cache.take_operations()))
        step.sample()
        tokens = iter(step.read().tokens)
        seconds = self._timer() - started
        self.seconds += seconds
        self.costs.observe(num_tokens, seconds)
        found: dict[int, int] = {}
        for index in order:
            part = parts[index]
            part.seq.num_computed_tokens += part.num_tokens
            if part.samples:
                found[index] = next(tokens)[0]
        return [found[index] for index in sorted(found)]


class _Part(NamedTuple):
    """Tokens of a copy that a step computes."""

    seq: Sequence
    num_tokens: int
    samples: bool = True
