"""Jobs and usage of a worker for tests."""

from __future__ import annotations

import time

from inference_worker.contract.messages import BillingContext, ExecutionUsage, InferenceJob
from inference_worker.contract.request import SamplingParams, TokenCounts


def make_job(
    request_id: str = "req_1", *, execution: int = 0, gateway_id: str = "gw-a", deadline: float | None = None
) -> InferenceJob:
    billing_context = BillingContext(1_000_000, request_id, execution, tenant_id=1, project_id=2, key_id=3, model="m")
    seconds = time.time() + 60 if deadline is None else deadline
    return InferenceJob(billing_context, gateway_id, [1, 2, 3], SamplingParams(max_tokens=4), b"salt", seconds)


def make_usage(job: InferenceJob, attempt: int = 1, outcome: str = "completed", output: int = 2) -> ExecutionUsage:
    return ExecutionUsage(
        job.billing_context, attempt, outcome, "stop", TokenCounts(uncached=3, output=output), "replica-1", 32
    )
