"""The claim record's scripts: each changes nothing unless the record is in the state that the caller expects."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from inference_worker.contract import claims
from inference_worker.contract.messages import (
    USAGE_STREAM,
    InferenceJob,
    claim_key,
    decode_job,
    decode_usage,
    encode,
    event_log_key,
    gateway_stream,
)
from tests.support.worker.jobs import make_job, make_usage

Queued = Callable[[InferenceJob], str]


NOT_STARTED = b"the usage event of an execution that never started"


def claim(broker: redis.Redis, key: str, attempt: int, replica: str) -> bytes | None:
    found: Any = broker.eval(claims.CLAIM, 1, key, attempt, replica)
    return found and found[0]  # type: ignore[no-any-return]


def give_up(broker: redis.Redis, key: str, attempt: int, replica: str) -> int | None:
    return broker.eval(claims.ABANDON, 1, key, attempt, replica)  # type: ignore[no-any-return]


def finish(broker: redis.Redis, key: str, job: InferenceJob, attempt: int) -> bytes | None:
    name = job.billing_context.request_id
    keys = [key, USAGE_STREAM, gateway_stream(job.gateway_id), event_log_key(name, attempt)]
    return broker.eval(claims.FINISH, 4, *keys, attempt, encode(make_usage(job, attempt)), b"batch", 60, b"end")  # type: ignore[no-any-return]


def fail(broker: redis.Redis, key: str, job: InferenceJob, attempt: int) -> int | bytes:
    usage = encode(make_usage(job, attempt, "failed", 0))
    return broker.eval(claims.FAIL, 2, key, USAGE_STREAM, attempt, usage)  # type: ignore[no-any-return]


def outcomes(broker: redis.Redis) -> list[str]:
    return [decode_usage(fields[b"e"]).outcome for _, fields in broker.xrange(USAGE_STREAM)]


def test_an_execution_is_claimed_once_with_repeated_wakeups(broker: redis.Redis, queued: Queued) -> None:
    job = make_job()
    key = queued(job)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: claim(broker, key, 1, f"replica-{n}"), range(50)))
    payloads = [payload for payload in results if payload is not None]
    assert len(payloads) == 1
    assert decode_job(payloads[0]) == job
    assert broker.hget(key, "state") == b"running"


def test_an_old_or_unknown_wakeup_claims_nothing(broker: redis.Redis, queued: Queued) -> None:
    key = queued(make_job())
    assert claim(broker, key, 2, "r") is None
    assert claim(broker, claim_key("unknown", 0), 1, "r") is None
    assert claim(broker, key, 1, "r") is not None
    assert give_up(broker, key, 1, "r") == 2
    assert claim(broker, key, 1, "r") is None  # the wakeup of attempt 1, redelivered
    assert claim(broker, key, 2, "s") is not None


def test_a_claim_repeated_after_a_lost_response_has_the_same_result(broker: redis.Redis, queued: Queued) -> None:
    key = queued(make_job())

    def call(name: str, replica: str = "r") -> bytes | None:
        found: Any = broker.eval(claims.CLAIM, 1, key, 1, replica, name)
        return found and found[0]  # type: ignore[no-any-return]

    job = call("one")
    assert job is not None
    assert call("one") == job
    assert call("two") is None  # another wakeup for the same execution
    assert call("one", "s") is None
    assert give_up(broker, key, 1, "r") == 2
    assert call("one") is None


def test_only_the_owners_claim_moves_to_the_next_attempt(broker: redis.Redis, queued: Queued) -> None:
    key = queued(make_job())
    claim(broker, key, 1, "r")
    assert give_up(broker, key, 1, "another") is None
    assert give_up(broker, key, 1, "r") == 2
    assert give_up(broker, key, 1, "r") is None


def test_an_end_is_published_and_metered_once(broker: redis.Redis, queued: Queued) -> None:
    job = make_job()
    key = queued(job)
    claim(broker, key, 1, "r")
    assert finish(broker, key, job, 1) is not None
    assert finish(broker, key, job, 1) is None
    assert outcomes(broker) == ["completed"]
    assert broker.lrange(event_log_key("req_1", 1), 0, -1) == [b"end"]


def test_a_superseded_attempt_cannot_end_the_execution(broker: redis.Redis, queued: Queued) -> None:
    job = make_job()
    key = queued(job)
    claim(broker, key, 1, "r")
    give_up(broker, key, 1, "r")
    assert finish(broker, key, job, 1) is None
    claim(broker, key, 2, "s")
    assert finish(broker, key, job, 2) is not None
    assert outcomes(broker) == ["completed"]


def test_failure_and_end_exclude_each_other(broker: redis.Redis, queued: Queued) -> None:
    ended, failed = make_job("req_ended"), make_job("req_failed")
    ended_key, failed_key = queued(ended), queued(failed)
    for key in (ended_key, failed_key):
        claim(broker, key, 1, "r")
    finish(broker, ended_key, ended, 1)
    assert fail(broker, ended_key, ended, 1) == b"done"
    assert fail(broker, failed_key, failed, 1) == 1
    assert fail(broker, failed_key, failed, 1) == 1
    assert finish(broker, failed_key, failed, 1) is None
    assert outcomes(broker) == ["completed", "failed"]


def test_usage_is_sent_after_its_claim_was_lost(broker: redis.Redis) -> None:
    """The broker may lose a claim. The settler counts each execution once anyway, so the event is sent."""
    job = make_job()
    assert finish(broker, claim_key("req_1", 0), job, 1) is not None
    assert outcomes(broker) == ["completed"]
    assert not broker.exists(claim_key("req_1", 0))


def test_an_end_creates_no_stream_for_a_dead_gateway(broker: redis.Redis, queued: Queued) -> None:
    job = make_job()
    key = queued(job)
    claim(broker, key, 1, "r")
    finish(broker, key, job, 1)
    assert not broker.exists(gateway_stream("gw-a"))


def test_a_cancel_returns_the_worker(broker: redis.Redis, queued: Queued) -> None:
    waiting, running = queued(make_job("req_w")), queued(make_job("req_r"))
    claim(broker, running, 1, "r")
    assert broker.eval(claims.CANCEL, 2, waiting, USAGE_STREAM, NOT_STARTED) is None
    assert broker.eval(claims.CANCEL, 2, running, USAGE_STREAM, NOT_STARTED) == [b"r", b"1"]
    assert claim(broker, waiting, 1, "r") is None  # cancelled before a worker started
    assert broker.hget(running, "cancel") == b"1"


def test_only_a_waiting_execution_can_be_withdrawn(broker: redis.Redis, queued: Queued) -> None:
    waiting, running = queued(make_job("req_w")), queued(make_job("req_r"))
    claim(broker, running, 1, "r")
    assert broker.eval(claims.WITHDRAW, 2, waiting, USAGE_STREAM, NOT_STARTED) == 1
    assert broker.eval(claims.WITHDRAW, 2, running, USAGE_STREAM, NOT_STARTED) == 0
    assert broker.hget(running, "state") == b"running"


@pytest.mark.parametrize("script", [claims.CANCEL, claims.WITHDRAW])
def test_an_execution_that_never_ran_is_sent_to_the_settler_once(
    broker: redis.Redis, queued: Queued, script: str
) -> None:
    """So its reservation is released. A claimed execution is reported by its worker."""
    waiting, running = queued(make_job("req_w")), queued(make_job("req_r"))
    claim(broker, running, 1, "r")
    for key in (waiting, waiting, running):
        broker.eval(script, 2, key, USAGE_STREAM, NOT_STARTED)
    assert [fields for _, fields in broker.xrange(USAGE_STREAM)] == [{b"e": NOT_STARTED}]
