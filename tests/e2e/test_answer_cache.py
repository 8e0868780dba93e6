"""The answer cache of a running platform: one answer for both SDKs, its price and its usage."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import anthropic
import httpx2
import pytest

from tests.support.stack import MODEL, Stack, eventually

MESSAGES: Any = [{"role": "user", "content": "Name the largest ocean."}]


@pytest.fixture
def caching(stack: Stack) -> Iterator[Stack]:
    """The platform, with the answer cache of the demo tenant on."""
    _set_lifetime(stack, 600)
    # The change reaches the gateway within a second.
    headers = stack.headers | {"x-millrace-cache": "only-if-cached"}
    body = {"model": MODEL, "prompt": "Warm", "max_tokens": 1, "temperature": 0}

    def is_on() -> bool:
        httpx2.post(f"{stack.url}/v1/completions", json=body, headers=stack.headers, timeout=60)
        return httpx2.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200

    eventually(is_on)
    yield stack
    _set_lifetime(stack, 0)


def _set_lifetime(stack: Stack, seconds: int) -> None:
    body = {"answer_cache_seconds": seconds}
    response = httpx2.patch(f"{stack.url}/api/tenant", json=body, headers=stack.headers, timeout=60)
    assert response.status_code == 200, response.text


def test_an_answer_is_cached_for_every_dialect(caching: Stack) -> None:
    stack = caching
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    completions = stack.client().chat.completions
    first = completions.with_raw_response.create(**options)
    again = completions.with_raw_response.create(**options)
    answer = first.parse()
    assert first.headers["x-millrace-cache"] in ("miss", "prefix")
    assert again.headers["x-millrace-cache"] == "exact"
    assert again.parse().choices[0] == answer.choices[0]
    assert answer.usage is not None
    usage = again.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens
    # A tenth of the tokens' prices: $0.30 and $1.50 instead of $3 and $15 per million.
    cost = (Decimal("0.30") * usage.prompt_tokens + Decimal("1.50") * usage.completion_tokens) / 1_000_000
    assert Decimal(again.headers["x-millrace-cost-usd"]) == cost
    event = stack.event(again.headers["x-request-id"])
    hits = event["answer_hits"]
    assert (hits["input"], hits["output"]) == (usage.prompt_tokens, usage.completion_tokens)
    assert (event["input"], event["output"], Decimal(event["cost"]["usd"])) == (0, 0, cost)

    chunks = list(completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    messages = anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0).messages
    message = messages.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, extra_body={"temperature": 0}
    )
    assert message.headers["x-millrace-cache"] == "exact"
    assert message.parse().content[0].text == answer.choices[0].message.content  # type: ignore[union-attr]


def test_tool_calls_and_structured_output_are_cached(caching: Stack) -> None:
    schema = {"type": "object", "properties": {"ocean": {"enum": ["Pacific", "Arctic"]}}, "required": ["ocean"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "ocean", "schema": schema, "strict": False}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": schema}}]
    for fields in ({"response_format": format_}, {"tools": tools, "tool_choice": "required"}):
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "temperature": 0, **fields}
        url, headers = f"{caching.url}/v1/chat/completions", caching.headers
        first, again = (httpx2.post(url, json=body, headers=headers, timeout=120) for _ in range(2))
        assert first.status_code == 200, first.text
        assert again.headers["x-millrace-cache"] == "exact"
        messages = [response.json()["choices"][0]["message"] for response in (first, again)]
        for call in [call for message in messages for call in message.get("tool_calls") or ()]:
            call.pop("id")
        assert messages[0] == messages[1]
