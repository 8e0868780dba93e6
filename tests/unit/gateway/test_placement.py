"""Placement of requests on replicas."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from inference_worker.contract.messages import Heartbeat, InferenceJob
from inference_worker.contract.model_bundles import derive_salt
from inference_worker.contract.prefix_digest import hash_block, make_digest
from inference_worker.contract.request import ServiceClass
from millrace.gateway.dispatch import placement
from millrace.gateway.dispatch.placement import AFFINITY_TOKENS, PlacementChoice
from tests.support.gateway.placement import Fleet, make_job, prompt


@pytest.fixture
def fleet() -> Fleet:
    return Fleet("a", "b", "c", "d")


def test_requests_with_the_same_prefix_go_to_one_replica(fleet: Fleet) -> None:
    went = {fleet.placement.choose(make_job(prompt(7, 80 + n))) for n in range(20)}
    assert len(went) == 1
    (choice,) = went
    assert choice and choice.by == "prefix"


def test_prefixes_are_spread_and_separated_by_tenant(fleet: Fleet) -> None:
    def home(start: int, salt: bytes) -> str:
        choice = fleet.placement.choose(make_job(prompt(start), salt))
        assert choice is not None
        return choice.replica_id

    homes = Counter(home(n, b"one") for n in range(400))
    assert min(homes.values()) > 60
    assert any(home(n, b"one") != home(n, b"two") for n in range(10))


def test_a_lost_replicas_prefixes_move_and_no_others(fleet: Fleet) -> None:
    before = {n: fleet.placement.choose(make_job(prompt(n))) for n in range(50)}
    fleet.names.remove("b")
    fleet.beats()
    after = {n: fleet.placement.choose(make_job(prompt(n))) for n in range(50)}
    for n in range(50):
        old, new = before[n], after[n]
        assert old and new
        assert new.replica_id == old.replica_id or old.replica_id == "b"
        assert new.replica_id != "b"


def test_a_popular_prefix_uses_several_replicas(fleet: Fleet) -> None:
    sent = [fleet.send(make_job(prompt(7))) for _ in range(40)]
    loads = Counter(choice.replica_id for choice in sent)
    assert max(loads.values()) <= 1.25 * 41 / 4 + 1
    assert {choice.by for choice in sent} >= {"prefix", "spill"}


def test_short_prompts_go_to_the_least_loaded_replica(fleet: Fleet) -> None:
    fleet.beats(a=3, b=1, c=2, d=3)
    choice = fleet.placement.choose(make_job([1, 2, 3]))
    assert choice == PlacementChoice("b", "load", 1, 17)


def test_no_replica_gets_more_requests_than_credits(fleet: Fleet) -> None:
    went = Counter(fleet.send(make_job(prompt(7))).replica_id for _ in range(4 * 18))
    assert set(went.values()) == {18}  # a batch of 16, and two queued
    assert fleet.placement.choose(make_job([1])) is None
    replicas = fleet.board.find_ready("m")
    assert [fleet.placement.credits(name, heartbeat) for name, heartbeat in replicas.items()] == [0, 0, 0, 0]
    fleet.placement.note_ended("a", claimed=False)
    again = fleet.placement.choose(make_job(prompt(7)))
    assert again and again.replica_id == "a"


def test_requests_that_wait_for_an_upstream_use_no_credits(fleet: Fleet) -> None:
    def credits(held_back: int) -> int:
        beat = Heartbeat(1, "m", True, False, 0, held_back, 16, 10, 0, held_back=held_back)
        return fleet.placement.credits("other", beat)

    assert credits(10) == credits(0) + 10
    assert credits(10**6) == credits(0) + placement.MAX_HELD_BACK * 16, "their number is limited"


def test_a_heartbeat_includes_other_gateways_requests(fleet: Fleet) -> None:
    for _ in range(4):
        fleet.placement.note_sent("a")
    fleet.placement.note_claimed("a")
    fleet.beats(a=6)  # one of this gateway, five of others; three of this gateway are not claimed yet
    assert fleet.placement.load("a") == 9
    for n in range(4):
        fleet.placement.note_ended("a", claimed=n == 0)
    assert fleet.placement.load("a") == 5
    fleet.beats(a=2)
    assert fleet.placement.load("a") == 2


def test_batch_requests_use_no_credits_of_other_classes(fleet: Fleet) -> None:
    line = msgspec.structs.replace(make_job(prompt(7)), service_class=ServiceClass.BATCH)
    for name in fleet.names:
        for _ in range(18):
            fleet.placement.note_sent(name, batch=True)
    assert fleet.placement.choose(line) is None
    assert fleet.placement.choose(make_job([1])) == PlacementChoice("a", "load", 0, 18)
    for name in fleet.names:
        fleet.placement.note_claimed(name, batch=True)
    fleet.batch = 1
    fleet.beats(
        a=18, b=20, c=1, d=1
    )  # one at each replica is this gateway's and of that class, the rest belong to others
    assert (fleet.placement.load("a"), fleet.placement.load("b")) == (17, 19)
    assert fleet.placement.load("c", batch=True) == 18
    for name in fleet.names:
        for n in range(18):
            fleet.placement.note_ended(name, claimed=n == 0, batch=True)
    assert fleet.placement.load("c", batch=True) == 0


def test_the_replica_of_a_computed_prefix_is_known(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    job, other = make_job(prompt(7)), make_job(prompt(7), b"another tenant's")
    first = fleet.send(job)
    assert first.replicas_with_prefix == ()  # sent there, but not computed yet
    fleet.placement.note_computed(first.prefix_hash, first.replica_id)
    for length in (AFFINITY_TOKENS, 200):
        choice = fleet.placement.choose(make_job(prompt(7, length)))
        assert choice and choice.replicas_with_prefix == (first.replica_id,)
    cold, short = fleet.placement.choose(other), fleet.placement.choose(make_job([7] * 8))
    assert cold and short and cold.replicas_with_prefix == short.replicas_with_prefix == ()
    assert short.prefix_hash == b""
    monkeypatch.setattr(placement, "WARM_SECONDS", 0.0)
    expired = fleet.placement.choose(job)
    assert expired and expired.replicas_with_prefix == ()
    monkeypatch.undo()
    fleet.names.remove(first.replica_id)
    fleet.beats()
    gone = fleet.placement.choose(job)
    assert gone and gone.replicas_with_prefix == ()


def test_the_number_of_remembered_prefixes_is_limited(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_REMEMBERED_PREFIXES", 2)
    jobs = [make_job(prompt(n)) for n in range(3)]
    for job in jobs:
        choice = fleet.send(job)
        fleet.placement.note_computed(choice.prefix_hash, choice.replica_id)
    known = [fleet.placement.choose(job) for job in jobs]
    assert [bool(choice and choice.replicas_with_prefix) for choice in known] == [False, True, True]


def large_fleet() -> Fleet:
    return Fleet(*(f"r-{number}" for number in range(64)))


def with_id(job: InferenceJob, request_id: str) -> InferenceJob:
    context = msgspec.structs.replace(job.billing_context, request_id=request_id)
    return msgspec.structs.replace(job, billing_context=context)


def test_a_limited_number_of_replicas_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = large_fleet()
    examined: set[str] = set()
    credits = fleet.placement.credits

    def count(replica_id: str, heartbeat: Heartbeat, *, batch: bool = False) -> int:
        examined.add(replica_id)
        return credits(replica_id, heartbeat, batch=batch)

    monkeypatch.setattr(fleet.placement, "credits", count)
    for length in (10, AFFINITY_TOKENS, 300, 5000, 40_000):
        examined.clear()
        assert fleet.placement.choose(make_job(prompt(length, length) if length > 10 else [1] * length))
        assert 1 < len(examined) <= placement.MAX_CANDIDATES


def test_prefixes_of_a_large_fleet_keep_their_replicas_when_one_is_lost() -> None:
    fleet = large_fleet()
    before = {n: fleet.placement.choose(make_job(prompt(n))) for n in range(400)}
    homes = Counter(choice.replica_id for choice in before.values() if choice)
    assert len(homes) > 40, "prefixes are spread"
    fleet.names.remove("r-7")
    fleet.beats()
    after = {n: fleet.placement.choose(make_job(prompt(n))) for n in range(400)}
    moved = [n for n, choice in before.items() if choice and after[n] != choice and choice.replica_id != "r-7"]
    assert len(moved) < 40


def test_a_prefix_that_all_requests_share_uses_all_replicas_of_a_large_fleet() -> None:
    fleet = large_fleet()
    for number in range(64 * 16):
        fleet.send(with_id(make_job(prompt(7, 80 + number % 100)), f"req_{number}"))
    loads = [fleet.placement.load(name) for name in fleet.names]
    assert min(loads) > 0
    assert max(loads) <= 18


def test_no_credit_of_a_large_fleet_is_left_unused() -> None:
    fleet = large_fleet()
    job = make_job(prompt(7))
    for _ in range(64 * 18):
        fleet.send(job)
    assert fleet.placement.choose(job) is None
    fleet.placement.note_ended("r-33", claimed=False)
    last = fleet.placement.choose(job)
    assert last and last.replica_id == "r-33"


def test_a_conversation_finds_its_cached_prompt_in_a_large_fleet() -> None:
    fleet = large_fleet()
    prompt_tokens = prompt(7, 600)
    first = fleet.send(make_job(prompt_tokens))
    fleet.placement.note_ended(first.replica_id, claimed=False)
    salt = derive_salt(b"salt", b"")
    hashes: list[bytes] = []
    for start in range(0, len(prompt_tokens) - 15, 16):
        hashes.append(hash_block(hashes[-1] if hashes else None, prompt_tokens[start : start + 16], salt))
    digest = msgspec.structs.replace(make_digest(16, hashes), version=1)
    fleet.placement.prefixes.update({first.replica_id: msgspec.msgpack.encode(digest)})
    following = fleet.placement.choose(with_id(make_job([*prompt_tokens, *range(200)]), "req_2"))
    assert following and (following.replica_id, following.by) == (first.replica_id, "cached")
