"""A reference for the scheduler's order: the same rules, computed from scratch for each decision.

This is how the scheduler worked before its queue was kept sorted. It is slow with many waiting tenants, but simple to
read. `test_scheduling_order.py` compares the decisions of both. Code that does not depend on the order (chunks,
blocks, prefixes) is shared with the scheduler.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator

from inference_worker.contract.request import ServiceClass
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.scheduling.fairness import OUTPUT_WEIGHT, FairShareTable, TenantShare
from inference_worker.engine.scheduling.preemption import MAX_CLAIMS, MAX_FAIRNESS_PREEMPTIONS
from inference_worker.engine.scheduling.scheduler import Scheduler
from inference_worker.engine.scheduling.waiting import (
    AGING_TOKENS,
    CLASS_SECONDS,
    GROUPING_WINDOW,
    MAX_SKIPPED_REQUESTS,
    WaitingQueue,
)
from inference_worker.engine.sequences.sequence import Sequence
from inference_worker.engine.sequences.step import SchedulerOutput

Key = tuple[int, int, float, int]


class ScanningTenants(FairShareTable):
    """Accounts without an order: every query scans all of them."""

    def __init__(self) -> None:
        self._known: dict[str, TenantShare] = {}

    def arrive(self, name: str, weight: float) -> TenantShare:
        tenant = self._known.setdefault(name, TenantShare(name))
        tenant.weight = weight
        if not tenant.active:
            tenant.served = max(tenant.served, min((t.served for t in self.active()), default=tenant.served))
        return tenant

    def count(self, tenant: TenantShare, *, waiting: int = 0, running: int = 0) -> None:
        tenant.num_waiting += waiting
        tenant.num_running += running

    def share(self, name: str) -> float:
        return self._known[name].weight / sum(tenant.weight for tenant in self.active())

    def active(self) -> list[TenantShare]:
        return [tenant for tenant in self._known.values() if tenant.active]


class Line:
    def __init__(self, tenant: TenantShare, service_class: ServiceClass) -> None:
        self.tenant = tenant
        self.service_class = service_class
        self.requests: list[tuple[Key, Sequence]] = []

    def rank(self, now: float) -> int:
        if self.service_class is ServiceClass.BATCH:
            return ServiceClass.BATCH
        return max(0, self.service_class - int((now - self.requests[0][1].waiting_since) / CLASS_SECONDS))


class ScanningQueue(WaitingQueue):
    """Waiting requests, ordered by a scan of all lines for each request."""

    def __init__(self, tenants: FairShareTable, num_cached: Callable[[Sequence], int]) -> None:
        self._tenants = tenants
        self._num_cached = num_cached
        self.lines: dict[tuple[str, ServiceClass], Line] = {}
        self._keys: dict[Sequence, Key] = {}

    def add(self, seq: Sequence) -> None:
        request = seq.request
        tenant = self._tenants[request.tenant]
        line = self.lines.setdefault((request.tenant, request.service_class), Line(tenant, request.service_class))
        expected = seq.num_prompt_tokens + OUTPUT_WEIGHT * tenant.expected_output(seq.num_prompt_tokens, seq.params)
        key = (request.priority, 0 if seq.preemptions else 1, request.arrival * AGING_TOKENS + expected, seq.number)
        self._keys[seq] = key
        insort(line.requests, (key, seq), key=lambda entry: entry[0])
        self._tenants.count(tenant, waiting=1)

    def remove(self, seq: Sequence) -> None:
        where = (seq.request.tenant, seq.request.service_class)
        line = self.lines[where]
        line.requests.remove((self._keys.pop(seq), seq))
        self._tenants.count(line.tenant, waiting=-1)
        if not line.requests:
            del self.lines[where]

    def in_order(self, now: float, batch: bool) -> Iterator[Sequence]:
        passed: dict[Line, set[Sequence]] = {}
        while True:
            lines = [
                line for line in self.lines.values()
                if (line.service_class is ServiceClass.BATCH) == batch
                and len(passed.get(line, ())) < min(len(line.requests), MAX_SKIPPED_REQUESTS)
            ]  # fmt: skip
            if not lines:
                return
            line = min(lines, key=lambda line: (line.rank(now), line.tenant.served))
            seq = self.choose(line, line.rank(now), passed.setdefault(line, set()))
            yield seq
            if seq in self._keys:
                passed[line].add(seq)

    def all_heads(self, now: float) -> list[tuple[int, Line]]:
        lines = [line for line in self.lines.values() if line.service_class is not ServiceClass.BATCH]
        return sorted(((line.rank(now), line) for line in lines), key=lambda head: (head[0], head[1].tenant.served))

    def choose(self, line: Line, rank: int, passed: set[Sequence]) -> Sequence:
        left = [(key, seq) for key, seq in line.requests if seq not in passed]
        window = [(key, seq) for key, seq in left if key[:2] == left[0][0][:2]][:GROUPING_WINDOW]
        for _, seq in window:
            seq.rank = rank
        if len(window) == 1:
            return window[0][1]
        return min(window, key=lambda entry: (entry[0][2] - self._num_cached(entry[1]), entry[0][3]))[1]

    def pop_expired(self, now: float) -> list[Sequence]:
        waiting = [seq for seq in self._keys if seq.group.prompt_usage is None]
        return [seq for seq in waiting if seq.request.expires_at is not None and seq.request.expires_at <= now]

    def check_integrity(self) -> None:
        pass


class ScanningScheduler(Scheduler):
    """The scheduler with a scan for each decision about waiting requests."""

    def __init__(self, like: Scheduler) -> None:
        super().__init__(
            like.cache,
            max_num_seqs=like.max_num_seqs,
            max_num_batched_tokens=like.max_num_batched_tokens,
            long_prefill_token_threshold=like.long_prefill_token_threshold,
            max_long_partial_prefills=like.max_long_partial_prefills,
        )
        self.tenants = ScanningTenants()
        self.queue = ScanningQueue(self.tenants, lambda seq: self.cache.lookup(seq).num_cached_tokens)
        self.waiting = self.queue

    def _admit_by_preemption(self, budget: int, now: float, output: SchedulerOutput) -> int:
        used, looks = 0, MAX_CLAIMS
        for rank, head in self.queue.all_heads(now):
            got = 1
            while got and looks and self.may_claim(head.tenant, rank):
                looks -= 1
                left = budget - used - sum(seq.num_missing_tokens == 1 for seq in self.running)
                line = self.queue.lines.get((head.tenant.name, head.service_class))
                got = 0
                if line is not None and left > 0:
                    got = self.try_claim(self.queue.choose(line, rank, set()), left, now, output)
                used += got
        return used

    def may_claim(self, tenant: TenantShare, rank: int) -> bool:
        return any(
            seq.rank > rank
            or (
                seq.request.tenant != tenant.name
                and seq.fairness_preemptions < MAX_FAIRNESS_PREEMPTIONS
                and seq.rank >= rank
            )
            for seq in self.running
        )

    def try_claim(self, seq: Sequence, budget: int, now: float, output: SchedulerOutput) -> int:
        start_point = self._find_start(seq, output)
        if start_point is None:
            return 0
        lacking = self._shortage(seq, start_point)
        needs_slot = len(self.running) >= self.max_num_seqs
        if lacking <= 0 and not needs_slot:
            return 0
        cached_blocks = set(start_point.block_ids)
        victims = self.victims(seq, needs_slot, lacking, cached_blocks, {s.seq for s in output.scheduled})
        for victim in victims:
            victim.fairness_preemptions += victim.rank <= seq.rank
            self._preempt(victim, now, output)
        return self._start(seq, start_point, budget, now, output) if victims else 0

    def victims(
        self, seq: Sequence, needs_slot: bool, shortage: int, cached_blocks: set[int], taken: set[Sequence]
    ) -> list[Sequence]:
        share, pool, mine = self.tenants.share, self.cache.pool, self.tenants[seq.request.tenant]
        slots = Counter(s.request.tenant for s in self.running)
        blocks: Counter[str] = Counter()
        for s in self.running:
            blocks[s.request.tenant] += len(s.block_ids)

        def is_over(tenant: str) -> bool:
            return (
                slots[tenant] > max(1.0, share(tenant) * self.max_num_seqs)
                or blocks[tenant] > share(tenant) * pool.num_blocks
            )

        def excess(tenant: str) -> float:
            return max(slots[tenant] / self.max_num_seqs, blocks[tenant] / pool.num_blocks) / share(tenant)

        more_blocks = self.cache.demand.blocks_for(seq.num_tokens)
        under_share = not slots[mine.name] or (
            slots[mine.name] + 1 <= share(mine.name) * self.max_num_seqs
            and blocks[mine.name] + more_blocks <= share(mine.name) * pool.num_blocks
        )
        left, victims = [s for s in self.running if s not in taken and s.group is not seq.group], list[Sequence]()
        while shortage > 0 or needs_slot:
            lower = [s for s in left if s.rank > seq.rank]
            if not lower and under_share:
                lower = [
                    s for s in left
                    if s.rank >= seq.rank and s.fairness_preemptions < MAX_FAIRNESS_PREEMPTIONS
                    and s.request.tenant != mine.name
                    and self.tenants[s.request.tenant].served >= mine.served and is_over(s.request.tenant)
                ]  # fmt: skip
            if not lower:
                return []
            victim = max(lower, key=lambda s: (s.rank, excess(s.request.tenant), s.request.arrival, s.number))
            left.remove(victim)
            victims.append(victim)
            slots[victim.request.tenant] -= 1
            blocks[victim.request.tenant] -= len(victim.block_ids)
            own = (block_id for block_id in victim.block_ids if block_id not in cached_blocks)
            shortage -= sum(pool.references(block_id) == 1 for block_id in own) + 1
            needs_slot = False
        return victims

    def _admit(self, batch: bool, budget: int, now: float, output: SchedulerOutput) -> tuple[int, bool]:
        used = 0
        for seq in self.queue.in_order(now, batch):
            if used == budget or len(self.running) >= self.max_num_seqs:
                return used, True
            start_point = self._find_start(seq, output)
            if start_point is None or self.is_long_too_many(seq):
                continue
            if self._shortage(seq, start_point) <= 0:
                used += self._start(seq, start_point, budget - used, now, output)
            elif self.running:
                return used, True
            else:
                output.exceeds_kv_cache.append(seq)
        return used, False

    def is_long_too_many(self, seq: Sequence) -> bool:
        if not self.max_long_partial_prefills or seq.num_prompt_tokens <= self.long_prefill_token_threshold:
            return False
        under_way = sum(s.num_missing_tokens > max(1, self.long_prefill_token_threshold) for s in self.running)
        return under_way >= self.max_long_partial_prefills


def use_scanning_scheduler(engine: LLMEngine) -> LLMEngine:
    """Replace a new engine's scheduler by the reference."""
    engine.scheduler = ScanningScheduler(engine.scheduler)
    engine.metrics._scheduler = engine.scheduler
    return engine
