"""Cordoned and drained workers: running requests complete, no new ones are sent, and none is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from tests.support.stack import MODEL, Stack, eventually


def operate(stack: Stack, call: str) -> None:
    """Run an operator's action in a separate process."""
    code = f"from millrace.apps.health.cordons import *; {call}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    environ["MILLRACE_DATA_DIR"] = str(stack.data_dir)
    subprocess.run([sys.executable, "manage.py", "shell", "-c", code], check=True, env=environ, timeout=60)


def send(stack: Stack, max_tokens: int, **more: Any) -> httpx2.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Count."}], "max_tokens": max_tokens}
    url = f"{stack.url}/v1/chat/completions"
    return httpx2.post(url, json={**body, "ignore_eos": True, **more}, headers=stack.headers, timeout=200)


def test_a_cordoned_worker_completes_its_requests_and_gets_no_new_ones(stack: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(send, stack, 400)
        eventually(lambda: stack.metric("millrace_kv_blocks_used"))
        operate(stack, f"do_cordon({stack.worker_name!r})")
        eventually(lambda: send(stack, 1).status_code == 503)
        assert send(stack, 1).json()["error"]["code"] == "model_loading"
        assert begun.result().json()["usage"]["completion_tokens"] == 400
    operate(stack, f"do_uncordon({stack.worker_name!r})")
    eventually(lambda: send(stack, 1).status_code == 200)


def test_a_drained_worker_returns_requests_that_have_not_started(stack: Stack) -> None:
    """More requests are sent than fit its batch. The waiting ones return to the gateway's queue and complete later."""
    responses: list[httpx2.Response] = []
    threads = [threading.Thread(target=lambda: responses.append(send(stack, 60))) for _ in range(48)]
    for thread in threads:
        thread.start()
    operate(stack, f"do_cordon({stack.worker_name!r}, drain=True)")
    eventually(lambda: send(stack, 1).status_code == 503)
    operate(stack, f"do_uncordon({stack.worker_name!r})")
    for thread in threads:
        thread.join()
    answered = [answer for answer in responses if answer.status_code == 200]
    assert all(answer.json()["usage"]["completion_tokens"] == 60 for answer in answered)
    # Requests that arrived during the drain were rejected; no admitted request was lost or truncated.
    assert {answer.status_code for answer in responses} <= {200, 503}
    assert len(answered) >= 8
    assert len(responses) == 48
