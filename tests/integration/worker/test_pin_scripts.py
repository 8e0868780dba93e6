"""The scripts of pins in Valkey: which pins they store, remove, and keep."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import redis

from inference_worker.contract import claims
from inference_worker.contract.messages import USAGE_STREAM, claim_key, encode, pins_key
from inference_worker.worker import shared_pins
from inference_worker.worker.engine_client import ActiveJob
from tests.support.worker.jobs import make_job, make_usage
from tests.support.worker.replicas import FIVE, HOUR, Queued


class Executions:
    """Running executions, with the results of the scripts."""

    def __init__(self, broker: redis.Redis, queued: Queued) -> None:
        self._broker, self._queued = broker, queued

    def begin(self, name: str) -> ActiveJob:
        job = make_job(name)
        self._broker.eval(claims.CLAIM, 1, self._queued(job), 1, "r")
        return ActiveJob(job, 1)

    def pin(self, live: ActiveJob, pins: dict[bytes, int]) -> None:
        keys = shared_pins.pin_keys(live)
        self._broker.eval(shared_pins.PIN, 2, *keys, *shared_pins.pin_args(live, pins))

    def live_pins(self, *hashes: bytes) -> list[int]:
        count, letters = self._broker.eval(shared_pins.LOOK_UP, 1, pins_key(1), *hashes)  # type: ignore[misc]
        assert count == self._broker.zcard(pins_key(1))
        return [{"m": FIVE, "h": HOUR, "-": 0}[letter] for letter in letters.decode()]

    def fail(self, live: ActiveJob, *whatever: str) -> None:
        usage = encode(make_usage(live.job, 1, "failed", 0))
        self._broker.eval(claims.FAIL, 2, self.key(live), USAGE_STREAM, 1, usage, *whatever)

    def finish(self, live: ActiveJob) -> None:
        keys = [self.key(live), USAGE_STREAM, "gw", "log"]
        self._broker.eval(claims.FINISH, 4, *keys, 1, encode(make_usage(live.job)), b"batch", 60, b"end")

    def give_up(self, live: ActiveJob) -> None:
        self._broker.eval(claims.ABANDON, 1, self.key(live), 1, "r")

    def key(self, live: ActiveJob) -> str:
        return claim_key(live.job.billing_context.request_id, 0)


@pytest.fixture
def executions(broker: redis.Redis, queued: Queued) -> Executions:
    return Executions(broker, queued)


def test_all_blocks_of_a_long_prompt_are_pinned(executions: Executions, broker: redis.Redis) -> None:
    blocks = [number.to_bytes(32, "big") for number in range(5000)]
    executions.pin(
        executions.begin("req_1"),
        {block: HOUR if number < 1700 else FIVE for number, block in enumerate(blocks[:4100])},
    )
    assert executions.live_pins(*blocks) == [HOUR] * 1700 + [FIVE] * 2400 + [0] * 900
    assert 3590 < broker.ttl(pins_key(1)) <= 3600


@pytest.mark.parametrize("ends", [Executions.fail, Executions.give_up])
def test_an_unbilled_execution_removes_its_pins(
    executions: Executions, ends: Callable[[Executions, ActiveJob], None]
) -> None:
    before, lost = executions.begin("req_1"), executions.begin("req_2")
    executions.pin(before, {b"a": FIVE})
    executions.pin(lost, {b"a": FIVE, b"b": FIVE, b"c": HOUR})
    time.sleep(0.005)
    executions.pin(lost, {b"a": FIVE, b"b": FIVE, b"c": HOUR})  # repeated after a lost response
    ends(executions, lost)
    assert executions.live_pins(b"a", b"b", b"c") == [FIVE, 0, 0]
    executions.pin(lost, {b"b": FIVE})  # too late
    assert executions.live_pins(b"b") == [0]


def test_a_use_with_five_minutes_does_not_shorten_an_hour(executions: Executions) -> None:
    executions.pin(executions.begin("req_1"), {b"a": HOUR, b"b": FIVE})
    executions.pin(executions.begin("req_2"), {b"a": FIVE, b"b": HOUR})
    assert executions.live_pins(b"a", b"b") == [HOUR, HOUR]


def test_pins_used_by_another_execution_stay(executions: Executions) -> None:
    lost, other = executions.begin("req_1"), executions.begin("req_2")
    executions.pin(lost, {b"a": FIVE, b"b": FIVE})
    time.sleep(0.005)  # the next one is in another millisecond
    executions.pin(other, {b"a": FIVE})
    executions.fail(lost)
    assert executions.live_pins(b"a", b"b") == [FIVE, 0]


def test_a_completed_execution_keeps_its_pins_unless_it_is_reversed(executions: Executions) -> None:
    live = executions.begin("req_1")
    executions.pin(live, {b"a": FIVE})
    executions.finish(live)
    executions.fail(live)
    assert executions.live_pins(b"a") == [FIVE]
    executions.fail(live, "unpin")
    assert executions.live_pins(b"a") == [0]


def test_a_claim_that_the_broker_lost_is_not_created_again(executions: Executions, broker: redis.Redis) -> None:
    live = executions.begin("req_1")
    broker.flushdb()
    executions.pin(live, {b"a": FIVE})
    assert executions.live_pins(b"a") == [FIVE]
    assert not broker.exists(executions.key(live))
