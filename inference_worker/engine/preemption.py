"""Who must give way. Free of torch.

Two occasions. A running request lacks a block (`under_pressure`): somebody is preempted, at once. Or a waiting request
has a claim to room that others fill (`choose_victims`): its class is higher, or its tenant is under its share while
another is over. For the sake of shares a request yields at most twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items

from inference_worker.engine.fairness import Tenants, TenantShare
from inference_worker.engine.kv_cache import KVCacheManager
from inference_worker.engine.sequence import Sequence

MOST_YIELDS = 2


def under_pressure(candidates: Items[Sequence], tenants: Tenants) -> Sequence:
    """The one to preempt when blocks have run out: of the lowest class, of the tenant that holds most beyond its
    share, the newest."""
    held = _blocks_by_tenant(candidates)
    if len(held) > 1:
        total, entitled = sum(held.values()), _entitlements(tenants)
        beyond = {name: max(0.0, count / total - entitled[name]) for name, count in held.items()}
    else:
        beyond = dict.fromkeys(held, 0.0)
    return max(candidates, key=lambda seq: (seq.rank, beyond[seq.request.tenant], seq.request.arrival, seq.number))


def has_claim(tenant: TenantShare, rank: int, running: Iterable[Sequence]) -> bool:
    """Whether a waiting request may have a claim to others' room: a quick look before the real one."""
    return any(
        seq.rank > rank or (seq.request.tenant != tenant.name and seq.yields < MOST_YIELDS and seq.rank >= rank)
        for seq in running
    )


def choose_victims(
    seq: Sequence,
    *,
    needs_slot: bool,
    shortage: int,
    wanted: Collection[int],
    running: Items[Sequence],
    taken: Collection[Sequence],
    tenants: Tenants,
    cache: KVCacheManager,
    max_batch: int,
) -> list[Sequence]:
    """Whom to preempt so that the waiting `seq` can begin; nobody, if that is not enough or it has no claim.

    Args:
        needs_slot: whether the batch is full.
        shortage: blocks it lacks.
        wanted: blocks it will hold because they are cached: when others let go of them nothing is gained.
        taken: of the running, those in this step's batch already, who must stay.
    """
    holdings = _Holdings(running, _entitlements(tenants), max_batch, cache.pool.num_blocks)
    mine = tenants[seq.request.tenant]
    under_share = holdings.is_under(mine.name, cache.num_blocks_for(seq.num_tokens))
    left, victims = [s for s in running if s not in taken and s.group is not seq.group], list[Sequence]()
    while shortage > 0 or needs_slot:
        lower = [s for s in left if s.rank > seq.rank]
        if not lower and under_share:
            lower = [
                s for s in left
                if s.rank >= seq.rank and s.yields < MOST_YIELDS and s.request.tenant != mine.name
                and tenants[s.request.tenant].served >= mine.served and holdings.is_over(s.request.tenant)
            ]  # fmt: skip
        if not lower:
            return []
        victim = max(lower, key=lambda s: (s.rank, holdings.excess(s.request.tenant), s.request.arrival, s.number))
        left.remove(victim)
        victims.append(victim)
        holdings.give_back(victim)
        # A block others hold as well is not freed. One that runs less is one spare block less.
        own = (block_id for block_id in victim.block_ids if block_id not in wanted)
        shortage -= sum(cache.pool.references(block_id) == 1 for block_id in own) + 1
        needs_slot = False
    return victims


class _Holdings:
    """How much of slots and blocks each tenant holds, against its part of the active tenants' weights."""

    def __init__(self, running: Items[Sequence], entitled: dict[str, float], max_batch: int, num_blocks: int) -> None:
        self._entitled = entitled
        self._max_batch = max_batch
        self._num_blocks = num_blocks
        self._slots = Counter(seq.request.tenant for seq in running)
        self._blocks = _blocks_by_tenant(running)

    def is_under(self, tenant: str, more_blocks: int) -> bool:
        """Whether one request more keeps the tenant within its share. Its first always does."""
        share = self._entitled[tenant]
        return not self._slots[tenant] or (
            self._slots[tenant] + 1 <= share * self._max_batch
            and self._blocks[tenant] + more_blocks <= share * self._num_blocks
        )

    def is_over(self, tenant: str) -> bool:
        share = self._entitled[tenant]
        return (
            self._slots[tenant] > max(1.0, share * self._max_batch) or self._blocks[tenant] > share * self._num_blocks
        )

    def excess(self, tenant: str) -> float:
        """The larger of the tenant's parts of slots and blocks, in its shares."""
        part = max(self._slots[tenant] / self._max_batch, self._blocks[tenant] / self._num_blocks)
        return part / self._entitled[tenant]

    def give_back(self, seq: Sequence) -> None:
        self._slots[seq.request.tenant] -= 1
        self._blocks[seq.request.tenant] -= len(seq.block_ids)


def _blocks_by_tenant(running: Iterable[Sequence]) -> Counter[str]:
    held: Counter[str] = Counter()
    for seq in running:
        held[seq.request.tenant] += len(seq.block_ids)
    return held


def _entitlements(tenants: Tenants) -> dict[str, float]:
    active = tenants.active()
    total = sum(tenant.weight for tenant in active)
    return {tenant.name: tenant.weight / total for tenant in active}
