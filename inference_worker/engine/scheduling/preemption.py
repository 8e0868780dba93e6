"""The choice of running requests to preempt. Does not import torch.

There are two occasions. If a running request lacks a block, `under_pressure` chooses one request to preempt
immediately. If a waiting request is entitled to capacity that others use, `Claims` chooses victims: its class is
higher, or its tenant is under its share while another tenant is over. A request is preempted for fairness at most
twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Items

from inference_worker.engine.kv_cache.kv_cache import KVCacheManager
from inference_worker.engine.scheduling.fairness import FairShareTable, TenantShare
from inference_worker.engine.sequences.sequence import Sequence

MAX_FAIRNESS_PREEMPTIONS = 2
MAX_CLAIMS = 16  # claims examined in a step


def under_pressure(candidates: Items[Sequence], tenants: FairShareTable) -> Sequence:
    """Return the request to preempt if blocks run out: of the lowest class, then of the tenant that exceeds its share
    most, then the newest."""
    blocks = _blocks_by_tenant(candidates)
    if len(blocks) > 1:
        total = sum(blocks.values())
        beyond = {name: max(0.0, count / total - tenants.share(name)) for name, count in blocks.items()}
    else:
        beyond = dict.fromkeys(blocks, 0.0)
    return max(candidates, key=lambda seq: (seq.rank, beyond[seq.request.tenant], seq.request.arrival, seq.number))


class Claims:
    """The claims of waiting requests to the capacity of running ones, during one step.

    Everything that depends only on the running requests is computed once for all claims of the step. `remove` and `add`
    update it when requests stop or start running.

    Args:
        running: all running requests.
        taken: running requests that are in this step's batch already and cannot be preempted.
    """

    def __init__(
        self,
        running: Iterable[Sequence],
        taken: Collection[Sequence],
        tenants: FairShareTable,
        cache: KVCacheManager,
        max_num_seqs: int,
    ) -> None:
        self._tenants = tenants
        self._cache = cache
        self._holdings = _Holdings(tenants, max_num_seqs, cache.pool.num_blocks)
        self._left: list[Sequence] = []  # requests that may be preempted
        self._over_share: list[Sequence] | None = None  # requests whose tenants are over their shares
        self._ranks: Counter[int] = Counter()
        # Requests that may be preempted for fairness, by class and tenant.
        self._preemptible: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.num_decodes = 0
        for seq in running:
            self._count(seq, 1)
            if seq not in taken:
                self._left.append(seq)
        self._holdings.update_all()

    def remove(self, seq: Sequence) -> None:
        """Remove a request that is preempted next."""
        self._left.remove(seq)
        self._count(seq, -1)
        self._holdings.update(seq.request.tenant)

    def add(self, seq: Sequence) -> None:
        """Add a request that has started and is in this step's batch."""
        self._count(seq, 1)
        self._holdings.update(seq.request.tenant)

    def is_entitled(self, tenant: TenantShare, rank: int) -> bool:
        """Return whether a waiting request may have a claim. A quick check before `choose_victims`."""
        lowest = max(self._ranks)
        if rank != lowest:
            return rank < lowest
        return len(self._preemptible[rank]) > (tenant.name in self._preemptible[rank])

    def may_have_victims(self, tenant: TenantShare, rank: int) -> bool:
        """Return false if `choose_victims` would find none for any request of this tenant and class."""
        return any(seq.rank > rank for seq in self._left) or any(self._over_share_requests(tenant, rank))

    def choose_victims(
        self, seq: Sequence, *, needs_slot: bool, shortage: int, cached_blocks: Collection[int]
    ) -> list[Sequence]:
        """Return the requests to preempt so that the waiting `seq` can start; none if they would not suffice or it has
        no claim.

        Args:
            needs_slot: whether the batch is full.
            shortage: blocks that `seq` lacks.
            cached_blocks: cached blocks that `seq` will use. Preempting their other users does not free them.
        """
        own_tenant, pool = self._tenants[seq.request.tenant], self._cache.pool
        spare = self._cache.num_groups  # reserved blocks of a running request
        holdings = self._holdings
        lower = [s for s in self._left if s.rank > seq.rank and s.group is not seq.group]
        under_share = holdings.is_under(own_tenant, self._cache.demand.blocks_for(seq.num_tokens))
        over_share = (
            [s for s in self._over_share_requests(own_tenant, seq.rank) if s.rank == seq.rank] if under_share else []
        )
        if shortage > 0 and shortage > sum(s.num_blocks + spare for s in lower + over_share):
            return []
        victims = list[Sequence]()
        while shortage > 0 or needs_slot:
            if victims:  # later choices count the earlier victims as removed
                holdings = holdings if len(victims) > 1 else holdings.copy()
                holdings.change(victims[-1], -1)
                holdings.update(victims[-1].request.tenant)
            if not lower:
                over_share = [s for s in over_share if s.request.tenant in holdings.over]
            candidates, excess = lower or over_share, holdings.excess
            if not candidates:
                return []
            victim = max(candidates, key=lambda s: (s.rank, excess[s.request.tenant], s.request.arrival, s.number))
            candidates.remove(victim)
            victims.append(victim)
            # A shared block is not freed. One running request less needs fewer spare blocks.
            own_blocks = (block_id for block_id in victim.block_ids if block_id not in cached_blocks)
            shortage -= sum(pool.references(block_id) == 1 for block_id in own_blocks) + spare
            needs_slot = False
        return victims

    def _count(self, seq: Sequence, sign: int) -> None:
        self._ranks[seq.rank] += sign
        if not self._ranks[seq.rank]:
            del self._ranks[seq.rank]
        if seq.fairness_preemptions < MAX_FAIRNESS_PREEMPTIONS:
            tenants, name = self._preemptible[seq.rank], seq.request.tenant
            tenants[name] += sign
            if not tenants[name]:
                del tenants[name]
        self.num_decodes += sign * (seq.num_missing_tokens == 1)
        self._holdings.change(seq, sign)
        self._over_share = None

    def _over_share_requests(self, own_tenant: TenantShare, rank: int) -> Iterator[Sequence]:
        """Yield requests of other tenants over their shares that may be preempted for the share of `own_tenant`."""
        if self._over_share is None:
            over = self._holdings.over
            self._over_share = [
                s for s in self._left if s.request.tenant in over and s.fairness_preemptions < MAX_FAIRNESS_PREEMPTIONS
            ]
        for seq in self._over_share:
            tenant = seq.request.tenant
            if seq.rank >= rank and tenant != own_tenant.name and self._tenants[tenant].served >= own_tenant.served:
                yield seq


class _Holdings:
    """The slots and blocks that each tenant uses, compared with its part of the active tenants' weights."""

    def __init__(self, tenants: FairShareTable, max_num_seqs: int, num_blocks: int) -> None:
        self._tenants = tenants
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks
        self._slots: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()
        self.over: set[str] = set()  # tenants over their shares, at each tenant's last update
        self.excess: dict[str, float] = {}  # the larger part of slots or blocks, divided by the share

    def copy(self) -> _Holdings:
        copied = _Holdings(self._tenants, self._max_num_seqs, self._num_blocks)
        copied._slots, copied._blocks = self._slots.copy(), self._blocks.copy()
        copied.over, copied.excess = self.over.copy(), self.excess.copy()
        return copied

    def change(self, seq: Sequence, sign: int) -> None:
        """Add (sign 1) or remove (sign -1) a running request."""
        self._slots[seq.request.tenant] += sign
        self._blocks[seq.request.tenant] += sign * seq.num_blocks

    def update(self, tenant: str) -> None:
        """Recompute by how much the tenant is over its share."""
        share, slots, blocks = self._tenants.share(tenant), self._slots[tenant], self._blocks[tenant]
        if slots > max(1.0, share * self._max_num_seqs) or blocks > share * self._num_blocks:
            self.over.add(tenant)
        else:
            self.over.discard(tenant)
        self.excess[tenant] = max(slots / self._max_num_seqs, blocks / self._num_blocks) / share

    def update_all(self) -> None:
        for tenant in self._slots:
            self.update(tenant)

    def is_under(self, tenant: TenantShare, more_blocks: int) -> bool:
        """Return whether the tenant stays within its share with one more request. Its first request is always
        within."""
        name, share = tenant.name, self._tenants.share(tenant.name)
        return not self._slots[name] or (
            self._slots[name] + 1 <= share * self._max_num_seqs
            and self._blocks[name] + more_blocks <= share * self._num_blocks
        )


def _blocks_by_tenant(running: Iterable[Sequence]) -> Counter[str]:
    blocks: Counter[str] = Counter()
    for seq in running:
        blocks[seq.request.tenant] += seq.num_blocks
    return blocks
