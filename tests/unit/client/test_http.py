"""Requests of the client: credentials, bodies, pages, retries and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx2
import pytest

from millrace import client as m
from millrace.client.http import MAX_DELAY_SECONDS, Http, Options, retry_after

Reply = httpx2.Response | Exception


class Server:
    """A server that gives the replies in order, and records the requests."""

    def __init__(self, *replies: Reply) -> None:
        self._replies = list(replies)
        self.requests: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def ok(value: Any, status: int = 200) -> httpx2.Response:
    return httpx2.Response(status, json=value)


def problem(status: int, code: str = "", headers: dict[str, str] | None = None, **fields: Any) -> httpx2.Response:
    body = {"type": "about:blank", "status": status, "code": code, **fields}
    return httpx2.Response(status, json=body, headers=headers)


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[m.Client, Server, list[float]]]:
    """Return a function that makes a client of a server with these replies, and a list of its waits."""

    def connect(*replies: Reply, **options: Any) -> tuple[m.Client, Server, list[float]]:
        server = Server(*replies)
        given = {"api_key": "sk-mr-x"} | options
        client = m.Client("http://host:8000/", transport=httpx2.MockTransport(server), **given)
        waits: list[float] = []
        monkeypatch.setattr(client._http, "_sleep", waits.append)
        return client, server, waits

    return connect


def test_request_has_the_key_the_path_and_the_query(connect):
    client, server, _ = connect(ok({"results": [], "next": None}))
    assert list(client.keys.list(live=True, project=3)) == []
    assert str(server.requests[0].url) == "http://host:8000/api/keys?live=true&project=3"
    assert server.requests[0].headers["authorization"] == "Bearer sk-mr-x"


def test_body_has_only_the_given_arguments(connect):
    client, server, _ = connect(ok({"id": 1}, 201))
    client.keys.create(name="ci", expires_at=None, scopes=["inference"])
    assert json.loads(server.requests[0].content) == {"name": "ci", "expires_at": None, "scopes": ["inference"]}


def test_times_are_sent_as_iso(connect):
    client, server, _ = connect(ok({"rows": []}), ok({"id": 1}))
    client.usage.get(from_=datetime(2026, 11, 1, tzinfo=UTC))
    assert server.requests[0].url.params["from"] == "2026-11-01T00:00:00+00:00"
    client.keys.update(4, expires_at=datetime(2027, 1, 1, tzinfo=UTC))
    assert json.loads(server.requests[1].content) == {"expires_at": "2027-01-01T00:00:00+00:00"}


def test_session_sends_its_cookies_and_csrf_token(connect):
    client, server, _ = connect(ok({}), api_key=None, cookies={"sessionid": "s", "csrftoken": "t"})
    client.operator.tenants.suspend(1)
    headers = server.requests[0].headers
    assert headers["x-csrftoken"] == "t"
    assert "sessionid=s" in headers["cookie"]
    assert "authorization" not in headers


@pytest.mark.parametrize("options", [{"api_key": None}, {"cookies": {"sessionid": "s"}}])
def test_client_takes_either_a_key_or_a_session(connect, options):
    with pytest.raises(ValueError, match="api_key, or the cookies"):
        connect(**options)


def test_client_rejects_an_address_without_a_scheme():
    with pytest.raises(ValueError, match="http://"):
        m.Client("localhost:8000", "sk-mr-x")


def test_secrets_are_not_in_the_options_text():
    assert "sk-mr" not in repr(Options("http://host", "sk-mr-x"))


# Pages


def page(*rows: int, cursor: str | None = None) -> httpx2.Response:
    link = f"http://elsewhere/api/keys?cursor={cursor}&live=true" if cursor else None
    return ok({"next": link, "previous": None, "results": [{"id": row} for row in rows]})


def test_iteration_follows_the_pages_at_the_same_host(connect):
    client, server, _ = connect(page(3, 2, cursor="abc%3D"), page(1))
    assert [key["id"] for key in client.keys.list(live=True)] == [3, 2, 1]
    assert [request.url.host for request in server.requests] == ["host", "host"]
    assert dict(server.requests[1].url.params) == {"live": "true", "cursor": "abc="}


def test_pages_are_requested_when_they_are_needed(connect):
    client, server, _ = connect(page(3, cursor="abc"), page(2))
    rows = iter(client.keys.list(page_size=1))
    assert next(rows)["id"] == 3
    assert len(server.requests) == 1
    assert next(rows)["id"] == 2


def test_each_iteration_starts_at_the_first_page(connect):
    client, _, _ = connect(page(2, cursor="abc"), page(1), page(2, cursor="abc"), page(1))
    keys = client.keys.list()
    assert [len(rows) for rows in keys.pages()] == [1, 1]
    assert len(list(keys)) == 2


async def test_asynchronous_iteration():
    server = Server(page(3, cursor="abc"), page(2))
    async with m.AsyncClient("http://host", "sk-mr-x", transport=httpx2.MockTransport(server)) as client:
        assert [key["id"] async for key in client.keys.list()] == [3, 2]


# Retries


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_transient_errors_are_retried_with_growing_waits(connect, status):
    client, server, waits = connect(*[problem(status)] * 3, ok({"id": 1}))
    client.keys.get(1)
    assert len(server.requests) == 4
    assert all(0.5 <= wait / (0.5 * 2**n) <= 1 for n, wait in enumerate(waits))


def test_waits_have_a_maximum(connect):
    client, _, waits = connect(*[problem(503)] * 9, ok({}), max_retries=9)
    client.keys.get(1)
    assert max(waits) <= MAX_DELAY_SECONDS


def test_retry_after_is_honored(connect):
    client, _, waits = connect(problem(429, headers={"Retry-After": "7"}), ok({}))
    client.keys.get(1)
    assert waits == [7.0]


def test_a_longer_retry_after_is_an_error(connect):
    client, server, waits = connect(problem(429, headers={"Retry-After": "3600"}))
    with pytest.raises(m.RateLimited) as caught:
        client.keys.get(1)
    assert (caught.value.retry_after, waits, len(server.requests)) == (3600.0, [], 1)


@pytest.mark.parametrize("value", ["soon", "", "Wed, 99 Nov"])
def test_invalid_retry_after_is_ignored(value):
    assert retry_after(httpx2.Response(429, headers={"Retry-After": value})) is None


def test_retry_after_may_be_a_date():
    later = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    wait = retry_after(httpx2.Response(503, headers={"Retry-After": later}))
    assert wait is not None
    assert 3000 < wait <= 3600


def test_all_attempts_of_a_creation_have_one_idempotency_key(connect):
    client, server, _ = connect(httpx2.ReadTimeout("slow"), problem(503), ok({"id": 1}), ok({"id": 2}))
    client.keys.create(name="a")
    client.keys.create(name="a")
    keys = [request.headers["idempotency-key"] for request in server.requests]
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]


def test_the_callers_idempotency_key_is_sent(connect):
    client, server, _ = connect(ok({"id": 1}))
    client.budgets.create(name="a", amount=1, unit="money", period="month", idempotency_key="order-17")
    assert server.requests[0].headers["idempotency-key"] == "order-17"


def test_conflict_with_the_running_first_call_is_retried(connect):
    client, _, waits = connect(problem(409, "conflict", {"Retry-After": "1"}), ok({"id": 1}))
    assert client.keys.create(name="a")["id"] == 1
    assert waits == [1.0]


def test_deletion_whose_response_was_lost_is_done(connect):
    client, _, _ = connect(httpx2.ReadError("gone"), problem(404, "not_found"))
    client.keys.revoke(1)


@pytest.mark.parametrize("before", [(), (problem(503),), (problem(429, headers={"Retry-After": "1"}),)])
def test_deletion_of_a_missing_object_is_an_error(connect, before):
    client, _, _ = connect(*before, problem(404, "not_found"))
    with pytest.raises(m.NotFound):
        client.keys.revoke(1)


@pytest.mark.parametrize("key", ["sk-mr-secret\n", "sk mr", "sk-mr-é"])
def test_malformed_key_is_rejected_without_being_printed(key):
    with pytest.raises(ValueError, match="API key") as exc_info:
        m.Client("http://host:8000", key)
    assert "secret" not in str(exc_info.value)


def test_malformed_url_is_rejected():
    with pytest.raises(ValueError, match="base_url is not a URL"):
        m.Client("http://host:abc", "sk-mr-x")


@pytest.mark.parametrize("reply", [problem(500), problem(504, "timeout")], ids=["error", "statement timeout"])
def test_other_errors_are_not_retried(connect, reply):
    client, server, _ = connect(reply)
    with pytest.raises(m.ServerError):
        client.keys.get(1)
    assert len(server.requests) == 1


def test_unreachable_server(connect):
    client, server, _ = connect(*[httpx2.ConnectError("refused")] * 4)
    with pytest.raises(m.ConnectionFailed, match=r"http://host:8000/api/keys/1 does not respond: refused"):
        client.keys.get(1)
    assert len(server.requests) == 4


async def test_asynchronous_client_retries(monkeypatch):
    server = Server(httpx2.ConnectError("refused"), problem(429, headers={"Retry-After": "2"}), ok({"id": 1}))
    client = m.AsyncClient("http://host", "sk-mr-x", transport=httpx2.MockTransport(server))
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(client._http, "_sleep", sleep)
    assert (await client.keys.create(name="a"))["id"] == 1
    assert waits[1] == 2.0
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 1
    await client.close()


# Errors


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "invalid", m.InvalidRequest),
        (401, "authentication_failed", m.AuthenticationFailed),
        (403, "not_authenticated", m.AuthenticationFailed),
        (403, "permission_denied", m.PermissionDenied),
        (403, "reauthentication_required", m.ReauthenticationNeeded),
        (404, "not_found", m.NotFound),
        (409, "conflict", m.ConflictError),
        (418, "", m.StatusError),
        (500, "", m.ServerError),
    ],
)
def test_error_type(connect, status, code, expected):
    client, _, _ = connect(problem(status, code, detail="It failed."))
    with pytest.raises(m.StatusError, match=r"It failed\.") as caught:
        client.keys.create(name="a")
    assert type(caught.value) is expected
    assert (caught.value.status, caught.value.code) == (status, code)


def test_error_names_the_fields(connect):
    client, _, _ = connect(problem(400, "invalid", errors={"name": ["Too long.", "Odd."], "prices": [{"a": ["No."]}]}))
    with pytest.raises(m.InvalidRequest, match=r"name: Too long\. Odd\.; prices: a: No\."):
        client.keys.create(name="a")


def test_error_without_json(connect):
    client, _, _ = connect(httpx2.Response(500, text="<h1>Bad gateway</h1>"))
    with pytest.raises(m.ServerError, match="Bad gateway"):
        client.keys.get(1)


def test_another_server(connect):
    client, _, _ = connect(httpx2.Response(200, text="<html>"))
    with pytest.raises(m.ConnectionFailed, match="is it a Millrace server"):
        client.keys.get(1)


def test_files_and_empty_responses(connect):
    client, _, _ = connect(
        httpx2.Response(200, content=b"%PDF"), httpx2.Response(200, text="a,b"), httpx2.Response(204)
    )
    assert client.invoices.pdf(1) == b"%PDF"
    assert client.invoices.csv(1) == "a,b"
    assert client.keys.revoke(1) is None


def test_http_is_closed():
    http = Http(Options("http://host", "sk-mr-x"), httpx2.MockTransport(Server()))
    http.close()
    with pytest.raises(RuntimeError, match="closed"):
        http.call("GET", "keys")
