"""Embedding requests while their worker is killed."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx2

from tests.support.stack import EMBEDDING_MODEL, Stack, eventually


def test_a_request_of_a_killed_worker_is_billed_once(stack: Stack) -> None:
    worker = stack.pid("inference_worker", model=EMBEDDING_MODEL)
    many = {"model": EMBEDDING_MODEL, "input": ["word " * 200] * 200}
    with httpx2.Client(headers=stack.headers, timeout=60) as client:
        request = client.build_request("POST", f"{stack.url}/v1/embeddings", json=many)

        async def send() -> httpx2.Response:
            answer = asyncio.create_task(asyncio.to_thread(client.send, request))
            await asyncio.sleep(0.5)
            os.kill(worker, signal.SIGKILL)
            return await answer

        answer = asyncio.run(send())
    assert answer.status_code in (200, 503), answer.text
    stack.wait_until_ready()
    if answer.status_code == 200:  # another worker process took it over before a byte of the response was sent
        assert stack.event(answer.headers["x-request-id"])["outcome"] == "completed"
    eventually(lambda: stack.client().embeddings.create(model=EMBEDDING_MODEL, input="again").data)
