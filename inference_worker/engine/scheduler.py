"""Who gets how many tokens of the next step. Free of torch.

There are no phases. A step moves `num_computed_tokens` of whoever is scheduled toward `num_tokens`: a chunk of a
prompt, a decode, a recomputation after a preemption are the same thing, and share a batch.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from inference_worker.engine.kv_cache import KVCacheManager, PrefixHit
from inference_worker.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens [start, start + num_new_tokens) of a sequence, to be computed in this step."""

    seq: Sequence
    start: int
    num_new_tokens: int
    samples: bool  # these reach the sequence's end, so the step brings it a new token
    epoch: int  # the sequence's when scheduled; another one since: it was preempted, and this work is void


@dataclass(slots=True)
class SchedulerOutput:
    """One step's batch, decodes first."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_tokens: int = 0
    started: list[Sequence] = field(default_factory=list)  # scheduled for the first time
    preempted: list[Sequence] = field(default_factory=list)
    outgrown: list[Sequence] = field(default_factory=list)  # alone in the cache, and still too large for it

    @property
    def num_decodes(self) -> int:
        """Leading entries that compute one token."""
        return next((i for i, s in enumerate(self.scheduled) if s.num_new_tokens != 1), len(self.scheduled))


class Scheduler:
    """First come, first served; running before waiting; the newest is preempted when blocks run out."""

    def __init__(self, cache: KVCacheManager, *, max_batch: int, step_tokens: int, long_prompt_tokens: int = 0) -> None:
        self.cache = cache
        self.max_batch = max_batch
        self.step_tokens = step_tokens
        self.long_prompt_tokens = long_prompt_tokens
        self.running: list[Sequence] = []  # oldest first
        self.waiting: list[Sequence] = []  # by arrival
        self._arrivals = 0
        self._order: dict[str, tuple[float, int]] = {}
        self.preemptions = 0

    def add(self, seq: Sequence) -> None:
        self._arrivals += 1
        self._order[seq.request_id] = (seq.request.arrival, self._arrivals)
        insort(self.waiting, seq, key=self._key)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's batch, give it its blocks, and advance `num_computed_tokens` of all in it.

        The caller answers with `complete` for each entry when the step has succeeded. If it has failed, with `finish`:
        blocks it would have filled were published for nobody.
        """
        output = SchedulerOutput()
        budget = self.step_tokens
        # Decodes go first: each takes one token, and no prompt, however long, may make them wait.
        decoding = [seq for seq in self.running if seq.num_missing_tokens == 1]
        for seq in decoding + [seq for seq in self.running if seq.num_missing_tokens > 1]:
            if budget == 0:
                break
            budget -= self._continue(seq, budget, output)
        if not output.preempted:
            self._admit(budget, output)
        output.scheduled.sort(key=lambda s: s.num_new_tokens != 1)
        output.num_tokens = sum(s.num_new_tokens for s in output.scheduled)
        return output

    def complete(self, scheduled: ScheduledSequence) -> bool:
        """The step has computed what was scheduled: publish its full blocks. False if the sequence lost it since."""
        seq = scheduled.seq
        if seq.epoch != scheduled.epoch or seq.status is not Status.RUNNING:
            return False
        self.cache.publish(seq, scheduled.start + scheduled.num_new_tokens)
        return True

    def finish(self, seq: Sequence) -> None:
        """Take the sequence out, wherever it stands, and free its blocks. Once finished, nothing happens."""
        if seq.status is Status.FINISHED:
            return
        (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
        self.cache.free(seq)
        seq.status = Status.FINISHED
        self._order.pop(seq.request_id)

    def check_integrity(self) -> None:
        """Check that every sequence is where its status says, and that the cache's accounts are right.

        Raises:
            RuntimeError: something is not as it must be.
        """
        wrong = [seq for seq in self.running if seq.status is not Status.RUNNING]
        wrong += [seq for seq in self.waiting if seq.status is not Status.WAITING or seq.block_ids]
        if wrong or len(self.running) > self.max_batch:
            raise RuntimeError(f"scheduler integrity: {wrong or self.running}")
        if set(self._order) != {seq.request_id for seq in self.running + self.waiting}:
            raise RuntimeError("scheduler integrity: the order knows other requests than the queues")
        self.cache.check_integrity(self.running)

    def _key(self, seq: Sequence) -> tuple[float, int]:
        return self._order[seq.request_id]

    def _chunk(self, seq: Sequence, budget: int) -> int:
        cap = self.long_prompt_tokens
        return min(seq.num_missing_tokens, budget, cap if cap else budget)

    def _continue(self, seq: Sequence, budget: int, output: SchedulerOutput) -> int:
        """Schedule a running sequence, preempting newer ones for its blocks; the tokens it got."""
        if seq.status is not Status.RUNNING:  # preempted earlier in this very step
            return 0
        count = self._chunk(seq, budget)
        while not self.cache.grow(seq, seq.num_computed_tokens + count):
            victim = self._victim(output)
            if len(self.running) == 1:
                output.outgrown.append(seq)
                return 0
            self._preempt(victim, output)
            if victim is seq:
                return 0
        self._schedule(seq, count, output)
        return count

    def _victim(self, output: SchedulerOutput) -> Sequence:
        """The newest running sequence that is not in this step's batch yet; the one in want is there at least."""
        taken = {id(s.seq) for s in output.scheduled}
        return next(seq for seq in reversed(self.running) if id(seq) not in taken)

    def _preempt(self, seq: Sequence, output: SchedulerOutput) -> None:
        self.running.remove(seq)
        self.cache.free(seq)
        seq.status = Status.WAITING
        seq.epoch += 1
        seq.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, seq, key=self._key)
        output.preempted.append(seq)

    def _admit(self, budget: int, output: SchedulerOutput) -> None:
        index = 0
        while index < len(self.waiting) and budget and len(self.running) < self.max_batch:
            seq = self.waiting[index]
            hit = self.cache.lookup(seq)
            if hit.pending:
                index += 1  # its prefix is being computed: those behind it need not wait with it
                continue
            # One block stays for each that runs, or the newcomer would be the next one's victim.
            if self.cache.can_start(seq, hit, spare=len(self.running)):
                del self.waiting[index]
                budget -= self._start(seq, hit, budget, output)
            elif self.running:
                break
            else:
                output.outgrown.append(seq)
                index += 1

    def _start(self, seq: Sequence, hit: PrefixHit, budget: int, output: SchedulerOutput) -> int:
        self.cache.start(seq, hit)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=self._key)
        if seq.cache_read is None:
            seq.cache_read = min(hit.num_cached_tokens, seq.num_prompt_tokens)
            output.started.append(seq)
        count = self._chunk(seq, budget)
        if not self.cache.grow(seq, seq.num_computed_tokens + count):
            raise RuntimeError("a request was admitted without room for it")  # can_start has just said otherwise
        self._schedule(seq, count, output)
        return count

    def _schedule(self, seq: Sequence, count: int, output: SchedulerOutput) -> None:
        start = seq.num_computed_tokens
        seq.num_computed_tokens += count
        samples = seq.num_computed_tokens == seq.num_tokens
        output.scheduled.append(ScheduledSequence(seq, start, count, samples, seq.epoch))
