"""A real Valkey, empty, and the small things a leg is made of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from inference_worker.contract.messages import Envelope, Job, UsageEvent, claim_key, encode
from inference_worker.contract.request import SamplingParams, TokenUsage


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(os.environ["MILLRACE_BROKER_URL"], socket_timeout=60)
    client.flushdb()
    yield client
    client.close()


def make_job(
    request_id: str = "req_1", *, leg: int = 0, gateway_id: str = "gw-a", deadline: float | None = None
) -> Job:
    envelope = Envelope(1_000_000, request_id, leg, tenant_id=1, project_id=2, key_id=3, model="m")
    seconds = time.time() + 60 if deadline is None else deadline
    return Job(envelope, gateway_id, [1, 2, 3], SamplingParams(max_tokens=4), b"salt", seconds)


def make_usage(job: Job, attempt: int = 1, verdict: str = "completed", output: int = 2) -> UsageEvent:
    return UsageEvent(job.envelope, attempt, verdict, "stop", TokenUsage(uncached=3, output=output), "replica-1", 32)


@pytest.fixture
def queued(broker: redis.Redis) -> Callable[[Job], str]:
    """Write a job's claim record as a gateway does; its key."""

    def write(job: Job) -> str:
        key = claim_key(job.envelope.request_id, job.envelope.leg)
        broker.hset(key, mapping={"attempt": 1, "state": "queued", "job": encode(job), "tenant": 1})
        return key

    return write
