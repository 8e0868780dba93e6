"""Workers that pause and return: their streams continue, waiting requests move, and none is billed twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import msgspec
import pytest
import redis

from inference_worker.contract.messages import (
    REPLICA_LOST_SECONDS,
    REPLICA_SUSPECT_SECONDS,
    REPLICAS_KEY,
    decode_heartbeat,
    event_log_key,
)
from millrace.environment.configuration import read_env_file
from millrace.local.program import die_with_parent
from tests.support.e2e.streams import Stream, usage_of
from tests.support.stack import EMBEDDING_MODEL, MODEL, Stack, eventually

pytestmark = pytest.mark.usefixtures("balanced_books")


@contextmanager
def stopped(pid: int) -> Iterator[float]:
    """Stop a process until the end of the block, and yield the time of the stop."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.kill(pid, signal.SIGCONT)


def begin_streams(stack: Stack, max_tokens: int) -> list[Stream]:
    stack.wait_until_ready()
    streams = [Stream(stack, max_tokens=max_tokens) for _ in range(4)]
    for stream in streams:
        stream.read(4)
    return streams


def model_check(stack: Stack) -> str:
    return str(httpx2.get(f"{stack.url}/readyz", timeout=20).json()["checks"][f"model {MODEL}"])


def test_a_worker_stopped_for_four_seconds_loses_no_stream(stack: Stack) -> None:
    streams = begin_streams(stack, 150)
    with stopped(stack.worker()) as since:
        eventually(lambda: model_check(stack) != "ok", REPLICA_LOST_SECONDS)
        assert time.monotonic() - since > REPLICA_SUSPECT_SECONDS - 1
        response = httpx2.post(
            f"{stack.url}/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]},
            headers=stack.headers,
            timeout=60,
        )
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_loading")
        time.sleep(max(0.0, since + 4 - time.monotonic()))
    for stream in streams:
        stream.read()
        assert usage_of(stream.datas)["completion_tokens"] == 150
    stack.wait_until_ready()
    for stream in streams:
        event = stack.event(stream.request_id)
        assert (event["outcome"], event["output"]) == ("completed", 150)


def test_a_worker_stopped_for_twelve_seconds_fails_its_streams_once(stack: Stack) -> None:
    streams = begin_streams(stack, 1500)
    with stopped(stack.worker()) as since:
        for stream in streams:
            stream.read()
            assert msgspec.json.decode(stream.datas[-1])["error"]["code"] == "worker_lost"
        assert REPLICA_LOST_SECONDS - 1 < time.monotonic() - since < REPLICA_LOST_SECONDS + 5
        time.sleep(max(0.0, since + 12 - time.monotonic()))
    stack.wait_until_ready()
    eventually(lambda: stack.metric("millrace_kv_blocks_used") == 0)  # it was cancelled before the end
    answer = stack.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=3
    )
    assert answer.choices[0].message.content
    for stream in streams:
        event = stack.event(stream.request_id)
        assert (event["outcome"], event["input"], event["output"]) == ("failed", 0, 0)
        assert len(stack.events(request_id=stream.request_id)) == 1


@pytest.fixture
def broker(stack: Stack) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(read_env_file(stack.data_dir / "env")["MILLRACE_VALKEY_URL"]) as broker:
        yield broker


@pytest.fixture
def second_worker(stack: Stack, broker: redis.Redis) -> Iterator[subprocess.Popen[bytes]]:
    """Start another worker of the model, without a supervisor."""
    stack.wait_until_ready()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "DJANGO_"))}
    stored = read_env_file(stack.data_dir / "env")
    environ |= {
        "MILLRACE_DATA_DIR": str(stack.data_dir),
        **{name: stored[name] for name in ("MILLRACE_VALKEY_URL", "MILLRACE_WORKER_SECRET")},
        "MILLRACE_MODELS": f"{MODEL}=embedded?dtype=float32,{EMBEDDING_MODEL}=embedded:minilm",
        "MILLRACE_WORKER_MODEL": MODEL,
        "MILLRACE_WORKER_NAME": f"{MODEL}-1",
        "MILLRACE_MAX_NUM_SEQS": "128",
    }
    with (stack.data_dir / "second-worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "inference_worker"],
            env=environ,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )
    try:
        eventually(lambda: len(replicas(broker)) == 2, 120)
        time.sleep(1)  # after two heartbeats, gateways treat it as live
        yield process
    finally:
        process.terminate()
        process.wait(60)
        eventually(lambda: len(replicas(broker)) == 1)


def replicas(broker: redis.Redis) -> list[str]:
    """Return the model's replicas in the heartbeat table."""
    board: Any = broker.hgetall(REPLICAS_KEY)
    return [name.decode() for name, beat in board.items() if decode_heartbeat(beat).model == MODEL]


def claimed_without_tokens(broker: redis.Redis, worker: str) -> set[str]:
    """Return the requests that the worker has claimed and that have no event yet."""
    found = set()
    for key in broker.scan_iter("millrace:claim:*", count=1000):
        request_id = key.decode().split(":")[2]
        claim: Any = broker.hmget(key, "state", "owner", "attempt")
        state, owner, attempt = claim
        claimed = state == b"running" and owner.decode().startswith(worker + ".")
        if claimed and not broker.exists(event_log_key(request_id, int(attempt))):
            found.add(request_id)
    return found


@pytest.mark.extended  # with a replica of the test: tests/integration/gateway/test_lost_replicas.py
@pytest.mark.usefixtures("second_worker")
def test_waiting_requests_move_from_a_stopped_worker_and_are_billed_once(stack: Stack, broker: redis.Redis) -> None:
    first = stack.worker_name

    def send(number: int) -> tuple[str, int]:
        content = f"{number} is the number. " + "apple pear plum cherry quince " * 150
        raw = stack.client(timeout=120).chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],
            max_tokens=3,
            extra_body={"ignore_eos": True},
        )
        usage = raw.parse().usage
        assert usage is not None
        return raw.headers["x-request-id"], usage.completion_tokens

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(send, number) for number in range(12)]
        eventually(lambda: len(claimed_without_tokens(broker, first)) > 1)
        with stopped(stack.worker()) as since:
            time.sleep(0.2)
            left_behind = claimed_without_tokens(broker, first)
            assert left_behind
            eventually(lambda: not claimed_without_tokens(broker, first), REPLICA_LOST_SECONDS)
            assert time.monotonic() - since < REPLICA_LOST_SECONDS  # because it is suspected
            # A busy machine takes a minute for twelve long prompts.
            eventually(lambda: all(stack.events(request_id=request_id) for request_id in left_behind), 180)
        answers = dict(answer.result() for answer in asked)
    assert set(answers.values()) == {3}
    assert left_behind <= answers.keys()
    stack.wait_until_ready()
    eventually(lambda: stack.metric("millrace_kv_blocks_used") == 0)
    for request_id in answers:
        event = stack.event(request_id)
        assert (event["outcome"], event["output"]) == ("completed", 3)
        assert len(stack.events(request_id=request_id)) == 1
