"""Results of one line of a batch: a response, or another attempt."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import redis

from millrace.apps.batches.storage import Storage
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.core.body_memory import BodyMemory
from millrace.gateway.core.errors import ApiError
from millrace.gateway.dispatch.stream_follower import StreamNotFound
from millrace.gateway.lifecycle.batch_lines import BatchHeader, BatchLine
from millrace.gateway.lifecycle.batch_runner import MAX_LOST_WORKERS, BatchRunner, RetryLater
from millrace.gateway.lifecycle.request_log import RequestTrace
from millrace.gateway.prompt_processes.prompt_reader import PromptReader
from millrace.gateway.routing.router import Router
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.gateway.keys import KEY

BODY = {"model": "m", "prompt": "Hello"}


class Service:
    """A fake service that rejects every request."""

    def __init__(self) -> None:
        self.error_to_raise: Exception = RuntimeError()
        self.asked: list[Any] = []

    async def begin(self, key: ApiKeySnapshot, request: Any, dialect: str, request_id: str, trace: Any) -> None:
        self.asked.append((request.service_class.name, dialect, request_id))
        raise self.error_to_raise


class Bench:
    def __init__(self, folder: Path) -> None:
        self.service, self.storage = Service(), Storage(folder)
        unused: Any = None
        prompts = PromptReader(Router({}), unused, unused, 2**20, "reject")
        parts: Any = (
            unused,
            self.storage,
            unused,
            ActiveRequests(),
            unused,
            self.service,
            unused,
            prompts,
            BodyMemory(),
        )
        self.runner = BatchRunner(*parts)

    async def answer(
        self,
        error_to_raise: Exception,
        key: ApiKeySnapshot | None = KEY,
        lost_count: int = 0,
        dialect: str = "openai",
        **body: Any,
    ) -> tuple[int, Any]:
        self.service.error_to_raise = error_to_raise
        url = "/v1/completions"
        text = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": BODY | body}).encode()
        with self.storage.writing("file-1") as file:
            file.write(text)
        line = BatchLine(BatchHeader(1, 1, 1, dialect, url, "file-1"), 0, 0, len(text), "req_1", lost_count, False)
        status, answer = await self.runner._respond(line, key)
        return status, json.loads(answer)

    async def put_off(self, error_to_raise: Exception, **more: Any) -> tuple[float, bool]:
        with pytest.raises(RetryLater) as exc_info:
            await self.answer(error_to_raise, **more)
        return exc_info.value.seconds, exc_info.value.lost


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_temporary_errors_are_retried_later(bench: Bench) -> None:
    assert await bench.put_off(ApiError("rate_limit_exceeded", "", retry_after=7)) == (7, False)
    assert await bench.put_off(ApiError("server_is_overloaded", "", retry_after=3)) == (3, False)
    assert await bench.put_off(ApiError("model_loading", "")) == (1, False)
    assert await bench.put_off(redis.ConnectionError()) == (1, False)
    assert await bench.put_off(ApiError("worker_lost", ""), lost_count=MAX_LOST_WORKERS - 2) == (1, True)
    assert set(bench.service.asked) == {("BATCH", "openai.completion", "req_1")}


async def test_permanent_errors_are_the_lines_result(bench: Bench) -> None:
    answers = [
        (await bench.answer(ApiError("quota_exceeded", "")), 429, "quota_exceeded"),
        (await bench.answer(ApiError("context_length_exceeded", "")), 400, "context_length_exceeded"),
        (await bench.answer(ApiError("not_served", "")), 500, "not_served"),
        (await bench.answer(ApiError("worker_lost", ""), lost_count=MAX_LOST_WORKERS - 1), 503, "worker_lost"),
        (await bench.answer(RuntimeError("of ours")), 500, "internal_error"),
        (await bench.answer(RuntimeError(), stream=True), 400, "invalid_value"),
        (await bench.answer(RuntimeError(), unknown=1), 400, "unknown_parameter"),
    ]
    for (status, body), wanted, code in answers:
        assert (status, body["error"]["code"]) == (wanted, code)
    status, body = await bench.answer(ApiError("model_not_found", "Which?"), dialect="anthropic")
    assert (status, body["error"]) == (404, {"type": "not_found_error", "message": "Which?"})
    assert body["request_id"] == "req_1"


async def test_no_line_runs_with_a_revoked_key(bench: Bench) -> None:
    past = time.time_ns() // 1000 - 1
    dead = [{"revoked": True}, {"suspended": True}, {"expires_at": past}]
    keys = [None, *(msgspec.structs.replace(KEY, **why) for why in dead)]
    assert [(await bench.answer(RuntimeError(), key=key))[0] for key in keys] == [401, 401, 403, 401]
    assert not bench.service.asked


async def test_a_line_that_may_be_billed_is_not_repeated_for_a_lost_response(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line's request ran at another gateway and has ended, and the broker is unreachable at first."""
    errors_to_raise: list[Exception] = [redis.ConnectionError(), redis.TimeoutError(), StreamNotFound()]

    class Unreachable:
        def __init__(self, *_: object) -> None:
            """Raise an error for every followed request."""

        async def events(self) -> AsyncIterator[Any]:
            raise errors_to_raise.pop(0)
            yield

        async def response_spec(self) -> None:
            """Return nothing, since no event needs it."""

    monkeypatch.setattr("millrace.gateway.lifecycle.batch_runner.StreamFollower", Unreachable)
    monkeypatch.setattr("millrace.gateway.lifecycle.batch_runner.FOLLOW_RETRY_SECONDS", 0)
    line = BatchLine(BatchHeader(1, 1, 1, "openai", "/v1/completions", "file-1"), 0, 0, 0, "req_1", 0, True)
    with pytest.raises(RetryLater):
        await bench.runner._respond(line, KEY)
    assert not errors_to_raise


class Desk:
    """A fake of the runner's stores of lines, keys and replicas, with one batch whose lines are claimed in order."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.replicas = self

    def live(self) -> dict[str, SimpleNamespace]:
        return {"r1": SimpleNamespace(max_num_seqs=8)}

    async def due_batches(self) -> list[BatchHeader]:
        return [BatchHeader(1, 1, 1, "openai", "/v1/completions", "file-1")]

    async def claim(self, batch: BatchHeader, most: int) -> list[BatchLine]:
        return [BatchLine(batch, number, 0, 0, f"req_{number}", 0, True) for number in self.numbers]

    async def by_id(self, key_ids: Collection[int]) -> dict[int, ApiKeySnapshot]:
        return {1: KEY}


async def test_a_running_line_is_not_started_again_after_its_lease_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk: Any = Desk([0])
    parts: Any = (desk, Storage(tmp_path), desk, ActiveRequests(), desk, Service(), desk, desk, BodyMemory())
    runner = BatchRunner(*parts)
    begun: list[int] = []

    async def run(line: BatchLine, key: ApiKeySnapshot | None) -> None:
        begun.append(line.number)
        await asyncio.Event().wait()

    monkeypatch.setattr(runner, "_run", run)
    for desk.numbers in ([0], [0, 1]):
        await runner._start_due_lines()
        await asyncio.sleep(0)
    assert begun == [0, 1]
    await runner.stop()


async def test_a_completed_line_has_a_request_record(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[dict[str, Any]] = []

    class Recorder:
        def end(self, trace: RequestTrace, status: str) -> None:
            ended.append(msgspec.to_builtins(trace.record("gw", status, complete=True)))

    class Kept:
        async def store_response(self, *_: object) -> None: ...

        async def requeue(self, *_: object, lost_count: int) -> None: ...

    monkeypatch.setattr(bench.runner, "_request_log", Recorder())
    monkeypatch.setattr(bench.runner, "_lines", Kept())
    with bench.storage.writing("file-1") as file:
        text = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}).encode()
        file.write(text)
    line = BatchLine(BatchHeader(5, 1, 1, "openai", "/v1/completions", "file-1"), 3, 0, len(text), "req_1", 0, False)
    for bench.service.error_to_raise in (
        ApiError("rate_limit_exceeded", "", retry_after=7),
        ApiError("quota_exceeded", ""),
    ):
        await bench.runner._run(line, KEY)
    (record,) = ended  # a postponed line has none
    assert (record["endpoint"], record["batch_id"], record["batch_line"]) == ("batch", 5, 3)
    assert (record["status"], record["outcome"], record["requested_model"]) == ("429", "limited", "m")


async def test_a_line_has_the_limits_of_a_request_body(bench: Bench) -> None:
    status, answer = await bench.answer(RuntimeError(), prompt="x" * 600_000)
    assert (status, answer["error"]["code"], bench.service.asked) == (413, "request_too_large", [])
