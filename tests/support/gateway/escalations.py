"""Services whose requests are escalated to another model."""

from __future__ import annotations

from typing import Any

import redis.asyncio as redis

from inference_worker.contract.messages import USAGE_STREAM, End, ExecutionUsage, Tokens, decode_usage
from inference_worker.contract.request import TokenCounts
from millrace.gateway import assembly
from millrace.gateway.admission.budget_admission import RequestAdmission
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_state import ExecutionState
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.routing.router import Router
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.routing_policies.policy import parse
from tests.support.gateway.services import make_parts

MODELS = {name: ServedModel(name, None, 10_000, 1000, 0) for name in ("small", "large")}  # type: ignore[arg-type]
PROMPT, OUTPUT = 1000, 500
SMALL, LARGE = 2_000_000, 20_000_000  # nano-USD of a request: 1 and 10 USD per million input tokens, 2 and 20 output


class Workers(Dispatcher):
    """A dispatcher whose executions answer immediately: the small model badly, the large one well."""

    def __init__(self, broker: redis.Redis) -> None:
        super().__init__(broker, broker, "gw-a", queue_seconds=5, retention_seconds=60)
        self.usage: list[ExecutionUsage] = []

    def require_capacity(self, key: str, tenant: int, weight: float = 1.0, *, batch: bool = False) -> None:
        return

    def submit(self, execution: Execution) -> None:
        context, attempt = execution.job.billing_context, execution.attempt
        counts = TokenCounts(PROMPT, output=execution.job.params.max_tokens)
        self.usage.append(ExecutionUsage(context, attempt, "completed", "stop", counts, "r", 0))
        text = "bad" if context.model == "small" else "good"
        execution.advance(ExecutionState.ENDED)
        execution.buffer.put(Tokens(context.request_id, attempt, 0, [1], text))
        execution.buffer.put(End(context.request_id, attempt, 1, "stop", None, counts))


def make_service(broker: redis.Redis, workers: Workers, gateway: Any) -> InferenceService:
    admission = RequestAdmission(broker, gateway.budget_admission)
    return assembly.make_service(make_parts(broker, Router(MODELS), admission, workers))


async def not_started(broker: redis.Redis) -> list[ExecutionUsage]:
    return [decode_usage(fields[b"e"]) for _, fields in await broker.xrange(USAGE_STREAM)]


def with_policy(key: ApiKeySnapshot, policy: dict[str, Any]) -> ApiKeySnapshot:
    fields = {name: getattr(key, name) for name in key.__struct_fields__}
    return ApiKeySnapshot(**fields | {"policies": {"mine": parse(policy)}})
