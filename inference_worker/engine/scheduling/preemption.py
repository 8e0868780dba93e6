"""The choice of running requests to preempt. Does not import torch.

There are two occasions. If a running request lacks a block, `under_pressure` chooses one to preempt immediately. If a
waiting request has a claim to room that others fill, `Claims` chooses victims: its class is higher, or its tenant is
under its share while another is over. For the sake of shares a request yields at most twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Items

from inference_worker.engine.kv_cache.kv_cache import KVCacheManager
from inference_worker.engine.scheduling.fairness import FairShareTable, TenantShare
from inference_worker.engine.scheduling.sequence import Sequence

MAX_FAIRNESS_PREEMPTIONS = 2
MAX_CLAIMS = 16  # claims to room looked at in a step


def under_pressure(candidates: Items[Sequence], tenants: FairShareTable) -> Sequence:
    """Return the one to preempt when blocks have run out: of the lowest class, of the tenant that holds most beyond its
    share, the newest."""
    held = _blocks_by_tenant(candidates)
    if len(held) > 1:
        total = sum(held.values())
        beyond = {name: max(0.0, count / total - tenants.share(name)) for name, count in held.items()}
    else:
        beyond = dict.fromkeys(held, 0.0)
    return max(candidates, key=lambda seq: (seq.rank, beyond[seq.request.tenant], seq.request.arrival, seq.number))


class Claims:
    """The claims that waiting requests have to the room of running ones, during one step.

    Everything that depends on the running requests only is computed once, for all claims of the step. `remove` and
    `add` keep it right when requests stop or start to run.

    Args:
        running: all running requests.
        taken: of these, those in this step's batch already, who must stay.
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
        self._over_share: list[Sequence] | None = None  # of these, those whose tenants are over their shares
        self._ranks: Counter[int] = Counter()
        self._yielding: defaultdict[int, Counter[str]] = defaultdict(Counter)  # requests that may: by class, tenant
        self.num_decodes = 0
        for seq in running:
            self._count(seq, 1)
            if seq not in taken:
                self._left.append(seq)
        self._holdings.update_all()

    def remove(self, seq: Sequence) -> None:
        """Count out a request that is about to be preempted."""
        self._left.remove(seq)
        self._count(seq, -1)
        self._holdings.update(seq.request.tenant)

    def add(self, seq: Sequence) -> None:
        """Count in a request that has started: it is in this step's batch."""
        self._count(seq, 1)
        self._holdings.update(seq.request.tenant)

    def has_claim(self, tenant: TenantShare, rank: int) -> bool:
        """Return true if a waiting request may have a claim to others' room: a quick look before the real one."""
        lowest = max(self._ranks)
        if rank != lowest:
            return rank < lowest
        return len(self._yielding[rank]) > (tenant.name in self._yielding[rank])

    def may_have_victims(self, tenant: TenantShare, rank: int) -> bool:
        """Return false if `choose_victims` would find none for any request of this tenant and class."""
        return any(seq.rank > rank for seq in self._left) or any(self._owing(tenant, rank))

    def choose_victims(
        self, seq: Sequence, *, needs_slot: bool, shortage: int, wanted: Collection[int]
    ) -> list[Sequence]:
        """Whom to preempt so that the waiting `seq` can begin; nobody, if that is not enough or it has no claim.

        Args:
            needs_slot: whether the batch is full.
            shortage: blocks it lacks.
            wanted: blocks it will hold because they are cached: when others let go of them nothing is gained.
        """
        mine, pool = self._tenants[seq.request.tenant], self._cache.pool
        holdings = self._holdings
        lower = [s for s in self._left if s.rank > seq.rank and s.group is not seq.group]
        under_share = holdings.is_under(mine, self._cache.num_blocks_for(seq.num_tokens))
        owing = [s for s in self._owing(mine, seq.rank) if s.rank == seq.rank] if under_share else []
        if shortage > 0 and shortage > sum(len(s.block_ids) + 1 for s in lower + owing):
            return []
        victims = list[Sequence]()
        while shortage > 0 or needs_slot:
            if victims:  # the first choice is by what the tenants hold, the others by what they would hold then
                holdings = holdings if len(victims) > 1 else holdings.copy()
                holdings.change(victims[-1], -1)
                holdings.update(victims[-1].request.tenant)
            if not lower:
                owing = [s for s in owing if s.request.tenant in holdings.over]
            candidates, excess = lower or owing, holdings.excess
            if not candidates:
                return []
            victim = max(candidates, key=lambda s: (s.rank, excess[s.request.tenant], s.request.arrival, s.number))
            candidates.remove(victim)
            victims.append(victim)
            # A block others hold as well is not freed. One that runs less is one spare block less.
            own = (block_id for block_id in victim.block_ids if block_id not in wanted)
            shortage -= sum(pool.references(block_id) == 1 for block_id in own) + 1
            needs_slot = False
        return victims

    def _count(self, seq: Sequence, sign: int) -> None:
        self._ranks[seq.rank] += sign
        if not self._ranks[seq.rank]:
            del self._ranks[seq.rank]
        if seq.yields < MAX_FAIRNESS_PREEMPTIONS:
            tenants, name = self._yielding[seq.rank], seq.request.tenant
            tenants[name] += sign
            if not tenants[name]:
                del tenants[name]
        self.num_decodes += sign * (seq.num_missing_tokens == 1)
        self._holdings.change(seq, sign)
        self._over_share = None

    def _owing(self, mine: TenantShare, rank: int) -> Iterator[Sequence]:
        """Yield requests of other tenants over their shares that may be preempted for the share of tenant `mine`."""
        if self._over_share is None:
            over = self._holdings.over
            self._over_share = [
                s for s in self._left if s.request.tenant in over and s.yields < MAX_FAIRNESS_PREEMPTIONS
            ]
        for seq in self._over_share:
            tenant = seq.request.tenant
            if seq.rank >= rank and tenant != mine.name and self._tenants[tenant].served >= mine.served:
                yield seq


class _Holdings:
    """How much of slots and blocks each tenant holds, against its part of the active tenants' weights."""

    def __init__(self, tenants: FairShareTable, max_num_seqs: int, num_blocks: int) -> None:
        self._tenants = tenants
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks
        self._slots: Counter[str] = Counter()
        self._blocks: Counter[str] = Counter()
        self.over: set[str] = set()  # tenants over their shares; this and the next as of each tenant's last update
        self.excess: dict[str, float] = {}  # the larger of a tenant's parts of slots and blocks, in its shares

    def copy(self) -> _Holdings:
        copied = _Holdings(self._tenants, self._max_num_seqs, self._num_blocks)
        copied._slots, copied._blocks = self._slots.copy(), self._blocks.copy()
        copied.over, copied.excess = self.over.copy(), self.excess.copy()
        return copied

    def change(self, seq: Sequence, sign: int) -> None:
        """Count the running request in or out."""
        self._slots[seq.request.tenant] += sign
        self._blocks[seq.request.tenant] += sign * len(seq.block_ids)

    def update(self, tenant: str) -> None:
        """Compute again whether the tenant is over its share, and by how much."""
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
        """Whether one request more keeps the tenant within its share. Its first always does."""
        name, share = tenant.name, self._tenants.share(tenant.name)
        return not self._slots[name] or (
            self._slots[name] + 1 <= share * self._max_num_seqs
            and self._blocks[name] + more_blocks <= share * self._num_blocks
        )


def _blocks_by_tenant(running: Iterable[Sequence]) -> Counter[str]:
    held: Counter[str] = Counter()
    for seq in running:
        held[seq.request.tenant] += len(seq.block_ids)
    return held
