"""The gateway is killed while it serves hits of the answer cache: each is billed once or not at all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.support.stack import MODEL, Stack, eventually

pytestmark = pytest.mark.usefixtures("balanced_books")

BODY = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
CLIENTS = 8


@pytest.fixture
def caching(stack: Stack) -> Iterator[Stack]:
    """The platform with the answer cache on. It is off again for the equal requests of other tests."""
    _set_lifetime(stack, 600)
    yield stack
    stack.wait_until_ready()
    _set_lifetime(stack, 0)


def _set_lifetime(stack: Stack, seconds: int) -> None:
    body = {"answer_cache_seconds": seconds}
    response = httpx2.patch(f"{stack.url}/api/tenant", json=body, headers=stack.headers, timeout=60)
    assert response.status_code == 200, response.text


def test_hits_during_a_kill_of_the_gateway_are_billed_once_or_not_at_all(caching: Stack) -> None:
    stack = caching

    def send(client: httpx2.Client) -> httpx2.Response:
        return client.post(f"{stack.url}/v1/completions", json=BODY, headers=stack.headers, timeout=60)

    def is_cached() -> bool:
        return send(httpx2.Client()).headers.get("x-millrace-cache") == "exact"

    eventually(is_cached)
    received: list[str] = []
    stopped = threading.Event()

    def send_until_killed(_: int) -> None:
        with httpx2.Client() as client:
            while not stopped.is_set():
                try:
                    answer = send(client)
                except httpx2.TransportError:
                    return
                if answer.headers.get("x-millrace-cache") == "exact":
                    received.append(answer.headers["x-request-id"])

    with ThreadPoolExecutor(CLIENTS) as pool:
        runs = [pool.submit(send_until_killed, number) for number in range(CLIENTS)]
        eventually(lambda: len(received) > 2 * CLIENTS)
        os.kill(stack.gateway(), signal.SIGKILL)
        time.sleep(0.5)
        stopped.set()
        for run in runs:
            run.result()
    stack.wait_until_ready()
    eventually(is_cached)
    for request_id in received[-CLIENTS:]:  # the last ones were sent just before the kill
        assert stack.event(request_id)["answer_hits"]["output"] == BODY["max_tokens"]
