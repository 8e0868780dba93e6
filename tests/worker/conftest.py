"""A real Valkey, empty, and the small things an execution is made of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from inference_worker.contract.messages import BillingContext, ExecutionUsage, InferenceJob, claim_key, encode
from inference_worker.contract.request import SamplingParams, TokenUsage


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"], socket_timeout=60)
    client.flushdb()
    yield client
    client.close()


def make_job(
    request_id: str = "req_1", *, execution: int = 0, gateway_id: str = "gw-a", deadline: float | None = None
) -> InferenceJob:
    billing_context = BillingContext(1_000_000, request_id, execution, tenant_id=1, project_id=2, key_id=3, model="m")
    seconds = time.time() + 60 if deadline is None else deadline
    return InferenceJob(billing_context, gateway_id, [1, 2, 3], SamplingParams(max_tokens=4), b"salt", seconds)


def make_usage(job: InferenceJob, attempt: int = 1, outcome: str = "completed", output: int = 2) -> ExecutionUsage:
    return ExecutionUsage(
        job.billing_context, attempt, outcome, "stop", TokenUsage(uncached=3, output=output), "replica-1", 32
    )


@pytest.fixture
def queued(broker: redis.Redis) -> Callable[[InferenceJob], str]:
    """Write a job's claim record as a gateway does; its key."""

    def write(job: InferenceJob) -> str:
        key = claim_key(job.billing_context.request_id, job.billing_context.execution)
        broker.hset(key, mapping={"attempt": 1, "state": "queued", "job": encode(job), "tenant": 1})
        return key

    return write
