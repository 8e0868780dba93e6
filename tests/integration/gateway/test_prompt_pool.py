"""The pool of prompt processes: fairness between tenants, and processes that die, hang or grow."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from inference_worker.contract.settings import ModelSpec
from millrace.gateway.core import asyncio_utils
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.prompt_processes import prompt_pool
from millrace.gateway.prompt_processes.prompt_frames import PromptTarget, PromptTask, Result
from millrace.gateway.prompt_processes.prompt_pool import PromptPool
from millrace.gateway.prompt_processes.tenant_queue import TenantQueue
from millrace.gateway.protocols.openai import chat
from tests.support.gateway.bundles import load_models
from tests.support.waiting import eventually_async

SPEC = ModelSpec("m", "embedded", "auto")
WORK = PromptTask(chat.DIALECT, {"m": PromptTarget(SPEC.key, 8192)})


@pytest.fixture(scope="module")
def models() -> dict[str, ServedModel]:
    return load_models([SPEC])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer than in production for processes, which start slowly on a busy machine."""
    monkeypatch.setattr(prompt_pool, "WAIT_SECONDS", 60)


@pytest_asyncio.fixture
async def pool(models: dict[str, ServedModel]) -> AsyncIterator[PromptPool]:
    found = PromptPool(models, 1)
    await found.start()
    yield found
    await found.stop()


def body(text: str = "Hello") -> bytes:
    return msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": text}]})


async def tokens(pool: PromptPool, tenant: int = 1, text: str = "Hello") -> int:
    result = await pool.run(tenant, WORK, body(text))
    (prompt,) = result.prompts
    return len(prompt.unpack().ids)


async def process_of(pool: PromptPool, *, other_than: int = 0) -> int:
    return next(iter(await eventually_async(lambda: pool.pids - {other_than})))


async def test_tenants_take_turns() -> None:
    queue: TenantQueue[str] = TenantQueue(3)
    for tenant, job in ((1, "a1"), (1, "a2"), (1, "a3"), (2, "b1"), (3, "c1"), (2, "b2")):
        assert queue.put(tenant, job)
    assert not queue.put(1, "a4")
    assert [await queue.get() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert queue.put(1, "a4")
    assert await queue.get() == "a4"


async def test_a_tenants_queue_is_limited(pool: PromptPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool._queue = TenantQueue(1)
    assert pool._queue.put(1, None)  # type: ignore[arg-type]
    with pytest.raises(ApiError) as exc_info:
        await pool.run(1, WORK, body())
    assert (exc_info.value.status, exc_info.value.code, exc_info.value.retry_after) == (429, "rate_limit_exceeded", 1)


async def test_a_request_that_waits_too_long_is_rejected(
    models: dict[str, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_pool, "WAIT_SECONDS", 0.05)
    with pytest.raises(ApiError) as exc_info:
        await PromptPool(models, 1).run(1, WORK, body())  # not started
    assert (exc_info.value.status, exc_info.value.retry_after) == (503, 1)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_dies_or_hangs_fails_only_its_own_request(
    pool: PromptPool, monkeypatch: pytest.MonkeyPatch, death: signal.Signals
) -> None:
    assert await tokens(pool) > 1
    monkeypatch.setattr(prompt_pool, "WORK_SECONDS", 0.5)
    first = await process_of(pool)
    os.kill(first, signal.SIGSTOP)
    struck = asyncio.create_task(pool.run(1, WORK, body()))
    others = [asyncio.create_task(tokens(pool, tenant)) for tenant in (1, 2)]
    await asyncio.sleep(0.1)
    os.kill(first, death)
    with pytest.raises(ApiError) as exc_info:
        await struck
    assert (exc_info.value.status, exc_info.value.code) == (503, "server_is_overloaded")
    monkeypatch.setattr(prompt_pool, "WORK_SECONDS", 60)
    assert len(set(await asyncio.gather(*others))) == 1
    assert await process_of(pool, other_than=first) != first


async def test_a_process_that_dies_idle_fails_no_request(pool: PromptPool) -> None:
    assert await tokens(pool) > 1
    first = await process_of(pool)
    os.kill(first, signal.SIGKILL)
    assert await process_of(pool, other_than=first)
    assert await tokens(pool) > 1


async def test_an_unexpected_error_does_not_reduce_the_number_of_processes(
    pool: PromptPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await tokens(pool) > 1
    first, close = await process_of(pool), prompt_pool._close

    async def fail(process: asyncio.subprocess.Process) -> None:
        await close(process)
        raise RuntimeError("unexpected")

    monkeypatch.setattr(prompt_pool, "_close", fail)
    os.kill(first, signal.SIGKILL)
    second = await process_of(pool, other_than=first)
    assert await tokens(pool) > 1
    os.kill(second, signal.SIGKILL)
    assert await process_of(pool, other_than=second) not in (first, second)


async def test_a_process_that_has_grown_is_replaced(pool: PromptPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await tokens(pool) > 1
    first = await process_of(pool)
    monkeypatch.setattr(prompt_pool, "MAX_GROWTH_BYTES", -(2**40))
    assert await tokens(pool) > 1
    monkeypatch.setattr(prompt_pool, "MAX_GROWTH_BYTES", 2**40)
    assert await process_of(pool, other_than=first) != first
    assert await tokens(pool) > 1


async def test_the_processes_have_ended_when_the_pool_has_stopped(
    models: dict[str, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop cancels its tasks again while they wait for their processes."""
    monkeypatch.setattr(asyncio_utils, "RETRY_SECONDS", 0.001)
    pool = PromptPool(models, 1)
    await pool.start()
    assert await tokens(pool) > 1
    (pid,) = pool.pids
    await pool.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_disconnected_caller_frees_its_place(models: dict[str, ServedModel]) -> None:
    pool = PromptPool(models, 1)  # not started yet
    gone = asyncio.create_task(pool.run(1, WORK, b"x" * 1000))
    await asyncio.sleep(0)
    gone.cancel()
    worked: list[Any] = []

    class Idle:
        resident_bytes = 0

        async def wait(self) -> None:
            await asyncio.Event().wait()

        async def exchange(self, work: bytes, body: bytes) -> Result:
            worked.append(body)
            return Result(2**50)

    next_ = asyncio.create_task(pool.run(1, WORK, b"y"))
    await asyncio.sleep(0)
    await pool._serve(Idle(), asyncio.Event())  # type: ignore[arg-type]
    assert (await next_).resident_bytes == 2**50
    assert worked == [b"y"]
