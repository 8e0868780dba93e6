"""Processes killed or stopped during streams: every request ends, and usage is neither lost nor counted twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from tests.support.e2e.streams import Stream, sse_events, usage_of
from tests.support.stack import MODEL, Stack, eventually

pytestmark = pytest.mark.usefixtures("balanced_books")


def resume(stack: Stack, request_id: str, last_id: str = "") -> tuple[list[str], list[str]]:
    headers = stack.headers | ({"last-event-id": last_id} if last_id else {})
    url = f"{stack.url}/v1/streams/{request_id}"
    while True:
        with httpx2.stream("GET", url, headers=headers, timeout=300) as response:
            if response.status_code == 503:  # overload on a busy machine: retry after the given time
                time.sleep(float(response.headers["retry-after"]))
                continue
            assert response.status_code == 200, response.read()
            events = list(sse_events(response))
            break
    return [event[0] for event in events], [event[1] for event in events]


def test_a_worker_killed_mid_stream_ends_it_with_an_error_and_restarts(stack: Stack) -> None:
    stream = Stream(stack, max_tokens=2000)
    stream.read(5)
    killed_at = time.monotonic()
    os.kill(stack.worker(), signal.SIGKILL)
    stream.read()
    assert time.monotonic() - killed_at < 5
    error = msgspec.json.decode(stream.datas[-1])["error"]
    assert error["code"] == "worker_lost"
    assert httpx2.get(f"{stack.url}/readyz?models=all", timeout=20).status_code == 503
    assert httpx2.get(f"{stack.url}/readyz", timeout=20).status_code == 200  # the gateway stays at the balancer
    event = stack.event(stream.request_id)
    assert (event["outcome"], event["output"], event["input"]) == ("failed", 0, 0)

    # The supervisor restarts it, and a waiting request is completed.
    eventually(lambda: stack.metric("vllm:iteration_tokens_total_count") >= 0 and stack.worker())
    stack.wait_until_ready()
    answer = stack.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=3
    )
    assert answer.choices[0].message.content
    assert len(stack.events(request_id=stream.request_id)) == 1  # also after the journal's replay


def test_a_worker_killed_before_the_first_token_delays_the_request_only(stack: Stack) -> None:
    """The stopped worker generates no token. After it is killed, its request moves to the next one."""
    stack.wait_until_ready()
    worker = stack.worker()
    os.kill(worker, signal.SIGSTOP)
    answers: list[Any] = []

    def send() -> None:
        answers.append(
            stack.client().chat.completions.with_raw_response.create(
                model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=3
            )
        )

    asking = threading.Thread(target=send)
    asking.start()
    time.sleep(0.5)
    os.kill(worker, signal.SIGKILL)
    asking.join(60)
    (raw,) = answers
    assert raw.parse().usage.completion_tokens == 3
    event = stack.event(raw.headers["x-request-id"])
    assert (event["outcome"], event["output"]) == ("completed", 3)


def test_a_stopping_worker_completes_running_requests_and_returns_the_rest(stack: Stack) -> None:
    stack.wait_until_ready()
    streams = [Stream(stack, max_tokens=30) for _ in range(3)]
    for stream in streams:
        stream.read(3)
    os.kill(stack.worker(), signal.SIGTERM)
    for stream in streams:
        stream.read()
        assert usage_of(stream.datas)["completion_tokens"] == 30
    stack.wait_until_ready()
    for stream in streams:
        assert stack.event(stream.request_id)["outcome"] == "completed"


def test_a_stream_resumes_without_gap_or_repeat(stack: Stack) -> None:
    stack.wait_until_ready()
    whole = Stream(stack, max_tokens=40)
    whole.read()
    assert whole.ids == [f"{whole.request_id}:{n}" for n in range(len(whole.ids))]
    for had in (0, 1, len(whole.ids) // 2, len(whole.ids) - 2):
        ids, datas = resume(stack, whole.request_id, whole.ids[had])
        assert (ids, datas) == (whole.ids[had + 1 :], whole.datas[had + 1 :])
    assert resume(stack, whole.request_id) == (whole.ids, whole.datas)


def test_a_resumable_stream_continues_after_a_disconnect(stack: Stack) -> None:
    stream = Stream(stack, max_tokens=60, **{"x-millrace-resume": "1"})
    stream.read(4)
    stream.close()
    ids, datas = resume(stack, stream.request_id, stream.ids[-1])
    assert stream.ids + ids == [f"{stream.request_id}:{n}" for n in range(len(stream.ids + ids))]
    assert usage_of(datas)["completion_tokens"] == 60
    assert stack.event(stream.request_id)["output"] == 60


def test_another_tenants_stream_returns_404(stack: Stack) -> None:
    stream = Stream(stack, max_tokens=3)
    stream.read()
    response = httpx2.get(
        f"{stack.url}/v1/streams/{stream.request_id}", headers={"authorization": "Bearer sk-mr-other"}
    )
    assert response.status_code == 401
    bad = httpx2.get(f"{stack.url}/v1/streams/{stream.request_id}", headers={**stack.headers, "last-event-id": "x:1"})
    assert bad.status_code == 400


@pytest.mark.parametrize(
    ("count", "least_cut"), [(4, 4), pytest.param(100, 51, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_streams_of_a_killed_gateway_resume_at_the_next_one(stack: Stack, count: int, least_cut: int) -> None:
    stack.wait_until_ready()
    with ThreadPoolExecutor(count) as pool:
        streams = list(pool.map(lambda _: Stream(stack, max_tokens=150), range(count)))
    for stream in streams:
        stream.read(5)
    os.kill(stack.gateway(), signal.SIGKILL)
    cut = []
    for stream in streams:
        try:
            stream.read()
        except httpx2.TransportError:
            cut.append(stream)
        else:  # of a hundred streams, the first may end before the last starts
            assert usage_of(stream.datas)["completion_tokens"] == 150
    assert len(cut) >= least_cut
    stack.wait_until_ready()
    with ThreadPoolExecutor(count) as pool:
        rests = list(pool.map(lambda stream: resume(stack, stream.request_id, stream.ids[-1]), cut))
    for stream, (ids, datas) in zip(cut, rests, strict=True):
        assert stream.ids + ids == [f"{stream.request_id}:{n}" for n in range(len(stream.ids + ids))]
        assert usage_of(datas)["completion_tokens"] == 150
        event = stack.event(stream.request_id)
        assert (event["outcome"], event["output"]) == ("completed", 150)


def test_a_killed_settler_loses_and_duplicates_no_usage(stack: Stack) -> None:
    stack.wait_until_ready()
    client = stack.client()
    names = []

    def another_settles(old: int) -> bool:
        return stack.pid("run_settler") != old

    for n in range(8):
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=2, extra_body={"ignore_eos": True}
        )
        names.append(raw.headers["x-request-id"])
        if n % 3 == 0:
            old = stack.pid("run_settler")
            os.kill(old, signal.SIGKILL)
            eventually(partial(another_settles, old))
    for name in names:
        assert stack.event(name)["output"] == 2


def test_a_killed_valkey_resets_no_limit_and_recovers(stack: Stack) -> None:
    stack.wait_until_ready()
    before = stack.client().chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=2
    )
    os.kill(stack.pid("valkey-server"), signal.SIGKILL)

    def served() -> bool:
        try:
            client = stack.client(timeout=60)
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
        except openai.APIError:
            return False
        return True

    eventually(served)
    assert stack.event(before.headers["x-request-id"])["output"] == 2
