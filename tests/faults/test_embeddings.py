"""Embeddings while their worker is killed."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx

from tests.support.stack import EMBEDDING_MODEL, Stack, eventually


def test_a_worker_killed_at_it_leaves_one_bill(stack: Stack) -> None:
    worker = stack.pid("inference_worker", model=EMBEDDING_MODEL)
    many = {"model": EMBEDDING_MODEL, "input": ["word " * 200] * 200}
    with httpx.Client(headers=stack.headers, timeout=60) as client:
        request = client.build_request("POST", f"{stack.url}/v1/embeddings", json=many)

        async def send() -> httpx.Response:
            answer = asyncio.create_task(asyncio.to_thread(client.send, request))
            await asyncio.sleep(0.5)
            os.kill(worker, signal.SIGKILL)
            return await answer

        answer = asyncio.run(send())
    assert answer.status_code in (200, 503), answer.text
    stack.wait_until_ready()
    if answer.status_code == 200:  # another process of the worker took it over, before a byte of the answer was sent
        assert stack.event(answer.headers["x-request-id"])["outcome"] == "completed"
    eventually(lambda: stack.client().embeddings.create(model=EMBEDDING_MODEL, input="again").data)
