"""The base class of the gateway's HTTP endpoints: one consumer per request, which detects a disconnect immediately.

The request is handled by a separate task, which authenticates the request and then receives the body. After that the
consumer watches the connection. Channels' own `AsyncHttpConsumer` detects a disconnect only after its handler has
returned, and collects the body before it calls the handler.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import redis
import structlog
from channels.consumer import AsyncConsumer
from uvicorn.protocols.http.flow_control import FlowControl

from inference_worker.contract.request import TokenCounts
from millrace.gateway.admission.idempotency import IdempotentCall, Replay, StoredResponse
from millrace.gateway.app import Gateway, running_gateway
from millrace.gateway.connections import mark_authenticated
from millrace.gateway.core import tracing
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.body_memory import BodyLease
from millrace.gateway.core.content_encoding import MIN_COMPRESSED_BYTES, accepted_encoding, compress, decoded_pieces
from millrace.gateway.core.cors import is_preflight
from millrace.gateway.core.errors import ApiError, unavailable
from millrace.gateway.core.ids import new_request_id
from millrace.gateway.core.limit_status import LimitStatus
from millrace.gateway.core.request_body import ClientGone, RequestBody, without_mark
from millrace.gateway.core.types import Writer
from millrace.gateway.http.client_paths import DEPLOYMENT
from millrace.gateway.http.queries import read_query
from millrace.gateway.http.stream_heartbeat import StreamHeartbeat
from millrace.gateway.lifecycle.request_log import RequestTrace
from millrace.gateway.protocols.dialects import OPENAI, Dialect
from millrace.gateway.protocols.prompt_bounds import FORM_BODY_BYTES
from tenants import idempotency_rules as rules
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

STALLED_SECONDS = 60.0  # a client that does not read for longer is disconnected; it can resume
REPORT_SECONDS = 1.0
FILE_PART_BYTES = 2**18
CANCEL_RETRY_SECONDS = 0.1
ANY_METHOD = "*"
METHODS = "millrace.methods"  # key in the scope: the methods of a path with several endpoints
Headers = list[tuple[bytes, bytes]]
_TYPE = b'{"type":"'


class HttpConsumer(AsyncConsumer):
    """Base class of the gateway's endpoints. Subclasses set the method and implement `handle`."""

    channel_layer_alias = None  # type: ignore[assignment]  # no channel layer: it may drop messages, and tokens have their own streams
    method = "POST"
    endpoint = ""
    api_dialect: Dialect = OPENAI
    logged = True
    recorded = False  # whether its requests are stored in the request log
    takes_head = True  # if its method is GET
    heartbeat: StreamHeartbeat | None = None  # set while a stream is sent
    _last_sent = float("-inf")  # time of the loop at which the last events were sent
    query_names: tuple[str, ...] = ()  # names of the query parameters of a GET request

    @classmethod
    def methods(cls) -> tuple[str, ...]:
        """Return the methods that the endpoint accepts."""
        return ("GET", "HEAD") if cls.method == "GET" and cls.takes_head else (cls.method,)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._responding = False
        self._complete = False  # whether the whole response was sent
        self.response_status = "nothing"  # the HTTP status, or `stream_<code>` after an error in the stream
        self._is_reporting_revocation = False  # the client is being informed that its key was revoked
        self.idempotent_call: IdempotentCall | None = None  # set if the request has an Idempotency-Key
        self.started_at = time.monotonic()
        self.key: ApiKeySnapshot | None = None
        self.trace: RequestTrace | None = None
        self.key_error: ApiError | None = None  # set if the key was revoked during the request
        self.limit_statuses: Sequence[LimitStatus] | None = None  # states of the key's limits, once they are known
        self._events_sent = 0
        self.writer: Writer | None = None  # writer of the stream that is sent
        self.request_id = new_request_id()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.http_method: str = scope["method"]
        self.path_arguments: dict[str, str] = scope["url_route"]["kwargs"]
        self.scope, self.base_send = scope, send
        self.api_dialect = self.choose_dialect()
        self.query: dict[str, str] = {}  # parameters of a GET request, after `authenticate`
        self.more_headers: Headers = []  # further headers of the response
        self._flow: FlowControl | None = getattr(getattr(send, "__self__", None), "flow", None)  # uvicorn's
        self.body = RequestBody(self.http_method, self.headers, receive)
        self.body_lease: BodyLease | None = None  # lease of a large body
        tracing.begin(self.request_id, self.headers.get(b"traceparent"))
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self.body.over.set())
        await self.body.over.wait()
        while not self.body.gone and (await receive())["type"] != "http.disconnect":
            pass
        await cancel_and_wait([self._task])

    @property
    def gateway(self) -> Gateway:
        return running_gateway()

    def choose_dialect(self) -> Dialect:
        """Return the dialect of the response and its errors."""
        return type(self).api_dialect

    async def authenticate(self, scope: str) -> ApiKeySnapshot:
        """Authenticate the request and return its key.

        Raises:
            ApiError: 401, 403 or 429; 400, it is a GET request with an unknown or repeated query parameter.
        """
        address = (self.scope["client"] or ("",))[0]
        self.key = await self.gateway.keys.authenticate(self.headers, scope, address)
        mark_authenticated(self.scope)
        # NOTE: no await between these two statements: from here on the request ends if the key is revoked.
        self.gateway.active_requests.add(self.key, self._end)
        tracing.name_tenant(self.key)
        if self.method == "GET":
            self.query = read_query(self.scope, self.query_names)
        if self.recorded:
            self.trace = RequestTrace(self.key, self.request_id, self.endpoint, self.started_at)
        return self.key

    async def read_body(self) -> bytes:
        """Receive the body, after `authenticate`, and begin the idempotent call if there is one.

        Raises:
            ApiError: 413, the body is too large; other codes, it cannot be read now.
            Replay: the call was made before.
        """
        body = b"".join([piece async for piece in self.pieces()])
        await self.begin_idempotent_call(body)
        return body

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces, within the limits of this endpoint."""
        return without_mark(decoded_pieces(self.headers, self.body.pieces(FORM_BODY_BYTES), FORM_BODY_BYTES))

    async def begin_idempotent_call(self, content: bytes) -> None:
        """If the request has an Idempotency-Key, take its record. `content` is the body, or its hash.

        Raises:
            Replay, ApiError: the request was made before, or is still running.
        """
        name = self.headers.get(b"idempotency-key")
        if name is not None and self.key is not None:
            target = f"{self.scope['path']}{self.scope.get(DEPLOYMENT, '')}"
            fingerprint = rules.fingerprint(target, content)
            self.idempotent_call = await self.gateway.idempotency.begin(self.key, name, fingerprint, self.request_id)

    async def handle(self) -> None:
        """Handle the request. Implementations authenticate it before they receive the body."""
        raise ApiError("not_found", "This URL does not exist.")

    async def _run(self) -> None:
        try:
            await self._respond()
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if self.key_error is None:
                raise
            self._is_reporting_revocation = True
            if not self._complete:
                await self._report_revocation(self.key_error)
        finally:
            if self.heartbeat is not None:
                self.heartbeat.cancel()
            self.release_body()
            if self.logged:
                duration_ms = round((time.monotonic() - self.started_at) * 1000)
                log.info(
                    "request",
                    request_id=self.request_id,
                    endpoint=self.endpoint,
                    status=self.response_status,
                    ms=duration_ms,
                )
            if self.trace is not None:
                self.gateway.request_log.end(self.trace, self.response_status, complete=self._complete)
            if self.key is not None:
                self.gateway.active_requests.remove(self.key, self._end)
            if self.idempotent_call is not None:
                await asyncio.shield(self.idempotent_call.end())

    def release_body(self) -> None:
        """Release the memory of a large body, which is no longer needed."""
        if self.body_lease is not None:
            self.body_lease.release()

    async def _respond(self) -> None:
        try:
            if is_preflight(self.http_method, self.headers) and self.scope["path"].startswith("/v1/"):
                return await self.respond(
                    204, b"", b"", await self.gateway.cross_origin.preflight_headers(self.headers)
                )
            if self.method != ANY_METHOD and self.http_method not in self.methods():
                methods: Any = self.scope.get(METHODS, self.methods())
                allowed = ", ".join(methods)
                self.more_headers.append((b"allow", allowed.encode()))
                raise ApiError("method_not_allowed", f"This endpoint requires {allowed}, not {self.http_method}.")
            await self.handle()
        except Replay as exc:
            await self._replay(exc.response)
        except ApiError as exc:
            # The traceback's frames refer to the body, and the request's trace refers to the error. Break the cycle.
            exc.__traceback__ = None
            await self.respond_error(exc)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            await self.respond_error(unavailable())
        except ClientGone:
            raise
        except Exception:
            log.exception("request_failed", request_id=self.request_id, endpoint=self.endpoint)
            await self.respond_error(
                ApiError("internal_error", "The server had an internal error. Send the request again.")
            )

    def _end(self, error: ApiError) -> None:
        """End the request, since its key was revoked."""
        self.key_error = error
        self._ending = asyncio.create_task(self._cancel_until_reported())

    async def _cancel_until_reported(self) -> None:
        # The cancellation is repeated, because redis-py swallows one that arrives while it connects.
        while not self._task.done() and not self._is_reporting_revocation:
            self._task.cancel()
            await asyncio.sleep(CANCEL_RETRY_SECONDS)

    async def _report_revocation(self, error: ApiError) -> None:
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                await self.respond_error(error)
        except TimeoutError:  # the client does not read
            self._abort()

    async def _replay(self, response: StoredResponse) -> None:
        """Send a stored response again."""
        self.request_id = response.request_id
        if self.trace is not None:
            self.trace.replay_of = response.request_id
        await self._start(response.status, [*response.headers, (rules.REPLAYED_HEADER.encode(), b"true")])
        await self._send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def respond_error(self, error: ApiError) -> None:
        """Send the error as an HTTP status, or as the last event of a stream that has started."""
        if error.code == "cancelled" and self.key_error is not None:
            # The execution was cancelled because the key was revoked. Its end can arrive before this task is cancelled.
            error = self.key_error
        if self.idempotent_call is not None:
            self.idempotent_call.failed = True
        if self.trace is not None:
            self.trace.error = error
        if self.heartbeat is not None:
            await self.heartbeat.stop()
        if self._responding:
            self.record_status(f"stream_{error.code}")
            tail = [] if self.writer is None else self.writer.interrupt(error.code, await self._billed_usage(error))
            body = b"".join(map(sse, tail)) + sse(
                self.api_dialect.event(error, self.stream_id, self._events_sent + len(tail))
            )
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            if error.limit_statuses is not None:
                self.limit_statuses = error.limit_statuses
            await self.respond_json(
                self.api_dialect.status(error), self.api_dialect.body(error, self.request_id), error.headers()
            )

    async def _billed_usage(self, error: ApiError) -> TokenCounts | None:
        """Return the usage that is billed for a stream that this error ends; None if it is not known.

        Failed requests are not billed. Cancelled requests are, also those of a key that was revoked.
        """
        is_billed = error.code == "cancelled" or error is self.key_error
        return await self.final_usage() if is_billed else TokenCounts()

    async def final_usage(self) -> TokenCounts | None:
        """Wait shortly for the usage of a cancelled request, and return it; None if it is not known."""
        return None

    async def respond_json(self, status: int, content: Any, headers: Headers | None = None) -> None:
        await self.respond(status, msgspec.json.encode(content), b"application/json", headers)

    async def respond(self, status: int, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
        head = list(headers or [])
        if status != 204:
            # A stored response of an idempotent call may be replayed to a client that accepts no compression.
            if len(body) >= MIN_COMPRESSED_BYTES and self.idempotent_call is None:
                head.append((b"vary", b"accept-encoding"))
                if encoding := accepted_encoding(self.headers):
                    body = await compress(body, encoding)
                    head.append((b"content-encoding", encoding.encode()))
            head += [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self._start(status, head)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def respond_file(self, name: str, content_type: bytes) -> None:
        """Send a stored file at the speed at which the client reads."""
        path = self.gateway.storage.path(name)
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError:
            raise ApiError("not_found", f"The contents of {name!r} were deleted.") from None
        with file:
            size = path.stat().st_size
            await self._start(200, [(b"content-type", content_type), (b"content-length", str(size).encode())])
            sent = 0
            while sent < size:
                part = await asyncio.to_thread(file.read, FILE_PART_BYTES)
                sent += len(part)
                await self._send({"type": "http.response.body", "body": part, "more_body": sent < size})

    def begin_heartbeat(self, headers: Callable[[], Headers]) -> StreamHeartbeat:
        """Send the headers after a delay and then pings, until the heartbeat is stopped.

        Args:
            headers: returns the headers that are known if no event has arrived by then.
        """

        async def start() -> None:
            if not self._responding:
                await self.start_stream(headers())

        elapsed = time.monotonic() - self.started_at
        delay = max(0.0, self.gateway.settings.stream_headers_seconds - elapsed)
        self.heartbeat = StreamHeartbeat(delay, start, self._ping, lambda: self._last_sent)
        return self.heartbeat

    async def _ping(self) -> None:
        # It is no part of the response that an idempotent call stores.
        if self._flow is None or not self._flow.write_paused:
            await self.base_send({"type": "http.response.body", "body": self.api_dialect.ping, "more_body": True})

    async def begin_events(self, headers: Headers) -> None:
        """Start a stream of server-sent events, unless its heartbeat has started it."""
        if self.heartbeat is not None:
            await self.heartbeat.settle()
        if not self._responding:
            await self.start_stream(headers)

    async def start_stream(self, headers: Headers) -> None:
        """Start a stream of server-sent events."""
        head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._start(200, [*head, (b"x-accel-buffering", b"no"), *headers])

    async def send_events(self, chunks: list[bytes], first: int, *, last: bool = False) -> None:
        """Send server-sent events with the IDs `<request>:<first>` and following. Waits while the client is slow."""
        name = self.stream_id.encode()
        parts = [b"id: %s:%d\n%s" % (name, first + index, sse(data)) for index, data in enumerate(chunks)]
        self._events_sent = first + len(chunks)
        self._last_sent = asyncio.get_running_loop().time()
        if last and self.heartbeat is not None:
            await self.heartbeat.stop()
        await self._send({"type": "http.response.body", "body": b"".join(parts), "more_body": not last})

    @property
    def stream_id(self) -> str:
        """Return the request ID in the events' IDs."""
        return self.request_id

    def record_status(self, status: str) -> None:
        self.response_status = status
        self.gateway.metrics.requests.labels(self.endpoint, status).inc()

    async def _start(self, status: int, headers: Headers) -> None:
        limit_statuses = self.limit_statuses
        if limit_statuses is None:
            limit_statuses = [] if self.key is None else await self.gateway.admission.current_limit_statuses(self.key)
        rates = self.api_dialect.rates(limit_statuses)
        self._responding = True
        if self.idempotent_call is not None:
            self.idempotent_call.record_start(status, headers)
        self.record_status(str(status))
        duration_ms = round((time.monotonic() - self.started_at) * 1000)
        answer = [
            *headers,
            *rates,
            *[(name, self.request_id.encode()) for name in self.api_dialect.id_headers],
            (b"openai-processing-ms", str(duration_ms).encode()),
            (b"x-content-type-options", b"nosniff"),
            *self.more_headers,
        ]
        if self.http_method != "OPTIONS":
            is_refusal = self.key is None and status >= 400 and self.scope["path"].startswith("/v1/")
            answer += await self.gateway.cross_origin.response_headers(
                self.headers, self.key, [name for name, _ in answer], is_refusal=is_refusal
            )
        if self.body.must_close:
            answer.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": answer})

    async def _send(self, message: Any) -> None:
        """Send a message. Waits while the client reads slowly, and closes the connection if it has stopped reading."""
        if self.idempotent_call is not None and message["type"] == "http.response.body":
            self.idempotent_call.record_body(message["body"])
            if not message["more_body"]:
                await self.idempotent_call.store_response(self.request_id)
        last = message["type"] == "http.response.body" and not message["more_body"]
        is_rejected = last and self.body.unread  # the request must not end before its body is discarded
        sending = self.base_send(dict(message, more_body=True) if is_rejected else message)  # type: ignore[arg-type]
        try:
            if self._flow is not None and not self._flow.write_paused:
                await sending  # does not wait
            else:
                async with asyncio.timeout(STALLED_SECONDS):
                    await sending
            self._complete = last
        except TimeoutError:
            log.info("client_stalled", request_id=self.request_id)
            self._abort()
            raise asyncio.CancelledError from None  # as for a disconnect
        if is_rejected:
            await self.body.discard()
            await self.base_send({"type": "http.response.body", "body": b"", "more_body": False})
            if self.body.unread:
                self._abort()

    def _abort(self) -> None:
        """Close the connection without waiting for the client to receive what was sent."""
        transport = getattr(getattr(self.base_send, "__self__", None), "transport", None)  # uvicorn's
        if transport is not None:
            transport.abort()


def sse(data: bytes) -> bytes:
    """Return a server-sent event. If the data begins with a `type`, that is also the event's name."""
    named = data.startswith(_TYPE)
    name = b"event: %s\n" % data[len(_TYPE) : data.index(b'"', len(_TYPE))] if named else b""
    return b"%sdata: %s\n\n" % (name, data)
