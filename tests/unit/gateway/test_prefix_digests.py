"""Digests of prefix caches: prediction of cached tokens, placement by them, and the drift of their hit rates."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from inference_worker.contract import prefix_digest
from inference_worker.contract.prefix_digest import NO_DIGEST, PrefixDigest, PrefixIndex, hash_block, make_digest
from inference_worker.engine.kv_cache.kv_cache import KVCacheManager
from millrace.gateway.dispatch.hit_rates import WINDOW_SECONDS, HitRates
from millrace.gateway.dispatch.placement import MIN_REQUESTS_TO_BALANCE
from tests.support.engine.fakes import fake_engine, request
from tests.support.gateway.placement import Fleet, make_job, prompt

SIZE, SALT = 16, b"salt"


def chain(tokens: list[int], salt: bytes = SALT) -> list[bytes]:
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        hashes.append(hash_block(hashes[-1] if hashes else None, tokens[start : start + SIZE], salt))
    return hashes


def encoded(hashes: list[bytes]) -> bytes:
    return msgspec.msgpack.encode(make_digest(SIZE, hashes))


def index_of(**digests: list[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    index.update({name: encoded(hashes) for name, hashes in digests.items()})
    return index


def test_the_longest_cached_start_is_predicted() -> None:
    tokens = list(range(100))
    hashes = chain(tokens)
    index = index_of(a=hashes, b=hashes[:2], c=hashes[1:], d=[])
    assert index.cached_tokens(tokens, SALT, ["a", "b", "c", "d", "unknown"]) == {"a": 96, "b": 32, "c": 0, "d": 0}
    assert index.cached_tokens(tokens[:96], SALT, ["a"]) == {"a": 80}  # the last block is always computed
    assert index.cached_tokens(tokens, b"other tenant", ["a"]) == {"a": 0}
    assert index.cached_tokens([], SALT, ["a"]) == {"a": 0}


def test_a_large_cache_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_digest, "MAX_DIGEST_HASHES", 64)
    tokens = list(range(16 * 500))
    digest = make_digest(SIZE, chain(tokens))
    assert (digest.rate >= 8, len(digest.hashes) <= 4 * 64) == (True, True)
    index = PrefixIndex()
    index.update({"a": msgspec.msgpack.encode(digest)})
    predicted = index.cached_tokens(tokens, SALT, ["a"])["a"]
    assert 0.8 * len(tokens) < predicted <= len(tokens)
    assert index.cached_tokens(list(range(1, 8000)), SALT, ["a"])["a"] == 0


def test_digests_are_replaced_forgotten_and_ignored_if_unreadable() -> None:
    tokens = list(range(100))
    index = index_of(a=chain(tokens), b=chain(tokens))
    index.update({"a": encoded([]), "b": b"?"})
    assert index.cached_tokens(tokens, SALT, ["a", "b"]) == {"a": 0}
    index.update({"a": encoded(chain(tokens)), "b": None})
    assert index.cached_tokens(tokens, SALT, ["a", "b"]) == {"a": 96}
    index.update({"a": msgspec.msgpack.encode(PrefixDigest(0, 0, b""))})
    index.update({"b": encoded(chain(tokens))})
    index.retain([])
    assert index.cached_tokens(tokens, SALT, ["a", "b"]) == {}


def versioned(hashes: list[bytes], version: int) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(make_digest(SIZE, hashes), version=version))


def test_only_changed_digests_are_read() -> None:
    tokens = list(range(100))
    index = PrefixIndex()
    versions: dict[str, int | None] = {"a": 1, "b": 2, "none": NO_DIGEST, "earlier": None}
    assert index.find_changed(versions) == ["a", "b", "earlier"]
    index.update({"a": versioned(chain(tokens), 1), "b": versioned([], 2), "earlier": encoded(chain(tokens))})
    assert index.find_changed(versions) == ["earlier"], "a worker of an earlier release reports no version"
    assert index.find_changed(versions | {"a": 2}) == ["a", "earlier"]
    before = index.version
    index.update({"a": versioned(chain(tokens), 1)})
    assert index.version == before, "predictions of waiting requests stay valid"
    index.update({"b": None})
    assert index.find_changed(versions) == ["b", "earlier"]
    index.retain(["b"])
    assert index.find_changed({"a": 1}) == ["a"]


def test_digests_of_earlier_releases_are_unsorted_and_read_nevertheless() -> None:
    tokens = list(range(400))
    hashes = chain(tokens)
    stored = [each[4:8] for each in hashes]
    assert stored != sorted(stored, key=lambda each: int.from_bytes(each, "little"))
    index = PrefixIndex()
    index.update({"a": msgspec.msgpack.encode({"block_size": SIZE, "rate": 1, "hashes": b"".join(stored)})})
    assert index.cached_tokens(tokens, SALT, ["a"]) == {"a": 384}


def test_a_digest_with_a_part_of_a_hash_is_ignored() -> None:
    index = index_of(a=chain(list(range(100))))
    index.update({"a": msgspec.msgpack.encode(PrefixDigest(SIZE, 1, b"12345", version=1))})
    assert index.cached_tokens(list(range(100)), SALT, ["a"]) == {}


def test_the_digest_of_one_cache_does_not_depend_on_its_order() -> None:
    hashes = chain(list(range(400)))
    assert make_digest(SIZE, hashes) == make_digest(SIZE, hashes[::-1])


def test_the_engine_publishes_what_it_reads_from_its_cache() -> None:
    engine, _ = fake_engine(32)
    tokens = list(range(70))
    engine.add_request(request("a", tokens, max_tokens=2))
    while engine.has_unfinished():
        engine.step()
    index, digest = PrefixIndex(), engine.prefix_digest()
    index.update({"a": msgspec.msgpack.encode(digest)})
    salt = request("b", tokens).cache_salt
    predicted = index.cached_tokens(tokens, salt, ["a"])["a"]
    engine.add_request(request("b", tokens, max_tokens=2))
    before = engine.stats().cached_tokens
    while engine.has_unfinished():
        engine.step()
    assert predicted == engine.stats().cached_tokens - before > 0
    assert KVCacheManager(4, 16, prefix_cache=False).prefix_digest() is None


def test_a_replica_that_has_cached_the_prompt_is_chosen() -> None:
    fleet = Fleet("a", "b", "c", "d")
    tokens = prompt(1, 1000)
    first = fleet.send(make_job(tokens))
    other = next(name for name in fleet.names if name != first.replica_id)
    fleet.placement.prefixes.update({name: encoded(chain(tokens) if name == other else []) for name in fleet.names})
    choice = fleet.send(make_job(tokens))
    assert (choice.replica_id, choice.by, choice.predicted) == (other, "cached", 992)


def test_a_cached_prompt_does_not_wait_for_a_busy_replica() -> None:
    fleet = Fleet("a", "b", "c", "d")
    tokens = prompt(1, 1000)
    for start in range(2, 40):  # the mean request computes 1,000 tokens
        fleet.placement.note_ended(fleet.send(make_job(prompt(start, 1000))).replica_id, claimed=False)
    fleet.placement.prefixes.update({name: encoded(chain(tokens) if name == "a" else []) for name in fleet.names})
    chosen = [fleet.send(make_job(tokens)) for _ in range(8)]
    assert [choice.replica_id for choice in chosen].count("a") < 6
    assert {choice.by for choice in chosen} == {"cached", "spill"}
    assert max(fleet.placement.load(name) for name in fleet.names) <= MIN_REQUESTS_TO_BALANCE


def test_the_drift_of_a_replica_is_recent_and_measured() -> None:
    rates = HitRates()
    rates.record("a", "m", 1000, 800, 800, now=0)
    rates.record("b", "m", 1000, 800, 0, now=0)
    assert [(rate.replica, rate.requests, rate.difference) for rate in rates.recent(["a", "b", "c"])] == [
        ("a", 1, 0.0),
        ("b", 1, 0.8),
    ]
    for _ in range(20):
        rates.record("b", "m", 1000, 800, 800, now=3 * WINDOW_SECONDS)
    (rate,) = rates.recent(["b"])
    assert 0 < rate.difference < 0.01
    registry = CollectorRegistry()
    registry.register(rates)
    text = generate_latest(registry).decode()
    assert 'millrace_prefix_predicted_tokens_total{model="m",replica="b"} 16800.0' in text
    assert 'millrace_prefix_hit_rate_difference{model="m",replica="a"} 0.0' in text
