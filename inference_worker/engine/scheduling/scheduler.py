"""Who gets how many tokens of the next step. Free of torch.

There are no phases. A step moves `num_computed_tokens` of each scheduled sequence toward `num_tokens`: a chunk of a
prompt, a decode, a recomputation after a preemption are the same thing, and share a batch.

A step is filled in this order: sequences admitted by preemption; the running requests, decodes first; the
waiting ones, as far as there is room; and after all of these the batch class, running and waiting, with what is left.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field

from inference_worker.contract.request import ServiceClass
from inference_worker.engine.kv_cache.kv_cache import BlockOperation, KVCacheManager, PrefixHit
from inference_worker.engine.scheduling.fairness import FairShareTable, TenantShare
from inference_worker.engine.scheduling.preemption import MAX_CLAIMS, Claims, under_pressure
from inference_worker.engine.scheduling.sequence import Sequence, SequenceStatus
from inference_worker.engine.scheduling.waiting import WaitingQueue

# Any line of which a claim may be looked at is among this number of first ones of its class: a claim succeeds at most
# MAX_CLAIMS times, and before and after each a single tenant, with its three interactive lines, may be passed over.
_MAX_HEADS = MAX_CLAIMS + 3 * (MAX_CLAIMS + 1)


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens [start, start + num_new_tokens) of a sequence, to be computed in this step."""

    seq: Sequence
    start: int
    num_new_tokens: int
    samples: bool  # these reach the sequence's end, so the step brings it a new token
    epoch: int  # the sequence's when scheduled; another one since: it was preempted, and this work is void
    in_flight: bool = False  # the last of these tokens is not known yet: the step before this one brings it


@dataclass(slots=True)
class SchedulerOutput:
    """One step's batch, decodes first."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_tokens: int = 0
    operations: list[BlockOperation] = field(default_factory=list)  # copies to be done before the forward pass
    started: list[Sequence] = field(default_factory=list)  # scheduled for the first time
    preempted: list[Sequence] = field(default_factory=list)
    exceeds_kv_cache: list[Sequence] = field(default_factory=list)  # alone in the cache, and still too large for it
    expired: list[Sequence] = field(default_factory=list)  # waited past the time they were wanted by

    @property
    def num_decodes(self) -> int:
        """Leading entries that compute one token."""
        return next((i for i, s in enumerate(self.scheduled) if s.num_new_tokens != 1), len(self.scheduled))


class Scheduler:
    """Shares the steps of one engine among its tenants' requests.

    Args:
        cache: the blocks.
        max_num_seqs: most sequences in a step.
        max_num_batched_tokens: most tokens in a step.
        long_prefill_token_threshold: most tokens of one prompt in a step; 0: no cap.
        max_long_partial_prefills: most concurrent prefills of prompts longer than that; 0: no cap.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
        max_long_partial_prefills: int = 0,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.max_long_partial_prefills = max_long_partial_prefills
        self.tenants = FairShareTable()
        self.running: list[Sequence] = []  # by arrival
        self.waiting = WaitingQueue(self.tenants, lambda seq: cache.lookup(seq).num_cached_tokens, self._is_long)
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
        """Choose the next step's batch, give it its blocks, and advance `num_computed_tokens` of all in it.

        The caller answers with `complete` for each entry when the step has succeeded. If it has failed, with `finish`:
        blocks it would have filled were published for nobody.
        """
        output = SchedulerOutput(expired=self.waiting.expired(now))
        for seq in output.expired:
            self.finish(seq)
        self.cache.expire(now)
        budget = self.max_num_batched_tokens
        budget -= self._let_in(budget, now, output)
        let_in = len(output.preempted)
        blocked = False
        for batch in (False, True):
            budget -= self._continue_all(batch, budget, now, output)
            if len(output.preempted) == let_in and not blocked:  # else blocks are short: nobody new takes them
                used, blocked = self._admit(batch, budget, now, output)
                budget -= used
        output.scheduled.sort(key=lambda s: s.num_new_tokens != 1)
        output.num_tokens = sum(s.num_new_tokens for s in output.scheduled)
        if output.scheduled:
            output.operations = self.cache.take_operations()
        return output

    def complete(self, scheduled: ScheduledSequence) -> bool:
        """Publish the full blocks that the step computed. Return False if the sequence has lost them since."""
        seq = scheduled.seq
        if scheduled.samples:
            seq.num_in_flight -= 1
        if seq.status is SequenceStatus.FINISHED:
            return False
        if scheduled.samples:
            self.tenants[seq.request.tenant].charge(0, 1)
        if seq.epoch != scheduled.epoch or seq.status is not SequenceStatus.RUNNING:
            return False
        self.cache.publish(seq, scheduled.start + scheduled.num_new_tokens)
        return True

    def finish(self, seq: Sequence) -> None:
        """Take the sequence out, wherever it stands, and free its blocks. Once finished, nothing happens."""
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
        """Check that every sequence is where its status says, and that all accounts are right.

        Raises:
            RuntimeError: something is not as it must be.
        """
        waiting = list(self.waiting)
        wrong = [seq for seq in self.running if seq.status is not SequenceStatus.RUNNING]
        wrong += [seq for seq in waiting if seq.status is not SequenceStatus.WAITING or seq.block_ids]
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

    def _let_in(self, budget: int, now: float, output: SchedulerOutput) -> int:
        """Preempt for those with a claim to room: a higher class, a tenant under its share. The tokens they got."""
        claimants = self._claimants(now)
        if not claimants:
            return 0
        used, looks = 0, MAX_CLAIMS
        taken = {s.seq for s in output.scheduled}
        claims = Claims(self.running, taken, self.tenants, self.cache, self.max_num_seqs)
        for rank, tenant, service_class in claimants:
            got = 1
            while got and looks and claims.has_claim(tenant, rank):
                looks -= 1
                got = 0
                left = budget - used - claims.num_decodes
                if left > 0 and claims.may_have_victims(tenant, rank):
                    seq = self.waiting.first(tenant.name, service_class, rank)
                    got = self._claim(seq, claims, left, now, output) if seq is not None else 0
                    used += got
        return used

    def _claimants(self, now: float) -> list[tuple[int, TenantShare, ServiceClass]]:
        """Return the first interactive lines that may have a claim: class they count as, tenant, own class."""
        lowest = max((seq.rank for seq in self.running), default=-1)
        ranks = [int(rank) for rank in ServiceClass if rank is not ServiceClass.BATCH and rank <= lowest]
        return [(rank, *head) for rank in ranks for head in self.waiting.heads(now, rank, _MAX_HEADS)]

    def _claim(self, seq: Sequence, claims: Claims, budget: int, now: float, output: SchedulerOutput) -> int:
        """Let `seq` begin at the expense of others, if it lacks room and has a claim to theirs; the tokens it got."""
        way = self._way_in(seq, output)
        if way is None:
            return 0
        lacking = self._shortage(seq, way)
        needs_slot = len(self.running) >= self.max_num_seqs
        if lacking <= 0 and not needs_slot:
            return 0  # it has room
        wanted = {block_id for block_id in way.block_ids if block_id is not None}
        victims = claims.choose_victims(seq, needs_slot=needs_slot, shortage=lacking, wanted=wanted)
        if not victims:
            return 0
        for victim in victims:
            claims.remove(victim)
            victim.yields += victim.rank <= seq.rank
            self._preempt(victim, now, output)
        got = self._start(seq, way, budget, now, output)
        claims.add(seq)
        return got

    def _continue_all(self, batch: bool, budget: int, now: float, output: SchedulerOutput) -> int:
        """Schedule the running sequences of the batch class, or all others; the tokens they got."""
        taken = {s.seq for s in output.scheduled}
        mine = [s for s in self.running if (s.request.service_class is ServiceClass.BATCH) == batch and s not in taken]
        # Decodes go first: each takes one token, and no prompt, however long, may make them wait.
        decodes = [seq for seq in mine if seq.num_missing_tokens == 1]
        prompts = [seq for seq in mine if seq.num_missing_tokens > 1]
        prompts.sort(key=lambda seq: (seq.rank, self.tenants[seq.request.tenant].served))
        used = 0
        for seq in decodes + prompts:
            if used == budget:
                break
            if seq.num_in_flight and seq.needs_history:
                continue  # its penalties, or its grammar, go by the token that is not known yet
            if seq.num_output_tokens + seq.num_in_flight < seq.params.max_tokens:
                used += self._continue(seq, budget - used, now, output)
        return used

    def _chunk(self, seq: Sequence, budget: int) -> int:
        cap = self.long_prefill_token_threshold
        return min(seq.num_missing_tokens, budget, cap if cap else budget)

    def _continue(self, seq: Sequence, budget: int, now: float, output: SchedulerOutput) -> int:
        """Schedule a running sequence, preempting others for its blocks; the tokens it got."""
        if seq.status is not SequenceStatus.RUNNING:  # preempted earlier in this very step
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
        self.cache.free(seq)

    def _admit(self, batch: bool, budget: int, now: float, output: SchedulerOutput) -> tuple[int, bool]:
        """Let in who waits and finds room; the tokens they got, and whether one found none."""
        used = 0
        candidates = self.waiting.candidates(now, batch)
        room_for_long = self._room_for_long()
        while used < budget and len(self.running) < self.max_num_seqs:
            seq = candidates.next(skip_long=room_for_long <= 0)
            if seq is None:
                return used, False
            if room_for_long <= 0 and self._is_long(seq):
                continue
            way = self._way_in(seq, output)
            if way is None:
                continue  # those behind it need not wait with it
            if self._shortage(seq, way) <= 0:
                used += self._start(seq, way, budget - used, now, output)
                room_for_long -= seq.num_missing_tokens > max(1, self.long_prefill_token_threshold)
            elif self.running:
                return used, True
            else:
                output.exceeds_kv_cache.append(seq)
        return used, True

    def _is_long(self, seq: Sequence) -> bool:
        """Return whether the sequence's prompt is long, so that the limit of concurrent long prompts applies."""
        return bool(self.max_long_partial_prefills) and seq.num_prompt_tokens > self.long_prefill_token_threshold

    def _room_for_long(self) -> float:
        """Return how many more long prompts may begin."""
        if not self.max_long_partial_prefills:
            return math.inf
        under_way = sum(s.num_missing_tokens > max(1, self.long_prefill_token_threshold) for s in self.running)
        return self.max_long_partial_prefills - under_way

    def _way_in(self, seq: Sequence, output: SchedulerOutput) -> PrefixHit | Sequence | None:
        """How a waiting sequence may begin: by what is cached, or by its sibling's blocks. None: not yet."""
        if seq.num_in_flight:
            return None  # preempted while a step computed it: that step's token is not known yet
        first = seq.group.sequences[0]
        if seq.index and not seq.preemptions and first.status is not SequenceStatus.FINISHED:
            # The first of `n` answers computes the prompt for all; they begin in a step after those that did.
            computed = next((s.start for s in output.scheduled if s.seq is first), first.num_computed_tokens)
            return first if computed >= first.num_prompt_tokens else None
        hit = self.cache.lookup(seq)
        return None if hit.pending else hit

    def _shortage(self, seq: Sequence, way: PrefixHit | Sequence) -> int:
        # One block stays for each that runs, or the newcomer would be the next one's victim.
        spare = len(self.running)
        if isinstance(way, Sequence):
            return 1 + spare - self.cache.num_available
        return self.cache.shortage(seq, way, spare)

    def _start(self, seq: Sequence, way: PrefixHit | Sequence, budget: int, now: float, output: SchedulerOutput) -> int:
        tenant = self.tenants[seq.request.tenant]
        self.tenants.count(tenant, running=1)
        self.waiting.remove(seq)
        is_first = seq.group.prompt_usage is None
        if isinstance(way, Sequence):
            self.cache.fork(way, seq)
        else:
            self.cache.start(seq, way, now)
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=lambda s: (s.request.arrival, s.number))
        if is_first and seq.group.prompt_usage is not None:
            tenant.charge(seq.num_prompt_tokens - seq.group.prompt_usage.cache_read, 0)
            seq.group.scheduled_at = now
            output.started.append(seq)
        count = self._chunk(seq, budget)
        if not self.cache.grow(seq, seq.num_computed_tokens + count):
            raise RuntimeError("a request was admitted without room for it")  # there was room just now
        self._schedule(seq, count, output)
        return count

    def _schedule(self, seq: Sequence, count: int, output: SchedulerOutput) -> None:
        start = seq.num_computed_tokens
        seq.num_computed_tokens += count
        samples = seq.num_computed_tokens == seq.num_tokens
        in_flight = seq.num_computed_tokens > len(seq.tokens)
        seq.num_in_flight += samples
        output.scheduled.append(ScheduledSequence(seq, start, count, samples, seq.epoch, in_flight))
