"""Pinned prefixes after their worker was killed: they are billed and reported as cache reads."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import anthropic
import httpx2

from tests.support.stack import MODEL, Stack, eventually

WORDS = "Answer briefly. " + "apple pear plum cherry quince " * 30
QUESTION = "What is the capital of France?"


def classes(event: dict[str, Any]) -> dict[str, int]:
    return {name: event[name] for name in ("uncached", "cache_read", "cache_write_5m", "cache_write_1h")}


def lose_the_worker(stack: Stack) -> None:
    killed = stack.worker()
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: stack.worker() != killed, 30)
    hello = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}

    def answers() -> bool:
        url = f"{stack.url}/v1/chat/completions"
        return httpx2.post(url, json=hello, headers=stack.headers, timeout=60).status_code == 200

    eventually(answers, 60)


def test_pins_of_a_killed_worker_are_billed_as_reads(stack: Stack) -> None:
    text = f"{time.time()} {WORDS}"
    client = anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0)
    marked: Any = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]

    def send() -> anthropic.types.Message:
        messages: Any = [{"role": "user", "content": QUESTION}]
        return client.messages.create(model=MODEL, max_tokens=2, system=marked, messages=messages)

    first = send().usage
    written = first.cache_creation_input_tokens or 0
    assert written > 100
    lose_the_worker(stack)
    again = send()
    second_usage = again.usage
    assert (second_usage.cache_creation_input_tokens, second_usage.cache_read_input_tokens) == (0, written)
    assert second_usage.input_tokens == first.input_tokens
    event = stack.event(str(again._request_id))
    assert classes(event) == {
        "uncached": second_usage.input_tokens,
        "cache_read": written,
        "cache_write_5m": 0,
        "cache_write_1h": 0,
    }
    assert event["miss_reason"] == "other_worker"

    lose_the_worker(stack)
    answer = stack.client().chat.completions.with_raw_response.create(
        model=MODEL,
        max_tokens=2,
        messages=[{"role": "system", "content": text}, {"role": "user", "content": QUESTION}],
    )
    usage = answer.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == written
    event = stack.event(str(answer.headers["x-request-id"]))
    assert (event["cache_read"], event["uncached"]) == (written, usage.prompt_tokens - written)
