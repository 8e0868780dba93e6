"""The tasks of a worker: which executions one task claims, how long it waits, and how a worker drains and ends."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from inference_worker.contract.messages import Wakeup, claim_key, encode, wakeup_sent_key, wakeups_key
from inference_worker.worker.engine_client import ActiveJob
from inference_worker.worker.replica import LocalReplica
from inference_worker.worker.thread_commands import ThreadCommands
from inference_worker.worker.wakeups import wait_for_wakeup
from inference_worker.worker.worker import MAX_REJECTIONS, Worker
from tests.support.engine.fakes import distinct
from tests.support.waiting import eventually
from tests.support.worker.replicas import PROMPT, Replicas, logged_events


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
