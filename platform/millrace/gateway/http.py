"""HTTP at the gateway: one consumer per request, that notices at once when its client has gone.

An `AsyncConsumer` whose `http_request` starts a task and returns: Channels' own `AsyncHttpConsumer` would see a
disconnect only after its handler has returned.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import structlog
from channels.consumer import AsyncConsumer
from channels.exceptions import StopConsumer

from millrace.gateway.app import Gateway, running_gateway
from millrace.gateway.cancelling import cancel_and_wait
from millrace.gateway.errors import ApiError
from millrace.gateway.ids import new_request_id
from tenants.snapshot import KeySnapshot

log = structlog.get_logger(__name__)

Headers = list[tuple[bytes, bytes]]


class HttpConsumer(AsyncConsumer):
    """Base of the data plane's endpoints: subclasses implement `handle` and the method it is for."""

    channel_layer_alias = None  # type: ignore[assignment]  # no channel layer: its core layer drops messages, and tokens have streams of their own
    method = "POST"
    endpoint = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._body: list[bytes] = []
        self._size = 0
        self._task: asyncio.Task[None] | None = None
        self._responding = False
        self.started = time.monotonic()
        self.key: KeySnapshot | None = None
        self.rate_headers: Headers | None = None  # of the caller's limits, as soon as they are known
        self.request_id = new_request_id()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.http_method: str = scope["method"]
        self.path_arguments: dict[str, str] = scope["url_route"]["kwargs"]
        await super().__call__(scope, receive, send)

    @property
    def gateway(self) -> Gateway:
        return running_gateway()

    async def authenticate(self, scope: str) -> KeySnapshot:
        """Whose request it is.

        Raises:
            ApiError: 401 or 403.
        """
        self.key = await self.gateway.keys.authenticate(self.headers, scope)
        return self.key

    async def handle(self, body: bytes) -> None:
        """Answer the request."""
        raise ApiError("not_found", "There is nothing here.")

    async def http_request(self, message: dict[str, Any]) -> None:
        chunk = message.get("body", b"")
        self._size += len(chunk)
        if self._task is not None:
            return  # refused already; the rest of the body is of no interest
        if self._size > self.gateway.settings.max_body_bytes:
            self._body.clear()
            self._task = asyncio.create_task(self._run(b"", too_large=True))
            return
        self._body.append(chunk)
        if not message.get("more_body", False):
            self._task = asyncio.create_task(self._run(b"".join(self._body)))

    async def http_disconnect(self, message: dict[str, Any]) -> None:
        if self._task is not None:
            await cancel_and_wait([self._task])
        raise StopConsumer

    async def _run(self, body: bytes, too_large: bool = False) -> None:
        try:
            if too_large:
                limit = self.gateway.settings.max_body_bytes
                raise ApiError("request_too_large", f"The request body is larger than {limit} bytes.")
            if self.http_method != self.method:
                raise ApiError("method_not_allowed", f"This endpoint takes {self.method}, not {self.http_method}.")
            await self.handle(body)
        except ApiError as fault:
            await self.respond_error(fault)
        except Exception:
            log.exception("request_failed", request_id=self.request_id, endpoint=self.endpoint)
            await self.respond_error(
                ApiError("internal_error", "The server had an error; please send the request again.")
            )

    async def respond_error(self, fault: ApiError) -> None:
        """Tell the fault as a status, or as the last event of a stream already begun."""
        if self._responding:
            self.count(f"stream_{fault.code}")
            body = msgspec.json.encode(fault.body())
            await self.send({"type": "http.response.body", "body": b"data: " + body + b"\n\n", "more_body": False})
        else:
            if fault.rate_headers is not None:
                self.rate_headers = list(fault.rate_headers)
            await self.respond_json(fault.status, fault.body(), fault.headers())

    async def respond_json(self, status: int, content: Any, headers: Headers | None = None) -> None:
        await self.respond(status, msgspec.json.encode(content), b"application/json", headers)

    async def respond(self, status: int, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
        head = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self._start(status, head + (headers or []))
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def start_stream(self, headers: Headers) -> None:
        """Begin a stream of server-sent events."""
        head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._start(200, [*head, (b"x-accel-buffering", b"no"), *headers])

    async def send_events(self, datas: list[bytes], first: int, *, last: bool = False) -> None:
        """Send server-sent events with the ids `<request>:<first>` and on. Waits while the client is slow."""
        name = self.stream_id.encode()
        parts = [b"id: %s:%d\ndata: %s\n\n" % (name, first + n, data) for n, data in enumerate(datas)]
        await self.send({"type": "http.response.body", "body": b"".join(parts), "more_body": not last})

    @property
    def stream_id(self) -> str:
        """The request whose stream is sent."""
        return self.request_id

    def count(self, status: str) -> None:
        self.gateway.metrics.requests.labels(self.endpoint, status).inc()

    async def _start(self, status: int, headers: Headers) -> None:
        rates = self.rate_headers
        if rates is None:
            rates = [] if self.key is None else await self.gateway.admission.standing(self.key)
        self._responding = True
        self.count(str(status))
        took = round((time.monotonic() - self.started) * 1000)
        common = [
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", str(took).encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        await self.send(
            {"type": "http.response.start", "status": status, "headers": headers + self.rate_headers + common}
        )
