"""Requests to a gateway with an answer cache, and the replica that computes the answers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from inference_worker.contract.messages import USAGE_STREAM, End, ExecutionUsage, Tokens, decode_usage
from inference_worker.contract.request import SamplingParams, ServiceClass, TokenCounts
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.protocols.openai import completions
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot, LimitSnapshot
from tests.support.gateway.inference_requests import make_request
from tests.support.gateway.replica import Replica
from tests.support.gateway.service_gates import Gate
from tests.support.gateway.services import recorded
from tests.support.waiting import eventually_async

PROMPT = (1, 2, 3)
USAGE = TokenCounts(uncached=3, output=2)


def make_key(tenant: int = 1, **fields: Any) -> ApiKeySnapshot:
    limits = LimitSnapshot((LimitSetSnapshot(1, "key", requests_per_day=1000, tokens_per_day=1000),))
    key = ApiKeySnapshot(1, tenant, 1, ("inference",), None, None, False, False, limits, 1)
    return msgspec.structs.replace(key, **{"answer_cache_seconds": 60, **fields})


class AnswerCacheClient:
    """Requests to one gateway, and the replica that runs them."""

    def __init__(self, gate: Gate, replica: Replica) -> None:
        self.gate, self.replica = gate, replica

    async def begin(
        self,
        key: ApiKeySnapshot | None = None,
        *directives: str,
        prompt: tuple[int, ...] = PROMPT,
        service_class: ServiceClass = ServiceClass.DEFAULT,
        dialect: str = completions.DIALECT,
        **sampling: Any,
    ) -> ActiveRequest:
        self.gate.count += 1
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        request = make_request(
            "a", list(prompt), params, 20, cache_directives=frozenset(directives), service_class=service_class
        )
        return await self.gate.service.begin(key or make_key(), request, dialect, f"req_{self.gate.count}")

    async def run(self, call: ActiveRequest, text: str = "Hello") -> None:
        """Compute the request's answer, as a worker does."""
        await self.claim(call)
        await self.replica.send(
            Tokens(call.request_id, 1, 0, [5], text, prompt=TokenCounts(uncached=3)),
            Tokens(call.request_id, 1, 1, [6], " there"),
            End(call.request_id, 1, 2, "stop", None, USAGE),
        )

    async def claim(self, call: ActiveRequest) -> None:
        async def is_claimed() -> bool:
            return await self.replica.claim(call.request_id)

        await eventually_async(is_claimed)

    async def answer(self, call: ActiveRequest) -> str:
        """Return the answer that the client receives, and release the request."""
        async with asyncio.timeout(30):
            events = [event async for event in self.gate.service.events(call)]
        assert isinstance(events[-1], End)
        assert [event.seq for event in events] == sorted(event.seq for event in events)
        await self.release(call)
        return "".join(event.text for event in events if isinstance(event, Tokens))

    async def release(self, call: ActiveRequest) -> None:
        self.gate.service.release(call)
        while self.gate.service._background:
            await asyncio.gather(*self.gate.service._background)

    async def answer_of_run(self, call: ActiveRequest, text: str = "Hello") -> str:
        await self.run(call, text)
        return await self.answer(call)

    async def hits(self) -> list[ExecutionUsage]:
        """Return the usage events of this gateway."""
        entries = await self.gate.broker.xrange(USAGE_STREAM)
        return [decode_usage(fields[b"e"]) for _, fields in entries]

    def layer(self, call: ActiveRequest) -> str:
        return "" if call.execution.answer is None else call.execution.answer.layer

    def origin(self, call: ActiveRequest) -> tuple[str, str]:
        """Return the layer of the answer, as in the request log, and the request that it is from."""
        answer = call.execution.answer
        return call.execution.cache_layer, "" if answer is None else answer.source

    def note(self, call: ActiveRequest) -> dict[str, Any]:
        return dict(recorded(call)["answer_cache"])
