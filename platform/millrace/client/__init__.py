"""Typed clients of the management API.

    from millrace.client import Client

    with Client("http://localhost:8000", api_key="sk-mr-…") as client:
        for key in client.keys.list(live=True):
            print(key["name"], key["last_used_at"])
        client.budgets.create(name="March", unit="money", period="month", amount=50_000_000_000)

Methods return the API's JSON objects, typed in `millrace.client.models`. Lists request their pages while they are
iterated. Requests that fail for a transient reason are repeated; each POST carries an `Idempotency-Key`, so a
repetition has no second effect. Errors are in `millrace.client.errors`. The package needs only httpx2.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import httpx2

from millrace.client.async_resources import AsyncResources
from millrace.client.errors import (
    AuthenticationFailed,
    ConflictError,
    ConnectionFailed,
    InvalidRequest,
    MillraceError,
    NotFound,
    PermissionDenied,
    RateLimited,
    ReauthenticationNeeded,
    ServerError,
    StatusError,
)
from millrace.client.http import OMIT, AsyncHttp, Http, Omit, Options
from millrace.client.pages import AsyncPager, Pager
from millrace.client.resources import Resources

__all__ = [
    "OMIT",
    "AsyncClient",
    "AsyncPager",
    "AuthenticationFailed",
    "Client",
    "ConflictError",
    "ConnectionFailed",
    "InvalidRequest",
    "MillraceError",
    "NotFound",
    "Omit",
    "Options",
    "Pager",
    "PermissionDenied",
    "RateLimited",
    "ReauthenticationNeeded",
    "ServerError",
    "StatusError",
]


class Client(Resources):
    """A synchronous client. `http.Options` describes the arguments. Threads may share it."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        cookies: Mapping[str, str] | None = None,
        tenant: str | None = None,
        max_retries: int = 3,
        timeout: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        options = Options(base_url, api_key, cookies, tenant, max_retries, timeout)
        self._http = Http(options, transport)
        super().__init__(self._http)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(AsyncResources):
    """An asynchronous client. `http.Options` describes the arguments."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        cookies: Mapping[str, str] | None = None,
        tenant: str | None = None,
        max_retries: int = 3,
        timeout: float = 30.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        options = Options(base_url, api_key, cookies, tenant, max_retries, timeout)
        self._http = AsyncHttp(options, transport)
        super().__init__(self._http)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
