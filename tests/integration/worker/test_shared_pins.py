"""Pins shared by all replicas, with workers, engines and Valkey. All models but one are fake."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace

import msgspec
import pytest
import redis

from inference_worker.contract.messages import pins_key
from inference_worker.contract.request import TokenCounts
from inference_worker.contract.settings import WorkerSettings
from inference_worker.worker import shared_pins
from tests.support.engine.fakes import distinct
from tests.support.worker.replicas import FIVE, HOUR, PROMPT, Queued, Replicas, logged_events

WRITTEN, READ = TokenCounts(4, 0, 96, output=1), TokenCounts(4, 96, output=1)


@pytest.mark.parametrize(("seconds", "written"), [(FIVE, WRITTEN), (HOUR, TokenCounts(4, 0, 0, 96, output=1))])
def test_a_prefix_written_by_one_replica_is_read_at_another(
    replicas: Replicas, seconds: int, written: TokenCounts
) -> None:
    one, two = replicas.start("one"), replicas.start("two")
    assert replicas.usage_of(one, PROMPT, (96, seconds)) == written
    assert replicas.usage_of(two, PROMPT, (96, seconds)) == READ
    assert list(replicas.runners[1].steps[0].values()) == [100]  # although it was computed again
    assert replicas.usage_of(replicas.start("three"), [*PROMPT[:64], *distinct(36, 2)]) == TokenCounts(36, 64, output=1)


def test_the_miss_reason_is_that_another_replica_had_the_prefix(replicas: Replicas) -> None:
    first, again = replicas.job(PROMPT, (96, FIVE)), replicas.job(PROMPT, (96, FIVE))
    replicas.run(replicas.start("one"), first)
    replicas.run(replicas.start("two"), again)
    assert [replicas.billed(job).miss_reason for job in (first, again)] == ["first_use", "other_worker"]


def test_a_restarted_worker_bills_as_read(replicas: Replicas) -> None:
    worker = replicas.start("one")
    assert replicas.usage_of(worker, PROMPT, (96, FIVE)) == WRITTEN
    replicas.stop(worker)
    assert replicas.usage_of(replicas.start("one"), PROMPT, (96, FIVE)) == READ


def test_pins_with_the_embedded_model(broker: redis.Redis, queued: Queued, replica_settings: WorkerSettings) -> None:
    shutil.rmtree(replica_settings.data_dir / "journal", ignore_errors=True)
    replicas = Replicas(broker, queued, replace(replica_settings, max_num_seqs=4, cpu_threads=1))
    one, two = replicas.start("one"), replicas.start("two")
    try:
        assert replicas.usage_of(one, PROMPT, (96, FIVE)) == WRITTEN
        assert replicas.usage_of(two, PROMPT) == READ
    finally:
        for worker in (one, two):
            replicas.stop(worker)


def test_a_replica_with_other_weights_does_not_read_the_prefix(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas.usage_of(replicas.start("one"), PROMPT, (96, FIVE))
    monkeypatch.setattr("inference_worker.worker.worker.fingerprint_weights", lambda _: "other")
    two = replicas.start("two")
    assert replicas.usage_of(two, PROMPT, (96, FIVE)) == WRITTEN
    assert replicas.usage_of(two, PROMPT, (96, FIVE)) == READ


def test_a_pin_expires(replicas: Replicas) -> None:
    replicas.usage_of(replicas.start("one"), PROMPT, (32, HOUR), (96, FIVE))
    replicas.pass_time(270)
    assert replicas.usage_of(replicas.start("two"), PROMPT) == READ
    replicas.pass_time(300)
    usage = replicas.usage_of(replicas.start("three"), PROMPT, (32, HOUR), (96, FIVE))
    assert usage == TokenCounts(4, 32, 64, output=1)
    replicas.pass_time(3600)
    assert replicas.usage_of(replicas.start("four"), PROMPT) == TokenCounts(100, output=1)


def test_a_hit_restarts_the_time(replicas: Replicas) -> None:
    replicas.usage_of(replicas.start("one"), PROMPT, (96, FIVE))
    for number in range(3):
        replicas.pass_time(200)
        assert replicas.usage_of(replicas.start(f"hit {number}"), PROMPT) == READ
    replicas.pass_time(300)
    assert replicas.usage_of(replicas.start("too late"), PROMPT, (96, FIVE)) == WRITTEN


def test_a_hit_at_the_writing_replica_restarts_the_time_too(replicas: Replicas) -> None:
    one = replicas.start("one")
    replicas.usage_of(one, PROMPT, (96, FIVE))
    replicas.pass_time(200)
    assert replicas.usage_of(one, PROMPT) == READ
    replicas.pass_time(200)
    assert replicas.usage_of(replicas.start("two"), PROMPT) == READ


def test_a_pin_of_an_hour_stays_for_an_hour(replicas: Replicas) -> None:
    replicas.usage_of(replicas.start("one"), PROMPT, (96, HOUR))
    replicas.usage_of(replicas.start("two"), PROMPT, (96, FIVE))
    replicas.pass_time(3500)
    assert replicas.usage_of(replicas.start("three"), PROMPT) == READ


def test_another_tenant_does_not_read_the_prefix(replicas: Replicas) -> None:
    replicas.usage_of(replicas.start("one"), PROMPT, (96, FIVE))
    two = replicas.start("two")
    assert replicas.usage_of(two, PROMPT, (96, FIVE), tenant=2) == WRITTEN
    assert replicas.usage_of(two, PROMPT, tenant=3) == TokenCounts(100, output=1)


def test_another_tenants_salt_does_not_read_the_prefix(replicas: Replicas) -> None:
    """The tenant is in the key and in the hashes; either would suffice."""
    one, two = replicas.start("one"), replicas.start("two")
    replicas.usage_of(one, PROMPT, (96, FIVE))
    stolen = msgspec.structs.replace(replicas.job(PROMPT, tenant=2), cache_salt=b"of tenant 1")
    replicas.run(two, stolen)
    assert replicas.billed(stolen).usage.cache_read == 0
    split = msgspec.structs.replace(replicas.job(PROMPT), cache_salt=b"of tenant 1, by a key of its own")
    replicas.run(two, split)
    assert replicas.billed(split).usage.cache_read == 0


def test_a_pin_is_shared_before_its_request_ends(replicas: Replicas) -> None:
    one, two = replicas.start("one"), replicas.start("two")
    steps = threading.Semaphore(2)
    replicas.runners[0].during = lambda _: steps.acquire() and None
    long = replicas.job(PROMPT, (96, FIVE), tokens=30)
    serving = threading.Thread(target=replicas.run, args=(one, long))
    serving.start()
    try:
        assert replicas.is_pinned()
        assert replicas.usage_of(two, PROMPT) == READ
        assert not replicas.is_billed(long)
    finally:
        steps.release(100)
        serving.join()
    assert replicas.billed(long).usage == msgspec.structs.replace(WRITTEN, output=30)


def test_a_failed_write_leaves_no_pin(replicas: Replicas) -> None:
    one, two = replicas.start("one"), replicas.start("two")
    reported = threading.Event()

    def fails_when_its_first_token_is_out(_: object) -> None:
        if len(replicas.runners[0].steps) > 1:
            if replicas.is_pinned():
                reported.set()
            raise RuntimeError("broken")

    replicas.runners[0].during = fails_when_its_first_token_is_out
    job = replicas.job(PROMPT, (96, FIVE), tokens=5)
    replicas.run(one, job)
    assert reported.is_set()
    assert replicas.billed(job).outcome == "failed"
    assert replicas.usage_of(two, PROMPT, (96, FIVE)) == WRITTEN


def test_pins_lost_by_the_broker_cost_a_write_and_cause_no_error(replicas: Replicas) -> None:
    one, two = replicas.start("one"), replicas.start("two")
    replicas.usage_of(one, PROMPT, (96, FIVE))
    replicas.broker.flushdb()
    assert replicas.usage_of(two, PROMPT, (96, FIVE)) == WRITTEN
    replicas.broker.flushdb()
    assert replicas.usage_of(one, PROMPT, (96, FIVE)) == READ  # its engine has the pin and reports it again
    assert replicas.usage_of(replicas.start("three"), PROMPT) == READ


def test_a_failed_lookup_costs_a_write_and_is_logged_once(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = replicas.start("one"), replicas.start("two")
    replicas.usage_of(one, PROMPT, (96, FIVE))
    replicas.usage_of(one, distinct(100, 2), (96, FIVE))

    def away(**_: object) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as patched:
        replica = two.replicas.find(two.replica_id)
        assert replica is not None
        assert replica.loaded is not None
        patched.setattr(replica.loaded.pins, "_look_up", away)
        assert replicas.usage_of(two, PROMPT, (96, FIVE)) == WRITTEN
        assert replicas.usage_of(two, distinct(100, 3), (96, FIVE)) == WRITTEN
    assert logged_events(caplog).count("pin_lookup_failed") == 1
    assert replicas.usage_of(two, distinct(100, 2)) == READ


def test_above_the_limit_nothing_is_pinned_or_billed_as_written(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_pins, "MAX_PINS", 8)
    one, two = replicas.start("one"), replicas.start("two")
    assert replicas.usage_of(one, PROMPT, (96, FIVE)) == WRITTEN
    job = replicas.job(distinct(100, 2), (96, FIVE))
    replicas.run(two, job)
    event = replicas.billed(job)
    assert (event.usage, event.unpinned_tokens) == (TokenCounts(100 - 32, 0, 32, output=1), 64)
    assert replicas.broker.zcard(pins_key(1)) == 8
    again = replicas.job(PROMPT, (96, FIVE))
    replicas.run(two, again)
    event = replicas.billed(again)
    assert (event.usage, event.unpinned_tokens) == (READ, 0)  # a paid prefix requires no room


def test_requests_without_pins_need_no_lookup(replicas: Replicas) -> None:
    one, two = replicas.start("one"), replicas.start("two")
    replicas.broker.config_resetstat()  # type: ignore[no-untyped-call]
    replicas.usage_of(one, PROMPT, tenant=2)
    replicas.usage_of(two, PROMPT, tenant=2)
    assert not {"cmdstat_zmscore", "cmdstat_zadd"} & set(replicas.broker.info("commandstats"))
    replicas.usage_of(one, PROMPT, (96, FIVE))
    replicas.usage_of(two, PROMPT)
    assert replicas.broker.info("commandstats")["cmdstat_zmscore"]["calls"] == 3  # reported, looked up, reported
