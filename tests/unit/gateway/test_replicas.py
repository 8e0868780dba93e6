"""Who lives, on a clock of our own."""

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


def test_it_works(board: ReplicaRegistry) -> None:
    assert board.update({b"r": beat(1)}) == set()
    assert board.serving("m") == []  # it may be a dead process' last word
    board.update({b"r": beat(2)})
    assert [heartbeat.beat for heartbeat in board.serving("m")] == [2]
    assert board.serving("other") == []


def test_silence_is_suspicion_and_then_loss_once(board: ReplicaRegistry, clock: Clock) -> None:
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
    assert set(board.live()) == {"r"}  # what it has begun continues
    clock.now += REPLICA_LOST_SECONDS - REPLICA_SUSPECT_SECONDS
    assert board.update({b"r": beat(2)}) == {"r"}
    assert board.is_lost("r")
    assert not board.is_suspected("r")
    assert board.update({b"r": beat(2)}) == set()
    assert board.serving("m") == []
    assert board.live() == {}


def test_a_heartbeat_ends_suspicion(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    board.update({b"r": beat(2)})
    clock.now += REPLICA_LOST_SECONDS - 0.1
    board.update({b"r": beat(2)})
    assert board.is_suspected("r")
    assert board.update({b"r": beat(3)}) == set()
    assert not board.is_suspected("r")
    assert board.serving("m")


def test_a_gateway_that_was_stopped_itself_suspects_nobody(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    board.update({b"r": beat(2)})
    clock.now += 60
    assert board.serving("m")
    assert board.update({b"r": beat(3)}) == set()
    assert board.serving("m")


def test_a_reported_exit_is_a_loss_at_the_next_look(board: ReplicaRegistry) -> None:
    board.update({b"r": beat(1), b"s": beat(1)})
    board.update({b"r": beat(2), b"s": beat(2)})
    assert board.update({b"s": beat(3)}, exited=[b"r"]) == {"r"}
    assert board.is_lost("r")
    assert list(board.ready("m")) == ["s"]


def test_an_exited_replica_does_not_return_with_a_heartbeat_that_was_on_its_way(board: ReplicaRegistry) -> None:
    board.update({b"r": beat(1)})
    board.update({b"r": beat(2)})
    assert board.update({b"r": beat(3)}, exited=[b"r"]) == {"r"}
    assert board.update({b"r": beat(4)}, exited=[b"r"]) == set()
    assert board.is_lost("r")
    assert board.live() == {}


def test_a_gateway_that_starts_later_finds_an_exit(board: ReplicaRegistry) -> None:
    board.update({}, exited=[b"r"])
    assert board.is_lost("r")


def test_one_that_speaks_again_is_back(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    clock.now += REPLICA_LOST_SECONDS + 0.1
    board.update({b"r": beat(1)})
    assert board.is_lost("r")
    board.update({b"r": beat(2)})
    assert not board.is_lost("r")
    assert board.serving("m")


def test_one_that_left_is_gone_at_once(board: ReplicaRegistry) -> None:
    board.update({b"r": beat(1)})
    assert board.update({}) == {"r"}


def test_one_that_is_not_on_the_board_gets_the_same_time(board: ReplicaRegistry, clock: Clock) -> None:
    assert not board.is_lost("r")
    clock.now += REPLICA_SUSPECT_SECONDS - 0.1
    assert not board.is_lost("r")
    board.update({b"r": beat(1)})
    assert not board.is_lost("r")
    board.update({})
    assert not board.is_lost("r")
    clock.now += REPLICA_SUSPECT_SECONDS + 0.1
    assert board.is_lost("r")


def test_nobody_dies_of_our_own_deafness(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    board.update({b"r": beat(2)})
    clock.now += 60  # the broker was away
    board.extend_liveness()
    assert board.update({b"r": beat(2)}) == set()


@pytest.mark.parametrize("state", [{"ready": False}, {"draining": True}])
def test_one_that_takes_nothing_is_not_serving(board: ReplicaRegistry, state: dict[str, bool]) -> None:
    board.update({b"r": beat(1, **state)})
    board.update({b"r": beat(2, **state)})
    assert board.serving("m") == []
    assert set(board.live()) == {"r"}


def test_the_long_dead_are_forgotten(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1)})
    clock.now += REPLICA_LOST_SECONDS + 1
    board.update({b"r": beat(1)})
    assert board.take_forgotten() == []
    clock.now += FORGET_SECONDS
    assert board.take_forgotten() == ["r"]


def test_what_one_that_left_has_in_the_broker_is_removed_once(board: ReplicaRegistry, clock: Clock) -> None:
    board.update({b"r": beat(1), b"s": beat(1)})
    board.update({})
    clock.now += FORGET_SECONDS
    assert board.take_forgotten() == []
    board.update({b"s": beat(2)})  # it is on the board again
    clock.now += 1
    assert board.take_forgotten() == ["r"]
    assert board.take_forgotten() == []


def test_an_unreadable_heartbeat_is_nobodys(board: ReplicaRegistry) -> None:
    board.update({b"r": b"\xc1"})
    assert board.live() == {}


def test_a_cordoned_worker_gets_no_new_work_and_lives(board: ReplicaRegistry) -> None:
    for n in (1, 2):
        board.update({b"m-0.aa": beat(n), b"m-1.bb": beat(n)}, [b"m-0"])
    assert list(board.ready("m")) == ["m-1.bb"]
    assert not board.takes_work("m-0.aa")
    assert not board.is_lost("m-0.aa")
    board.update({b"m-0.cc": beat(1), b"m-1.bb": beat(3)}, [b"m-0"])
    board.update({b"m-0.cc": beat(2), b"m-1.bb": beat(4)}, [b"m-0"])
    assert list(board.ready("m")) == ["m-1.bb"]  # it was started again, under its name
    board.update({b"m-0.cc": beat(3), b"m-1.bb": beat(5)}, [])
    assert set(board.ready("m")) == {"m-0.cc", "m-1.bb"}
