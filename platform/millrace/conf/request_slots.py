"""Limits of concurrent requests to the console and the management API, enforced before Django.

A caller (an API key, a user, or the network of a visitor) has `MAX_RUNNING` concurrent requests, and so has a tenant.
Further requests wait for a short time, so that a page can load its panels in parallel. Then they are rejected with 429.
A request takes the slot of its caller before the slot of its tenant, so one caller of a tenant cannot fill the tenant's
queue. Expensive requests run one at a time: their threads compute in Python, and more would only delay other threads.

A tenant's API keys, each user and each network of visitors also have a budget per minute, which each request reduces by
its cost (`millrace.conf.request_costs`). The limits apply to each gateway process.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from io import BytesIO
from typing import Any

import structlog
from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse
from django.template.loader import render_to_string
from django.utils import translation
from django.utils.module_loading import import_string

from millrace.conf.request_costs import cost_of
from millrace.gateway.auth.callers import CallerStore, credential_of
from tenants import problems
from tenants.keys.ip_allowlist import client_network
from tenants.limits.process_buckets import ProcessBuckets

log = structlog.get_logger(__name__)

MAX_RUNNING, MAX_EXPENSIVE = 3, 1
MAX_WAITING = 24
WAIT_SECONDS = 5.0
RETRY_AFTER_SECONDS = 2
LOG_SECONDS = 10.0  # at most one line in this time


class TooManyRequests(Exception):
    """A rejected request; retry after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"retry after {seconds} s")
        self.seconds = seconds


class _Slots:
    """The slots of one caller or tenant."""

    def __init__(self, max_running: int) -> None:
        self.free = asyncio.Semaphore(max_running)
        self.max_requests = max_running + MAX_WAITING
        self.requests = 0  # running and waiting


class RequestSlots:
    """The slots of a process. Names without requests take no memory."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slots] = {}

    @asynccontextmanager
    async def take(self, name: str, max_running: int = MAX_RUNNING) -> AsyncIterator[None]:
        """Take a slot until the block ends.

        Raises:
            TooManyRequests: too many requests wait, or no slot was free in time.
        """
        slots = self._slots.setdefault(name, _Slots(max_running))
        if slots.requests >= slots.max_requests:
            raise TooManyRequests(RETRY_AFTER_SECONDS)
        slots.requests += 1
        try:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    await slots.free.acquire()
            except TimeoutError:
                raise TooManyRequests(RETRY_AFTER_SECONDS) from None
            try:
                yield
            finally:
                slots.free.release()
        finally:
            slots.requests -= 1
            if not slots.requests:
                del self._slots[name]


class LimitedRequests:
    """An ASGI application that limits the concurrent requests of callers and tenants to another application."""

    def __init__(self, application: Any, callers: Callable[[], CallerStore]) -> None:
        self._application = application
        self._callers = callers
        self._slots = RequestSlots()
        self._budgets = ProcessBuckets(settings.MILLRACE.management_cost_per_minute)
        self._logged_at = float("-inf")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith(f"/{settings.STATIC_URL.strip('/')}/"):  # files, without a database
            await self._application(scope, receive, send)
            return
        receive = await _read_body(receive)  # before a slot is taken, so that a slow client occupies none
        try:
            async with AsyncExitStack() as taken:
                cost = cost_of(scope["path"])
                names = await self._names(scope)
                for name in names if cost > 1 else ():
                    await taken.enter_async_context(self._slots.take(f"expensive requests of {name}", MAX_EXPENSIVE))
                for name in names:
                    await taken.enter_async_context(self._slots.take(name))
                # A key's requests are charged to its tenant; its members have budgets of their own.
                self._charge(names[-1] if names[0].startswith("key ") else names[0], cost)
                await self._application(scope, receive, send)
        except TooManyRequests as exc:
            if time.monotonic() - self._logged_at > LOG_SECONDS:
                self._logged_at = time.monotonic()
                log.warning("management_requests_limited", path=scope["path"])
            await _send(rejection(ASGIRequest(scope, BytesIO()), exc.seconds), send)

    async def _names(self, scope: Any) -> list[str]:
        """Return whose slots the request takes: those of the caller and its tenant, or of the visitor's network."""
        credential = credential_of(scope["path"], scope["headers"])
        caller = None if credential is None else await self._callers().find(credential)
        if caller is None:
            return [f"address {client_network((scope.get('client') or ('',))[0])}"]
        tenant_id = caller.tenant_id(scope["path"], scope["query_string"])
        return [caller.name] if tenant_id is None else [caller.name, f"tenant {tenant_id}"]

    def _charge(self, name: str, cost: int) -> None:
        """Reduce a budget.

        Raises:
            TooManyRequests: the budget is used up.
        """
        if not self._budgets.take(name, cost):
            raise TooManyRequests(self._budgets.retry_after(name, cost))


async def _read_body(receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    """Read the body, and return a function that returns its messages again, and then the further ones."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())
    messages.reverse()

    async def receive_again() -> Any:
        return messages.pop() if messages else await receive()

    return receive_again


def rejection(request: ASGIRequest, seconds: float) -> HttpResponse:
    """Return the response with status 429: problem details below /api, and a page elsewhere."""
    if request.path_info.startswith("/api/"):
        return problems.too_many_requests(seconds)
    language = import_string(settings.FIND_LANGUAGE)(request)
    response = HttpResponse(_page(language), status=429, headers=settings.SECURITY_HEADERS)
    response.headers["Retry-After"] = str(math.ceil(seconds))
    return response


@cache
def _page(language: str) -> str:
    with translation.override(language):
        return render_to_string("frontend/too_many_requests.html")


async def _send(response: HttpResponse, send: Callable[[Any], Awaitable[None]]) -> None:
    response.headers["Content-Length"] = str(len(response.content))
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.content})
