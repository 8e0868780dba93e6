"""Limits of the console and the management API: one tenant's requests leave the others and sign-in alone.

Each URL of the resolver is requested many times at once by a tenant. No speed is asserted; `benchmarks.management` has
the times.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.handlers.asgi import ASGIHandler
from django.core.signals import request_started
from django.db import connection
from django.db.backends.postgresql.base import DatabaseWrapper
from django.test import Client
from rest_framework.renderers import JSONRenderer

from frontend.accounts import sessions
from millrace.apps.request_log import api
from millrace.conf import request_slots, web_database
from millrace.conf.request_costs import COSTS, cost_of, cost_of_view
from millrace.conf.request_slots import MAX_EXPENSIVE, MAX_RUNNING, LimitedRequests
from millrace.conf.web_database import SIGN_IN, WEB
from millrace.gateway.auth.callers import CallerStore
from tenants import actions
from tenants.limits import process_buckets
from tenants.limits.process_buckets import ProcessBuckets
from tenants.models import Tenant, User
from tenants.request_costs import PAGE_COST, REPORT_COST, SIMPLE_COST
from tests.support.frontend.console import World, remembered
from tests.support.frontend.routes import all_routes
from tests.support.gateway.budgets import database_url
from tests.support.rows import only_project
from tests.support.waiting import eventually_async

CONCURRENT = 8  # more than twice MAX_RUNNING
ROUTES = [route for route in all_routes() if route.is_of_tenant and not route.is_on_page]
OUTCOMES = "/api/requests/outcomes?model=m&weak=a&strong=b"


class Held:
    """Django, whose requests to a path wait before they run until they are released."""

    def __init__(self) -> None:
        self._django = get_asgi_application()
        self.path = ""
        self.running: Counter[str] = Counter()
        self.released = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.running[path] += 1
        try:
            if path == self.path:
                await self.released.wait()
            await self._django(scope, receive, send)
        finally:
            self.running[path] -= 1


@dataclass(frozen=True)
class Credentials:
    """A key and a session of a tenant and of another one, the session of an operator, and the other tenant's page."""

    key: str
    session: str
    other_key: str
    other_session: str
    operator: str
    other_page: str


class Platform:
    """The console and the management API with their limits."""

    def __init__(self, credentials: Credentials) -> None:
        self.callers = CallerStore(database_url(), settings.MILLRACE.key_peppers)
        self.held = Held()
        self.credentials = credentials
        self._application = LimitedRequests(self.held, lambda: self.callers)

    async def get(self, path: str, *, key: str = "", session: str = "", address: str = "10.0.0.1") -> httpx2.Response:
        transport = httpx2.ASGITransport(app=self._application, client=(address, 1), raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        cookies = {"sessionid": session} if session else {}
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", cookies=cookies) as client:
            return await client.get(path, headers=headers)

    async def flood(self, path: str, **credential: str) -> tuple[list[httpx2.Response], list[asyncio.Task[Any]]]:
        """Send concurrent requests. Return the rejections, and the requests that run until they are released."""
        self.held.path, self.held.released = path.partition("?")[0], asyncio.Event()
        sent = [asyncio.create_task(self.get(path, **credential)) for _ in range(CONCURRENT)]
        most = MAX_EXPENSIVE if cost_of(self.held.path) > 1 else MAX_RUNNING
        await eventually_async(lambda: sum(task.done() for task in sent) >= CONCURRENT - most)
        assert self.held.running[self.held.path] == most, path
        return [task.result() for task in sent if task.done()], [task for task in sent if not task.done()]


def _manage_key(tenant: Tenant) -> str:
    return str(actions.do_create_api_key(only_project(tenant), "manage", scopes=["manage"])[1])


def _member(tenant: Tenant) -> User:
    user = User.objects.create_user(f"member@{tenant.slug}.example")
    actions.do_add_member(tenant, user, "owner")
    return user


def _session(user: User) -> str:
    client = Client()
    client.force_login(user)
    remembered(client.session)
    return str(client.session.session_key)


@pytest.fixture(scope="module")
def credentials(world: World) -> Credentials:
    tenant, other = (world.tenants[state] for state in ("populated", "empty"))
    sessions = _session(_member(tenant)), _session(_member(other))
    keys = _manage_key(tenant), _manage_key(other)
    return Credentials(keys[0], sessions[0], keys[1], sessions[1], _session(world.operator), f"/t/{other.slug}/")


@pytest.fixture(scope="module")
def addresses(world: World) -> dict[str, str]:
    """The URLs of the tenant by route."""
    return {str(route): route.address(world, "populated") for route in ROUTES}


@pytest.fixture
def pools() -> Iterator[None]:
    """Give the requests of this process the pools of a gateway."""
    web_database.use_web_pools()
    yield
    request_started.disconnect(web_database._use_pool, sender=ASGIHandler)
    for name in (WEB, SIGN_IN):
        DatabaseWrapper(web_database._parameters(name), alias=name).close_pool()
    web_database._parameters.cache_clear()


@pytest_asyncio.fixture
async def platform(credentials: Credentials, pools: None) -> AsyncIterator[Platform]:
    platform = Platform(credentials)
    await platform.callers.start()
    yield platform
    await platform.callers.stop()


def pool_of(name: str) -> Any:
    return DatabaseWrapper(web_database._parameters(name), alias=name).pool


def requests_to(name: str) -> int:
    """Return how often a connection of this pool was used."""
    return int(pool_of(name).get_stats().get("requests_num", 0))


def is_rejection(response: httpx2.Response, path: str) -> bool:
    content_type = "application/problem+json" if path.startswith("/api/") else "text/html; charset=utf-8"
    headers = response.headers
    is_clear = headers["content-type"] == content_type and int(headers.get("retry-after", "0")) > 0
    return response.status_code == HTTPStatus.TOO_MANY_REQUESTS and is_clear


async def test_no_url_gives_a_tenant_more_than_its_slots(
    platform: Platform, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each URL of the resolver below /t/<slug>/ and /api/, by a member and by a key, while another tenant works."""
    monkeypatch.setattr(request_slots, "MAX_WAITING", 0)
    theirs, visited, wrong = platform.credentials, 0, []
    sign_ins = requests_to(SIGN_IN)
    for route in ROUTES:
        path = addresses[str(route)]
        credential = {"key": theirs.key} if route.is_api else {"session": theirs.session}
        rejections, running = await platform.flood(path, **credential)
        other = await platform.get(theirs.other_page, session=theirs.other_session)
        platform.held.released.set()
        answers = await asyncio.gather(*running)
        if not all(is_rejection(response, path) for response in rejections):
            wrong.append(f"{path}: not rejected")
        if other.status_code != HTTPStatus.OK:
            wrong.append(f"{path}: the other tenant gets {other.status_code}")
        wrong += [f"{path}: {answer.status_code}" for answer in answers if answer.status_code >= 500]
        visited += 1
    assert wrong == []
    assert visited >= 200
    assert requests_to(SIGN_IN) == sign_ins


@pytest.mark.parametrize("who", ["operator", "visitor", "wrong key", "wrong session"])
async def test_other_callers_have_slots_of_their_own(
    platform: Platform, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_slots, "MAX_WAITING", 0)
    theirs = platform.credentials
    path, credential = {
        "operator": ("/operator/", {"session": theirs.operator}),
        "visitor": ("/login", {}),
        "wrong key": ("/api/keys", {"key": "sk-wrong"}),
        "wrong session": ("/account/", {"session": "wrong"}),
    }[who]
    rejections, running = await platform.flood(path, **credential)
    assert all(is_rejection(response, path) for response in rejections)
    assert (await platform.get("/t/acme/", session=theirs.session)).status_code == HTTPStatus.OK
    platform.held.path = ""
    assert (await platform.get("/login", address="10.0.0.2")).status_code == HTTPStatus.OK
    platform.held.released.set()
    await asyncio.gather(*running)


async def test_a_page_loads_its_panels_in_parallel(platform: Platform, addresses: dict[str, str]) -> None:
    """Six connections of a browser, as many as it opens, for three pages at once."""
    panels = [addresses[str(route)] for route in ROUTES if route.panel][:18]
    answers = await asyncio.gather(*(platform.get(path, session=platform.credentials.session) for path in panels))
    assert [answer.status_code for answer in answers] == [HTTPStatus.OK] * len(panels)


async def test_the_cost_of_a_minute_is_limited(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = platform.credentials
    budgets = ProcessBuckets(60)
    monkeypatch.setattr(platform._application, "_budgets", budgets)
    monkeypatch.setattr(process_buckets.time, "monotonic", lambda: 1000.0)
    answers = [await platform.get(OUTCOMES, key=theirs.key) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert is_rejection(answers[2], OUTCOMES)
    assert answers[2].headers["retry-after"] == "30"
    assert (await platform.get("/api/keys", key=theirs.key)).status_code == 429
    assert (await platform.get("/api/keys", key=theirs.other_key)).status_code == 200
    assert (await platform.get("/t/acme/", session=theirs.session)).status_code == 200  # a budget of its own


def test_each_cost_is_of_a_url() -> None:
    routes = all_routes()
    assert set(COSTS) <= {route.name for route in routes if not hasattr(route.view, "request_cost")}
    assert (cost_of("/api/requests/outcomes"), cost_of("/api/keys"), cost_of("/none")) == (
        COSTS["api-requests-outcomes"],
        1,
        1,
    )
    costs = [cost_of(path) for path in ("/t/acme/settings/", "/t/acme/usage/", "/t/acme/usage/csv")]
    assert costs == [SIMPLE_COST, PAGE_COST, REPORT_COST]
    reports = [route for route in routes if route.name.endswith(("-export", "-csv", "-preview", "-dry-run"))]
    assert len(reports) > 20
    assert min(cost_of_view(route.view, route.name) for route in reports) >= REPORT_COST


@contextmanager
def changed(**fields: Any) -> Iterator[None]:
    before = settings.MILLRACE
    settings.MILLRACE = replace(before, **fields)
    try:
        yield
    finally:
        settings.MILLRACE = before


async def test_a_statement_has_a_time_limit(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(*_: Any, **__: Any) -> Any:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(60)")

    monkeypatch.setattr(api, "labeled_outcomes", sleep)
    monkeypatch.setattr(sessions, "sessions_of", sleep)
    with changed(statement_timeout_seconds=1):
        answer = await platform.get(OUTCOMES, key=platform.credentials.key)
        page = await platform.get("/account/", session=platform.credentials.session)
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["title"]) == (504, "timeout", "Gateway Timeout")
    assert answer.headers["content-type"] == "application/problem+json"
    assert (page.status_code, "Time limit exceeded" in page.text) == (504, True)


async def test_an_answer_is_written_without_a_connection(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    pool, lent, uses = pool_of(WEB), set[int](), 0
    lend, take_back, render = pool.getconn, pool.putconn, JSONRenderer.render

    def getconn(*args: Any, **kwargs: Any) -> Any:
        nonlocal uses
        uses += 1
        connection = lend(*args, **kwargs)
        lent.add(id(connection))
        return connection

    def putconn(connection: Any) -> None:
        lent.discard(id(connection))
        take_back(connection)

    def observed(*args: Any, **kwargs: Any) -> bytes:
        taken.append(len(lent))
        return render(*args, **kwargs)

    monkeypatch.setattr(pool, "getconn", getconn)
    monkeypatch.setattr(pool, "putconn", putconn)
    monkeypatch.setattr(JSONRenderer, "render", observed)
    for path in ("/api/usage", "/api/keys", OUTCOMES):
        assert (await platform.get(path, key=platform.credentials.key)).status_code == HTTPStatus.OK
    assert taken == [0, 0, 0]
    assert uses >= len(taken)


async def test_sign_in_works_while_the_pool_of_pages_is_exhausted(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = platform.credentials
    pool = pool_of(WEB)
    monkeypatch.setattr(pool, "timeout", 0.1)
    pool.open()
    taken = [await sync_to_async(pool.getconn)(10) for _ in range(pool.max_size)]
    try:
        answer = await platform.get("/api/keys", key=theirs.key)
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) > 0
        page = await platform.get("/t/acme/", session=theirs.session)
        assert (page.status_code, "Platform busy" in page.text) == (503, True)
        assert (await platform.get("/login")).status_code == HTTPStatus.OK
        assert (await platform.get("/account/", session=theirs.session)).status_code == HTTPStatus.OK
    finally:
        for each in taken:
            pool.putconn(each)
    assert (await platform.get("/api/keys", key=theirs.key)).status_code == HTTPStatus.OK
