"""Web jobs and gateways of a batch with PostgreSQL: every line has one result, whichever process dies."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connection
from psycopg.conninfo import make_conninfo

from millrace.apps.batches import actions, tasks
from millrace.apps.batches.actions import do_advance, storage
from millrace.apps.batches.models import Batch, File, Line
from millrace.apps.batches.storage import new_name
from millrace.apps.feedback import tasks as feedback
from millrace.apps.feedback.models import SubmittedFeedback
from millrace.environment.configuration import platform_settings
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.request_db import TenantConnectionPool
from millrace.gateway.http.endpoints.batches import cancel, find
from millrace.gateway.lifecycle.batch_lines import BatchLineStore
from tenants.actions import do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys.snapshot import ApiKeySnapshot, LimitSnapshot
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db(transaction=True)
URL = "/v1/completions"
ANSWER = b'{"text": "yes"}'
COUNTED = json.dumps(
    {
        "text": "yes",
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    }
).encode()


class Killed(Exception):
    """An error that simulates the job's end at this line."""


class Desk:
    """Helpers of the tests for batches in the database."""

    def __init__(self, rows: TenantConnectionPool) -> None:
        self.rows = rows
        self.one, self.two = BatchLineStore(rows, "gw-1"), BatchLineStore(rows, "gw-2")

    async def make(self, count: int = 4, **fields: Any) -> Batch:
        return await sync_to_async(make_batch)(count, **fields)

    async def advance(self, batch: Batch) -> Batch:
        await sync_to_async(do_advance)(batch.pk)
        return await self.stored(batch)

    async def stored(self, batch: Batch) -> Batch:
        return await sync_to_async(lambda: unscoped(Batch).get(pk=batch.pk))()

    async def results(self, batch: Batch) -> dict[str, Any]:
        batch = await self.stored(batch)
        names = [name for name in (batch.output_file, batch.error_file) if name]
        lines = [json.loads(text) for name in names for text in storage().path(name).read_bytes().splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}

    async def run(self, sql: str, *arguments: Any) -> None:
        async with self.rows.autocommit_connection() as found:
            await found.execute(sql, arguments)

    async def lapse(self) -> None:
        """Let all leases expire."""
        await self.run("UPDATE batches_line SET lease_expires_at = now() - interval '1 second' WHERE state = 'running'")

    async def only(self, lines: BatchLineStore, most: int = 100) -> list[Any]:
        (found,) = await lines.due_batches()
        return list(await lines.claim(found, most))


def make_batch(count: int, **fields: Any) -> Batch:
    tenant = fields.pop("tenant", None) or do_create_tenant(f"t{os.urandom(4).hex()}", "T").pk
    name = new_name("file-")
    line = {"method": "POST", "url": URL, "body": {"model": "m"}}
    with storage().writing(name) as file:
        file.writelines(json.dumps({"custom_id": f"n{n}", **line}).encode() + b"\n" for n in range(count))
    day = datetime.now(UTC) + timedelta(hours=24)
    whose = {"tenant_id": tenant, "project_id": tenant}
    with all_tenants_scope(BypassReason.COMMAND):
        size = storage().path(name).stat().st_size
        File.objects.create(name=name, filename="x", purpose="batch", size=size, expires_at=day, **whose)
        made = {"name": new_name("batch_"), "key_id": 1, "dialect": "openai", "endpoint": URL, "expires_at": day}
        return Batch.objects.create(input_file=name, **{**whose, **made, **fields})


def key_of(batch: Batch, project: int | None = None) -> ApiKeySnapshot:
    whose = (1, batch.tenant_id, project or batch.project_id)
    return ApiKeySnapshot(*whose, ("inference",), None, None, False, False, LimitSnapshot(), 1)


@pytest_asyncio.fixture
async def desk() -> AsyncIterator[Desk]:
    rows = TenantConnectionPool(
        make_conninfo(platform_settings().database_url, dbname=connection.settings_dict["NAME"])
    )
    await rows.open()
    yield Desk(rows)
    await rows.close()
    await sync_to_async(lambda: connection.close())()  # of the thread that has a connection


async def test_a_batch_from_its_file_to_its_results(desk: Desk) -> None:
    batch = await desk.advance(await desk.make(5))
    assert (batch.status, batch.total) == ("in_progress", 5)
    first, second = await desk.only(desk.one, 2), await desk.only(desk.two)
    assert [line.number for line in (*first, *second)] == [0, 1, 2, 3, 4]
    assert len({line.request_id for line in (*first, *second)}) == 5
    assert not any(line.taken_over for line in (*first, *second))
    assert await desk.one.due_batches() == []
    for line in first:
        assert (
            storage()
            .read(line.batch.input_file, line.byte_offset, line.size)
            .startswith(b'{"custom_id": "n%d"' % line.number)
        )
        assert await desk.one.store_response(line, 200, COUNTED if line.number else ANSWER)
    assert (await desk.advance(batch)).status == "in_progress"  # three run
    for line in second:
        assert await desk.two.store_response(line, 200 if line.number < 4 else 400, ANSWER)
    batch = await desk.advance(batch)
    assert (batch.status, batch.succeeded, batch.errored, batch.expired) == ("completed", 4, 1, 0)
    assert batch.usage == {
        **{"input_tokens": 5, "input_tokens_details": {"cached_tokens": 4}},
        **{"output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 7},
    }
    found = await desk.results(batch)
    assert list(found) == ["n0", "n1", "n2", "n3", "n4"]
    assert found["n0"]["response"] == {"status_code": 200, "request_id": first[0].request_id, "body": {"text": "yes"}}
    assert found["n4"]["response"]["status_code"] == 400
    assert await sync_to_async(unscoped(Line).count)() == 0
    again = await desk.advance(batch)  # a job that comes late
    assert (again.output_file, again.completed_at) == (batch.output_file, batch.completed_at)


async def test_lines_of_a_dead_gateway_continue_with_their_requests(desk: Desk) -> None:
    await desk.advance(await desk.make(2))
    (kept, lost) = await desk.only(desk.one)
    await desk.lapse()
    await desk.one.renew_leases()
    assert await desk.two.due_batches() == []  # its leases are renewed
    await desk.lapse()
    taken = await desk.only(desk.two)
    assert [(line.request_id, line.taken_over) for line in taken] == [(kept.request_id, True), (lost.request_id, True)]
    assert not await desk.one.store_response(
        kept, 200, b'{"text": "late"}'
    )  # it is alive after all, but its result is ignored
    await desk.one.requeue(kept, 0, lost_count=3)
    assert await desk.two.store_response(taken[0], 200, ANSWER)
    assert not await desk.two.store_response(taken[0], 200, b'{"text": "twice"}')
    await desk.two.requeue(taken[1], 0, lost_count=1)
    (again,) = await desk.only(desk.one)
    assert not again.taken_over
    assert again.lost_count == 1
    assert again.request_id != lost.request_id


async def test_a_postponed_line_waits(desk: Desk) -> None:
    await desk.advance(await desk.make(1))
    (line,) = await desk.only(desk.one)
    await desk.one.requeue(line, 60, lost_count=0)
    assert await desk.one.due_batches() == []
    await desk.run("UPDATE batches_line SET not_before = now()")
    (line,) = await desk.only(desk.one)
    await desk.one.release(line)
    assert (await desk.only(desk.two))[0].taken_over


async def test_a_cancelled_batch_ends_after_its_running_lines(desk: Desk) -> None:
    batch = await desk.advance(await desk.make(3))
    (line,) = await desk.only(desk.one, 1)
    key = key_of(batch)
    async with desk.rows.tenant_transaction(key.tenant_id) as found:
        assert (await cancel(found, key, "openai", batch.name))["status"] == "cancelling"
    assert await desk.two.due_batches() == []
    assert (await desk.advance(batch)).status == "cancelling"
    await desk.one.store_response(line, 200, ANSWER)
    batch = await desk.advance(batch)
    assert (batch.status, batch.succeeded, batch.cancelled) == ("cancelled", 1, 2)
    found = await desk.results(batch)
    assert [each["error"] and each["error"]["code"] for each in found.values()] == [None, *["batch_cancelled"] * 2]
    async with desk.rows.tenant_transaction(key.tenant_id) as rows:
        assert (await cancel(rows, key, "openai", batch.name))["status"] == "cancelled"


async def test_a_batch_cancelled_before_it_was_read_has_no_results(desk: Desk) -> None:
    batch = await desk.make(3)
    async with desk.rows.tenant_transaction(batch.tenant_id) as rows:
        await cancel(rows, key_of(batch), "openai", batch.name)
    batch = await desk.advance(batch)
    assert (batch.status, batch.total, batch.output_file) == ("cancelled", 0, None)
    async with desk.rows.tenant_transaction(batch.tenant_id) as rows:
        await rows.execute("UPDATE batches_batch SET status = 'completed'")
        with pytest.raises(ApiError, match="completed"):
            await cancel(rows, key_of(batch), "openai", batch.name)


async def test_an_expired_batch_has_an_error_for_each_line_that_did_not_run(desk: Desk) -> None:
    batch = await desk.advance(await desk.make(3))
    (line,) = await desk.only(desk.one, 1)
    await desk.run("UPDATE batches_batch SET expires_at = now()")
    assert await desk.two.due_batches() == []
    assert (await desk.advance(batch)).status == "in_progress"
    await desk.one.store_response(line, 200, ANSWER)
    batch = await desk.advance(batch)
    assert (batch.status, batch.succeeded, batch.expired) == ("expired", 1, 2)
    assert batch.expired_at and not batch.completed_at
    found = await desk.results(batch)
    assert [each["error"] and each["error"]["code"] for each in found.values()] == [None, *["batch_expired"] * 2]


async def test_a_batch_without_its_file_fails(desk: Desk) -> None:
    batch = await desk.make(3)
    storage().remove(batch.input_file)
    batch = await desk.advance(batch)
    assert (batch.status, batch.errors[0]["code"]) == ("failed", "file_not_found")


async def test_anthropics_results_are_one_file(desk: Desk) -> None:
    batch = await desk.advance(await desk.make(3, dialect="anthropic", name=new_name("msgbatch_")))
    for line in await desk.only(desk.one, 2):
        await desk.one.store_response(line, 400 if line.number else 200, ANSWER)
    await desk.run("UPDATE batches_batch SET expires_at = now()")
    await desk.advance(batch)
    assert [each["result"] for each in (await desk.results(batch)).values()] == [
        {"type": "succeeded", "message": {"text": "yes"}},
        {"type": "errored", "error": {"text": "yes"}},
        {"type": "expired"},
    ]


@pytest.mark.parametrize("at", ["_insert_lines", "_write_results", "_move"])
async def test_a_killed_job_changes_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    batch, real = await desk.make(3), getattr(actions, at)

    def die(*arguments: Any, **fields: Any) -> Any:
        real(*arguments, **fields)
        raise Killed

    if at == "_write_results":
        await desk.advance(batch)
        for line in await desk.only(desk.one):
            await desk.one.store_response(line, 200, ANSWER)
    before = await desk.stored(batch)
    with monkeypatch.context() as patch:
        patch.setattr(actions, at, die)
        with pytest.raises(Killed):
            await desk.advance(batch)
    after = await desk.stored(batch)
    assert (after.output_file, after.total) == (before.output_file, before.total)
    if at != "_write_results":
        assert after.status == "validating"
        await desk.advance(batch)
        for line in await desk.only(desk.one):
            await desk.one.store_response(line, 200, ANSWER)
    batch = await desk.advance(batch)
    assert (batch.status, batch.succeeded) == ("completed", 3)
    assert len(await desk.results(batch)) == 3
    assert await sync_to_async(unscoped(File).count)() == 2  # input and output


async def test_concurrent_jobs_run_a_step_once(desk: Desk) -> None:
    batch = await desk.make(200)

    def at_once() -> None:
        def job(_: int) -> None:
            do_advance(batch.pk)
            connection.close()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(job, range(8)))
        do_advance(batch.pk)  # as in the next tick: a job may have left a step to another job

    await sync_to_async(at_once)()
    assert (await desk.stored(batch)).status == "in_progress"
    assert await sync_to_async(unscoped(Line).count)() == 200
    while claimed := await desk.one.due_batches():
        for line in await desk.one.claim(claimed[0], 50):
            await desk.one.store_response(line, 200, ANSWER)
    await sync_to_async(at_once)()
    assert (await desk.stored(batch)).succeeded == 200
    assert await sync_to_async(unscoped(File).count)() == 2


async def test_other_tenants_and_projects_see_no_batch(desk: Desk) -> None:
    batch, other = await desk.make(1), await desk.make(1)
    for key in (key_of(other), key_of(batch, project=batch.project_id + 1000)):
        async with desk.rows.tenant_transaction(key.tenant_id) as rows:
            for act in (find, cancel):
                with pytest.raises(ApiError) as exc_info:
                    await act(rows, key, "openai", batch.name)
                assert exc_info.value.status == 404
    async with desk.rows.tenant_transaction(other.tenant_id) as rows:
        for table in ("batches_batch", "batches_file", "batches_line", "feedback_submittedfeedback"):
            found = await (await rows.execute(f"SELECT tenant_id FROM {table}")).fetchall()  # noqa: S608
            assert {row["tenant_id"] for row in found} <= {other.tenant_id}
        with pytest.raises(Exception, match="row-level security"):
            await rows.execute(
                "INSERT INTO feedback_submittedfeedback (tenant_id, request_id, key_id, success)"
                " VALUES (%s, 'r', 1, true)",
                [batch.tenant_id],
            )


async def test_the_sweep_deletes_only_expired_files_and_batches(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LEFT_OVER_SECONDS", -1)  # everything is old
    sweep: Callable[[], Any] = sync_to_async(tasks.purge_expired)
    used, expired, purged = await desk.make(1), await desk.make(1), await desk.make(1)
    await desk.run("UPDATE batches_file SET expires_at = now() WHERE name <> %s", purged.input_file)
    await desk.run("UPDATE batches_batch SET status = 'completed' WHERE id = %s", expired.pk)
    await desk.run("UPDATE tenants_tenant SET status = 'purged' WHERE id = %s", purged.tenant_id)
    for tenant in (used.tenant_id, purged.tenant_id):
        await desk.run(
            "INSERT INTO feedback_submittedfeedback (tenant_id, request_id, key_id, success) VALUES (%s, 'r', 1, true)",
            tenant,
        )
    stray = new_name("file-")
    storage().path(stray).write_bytes(b"of a crash")
    await sweep()
    there = {
        name: storage().path(name).exists() for name in (used.input_file, expired.input_file, purged.input_file, stray)
    }
    assert there == {used.input_file: True, expired.input_file: False, purged.input_file: False, stray: False}
    names = await sync_to_async(lambda: {file.name for file in unscoped(File).all()})()
    assert names == {used.input_file}
    assert {each.pk for each in await sync_to_async(lambda: unscoped(Batch).all())()} == {used.pk, expired.pk}
    assert await sync_to_async(feedback.purge_expired)() == 1
    assert [each.tenant_id for each in await sync_to_async(lambda: unscoped(SubmittedFeedback).all())()] == [
        used.tenant_id
    ]
