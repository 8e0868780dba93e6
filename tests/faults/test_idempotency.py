"""Idempotency keys while the gateway is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid

import httpx2
import pytest

from tests.support.e2e.idempotency import PATH, body, named, post
from tests.support.stack import Stack, eventually


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def test_a_killed_gateway_blocks_no_key_and_causes_no_double_charge(stack: Stack, name: str) -> None:
    stack.wait_until_ready()
    asked, other = body(150, stream=True), uuid.uuid4().hex

    def whole() -> None:
        with pytest.raises(httpx2.TransportError):
            post(stack, other, body(150))

    waiting = threading.Thread(target=whole)
    with httpx2.stream("POST", stack.url + PATH, json=asked, headers=named(stack, name), timeout=60) as response:
        request_id = response.headers["x-request-id"]
        waiting.start()
        lines = response.iter_lines()
        begun = [next(lines) for _ in range(12)]
        os.kill(stack.gateway(), signal.SIGKILL)
    waiting.join()
    stack.wait_until_ready()
    killed = time.monotonic()
    eventually(lambda: post(stack, name, asked).status_code == 200)
    assert time.monotonic() - killed < 40
    again = post(stack, name, asked)
    assert again.headers["x-request-id"] == request_id
    assert again.text.splitlines()[:12] == begun
    eventually(lambda: post(stack, other, body(150)).status_code == 200)
    found = post(stack, other, body(150))
    assert found.json()["usage"]["completion_tokens"] == 150
    for each in (request_id, found.headers["x-request-id"]):
        assert stack.event(each)["output"] == 150
    newest = [each["request_id"] for each in stack.events(limit="2")]
    assert sorted(newest) == sorted([request_id, found.headers["x-request-id"]])  # and no other request ran
