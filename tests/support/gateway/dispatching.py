"""Executions that tests submit to a dispatcher, and what became of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import redis.asyncio as redis

from inference_worker.contract.messages import (
    USAGE_STREAM,
    BillingContext,
    End,
    Failed,
    InferenceJob,
    Tokens,
    decode_usage,
    replica_queue_key,
    wakeups_key,
)
from inference_worker.contract.request import SamplingParams
from millrace.gateway.admission.admission import AdmittedRequest
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.types import ResponseSpec
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from tests.support.gateway.keys import make_demand, make_key
from tests.support.gateway.replica import GATEWAY
from tests.support.waiting import eventually_async


def make_job(request_id: str = "req_1", seconds: float = 60, tenant: int = 1) -> InferenceJob:
    billing_context = BillingContext(time.time_ns() // 1000, request_id, 0, tenant, 1, 1, "m")
    return InferenceJob(billing_context, GATEWAY, [1, 2], SamplingParams(), b"salt", time.time() + seconds)


async def serving(dispatcher: Dispatcher) -> bool:
    return bool(dispatcher.replicas.serving("m"))


def submit(dispatcher: Dispatcher, job: InferenceJob, decision_record: DecisionRecord | None = None) -> Execution:
    """Submit an execution of the job."""
    billing_context = job.billing_context
    admitted = AdmittedRequest(make_demand(make_key(), billing_context.request_id), job.params.max_tokens)
    response_spec = ResponseSpec("completions", billing_context.request_id, billing_context.model, 0, 2)
    execution = Execution(dispatcher.broker, admitted, job, response_spec, decision_record or DecisionRecord())
    dispatcher.submit(execution)
    return execution


async def send(dispatcher: Dispatcher, job: InferenceJob, **changes: Any) -> Execution:
    """Submit an execution and wait until its claim is written."""
    generation = submit(dispatcher, job, **changes)

    async def written() -> bool:
        return generation.written or generation.is_queued

    await eventually_async(written)
    return generation


async def owned(generation: Execution, replica: str | None) -> bool:
    return generation.owner == replica


async def next_event(generation: Execution) -> Tokens | End | Failed:
    async with asyncio.timeout(60):
        return await generation.next_event()


async def wakeups(broker: redis.Redis, replica: str = "r1") -> int:
    tasks, others = await broker.llen(replica_queue_key(replica)), await broker.llen(wakeups_key(replica))
    return int(tasks + others)


async def outcomes(broker: redis.Redis) -> list[str]:
    return [decode_usage(fields[b"e"]).outcome for _, fields in await broker.xrange(USAGE_STREAM)]
