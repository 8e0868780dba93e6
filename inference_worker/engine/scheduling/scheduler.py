"""The choice of tokens to compute in each step. Does not import torch.

There are no phases. A step moves `num_computed_tokens` of each scheduled sequence toward `num_tokens`. A chunk of a
prompt, a decode and a recomputation after a preemption are treated alike, and share a batch.

A step is filled in this order: sequences admitted by preemption; running sequences, decodes first; waiting sequences,
as far as there is capacity; the batch class, running and waiting, with the remaining capacity; and finally draft tokens
of the scheduled sequences.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from dataclasses import replace

from inference_worker.contract.request import ServiceClass
from inference_worker.engine.kv_cache.kv_cache import KVCacheManager, PrefixHit
from inference_worker.engine.scheduling.fairness import FairShareTable, TenantShare
from inference_worker.engine.scheduling.preemption import MAX_CLAIMS, Claims, under_pressure
from inference_worker.engine.scheduling.waiting import WaitingQueue
from inference_worker.engine.sequences.sequence import Sequence, SequenceStatus
from inference_worker.engine.sequences.step import ScheduledSequence, SchedulerOutput
from inference_worker.engine.speculation.drafter import MAX_DEPTH
from inference_worker.engine.speculation.speculator import DraftLimit, Speculator

# The lines whose claims are examined are among this many first lines of a class: at most MAX_CLAIMS claims succeed, and
# before and after each of them the three interactive lines of one tenant may be skipped.
_MAX_HEADS = MAX_CLAIMS + 3 * (MAX_CLAIMS + 1)

FEW_SEQUENCES = 16  # running and waiting; with more, throughput matters more than the first tokens of the next prompts


class Scheduler:
    """The scheduler of one engine, which shares steps among the tenants' requests.

    Args:
        cache: the KV cache.
        max_num_seqs: maximum sequences in a step.
        max_num_batched_tokens: maximum tokens in a step.
        max_starting_tokens: maximum tokens of the prompts that start in a step, while few sequences run or wait. The
            first prompt may exceed it. 0: no limit.
        long_prefill_token_threshold: maximum tokens of one prompt in a step; 0: no limit.
        max_long_partial_prefills: maximum concurrent prefills of longer prompts; 0: no limit.
        locality_tokens: the advantage in a tenant's counter that cached tokens can outweigh.
        speculator: chooses drafts; None: steps verify no drafts.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_starting_tokens: int = 0,
        long_prefill_token_threshold: int = 0,
        max_long_partial_prefills: int = 0,
        locality_tokens: int = 0,
        speculator: Speculator | None = None,
    ) -> None:
        self.cache = cache
        self._speculator = speculator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_starting_tokens = max_starting_tokens
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.max_long_partial_prefills = max_long_partial_prefills
        self.tenants = FairShareTable()
        self.running: list[Sequence] = []  # by arrival
        self.waiting = WaitingQueue(
            self.tenants, lambda seq: cache.lookup(seq).num_cached_tokens, self._is_long, locality_tokens
        )
        self.preemptions = 0
        self._number = 0

    def add(self, seq: Sequence, now: float = 0.0) -> None:
        request = seq.request
        self._number += 1
        seq.number = self._number
        seq.waiting_since = now
        self.tenants.arrive(request.tenant, request.weight)
        self.waiting.add(seq)

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Choose the next step's batch, allocate its blocks, and advance `num_computed_tokens` of its sequences.

        If the step succeeds, the caller calls `complete` for each entry. If it fails, the caller calls `finish`, and
        the step's blocks are not published.
        """
        output = SchedulerOutput(expired=self.waiting.pop_expired(now))
        for seq in output.expired:
            self.finish(seq)
        self.cache.expire(now)
        budget = self.max_num_batched_tokens
        budget -= self._admit_by_preemption(budget, now, output)
        let_in = len(output.preempted)
        blocked = False
        for batch in (False, True):
            budget -= self._continue_all(batch, budget, now, output)
            if (
                len(output.preempted) == let_in and not blocked
            ):  # otherwise blocks are scarce, so no new sequence starts
                used, blocked = self._admit(batch, budget, now, output)
                budget -= used
        if self._speculator is not None and output.scheduled:
            self._add_drafts(self._speculator, budget, output)
        output.scheduled.sort(key=lambda s: s.num_new_tokens != 1)
        output.num_tokens = sum(s.num_new_tokens for s in output.scheduled)
        if output.scheduled:
            output.operations = self.cache.take_operations()
        return output

    def complete(self, scheduled: ScheduledSequence, num_tokens: int = 1) -> bool:
        """Publish the full blocks that the step computed. Return False if the sequence was preempted or finished
        since.

        Args:
            num_tokens: sampled tokens, which are one more than the accepted drafts; ignored if the entry does not
                sample. Blocks of rejected drafts are released.
        """
        seq = scheduled.seq
        if scheduled.samples:
            seq.num_in_flight -= 1
        if seq.status is SequenceStatus.FINISHED:
            return False
        if seq.epoch != scheduled.epoch or seq.status is not SequenceStatus.RUNNING:
            return False
        self.cache.publish(seq, scheduled.start + scheduled.num_known_tokens)
        if scheduled.drafts:
            seq.num_computed_tokens += num_tokens - 1
            self.cache.shrink(seq, seq.num_computed_tokens + 1)
        return True

    def charge_output(self, seq: Sequence, num_tokens: int) -> None:
        """Charge the tokens that an output has."""
        self.tenants[seq.request.tenant].charge(0, num_tokens)

    def finish(self, seq: Sequence) -> None:
        """Remove the sequence from its queue and release its blocks. Does nothing if it has finished."""
        if seq.status is SequenceStatus.FINISHED:
            return
        tenant = self.tenants[seq.request.tenant]
        if seq.status is SequenceStatus.RUNNING:
            self._leave(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        if seq.finish_reason in ("stop", "length"):
            tenant.note_output(seq.num_prompt_tokens, seq.num_output_tokens)

    def check_integrity(self) -> None:
        """Check that every sequence is in the list of its status, and that all accounting is right.

        Raises:
            RuntimeError: an invariant is violated.
        """
        waiting = list(self.waiting)
        wrong = [seq for seq in self.running if seq.status is not SequenceStatus.RUNNING]
        wrong += [seq for seq in waiting if seq.status is not SequenceStatus.WAITING or seq.block_tables]
        if wrong or len(self.running) > self.max_num_seqs:
            raise RuntimeError(f"scheduler integrity: {wrong or self.running}")
        counted = Counter(seq.request.tenant for seq in self.running), Counter(seq.request.tenant for seq in waiting)
        for tenant in self.tenants.active():
            if (tenant.num_running, tenant.num_waiting) != (counted[0][tenant.name], counted[1][tenant.name]):
                raise RuntimeError(f"scheduler integrity: tenant {tenant.name} is miscounted")
        if set(counted[0] | counted[1]) != {tenant.name for tenant in self.tenants.active()}:
            raise RuntimeError("scheduler integrity: a tenant is active without requests, or not with them")
        self.waiting.check_integrity()
        self.cache.check_integrity(self.running)
        if self._speculator is not None:
            self._speculator.check_integrity(self.running)

    def _admit_by_preemption(self, budget: int, now: float, output: SchedulerOutput) -> int:
        """Start waiting sequences that are entitled to preempt others, and return the number of scheduled tokens."""
        claimants = self._claimants(now)
        if not claimants:
            return 0
        used, attempts = 0, MAX_CLAIMS
        taken = {s.seq for s in output.scheduled}
        claims = Claims(self.running, taken, self.tenants, self.cache, self.max_num_seqs)
        for rank, tenant, service_class in claimants:
            got = 1
            while got and attempts and claims.is_entitled(tenant, rank):
                attempts -= 1
                got = 0
                left = budget - used - claims.num_decodes
                if left > 0 and claims.may_have_victims(tenant, rank):
                    seq = self.waiting.find_next(tenant.name, service_class, rank)
                    got = self._try_preempt(seq, claims, left, now, output) if seq is not None else 0
                    used += got
        return used

    def _claimants(self, now: float) -> list[tuple[int, TenantShare, ServiceClass]]:
        """Return the interactive lines that may have a claim: effective class, tenant and own class of each."""
        if not self.waiting:
            return []
        lowest = max((seq.rank for seq in self.running), default=-1)
        ranks = [int(rank) for rank in ServiceClass if rank is not ServiceClass.BATCH and rank <= lowest]
        return [(rank, *head) for rank in ranks for head in self.waiting.heads(now, rank, _MAX_HEADS)]

    def _try_preempt(self, seq: Sequence, claims: Claims, budget: int, now: float, output: SchedulerOutput) -> int:
        """Preempt others for `seq` if it lacks capacity and is entitled to it. Return the number of scheduled
        tokens."""
        start_point = self._find_start(seq, output)
        if start_point is None:
            return 0
        lacking = self._shortage(seq, start_point)
        needs_slot = len(self.running) >= self.max_num_seqs
        if lacking <= 0 and not needs_slot:
            return 0  # it needs no preemption
        cached_blocks = set(start_point.block_ids)
        victims = claims.choose_victims(seq, needs_slot=needs_slot, shortage=lacking, cached_blocks=cached_blocks)
        if not victims:
            return 0
        for victim in victims:
            claims.remove(victim)
            victim.fairness_preemptions += victim.rank <= seq.rank
            self._preempt(victim, now, output)
        got = self._start(seq, start_point, budget, now, output)
        claims.add(seq)
        return got

    def _continue_all(self, batch: bool, budget: int, now: float, output: SchedulerOutput) -> int:
        """Schedule the running sequences of the batch class or of all others. Return the number of scheduled tokens."""
        taken = {s.seq for s in output.scheduled}
        selected = [
            s for s in self.running if (s.request.service_class is ServiceClass.BATCH) == batch and s not in taken
        ]
        # Decodes go first: each takes one token, and long prompts must not delay them.
        decodes = [seq for seq in selected if seq.num_missing_tokens == 1]
        prompts = [seq for seq in selected if seq.num_missing_tokens > 1]
        prompts.sort(key=lambda seq: (seq.rank, self.tenants[seq.request.tenant].served))
        used = 0
        for seq in decodes + prompts:
            if used == budget:
                break
            if seq.num_output_tokens + seq.num_in_flight < seq.params.max_tokens:
                used += self._continue(seq, budget - used, now, output)
        return used

    def _add_drafts(self, speculator: Speculator, budget: int, output: SchedulerOutput) -> None:
        """Add draft tokens to the step, as far as neither the budget nor blocks are necessary for other sequences."""
        places = [i for i, s in enumerate(output.scheduled) if s.samples and not s.in_flight and s.seq.speculates]
        limits = [
            DraftLimit(seq, seq.max_drafts(min(MAX_DEPTH, budget))) for seq in (output.scheduled[i].seq for i in places)
        ]
        num_tokens = sum(s.num_new_tokens for s in output.scheduled)
        plans = speculator.plan(limits, sum(s.samples for s in output.scheduled), num_tokens)
        for place, plan in zip(places, plans, strict=True):
            scheduled = output.scheduled[place]
            seq = scheduled.seq
            count = min(len(plan), budget, self.cache.room_for_drafts(seq, len(self.running)))
            if count > 0 and self.cache.grow(seq, seq.num_computed_tokens + count):
                budget -= count
                output.scheduled[place] = replace(
                    scheduled,
                    num_new_tokens=scheduled.num_new_tokens + count,
                    drafts=tuple(plan[:count]),
                )

    def _chunk(self, seq: Sequence, budget: int) -> int:
        cap = self.long_prefill_token_threshold
        return min(seq.num_missing_tokens, budget, cap if cap else budget)

    def _continue(self, seq: Sequence, budget: int, now: float, output: SchedulerOutput) -> int:
        """Schedule a running sequence; preempt others if it needs their blocks. Return the number of scheduled
        tokens."""
        if seq.status is not SequenceStatus.RUNNING:  # preempted earlier in this step
            return 0
        count = self._chunk(seq, budget)
        while not self.cache.grow(seq, seq.num_computed_tokens + count):
            if len(self.running) == 1:
                output.exceeds_kv_cache.append(seq)
                return 0
            taken = {s.seq for s in output.scheduled}
            victim = under_pressure([s for s in self.running if s not in taken], self.tenants)
            self._preempt(victim, now, output)
            if victim is seq:
                return 0
        self._schedule(seq, count, output)
        return count

    def _preempt(self, seq: Sequence, now: float, output: SchedulerOutput) -> None:
        seq.preemptions += 1
        seq.waiting_since = now
        self.waiting.add(seq)
        self._leave(seq)
        seq.status = SequenceStatus.WAITING
        seq.epoch += 1
        self.preemptions += 1
        output.preempted.append(seq)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.tenants.count(self.tenants[seq.request.tenant], running=-1)
        self.cache.release(seq)
        if self._speculator is not None:
            self._speculator.release(seq)

    def _admit(self, batch: bool, budget: int, now: float, output: SchedulerOutput) -> tuple[int, bool]:
        """Start waiting sequences. Return the number of scheduled tokens, and whether capacity ran out."""
        used = 0
        is_limited = self.max_starting_tokens and len(self.running) + len(self.waiting) <= FEW_SEQUENCES
        limit = self.max_starting_tokens if is_limited else budget
        candidates = self.waiting.candidates(now, batch)
        room_for_long = self._room_for_long()
        while used < min(budget, limit) and len(self.running) < self.max_num_seqs:
            seq = candidates.next(skip_long=room_for_long <= 0)
            if seq is None:
                return used, False
            if room_for_long <= 0 and self._is_long(seq):
                continue
            start_point = self._find_start(seq, output)
            if start_point is None:
                continue  # later requests of the line need not wait for it
            if used and used + min(self._missing_tokens(seq, start_point), budget - used) > limit:
                return used, True
            if self._shortage(seq, start_point) <= 0:
                used += self._start(seq, start_point, budget - used, now, output)
                room_for_long -= seq.num_missing_tokens > max(1, self.long_prefill_token_threshold)
            elif self.running:
                return used, True
            else:
                output.exceeds_kv_cache.append(seq)
        return used, True

    def _is_long(self, seq: Sequence) -> bool:
        """Return whether the sequence's prompt counts toward the limit of concurrent long prefills."""
        return bool(self.max_long_partial_prefills) and seq.num_prompt_tokens > self.long_prefill_token_threshold

    def _room_for_long(self) -> float:
        """Return how many more long prefills may start."""
        if not self.max_long_partial_prefills:
            return math.inf
        running_prefills = sum(s.num_missing_tokens > max(1, self.long_prefill_token_threshold) for s in self.running)
        return self.max_long_partial_prefills - running_prefills

    def _find_start(self, seq: Sequence, output: SchedulerOutput) -> PrefixHit | Sequence | None:
        """Return what a waiting sequence can start from: cached blocks, or its sibling's blocks. None: it cannot start
        yet."""
        if seq.num_in_flight:
            return None  # preempted during a step whose token is still in flight
        first = seq.group.sequences[0]
        if seq.index and not seq.preemptions and first.status is not SequenceStatus.FINISHED:
            # The first of `n` sequences computes the prompt for all; the others start in a later step.
            computed = next((s.start for s in output.scheduled if s.seq is first), first.num_computed_tokens)
            if computed < first.num_prompt_tokens:
                return None
            if self.cache.can_fork(first, seq):
                return first
        hit = self.cache.lookup(seq)
        return None if hit.pending else hit

    def _missing_tokens(self, seq: Sequence, start_point: PrefixHit | Sequence) -> int:
        """Return the tokens that the sequence's first step would compute."""
        cached = start_point.num_cached_tokens if isinstance(start_point, PrefixHit) else seq.num_tokens - 1
        missing = seq.num_tokens - cached
        return max(1, min(missing, self.long_prefill_token_threshold or missing))

    def _shortage(self, seq: Sequence, start_point: PrefixHit | Sequence) -> int:
        # A block of each group is reserved for each running sequence; otherwise the new one would be preempted next.
        spare = len(self.running)
        if isinstance(start_point, Sequence):
            return self.cache.fork_shortage(spare)
        return self.cache.shortage(seq, start_point, spare)

    def _start(
        self, seq: Sequence, start_point: PrefixHit | Sequence, budget: int, now: float, output: SchedulerOutput
    ) -> int:
        tenant = self.tenants[seq.request.tenant]
        self.tenants.count(tenant, running=1)
        self.waiting.remove(seq)
        is_first = seq.group.prompt_usage is None
        if isinstance(start_point, Sequence):
            self.cache.fork(start_point, seq)
        else:
            self.cache.start(seq, start_point, now)
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=lambda s: (s.request.arrival, s.number))
        if is_first and seq.group.prompt_usage is not None:
            tenant.charge(seq.num_prompt_tokens - seq.group.prompt_usage.cache_read, 0)
            seq.group.scheduled_at = now
            output.started.append(seq)
        count = self._chunk(seq, budget)
        if not self.cache.grow(seq, seq.num_computed_tokens + count):
            raise RuntimeError("the KV cache has no blocks for an admitted request")  # checked by _shortage
        self._schedule(seq, count, output)
        return count

    def _schedule(self, seq: Sequence, count: int, output: SchedulerOutput) -> None:
        start = seq.num_computed_tokens
        seq.num_computed_tokens += count
        samples = seq.num_computed_tokens == seq.num_tokens
        in_flight = seq.num_computed_tokens > len(seq.tokens)
        seq.num_in_flight += samples
        output.scheduled.append(ScheduledSequence(seq, start, count, samples, seq.epoch, in_flight))
