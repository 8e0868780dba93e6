"""Liveness of replicas, with a fake clock."""

from __future__ import annotations

import pytest

from inference_worker.contract.messages import REPLICA_LOST_SECONDS, REPLICA_SUSPECT_SECONDS, Heartbeat, encode
from millrace.gateway.dispatch.replicas import FORGET_SECONDS, ReplicaRegistry


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> ReplicaRegistry:
    return ReplicaRegistry(clock)


def beat(n: int, *, ready: bool = True, draining: bool = False, model: str = "m") -> bytes:
    return encode(Heartbeat(n, model, ready, draining, 0, 0, 8, 10, 0))


def test_a_heartbeat_adds_a_replica(board: ReplicaRegistry) -> None:
    assert board.update({b"r": beat(1)}) == set()
    assert board.serving("m") == []  # it may be the last heartbeat of a dead process
    board.update({b"r": beat(2)})
    assert [heartbeat.beat for heartbeat in board.serving("m")] == [2]
    assert board.serving("other") == []


def test_a_silent_replica_is_suspected_and_then_lost_once(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    board.update({b"r": beat(2)})
    clock.now += REPLICA_SUSPECT_SECONDS
    assert board.update({b"r": beat(2)}) == set()
    assert board.takes_work("r")
    assert not board.is_suspected("r")
    clock.now += 0.1
    assert board.update({b"r": beat(2)}) == set()
    assert board.is_suspected("r")
    assert not board.is_lost("r")
    assert not board.takes_work("r")
    assert board.serving("m") == []
    assert set(board.live()) == {"r"}  # its running requests continue
    clock.now += REPLICA_LOST_SECONDS - REPLICA_SUSPECT_SECONDS
    assert board.update({b"r": beat(2)}) == {"r"}
    assert board.is_lost("r")
    assert not board.is_suspected("r")
    assert board.update({b"r": beat(2)}) == set()
    assert board.serving("m") == []
    assert board.live() == {}


def test_a_heartbeat_ends_a_suspicion(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    board.update({b"r": beat(2)})
    clock.now += REPLICA_LOST_SECONDS - 0.1
    board.update({b"r": beat(2)})
    assert board.is_suspected("r")
    assert board.update({b"r": beat(3)}) == set()
    assert not board.is_suspected("r")
    assert board.serving("m")


def test_a_gateway_that_was_stopped_suspects_no_replica(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    board.update({b"r": beat(2)})
    clock.now += 60
    assert board.serving("m")
    assert board.update({b"r": beat(3)}) == set()
    assert board.serving("m")


def test_a_reported_exit_is_a_loss_at_the_next_check(board: ReplicaRegistry) -> None:
    board.update({b"r": beat(1), b"s": beat(1)})
    board.update({b"r": beat(2), b"s": beat(2)})
    assert board.update({b"s": beat(3)}, exited=[b"r"]) == {"r"}
    assert board.is_lost("r")
    assert list(board.find_ready("m")) == ["s"]


def test_a_late_heartbeat_does_not_restore_an_exited_replica(board: ReplicaRegistry) -> None:
    board.update({b"r": beat(1)})
    board.update({b"r": beat(2)})
    assert board.update({b"r": beat(3)}, exited=[b"r"]) == {"r"}
    assert board.update({b"r": beat(4)}, exited=[b"r"]) == set()
    assert board.is_lost("r")
    assert board.live() == {}


def test_a_gateway_that_starts_later_finds_an_exit(board: ReplicaRegistry) -> None:
    board.update({}, exited=[b"r"])
    assert board.is_lost("r")


def test_a_lost_replica_returns_with_a_heartbeat(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    clock.now += REPLICA_LOST_SECONDS + 0.1
    board.update({b"r": beat(1)})
    assert board.is_lost("r")
    board.update({b"r": beat(2)})
    assert not board.is_lost("r")
    assert board.serving("m")


def test_a_replica_that_left_is_removed_immediately(board: ReplicaRegistry) -> None:
    board.update({b"r": beat(1)})
    assert board.update({}) == {"r"}


def test_an_unknown_replica_has_the_same_timeout(board: ReplicaRegistry, clock: Clock) -> None:
    assert not board.is_lost("r")
    clock.now += REPLICA_SUSPECT_SECONDS - 0.1
    assert not board.is_lost("r")
    board.update({b"r": beat(1)})
    assert not board.is_lost("r")
    board.update({})
    assert not board.is_lost("r")
    clock.now += REPLICA_SUSPECT_SECONDS + 0.1
    assert board.is_lost("r")


def test_no_replica_is_lost_while_the_broker_is_unavailable(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    board.update({b"r": beat(2)})
    clock.now += 60  # the broker was unavailable
    board.extend_liveness()
    assert board.update({b"r": beat(2)}) == set()


@pytest.mark.parametrize("state", [{"ready": False}, {"draining": True}])
def test_a_replica_that_accepts_no_work_is_not_serving(board: ReplicaRegistry, state: dict[str, bool]) -> None:
    board.update({b"r": beat(1, **state)})
    board.update({b"r": beat(2, **state)})
    assert board.serving("m") == []
    assert set(board.live()) == {"r"}


def test_lost_replicas_are_removed_after_a_time(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    clock.now += REPLICA_LOST_SECONDS + 1
    board.update({b"r": beat(1)})
    assert board.take_forgotten() == []
    clock.now += FORGET_SECONDS
    assert board.take_forgotten() == ["r"]


def test_the_broker_keys_of_a_replica_that_left_are_removed_once(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1), b"s": beat(1)})
    board.update({})
    clock.now += FORGET_SECONDS
    assert board.take_forgotten() == []
    board.update({b"s": beat(2)})  # it is in the table again
    clock.now += 1
    assert board.take_forgotten() == ["r"]
    assert board.take_forgotten() == []


def test_an_unreadable_heartbeat_is_ignored(board: ReplicaRegistry) -> None:
    board.update({b"r": b"\xc1"})
    assert board.live() == {}


def test_a_cordoned_worker_gets_no_new_work_and_stays_live(board: ReplicaRegistry) -> None:
    for n in (1, 2):
        board.update({b"m-0.aa": beat(n), b"m-1.bb": beat(n)}, [b"m-0"])
    assert list(board.find_ready("m")) == ["m-1.bb"]
    assert not board.takes_work("m-0.aa")
    assert not board.is_lost("m-0.aa")
    board.update({b"m-0.cc": beat(1), b"m-1.bb": beat(3)}, [b"m-0"])
    board.update({b"m-0.cc": beat(2), b"m-1.bb": beat(4)}, [b"m-0"])
    assert list(board.find_ready("m")) == ["m-1.bb"]  # it was restarted with the same name
    board.update({b"m-0.cc": beat(3), b"m-1.bb": beat(5)}, [])
    assert set(board.find_ready("m")) == {"m-0.cc", "m-1.bb"}
