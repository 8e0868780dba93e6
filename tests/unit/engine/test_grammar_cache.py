"""The cache of compiled grammars: isolation of tenants, and eviction."""

from __future__ import annotations

import random

from inference_worker.engine.structured_output.grammar_cache import CacheCapacity, TenantCache


def cache(total: CacheCapacity, tenant: CacheCapacity) -> TenantCache[str, str]:
    return TenantCache(total, tenant)


def held(made: TenantCache[str, str], tenant: str, keys: list[str]) -> list[str]:
    return [key for key in keys if made.get(tenant, key) is not None]


def test_a_tenant_finds_only_its_own_grammars() -> None:
    made = cache(CacheCapacity(100, 100), CacheCapacity(100, 100))
    made.put("a", "form", "of a", 1)
    assert made.get("a", "form") == "of a"
    assert made.get("b", "form") is None
    made.put("b", "form", "of b", 1)
    assert (made.get("a", "form"), made.get("b", "form")) == ("of a", "of b")


def test_a_tenant_that_fills_the_cache_evicts_only_its_own_grammars() -> None:
    made = cache(CacheCapacity(400, 1000), CacheCapacity(300, 1000))
    made.put("small", "form", "small", 50)
    for number in range(1000):
        made.put("large", str(number), "", 30)
    assert made.get("small", "form") == "small"
    assert len(held(made, "large", [str(number) for number in range(1000)])) == 10  # its own limit
    for number in range(1000):
        made.put("other", str(number), "", 30)
    assert made.get("small", "form") == "small"  # the two large ones share the rest
    assert made._bytes <= 400


def test_the_least_recently_used_grammar_is_evicted_first() -> None:
    made = cache(CacheCapacity(1000, 1000), CacheCapacity(1000, 2))
    made.put("a", "one", "", 1)
    made.put("a", "two", "", 1)
    made.get("a", "one")
    made.put("a", "three", "", 1)
    assert held(made, "a", ["one", "two", "three"]) == ["one", "three"]


def test_a_new_grammar_is_cached_whatever_its_size() -> None:
    made = cache(CacheCapacity(10, 10), CacheCapacity(10, 10))
    made.put("a", "one", "", 100)
    made.put("b", "two", "", 100)
    assert made.get("b", "two") is not None and made.get("a", "one") is None


def test_many_tenants_stay_within_the_total_size() -> None:
    draw = random.Random(1)
    made = cache(CacheCapacity(500, 40), CacheCapacity(200, 15))
    for _ in range(5000):
        tenant, key = str(draw.randrange(60)), str(draw.randrange(20))
        if made.get(tenant, key) is None:
            made.put(tenant, key, "", draw.randrange(1, 60))
        if draw.random() < 0.1:
            made.put(tenant, key, "again", draw.randrange(1, 60))
        shares = made._shares.values()
        assert made._bytes == sum(size for share in shares for _, size in share.entries.values()) <= 500
        assert made._entries == sum(len(share.entries) for share in shares) <= 40
        assert all(share.entries and len(share.entries) <= 15 and share.bytes <= 200 for share in shares)
