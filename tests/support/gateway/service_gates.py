"""A gateway's inference service with replicas, for tests of its lifecycle."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import redis.asyncio as redis

from inference_worker.contract.messages import End, Tokens
from inference_worker.contract.request import SamplingParams, TokenCounts
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.gateway.admission import rates
from millrace.gateway.admission.admission import RateLimitAdmission
from millrace.gateway.assembly import make_service
from millrace.gateway.core.catalog import ServedModel, upstream_model
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.dispatch.dispatcher import Dispatcher, decision_record_key
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.protocols.openai import completions
from millrace.gateway.routing.router import Router
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot, LimitSnapshot
from tenants.routing_policies.policy import parse
from tests.support.gateway.replica import GATEWAY
from tests.support.gateway.services import make_parts
from tests.support.waiting import eventually_async

UPSTREAM = UpstreamSpec(UpstreamEngine.OPENAI, "https://api.example.com/v1", "x", context_length=1000)
MODELS = {name: ServedModel(name, None, context, 1000, 0) for name, context in (("a", 100), ("b", 400))}  # type: ignore[arg-type]
MODELS |= {name: upstream_model(name, "", UPSTREAM) for name in ("u", "v")}
LIMIT = LimitSetSnapshot(1, "key", requests_per_day=100, tokens_per_day=1000, concurrency=2)
EITHER = {"models": ["a", "b"]}


def make_key(*sets: LimitSetSnapshot, **policies: Any) -> ApiKeySnapshot:
    parsed = {name: parse(body, version=3) for name, body in policies.items()}
    return ApiKeySnapshot(1, 1, 1, ("inference",), None, None, False, False, LimitSnapshot(sets), 1, None, parsed)


class Gate:
    """One gateway's service and its replicas, with helpers for tests."""

    def __init__(self, broker: redis.Redis) -> None:
        self.broker = broker
        self.dispatcher = Dispatcher(broker, broker, GATEWAY, queue_seconds=5, retention_seconds=60)
        self.admission = RateLimitAdmission(broker)
        parts = make_parts(broker, Router(MODELS), self.admission, self.dispatcher)
        self.disk = parts.disk
        self.service = make_service(parts)
        self.count = 0

    async def begin(self, key: ApiKeySnapshot, model: str, prompt: int = 10, max_tokens: int = 20) -> ActiveRequest:
        self.count += 1
        request = InferenceRequest(model, [1] * prompt, SamplingParams(), max_tokens)
        call = await self.service.begin(key, request, completions.DIALECT, f"req_{self.count}")
        await eventually_async(partial(self.written, call))
        return call

    async def written(self, call: ActiveRequest) -> bool:
        return call.execution.written

    async def left(self, key: ApiKeySnapshot) -> tuple[str, str]:
        """Return the remaining requests and tokens of the key's limits."""
        left = dict(rates.headers(await self.admission.current_limit_statuses(key)))
        return tuple(left[f"x-ratelimit-remaining-{kind}".encode()].decode() for kind in ("requests", "tokens"))  # type: ignore[return-value]

    async def decision_record(self, call: ActiveRequest) -> dict[str, Any]:
        return dict(msgspec.json.decode(await self.broker.get(decision_record_key(call.request_id))))


async def serving(gate: Gate, model: str) -> bool:
    return bool(gate.dispatcher.replicas.serving(model))


async def events_of(gate: Gate, call: ActiveRequest) -> list[Tokens | End]:
    """Return the events of a request until its end."""
    async with asyncio.timeout(60):
        return [event async for event in gate.service.events(call)]


def end(call: ActiveRequest, usage: TokenCounts, attempt: int = 1, seq: int = 0, reason: Any = "stop") -> End:
    """Return the last event of an execution."""
    return End(call.request_id, attempt, seq, reason, None, usage)
