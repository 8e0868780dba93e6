"""Limits of embedding requests."""

from __future__ import annotations

import pytest
import redis.asyncio as redis

from inference_worker.contract.request import TokenCounts
from millrace.gateway.admission.admission import RateLimitAdmission
from millrace.gateway.core.errors import ApiError
from tests.support.gateway.keys import key_set, make_demand, make_key


async def test_embeddings_have_a_prompt_limit_and_a_rate_limit(broker: redis.Redis) -> None:
    gate = RateLimitAdmission(broker)
    key = make_key(key_set(tokens_per_minute=6000, max_prompt_tokens=5000))
    admitted = await gate.admit(make_demand(key, prompt=4500, max_tokens=0))
    assert admitted.max_tokens == 0
    for prompt, code in ((5001, "invalid_value"), (4500, "rate_limit_exceeded")):
        with pytest.raises(ApiError) as exc_info:
            await gate.admit(make_demand(key, "req_2", prompt=prompt, max_tokens=0))
        assert exc_info.value.code == code
    await gate.close(admitted, TokenCounts(4500))
