"""Blocks, their order of reuse, and the prefix cache, with ten blocks of 16 tokens and IDs from 1."""

from __future__ import annotations

import pytest

from inference_worker.contract.prefix_digest import hash_block
from inference_worker.engine.kv_cache.block_pool import BlockPool
from inference_worker.engine.kv_cache.kv_cache import KVCacheManager
from inference_worker.engine.sequences.sequence import Sequence
from tests.support.engine.fakes import request

SHARED = list(range(100, 148))


def sequence(name: str, tokens: list[int], salt: bytes = b"") -> Sequence:
    return Sequence(request(name, tokens, salt=salt), None)


def compute(cache: KVCacheManager, seq: Sequence) -> None:
    """Run a whole successful step for `seq`."""
    cache.start(seq, cache.lookup(seq))
    assert cache.grow(seq, seq.num_tokens)
    seq.num_computed_tokens = seq.num_tokens
    cache.publish(seq, seq.num_tokens)


@pytest.fixture
def cache() -> KVCacheManager:
    return KVCacheManager(10, 16)


def two_sharing(cache: KVCacheManager) -> tuple[Sequence, Sequence]:
    first = sequence("first", SHARED + list(range(7)))
    compute(cache, first)
    second = sequence("second", SHARED + list(range(500, 505)))
    assert cache.lookup(second).num_cached_tokens == 48
    compute(cache, second)
    return first, second


def test_a_shared_prefix_is_stored_once(cache: KVCacheManager) -> None:
    first, second = two_sharing(cache)
    assert first.block_ids == [1, 2, 3, 4]
    assert len(first.block_hashes) == 3
    assert second.block_ids == [1, 2, 3, 5]
    assert [cache.pool.references(i) for i in (1, 2, 3, 4, 5)] == [2, 2, 2, 1, 1]
    assert cache.pool.num_free == 5
    cache.check_integrity([first, second])


def test_tail_blocks_are_freed_first_and_unhashed_ones_are_reused_first(cache: KVCacheManager) -> None:
    first, second = two_sharing(cache)
    cache.release(first)
    cache.release(second)
    assert cache.pool.free_ids() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    cache.check_integrity([])


def test_a_fully_cached_prompt_computes_its_last_block_again(cache: KVCacheManager) -> None:
    compute(cache, sequence("first", SHARED))
    hit = cache.lookup(sequence("again", SHARED))
    assert hit.block_ids == [1, 2]
    assert hit.num_cached_tokens == 48


def test_a_reused_block_loses_its_hash(cache: KVCacheManager) -> None:
    first = sequence("first", [*SHARED, 1])
    compute(cache, first)
    cache.release(first)
    cache.pool.allocate(7)  # all but the three cached ones
    assert cache.lookup(sequence("again", [*SHARED, 1])).num_cached_tokens == 48
    cache.pool.allocate(1)  # uses the chain's tail
    assert cache.lookup(sequence("again", [*SHARED, 1])).block_ids == [1, 2]


def test_a_failed_allocation_changes_nothing(cache: KVCacheManager) -> None:
    seq = sequence("large", list(range(11 * 16)))
    cache.start(seq, cache.lookup(seq))
    assert not cache.grow(seq, seq.num_tokens)
    assert (seq.block_ids, cache.pool.num_free) == ([], 10)
    with pytest.raises(IndexError):
        cache.pool.allocate(11)
    cache.check_integrity([seq])


def test_reset_is_rejected_while_blocks_are_used(cache: KVCacheManager) -> None:
    seq = sequence("first", [*SHARED, 1])
    compute(cache, seq)
    assert not cache.reset_prefix_cache()
    cache.release(seq)
    assert cache.reset_prefix_cache()
    assert cache.lookup(sequence("again", [*SHARED, 1])).num_cached_tokens == 0


def test_another_salt_has_no_hit(cache: KVCacheManager) -> None:
    compute(cache, sequence("ours", [*SHARED, 1], salt=b"ours"))
    assert cache.lookup(sequence("ours too", [*SHARED, 1], salt=b"ours")).num_cached_tokens == 48
    assert cache.lookup(sequence("theirs", [*SHARED, 1], salt=b"theirs")).num_cached_tokens == 0


def test_only_the_first_blocks_hash_contains_the_salt() -> None:
    tokens = SHARED[:16]
    first = hash_block(None, tokens, b"a")
    assert first != hash_block(None, tokens, b"b")
    assert hash_block(first, tokens, b"a") == hash_block(first, tokens, b"b")
    assert len(first) * 8 >= 128


def test_a_hash_depends_on_all_tokens_and_earlier_blocks() -> None:
    tokens = SHARED[:16]
    seen = {hash_block(None, [*tokens[:i], 999, *tokens[i + 1 :]], b"") for i in range(16)}
    assert len(seen | {hash_block(None, tokens, b"")}) == 17
    assert hash_block(b"p" * 32, tokens, b"") != hash_block(b"q" * 32, tokens, b"")


def test_blocks_are_found_only_after_their_step_succeeded(cache: KVCacheManager) -> None:
    first = sequence("first", [*SHARED, 1])
    cache.start(first, cache.lookup(first))
    assert cache.grow(first, 49)
    follower = sequence("follower", [*SHARED, 2])
    hit = cache.lookup(follower)
    assert hit.pending
    assert not hit.block_ids
    cache.publish(first, 32)  # one chunk is computed, but not the third block
    assert cache.lookup(follower).pending
    cache.publish(first, 48)
    assert cache.lookup(follower) == cache.lookup(sequence("other", [*SHARED, 3]))
    assert cache.lookup(follower).block_ids == [1, 2, 3]


def test_a_follower_takes_over_after_its_leader(cache: KVCacheManager) -> None:
    leader = sequence("leader", [*SHARED, 1])
    cache.start(leader, cache.lookup(leader))
    follower = sequence("follower", [*SHARED, 2])
    assert cache.lookup(follower).pending
    cache.release(leader)
    assert not cache.lookup(follower).pending
    cache.check_integrity([])


def test_a_request_does_not_wait_for_another_tenants_computation(cache: KVCacheManager) -> None:
    leader = sequence("leader", [*SHARED, 1], salt=b"a")
    cache.start(leader, cache.lookup(leader))
    assert not cache.lookup(sequence("other", [*SHARED, 1], salt=b"b")).pending


def test_without_the_prefix_cache_no_block_is_shared() -> None:
    cache = KVCacheManager(10, 16, prefix_cache=False)
    compute(cache, sequence("first", [*SHARED, 1]))
    assert cache.lookup(sequence("again", [*SHARED, 1])).num_cached_tokens == 0


def test_the_integrity_check_detects_a_lost_block(cache: KVCacheManager) -> None:
    seq = sequence("first", SHARED)
    compute(cache, seq)
    seq.block_tables[0].pop()
    with pytest.raises(RuntimeError, match="integrity"):
        cache.check_integrity([seq])


def test_a_pool_requires_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
