"""The share of a tenant in a gateway's slots."""

from __future__ import annotations

import random

import pytest

from millrace.gateway.core.tenant_slots import has_free_slot


def fill(slots: int, tenant_id: int, used: list[int]) -> int:
    """Let a tenant use as many slots as it may. Return their number."""
    before = len(used)
    while has_free_slot(tenant_id, slots, used):
        used.append(tenant_id)
    return len(used) - before


@pytest.mark.parametrize(
    ("slots", "shares"),
    [(0, [0]), (1, [1, 0]), (2, [1, 1, 0]), (3, [2, 1, 0]), (8, [4, 2, 1, 1, 0]), (64, [32, 16, 8, 4, 2, 1, 1, 0])],
)
def test_tenants_that_use_all_they_may_one_after_the_other(slots: int, shares: list[int]) -> None:
    used: list[int] = []
    assert [fill(slots, tenant, used) for tenant in range(len(shares))] == shares


@pytest.mark.parametrize("seed", range(20))
def test_no_tenant_uses_more_than_half_however_slots_are_taken_and_returned(seed: int) -> None:
    random_ = random.Random(seed)
    slots, used = random_.randint(1, 20), list[int]()
    for _ in range(500):
        tenant = random_.randint(1, 5)
        if random_.random() < 0.3 and used:
            used.remove(random_.choice(used))
        elif has_free_slot(tenant, slots, used):
            used.append(tenant)
        assert len(used) <= slots
        assert used.count(tenant) <= -(-slots // 2)
        # A tenant without a slot gets one as long as any is free.
        assert has_free_slot(99, slots, used) is (len(used) < slots)
