"""Requests of both clients: authentication, idempotency keys, retries and errors."""

from __future__ import annotations

import asyncio
import random
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

import httpx2

from millrace.client.errors import ConnectionFailed, StatusError, error_of

RETRY_STATUSES = frozenset({429, 502, 503, 504})
FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 8.0
MAX_RETRY_AFTER_SECONDS = 60.0  # a longer wait is an error, which names it
OPERATORS = "operator/"


class Omit(Enum):
    """The type of `OMIT`, the default of arguments that are not sent."""

    OMIT = "omit"


OMIT = Omit.OMIT


@dataclass(frozen=True)
class Options:
    """The options of both clients.

    Args:
        base_url: URL of the platform, such as `http://localhost:8000`.
        api_key: an API key with the scope `manage`.
        cookies: the cookies of a session, for operators, instead of an API key.
        tenant: the slug of the tenant, for users with several tenants.
        max_retries: repetitions of a request that failed for a transient reason.
        timeout: seconds to wait for a connection, and for each part of a response.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    cookies: Mapping[str, str] | None = field(default=None, repr=False)
    tenant: str | None = None
    max_retries: int = 3
    timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, not {self.base_url!r}")
        if bool(self.api_key) == bool(self.cookies):
            raise ValueError("Pass an api_key, or the cookies of a session.")
        if self.api_key and not re.fullmatch(r"[!-~]+", self.api_key):
            raise ValueError("The API key contains a space, a line break or another character that no key has.")
        try:
            httpx2.URL(self.base_url)
        except httpx2.InvalidURL as exc:
            raise ValueError(f"base_url is not a URL: {exc}") from None

    def http_options(self) -> dict[str, Any]:
        """Return the arguments of the httpx2 client."""
        headers = {"Accept": "application/json", "User-Agent": "millrace-python"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        elif self.cookies:
            headers["X-CSRFToken"] = self.cookies.get("csrftoken", "")
            headers["Referer"] = self.base_url  # Django checks it for HTTPS
        base = f"{self.base_url.rstrip('/')}/api/"
        return {"base_url": base, "headers": headers, "cookies": dict(self.cookies or {}), "timeout": self.timeout}


class _Call:
    """One call with its repetitions. Idempotent: a repetition after a lost response changes nothing more."""

    def __init__(
        self,
        options: Options,
        verb: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Mapping[str, Any] | None,
        idempotency_key: str | None,
    ) -> None:
        self._max_retries = options.max_retries
        self.attempts = 0
        self.is_response_lost = False  # whether the response of an attempt that may have reached the server was lost
        params = {
            name: _text(value) for name, value in (query or {}).items() if value is not OMIT and value is not None
        }
        if options.tenant and not path.startswith(OPERATORS):
            params["tenant"] = options.tenant
        self.request: dict[str, Any] = {"method": verb, "url": path, "params": params}
        if body is not None:
            self.request["json"] = {name: _json(value) for name, value in body.items() if value is not OMIT}
        if verb == "POST":
            self.request["headers"] = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}

    def delay_after(self, response: httpx2.Response | None) -> float | None:
        """Return the seconds to wait before the next attempt; None if there is none. None as argument: no response."""
        self.attempts += 1
        self.is_response_lost |= response is None or response.status_code in (502, 504)
        if self.attempts > self._max_retries:
            return None
        backoff = min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** (self.attempts - 1))
        backoff *= random.uniform(0.5, 1.0)  # noqa: S311  (spreads the clients' retries)
        if response is None:
            return backoff
        wait = retry_after(response)
        # 409 with Retry-After: the first call with this idempotency key is still running.
        if response.status_code not in RETRY_STATUSES and not (response.status_code == 409 and wait is not None):
            return None
        if response.status_code == 504 and _error(response).code == "timeout":  # the database's, which would repeat
            return None
        if wait is None:
            return backoff
        return wait if wait <= MAX_RETRY_AFTER_SECONDS else None

    def check(self, response: httpx2.Response) -> httpx2.Response:
        """Return the response.

        Raises:
            StatusError: it has an error status.
        """
        if response.is_success:
            return response
        if response.status_code == 404 and self.request["method"] == "DELETE" and self.is_response_lost:
            return response  # deleted by an attempt whose response was lost
        raise _error(response)

    def unreachable(self, exc: httpx2.TransportError) -> ConnectionFailed:
        reason = str(exc) or type(exc).__name__
        return ConnectionFailed(f"{exc.request.url.copy_with(query=None)} does not respond: {reason}")


class Http:
    """The synchronous HTTP client."""

    def __init__(
        self,
        options: Options,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._client = httpx2.Client(transport=transport, **options.http_options())
        self._sleep = sleep

    def call(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> Any:
        """Return the decoded JSON of a response; None if it is empty."""
        return _decode_response(self.raw(verb, path, query=query, body=body, idempotency_key=idempotency_key))

    def raw(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> httpx2.Response:
        """Return a response, after retries.

        Raises:
            StatusError: the response has an error status.
            ConnectionFailed: there was no response.
        """
        call = _Call(self._options, verb, path, query, body, idempotency_key)
        while True:
            try:
                response = self._client.request(**call.request)
            except httpx2.TransportError as exc:
                if (delay := call.delay_after(None)) is None:
                    raise call.unreachable(exc) from exc
            else:
                if response.is_success or (delay := call.delay_after(response)) is None:
                    return call.check(response)
            self._sleep(delay)

    def close(self) -> None:
        self._client.close()


class AsyncHttp:
    """The asynchronous HTTP client."""

    def __init__(
        self,
        options: Options,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._options = options
        self._client = httpx2.AsyncClient(transport=transport, **options.http_options())
        self._sleep = sleep

    async def call(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> Any:
        """Return the decoded JSON of a response; None if it is empty."""
        return _decode_response(await self.raw(verb, path, query=query, body=body, idempotency_key=idempotency_key))

    async def raw(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> httpx2.Response:
        """Return a response, after retries. Raises like `Http.raw`."""
        call = _Call(self._options, verb, path, query, body, idempotency_key)
        while True:
            try:
                response = await self._client.request(**call.request)
            except httpx2.TransportError as exc:
                if (delay := call.delay_after(None)) is None:
                    raise call.unreachable(exc) from exc
            else:
                if response.is_success or (delay := call.delay_after(response)) is None:
                    return call.check(response)
            await self._sleep(delay)

    async def close(self) -> None:
        await self._client.aclose()


def retry_after(response: httpx2.Response) -> float | None:
    """Return the seconds of the `Retry-After` header, which is a number or a date; None without a valid one."""
    value = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None


def _error(response: httpx2.Response) -> StatusError:
    try:
        body = response.json()
    except ValueError:
        body = None
    return error_of(response.status_code, body, response.text, retry_after(response))


def _decode_response(response: httpx2.Response) -> Any:
    if not response.content or not response.is_success:
        return None
    try:
        return response.json()
    except ValueError as exc:
        raise ConnectionFailed(f"{response.url} returned text that is not JSON: is it a Millrace server?") from exc


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(_json(value))


def _json(value: Any) -> Any:
    """Convert a value to JSON types."""
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {name: _json(inner) for name, inner in value.items()}
    return [_json(inner) for inner in value] if isinstance(value, list | tuple) else value
