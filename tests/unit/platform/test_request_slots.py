"""Limits of concurrent requests to the console and the management API, without Django's views and a database."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from millrace.conf import request_slots
from millrace.conf.request_slots import MAX_RUNNING, MAX_WAITING, LimitedRequests
from millrace.gateway.auth.callers import Caller, credential_of
from tests.support.waiting import eventually_async

ALL = MAX_RUNNING + MAX_WAITING
CALLERS = {
    "key a1": Caller("key 1", key_tenant_id=1),
    "key a2": Caller("key 2", key_tenant_id=1),
    "key b1": Caller("key 3", key_tenant_id=2),
    "session ann": Caller("user 1", {"a": 1}),
    "session bob": Caller("user 2", {"a": 1, "b": 2}),
    "session op": Caller("user 3"),
}


class Callers:
    async def find(self, credential: str) -> Caller | None:
        return CALLERS.get(credential)


class Site:
    """A fake Django whose requests run until they are released."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.released = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = dict(scope["headers"]).get(b"x-name", b"").decode()
        assert [(await receive())["body"] for _ in range(2)] == [b"bo", b"dy"]
        self.running[name] += 1
        self.most[name] = max(self.most[name], self.running[name])
        await self.released.wait()
        self.running[name] -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Served:
    """The limits before a fake Django."""

    def __init__(self) -> None:
        self.site = Site()
        self._application = LimitedRequests(self.site, Callers)  # type: ignore[arg-type]

    def send(
        self, name: str = "", path: str = "/api/keys", query: str = "", address: str = "10.0.0.1"
    ) -> asyncio.Task[Any]:
        return asyncio.create_task(self._send(name, path, query, address))

    async def _send(self, name: str, path: str, query: str, address: str) -> tuple[int, dict[str, str], bytes]:
        kind, _, secret = name.partition(" ")
        headers = {"key": [(b"x-api-key", secret.encode())], "session": [(b"cookie", f"sessionid={secret}".encode())]}
        scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "client": (address, 1)}
        sent: list[Any] = []
        parts = [(b"bo", True), (b"dy", False)]

        async def receive() -> dict[str, Any]:
            body, more = parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": more}

        async def keep(message: Any) -> None:
            sent.append(message)

        found = [*headers.get(kind, []), (b"x-name", name.encode())]
        await self._application({**scope, "headers": found}, receive, keep)
        start = sent[0]
        return start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, sent[1]["body"]

    async def wait_for(self, number: int) -> None:
        await eventually_async(lambda: sum(self.site.running.values()) >= number)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for a moment only."""
    monkeypatch.setattr(request_slots, "WAIT_SECONDS", 0.05)


@pytest.mark.parametrize(
    ("sender", "path", "others"),
    [
        ("key a1", "/api/keys", ("key b1", "session bob", "session op", "")),
        ("session ann", "/t/a/members/", ("key b1", "session bob", "session op", "")),
        ("session op", "/operator/", ("key a1", "key b1", "session ann", "")),
        ("", "/login", ("key a1", "key b1", "session ann", "session op")),
        ("key wrong", "/api/keys", ("key a1", "key b1", "session ann", "session op")),
        ("session wrong", "/account/", ("key a1", "key b1", "session ann", "session op")),
    ],
)
async def test_a_caller_runs_at_most_three_requests_and_delays_no_other(
    sender: str, path: str, others: tuple[str, ...]
) -> None:
    served = Served()
    sent = [served.send(sender, path) for _ in range(ALL + 10)]
    await served.wait_for(MAX_RUNNING)
    rejected = [await task for task in sent if task.done() or sent.index(task) >= ALL]
    assert [status for status, _, _ in rejected] == [429] * 10
    assert all(int(headers.get("retry-after", "0")) > 0 for _, headers, _ in rejected)
    for name in others:
        other_path = "/t/b/keys/" if name == "session bob" else "/api/keys" if name.startswith("key") else "/account/"
        served.send(name, other_path, address="10.0.0.2")
    await served.wait_for(MAX_RUNNING + len(others))
    served.site.released.set()
    assert [status for status, _, _ in await asyncio.gather(*sent[:ALL])] == [200] * ALL
    assert served.site.most[sender] == MAX_RUNNING


async def test_all_keys_and_users_of_a_tenant_share_its_slots() -> None:
    served = Served()
    callers = [
        ("key a1", "/api/keys"),
        ("key a2", "/api/keys"),
        ("session ann", "/t/a/members/"),
        ("session bob", "/t/a/members/"),
    ]
    sent = [served.send(*caller) for _ in range(3) for caller in callers]
    await served.wait_for(MAX_RUNNING)
    await asyncio.sleep(0)
    assert sum(served.site.running.values()) == MAX_RUNNING
    served.site.released.set()
    assert [status for status, _, _ in await asyncio.gather(*sent)] == [200] * len(sent)


async def test_expensive_requests_of_a_tenant_run_one_at_a_time_and_leave_its_slots_free() -> None:
    served = Served()
    expensive = [served.send(name, "/api/usage") for name in ("key a1", "key a2") for _ in range(4)]
    await served.wait_for(1)
    for _ in range(50):  # turns of the event loop
        await asyncio.sleep(0)
    assert sum(served.site.running.values()) == 1
    others = [served.send(name) for name in ("key a1", "key a2")]
    await served.wait_for(3)
    assert sum(served.site.running.values()) == MAX_RUNNING
    served.site.released.set()
    assert [status for status, _, _ in await asyncio.gather(*expensive, *others)] == [200] * 10


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("name", "path", "content_type"),
    [("key a1", "/api/keys", "application/problem+json"), ("session ann", "/t/a/members/", "text/html; charset=utf-8")],
)
async def test_a_request_that_waits_too_long_is_rejected(name: str, path: str, content_type: str) -> None:
    served = Served()
    running = [served.send(name, path) for _ in range(MAX_RUNNING)]
    await served.wait_for(MAX_RUNNING)
    status, headers, body = await served.send(name, path)
    assert (status, headers["content-type"], int(headers["retry-after"]) > 0) == (429, content_type, True)
    if name.startswith("key"):
        problem = json.loads(body)
        assert (problem["status"], problem["code"], problem["title"]) == (429, "throttled", "Too Many Requests")
    else:
        assert b"Too many requests" in body
        assert "content-security-policy" in headers
    served.site.released.set()
    await asyncio.gather(*running)
    assert (await served.send(name, path))[0] == 200


async def test_a_waiting_request_that_is_cancelled_frees_its_place() -> None:
    served = Served()
    sent = [served.send("key a1") for _ in range(ALL)]
    await served.wait_for(MAX_RUNNING)
    sent[-1].cancel()
    await asyncio.wait([sent[-1]])
    assert not served.send("key a1").done()
    served.site.released.set()
    assert [status for status, _, _ in await asyncio.gather(*sent[:-1])] == [200] * (ALL - 1)


async def test_static_files_take_no_slot() -> None:
    served = Served()
    for _ in range(ALL + 5):
        served.send("session ann", "/static/frontend/console.css")
    await served.wait_for(ALL + 5)


@pytest.mark.parametrize(
    ("name", "path", "query", "tenant"),
    [
        ("key a1", "/api/keys", "", 1),
        ("key a1", "/api/keys", "tenant=b", 1),
        ("session ann", "/api/keys", "", 1),
        ("session ann", "/t/a/usage", "", 1),
        ("session ann", "/t/b/usage", "", None),  # not a member: no slot of that tenant
        ("session ann", "/api/keys", "tenant=b", None),
        ("session ann", "/account/", "", None),
        ("session bob", "/api/keys", "tenant=a&tenant=b", 2),
        ("session op", "/t/a/usage", "", None),
        ("session op", "/api/operator/tenants", "", None),
    ],
)
def test_the_tenant_of_a_request(name: str, path: str, query: str, tenant: int | None) -> None:
    assert CALLERS[name].tenant_id(path, query.encode()) == tenant


@pytest.mark.parametrize(
    ("path", "headers", "credential"),
    [
        ("/api/keys", [(b"authorization", b"Bearer sk-1")], "key sk-1"),
        ("/api/keys", [(b"x-api-key", b"sk-1"), (b"cookie", b"sessionid=abc")], "key sk-1"),
        ("/t/a/", [(b"x-api-key", b"sk-1"), (b"cookie", b"a=b; sessionid=abc")], "session abc"),
        ("/t/a/", [(b"cookie", b"sessionid=abc"), (b"cookie", b"a=b")], "session abc"),
        ("/t/a/", [(b"x-api-key", b"sk-1")], None),
        ("/api/keys", [(b"authorization", b"Basic x")], None),
        ("/api/keys", [(b"authorization", b"Bearer sk-1"), (b"authorization", b"Bearer sk-2")], "key sk-1,Bearer sk-2"),
        ("/api/keys", [(b"cookie", b'sessionid="\\000"')], None),
        ("/api/keys", [(b"cookie", b"\xff\xff")], None),
        ("/api/keys", [], None),
    ],
)
def test_the_credential_of_a_request(path: str, headers: list[tuple[bytes, bytes]], credential: str | None) -> None:
    assert credential_of(path, headers) == credential
