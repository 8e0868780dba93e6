"""An empty Valkey, and helpers that create executions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from inference_worker.contract.messages import InferenceJob, claim_key, encode


@pytest.fixture
def queued(broker: redis.Redis) -> Callable[[InferenceJob], str]:
    """Return a function that writes a job's claim record as a gateway does, and returns its key."""

    def write(job: InferenceJob) -> str:
        key = claim_key(job.billing_context.request_id, job.billing_context.execution)
        record = {"attempt": 1, "state": "queued", "job": encode(job), "tenant": 1, "gateway": job.gateway_id}
        broker.hset(key, mapping=record)
        return key

    return write
