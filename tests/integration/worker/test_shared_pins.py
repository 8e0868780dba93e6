"""Pins shared by all replicas, with workers, engines and Valkey. All models but one are fake."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import redis
from structlog.testing import CapturingLogger

from inference_worker.contract import claims
from inference_worker.contract.messages import (
    USAGE_STREAM,
    End,
    ExecutionUsage,
    InferenceJob,
    Wakeup,
    claim_key,
    decode_event,
    decode_usage,
    encode,
    event_log_key,
    pins_key,
    wakeup_sent_key,
    wakeups_key,
)
from inference_worker.contract.request import CacheBreakpoint, TokenCounts
from inference_worker.contract.settings import WorkerSettings, worker_settings
from inference_worker.worker import shared_pins
from inference_worker.worker.engine_client import ActiveJob
from inference_worker.worker.replica import LocalReplica
from inference_worker.worker.thread_commands import ThreadCommands
from inference_worker.worker.wakeups import wait_for_wakeup
from inference_worker.worker.worker import MAX_REJECTIONS, Worker, new_replica_id
from tests.support.engine.fakes import Clock, FakeRunner, distinct, fake_engine
from tests.support.models import share_models
from tests.support.waiting import eventually
from tests.support.worker.jobs import make_job, make_usage

BLOCK, FIVE, HOUR = 16, 300, 3600
PROMPT = distinct(100, 1)
WRITTEN, READ = TokenCounts(4, 0, 96, output=1), TokenCounts(4, 96, output=1)
Queued = Callable[[InferenceJob], str]


class Replicas:
    """Workers of one model, and requests of tenants."""

    def __init__(self, broker: redis.Redis, queued: Queued, settings: WorkerSettings) -> None:
        self.broker = broker
        self.settings = settings
        self._queued = queued
        self._count = 0
        self.workers: list[Worker] = []
        self.runners: list[FakeRunner] = []

    def start(self, name: str) -> Worker:
        settings = replace(self.settings, worker_name=name)
        self.workers.append(Worker(settings, new_replica_id(settings)))
        return self.workers[-1]

    def stop(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.drain()
        worker.close()

    def job(self, prompt: list[int], *points: tuple[int, int], tenant: int = 1, tokens: int = 1) -> InferenceJob:
        self._count += 1
        job = make_job(f"req_{self._count}")
        return msgspec.structs.replace(
            job,
            billing_context=msgspec.structs.replace(job.billing_context, tenant_id=tenant),
            prompt_token_ids=prompt,
            params=msgspec.structs.replace(job.params, max_tokens=tokens, temperature=0.0, ignore_eos=True),
            cache_salt=f"of tenant {tenant}".encode(),
            breakpoints=tuple(CacheBreakpoint(*point) for point in points),
        )

    def queue(self, job: InferenceJob) -> tuple[str, int, int]:
        """Submit the job and its wakeup."""
        self.broker.hset(self._queued(job), "tenant", job.billing_context.tenant_id)
        return job.billing_context.request_id, 0, 1

    def run(self, worker: Worker, job: InferenceJob) -> None:
        """Run a request at the worker until its end is published."""
        assert worker.serve([self.queue(job)])
        eventually(lambda: self.is_billed(job))

    def usage_of(self, worker: Worker, prompt: list[int], *points: tuple[int, int], tenant: int = 1) -> TokenCounts:
        """Run a request and return its usage, which is also billed."""
        job = self.job(prompt, *points, tenant=tenant)
        self.run(worker, job)
        event = self.billed(job)
        last = decode_event(self.broker.lrange(event_log_key(job.billing_context.request_id, 1), -1, -1)[0])
        assert isinstance(last, End)
        assert last.usage == event.usage
        assert event.outcome == "completed"
        return event.usage

    def billed(self, job: InferenceJob) -> ExecutionUsage:
        (event,) = self._events(job)
        return event

    def is_billed(self, job: InferenceJob) -> bool:
        return bool(self._events(job))

    def is_pinned(self) -> bool:
        """Return whether a pin is stored in the broker within a few seconds."""
        give_up_at = time.monotonic() + 10
        while not (reported := self.broker.exists(pins_key(1))) and time.monotonic() < give_up_at:
            time.sleep(0.01)
        return bool(reported)

    def _events(self, job: InferenceJob) -> list[ExecutionUsage]:
        events = [decode_usage(fields[b"e"]) for _, fields in self.broker.xrange(USAGE_STREAM)]
        return [event for event in events if event.billing_context.request_id == job.billing_context.request_id]

    def pass_time(self, seconds: int, tenant: int = 1) -> None:
        """Move the expiry of all pins in the broker."""
        for block in self.broker.zrange(pins_key(tenant), 0, -1):
            self.broker.zincrby(pins_key(tenant), -2000 * seconds, block)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> WorkerSettings:
    small = replace(worker_settings(), block_size=BLOCK, kv_cache_memory=192 << 20, shutdown_timeout_seconds=1)
    data_dir = tmp_path_factory.mktemp("state")
    share_models(data_dir)
    return replace(small, data_dir=data_dir, worker_model="smollm2-135m")


@pytest.fixture
def replicas(
    broker: redis.Redis, queued: Queued, settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Replicas]:
    replicas = Replicas(broker, queued, settings)
    shutil.rmtree(settings.data_dir / "journal", ignore_errors=True)  # of the previous test

    def engine(_: object) -> Any:
        replicas.runners.append(FakeRunner(80))
        return fake_engine(runner=replicas.runners[-1], clock=Clock())[0]

    monkeypatch.setattr("inference_worker.worker.worker.make_engine", engine)
    yield replicas
    for worker in list(replicas.workers):
        replicas.stop(worker)


@pytest.mark.parametrize(("seconds", "written"), [(FIVE, WRITTEN), (HOUR, TokenCounts(4, 0, 0, 96, output=1))])
def test_a_prefix_written_by_one_replica_is_read_at_another(
    replicas: Replicas, seconds: int, written: TokenCounts
) -> None:
    one, two = replicas.start("one"), replicas.start("two")
    assert replicas.usage_of(one, PROMPT, (96, seconds)) == written
    assert replicas.usage_of(two, PROMPT, (96, seconds)) == READ
    assert list(replicas.runners[1].steps[0].values()) == [100]  # although it was computed again
    assert replicas.usage_of(replicas.start("three"), [*PROMPT[:64], *distinct(36, 2)]) == TokenCounts(36, 64, output=1)


def test_one_task_claims_all_executions_that_gateways_have_sent(replicas: Replicas) -> None:
    worker = replicas.start("one")
    jobs = [replicas.job(distinct(10, number)) for number in range(3)]
    first, *others = map(replicas.queue, jobs)
    replicas.broker.rpush(wakeups_key(worker.replica_id), *map(encode, others))
    replicas.broker.set(wakeup_sent_key(worker.replica_id), "")
    assert len(worker.serve([first])) == 3
    eventually(lambda: all(map(replicas.is_billed, jobs)))
    assert not replicas.broker.exists(wakeups_key(worker.replica_id), wakeup_sent_key(worker.replica_id))
    assert worker.serve([first]) == []  # a late task


def test_executions_sent_after_the_task_began_wait_for_the_next_task(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_worker.worker.worker.MAX_WAKEUPS", 2)
    worker, submit = replicas.start("one"), Worker._submit
    listed, flag = wakeups_key(worker.replica_id), wakeup_sent_key(worker.replica_id)
    first, *others, later = [replicas.queue(replicas.job(distinct(10, number))) for number in range(5)]

    def submit_while_a_gateway_sends(worker: Worker, *claim: Any) -> ActiveJob:
        live = submit(worker, *claim)
        if live.job.billing_context.request_id == others[0][0]:
            replicas.broker.set(flag, "")
            replicas.broker.rpush(listed, encode(later))
        return live

    replicas.broker.rpush(listed, *map(encode, others))
    monkeypatch.setattr(Worker, "_submit", submit_while_a_gateway_sends)
    assert len(worker.serve([first])) == 4  # the list was longer than one response
    assert replicas.broker.exists(flag)
    assert replicas.broker.lrange(listed, 0, -1) == [encode(later)]
    assert len(worker.serve([])) == 1


def test_a_worker_takes_only_as_many_wakeups_as_it_has_room_for(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = replicas.start("one")
    listed, flag = wakeups_key(worker.replica_id), wakeup_sent_key(worker.replica_id)
    first, *others = [replicas.queue(replicas.job(distinct(10, number))) for number in range(4)]
    replicas.broker.rpush(listed, *map(encode, others))
    for room, served in ((0, 0), (2, 2)):
        replicas.broker.set(flag, "")
        monkeypatch.setattr(worker, "_room", lambda room=room: room)
        assert len(worker.serve([first])) == served
        assert not replicas.broker.exists(flag)
    assert replicas.broker.llen(listed) == 2


def test_a_task_serves_executions_that_follow(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def wait_until_ended(commands: ThreadCommands, replica_id: str) -> list[Wakeup]:
        while not (found := wait_for_wakeup(commands, replica_id)) and not ended.is_set():
            pass  # the machine may be slow
        return found

    monkeypatch.setattr("inference_worker.worker.worker.wait_for_wakeup", wait_until_ended)
    monkeypatch.setattr("inference_worker.worker.worker.TASK_SECONDS", 60)
    monkeypatch.setattr("inference_worker.worker.worker.TASK_LOST_MS", 60_000)
    worker = replicas.start("one")
    listed, flag = wakeups_key(worker.replica_id), wakeup_sent_key(worker.replica_id)
    jobs = [replicas.job(distinct(10, number)) for number in range(3)]
    replicas.broker.set(flag, "")
    task = threading.Thread(target=worker.run_task, args=([replicas.queue(jobs[0])],))
    task.start()
    try:
        for previous, job in pairwise(jobs):
            eventually(partial(replicas.is_billed, previous))
            assert 0 < replicas.broker.pttl(flag) <= 60_000  # so that gateways use the list
            replicas.broker.rpush(listed, encode(replicas.queue(job)))
        eventually(partial(replicas.is_billed, jobs[-1]))
    finally:
        ended.set()
        task.join()
    assert not replicas.broker.exists(flag)


@pytest.mark.parametrize("reason", ["draining", "full", "several"])
def test_a_task_that_may_not_wait_ends(replicas: Replicas, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    waits: list[str] = []
    worker = replicas.start("one")
    (home,) = worker.replicas.replicas
    other = LocalReplica(f"{home.id}-1", home.spec)
    other.phase, other.loaded = home.phase, home.loaded
    replicas.broker.set(wakeup_sent_key(worker.replica_id), "")
    with monkeypatch.context() as patched:
        patched.setattr("inference_worker.worker.worker.wait_for_wakeup", lambda _, name: waits.append(name))
        if reason == "draining":
            worker._draining.set()
        elif reason == "full":
            patched.setattr(worker, "_room", lambda: 0)
        else:
            patched.setattr(worker.replicas, "_replicas", (home, other))
        worker.run_task([replicas.queue(replicas.job(distinct(10, 1)))])
    assert not waits
    assert not replicas.broker.exists(wakeup_sent_key(worker.replica_id))


def test_a_worker_that_drains_claims_no_execution_that_follows(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = replicas.start("one")
    first, later = (replicas.queue(replicas.job(distinct(10, number))) for number in range(2))

    def drain_meanwhile(_: ThreadCommands, name: str) -> list[Wakeup]:
        worker._draining.set()
        return [later]

    monkeypatch.setattr("inference_worker.worker.worker.wait_for_wakeup", drain_meanwhile)
    worker.run_task([first])
    states = [replicas.broker.hget(claim_key(request, execution), "state") for request, execution, _ in (first, later)]
    assert states[0] != b"queued"
    assert states[1] == b"queued"  # its gateway sends it to another worker
    assert not replicas.broker.exists(wakeup_sent_key(worker.replica_id))


def logged_events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the events that were logged. structlog's own capture misses loggers of an earlier configuration."""
    return [record.msg["event"] for record in caplog.records if isinstance(record.msg, dict)]


def test_an_invalid_claim_or_wakeup_does_not_block_the_others(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inference_worker.worker.worker.CLAIM_AGAIN_SECONDS", 0.01)
    worker = replicas.start("one")
    good, listed, late = [replicas.queue(replicas.job(distinct(10, number))) for number in range(3)]
    invalid = ("req_invalid", 0, 1)
    replicas.broker.set(claim_key("req_invalid", 0), "no hash")
    replicas.broker.rpush(wakeups_key(worker.replica_id), b"\xff", encode(listed))
    assert len(worker.serve([invalid, good, good])) == 2
    events = logged_events(caplog)
    assert events.count("broker_command_failed") == MAX_REJECTIONS
    assert "invalid_wakeup" in events
    worker._draining.set()  # in a claim
    home = worker.replicas.find(worker.replica_id)
    assert home is not None
    claimed, _ = worker._claim(home, [invalid, late], 0, is_first=True, has_task=False)
    assert len(claimed) == 1


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


def test_pins_with_the_embedded_model(broker: redis.Redis, queued: Queued, settings: WorkerSettings) -> None:
    shutil.rmtree(settings.data_dir / "journal", ignore_errors=True)
    replicas = Replicas(broker, queued, replace(settings, max_num_seqs=4, cpu_threads=1))
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


def test_an_execution_that_does_not_end_does_not_delay_the_workers_end(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("worker", "engine_client"):
        monkeypatch.setattr(f"inference_worker.worker.{module}.CLOSING_SECONDS", 0.2)
    worker = replicas.start("one")
    is_computing, is_released = threading.Event(), threading.Event()

    def compute(_: object) -> None:
        is_computing.set()
        is_released.wait(60)

    replicas.runners[0].during = compute
    job = replicas.job(PROMPT)
    (live,) = worker.serve([replicas.queue(job)])
    assert is_computing.wait(60)  # before that, the worker would requeue the execution
    log = CapturingLogger()
    monkeypatch.setattr("inference_worker.worker.worker.log", log)
    began = time.monotonic()
    replicas.stop(worker)
    assert time.monotonic() - began < 30
    left = [call.kwargs["request_id"] for call in log.calls if call.args == ("execution_left",)]
    assert left == [live.job.billing_context.request_id]
    is_released.set()


def test_a_worker_that_drains_completes_its_executions_before_it_closes(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drain as the signal's thread does, and close as the end of Celery's consumer does meanwhile."""
    for module in ("worker", "engine_client", "publisher"):
        monkeypatch.setattr(f"inference_worker.worker.{module}.CLOSING_SECONDS", 0.1)
    monkeypatch.setattr(replicas, "settings", replace(replicas.settings, shutdown_timeout_seconds=60))
    worker = replicas.start("one")
    has_begun, is_released = threading.Event(), threading.Event()

    def compute(_: object) -> None:
        has_begun.set()
        is_released.wait(60)

    replicas.runners[0].during = compute
    job = replicas.job(PROMPT)
    assert worker.serve([replicas.queue(job)])
    assert has_begun.wait(60)
    drain = threading.Thread(target=worker.drain)
    drain.start()
    eventually(worker._draining.is_set)
    stop = threading.Thread(target=replicas.stop, args=(worker,))
    stop.start()
    stop.join(1)  # longer than CLOSING_SECONDS
    is_released.set()
    for thread in (drain, stop):
        thread.join(60)
        assert not thread.is_alive()
    assert replicas.billed(job).outcome == "completed"
