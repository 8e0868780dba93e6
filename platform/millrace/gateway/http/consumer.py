"""HTTP at the gateway: one consumer per request, which sees immediately that its client has gone.

The request is answered by a task of its own, which authenticates its caller and then receives the body. After that the
consumer watches the connection. Channels' own `AsyncHttpConsumer` would see a disconnect only after its handler has
returned, and collects the body before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import redis
import structlog
from channels.consumer import AsyncConsumer

from millrace.gateway.admission.idempotency import IdempotentCall, Replay, StoredResponse
from millrace.gateway.app import Gateway, running_gateway
from millrace.gateway.connections import mark_authenticated
from millrace.gateway.core import tracing
from millrace.gateway.core.asyncio_utils import cancel_and_wait
from millrace.gateway.core.body_memory import BodyLease
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.core.ids import new_request_id
from millrace.gateway.core.limit_status import LimitStatus
from millrace.gateway.core.request_body import ClientGone, RequestBody
from millrace.gateway.lifecycle.request_log import RequestTrace
from millrace.gateway.protocols.dialects import OPENAI, Dialect
from millrace.gateway.protocols.prompt_bounds import FORM_BODY_BYTES
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

STALLED_SECONDS = 60.0  # a client that reads almost nothing for longer is disconnected; it can resume
TELL_SECONDS = 1.0
FILE_PART_BYTES = 2**18
CANCEL_AGAIN_SECONDS = 0.1
ANY_METHOD = "*"
Headers = list[tuple[bytes, bytes]]
_TYPE = b'{"type":"'


class HttpConsumer(AsyncConsumer):
    """Base of the data plane's endpoints: subclasses implement `handle` and the method it is for."""

    channel_layer_alias = None  # type: ignore[assignment]  # no channel layer: its core layer drops messages, and tokens have streams of their own
    method = "POST"
    endpoint = ""
    words: Dialect = OPENAI
    logged = True
    recorded = False  # whether its requests have a record

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._responding = False
        self._complete = False  # the response is
        self.told = "nothing"  # the status sent, or what went wrong after it
        self._telling = False  # the caller is being told that the key died
        self.once: IdempotentCall | None = None  # the call has an Idempotency-Key
        self.started = time.monotonic()
        self.key: ApiKeySnapshot | None = None
        self.trace: RequestTrace | None = None
        self.key_died: ApiError | None = None  # while the request was under way
        self.limit_statuses: Sequence[LimitStatus] | None = None  # of the caller's limits, as soon as they are known
        self._events_sent = 0
        self.request_id = new_request_id()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.http_method: str = scope["method"]
        self.path_arguments: dict[str, str] = scope["url_route"]["kwargs"]
        self.scope, self.base_send = scope, send
        self.body = RequestBody(self.http_method, self.headers, receive)
        self.lease: BodyLease | None = None  # of a large body
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

    async def authenticate(self, scope: str) -> ApiKeySnapshot:
        """Whose request it is.

        Raises:
            ApiError: 401 or 403.
        """
        address = (self.scope["client"] or ("",))[0]
        self.key = await self.gateway.keys.authenticate(self.headers, scope, address)
        mark_authenticated(self.scope)
        # NOTE: nothing may be awaited between the two: from here on a change of the key is heard.
        self.gateway.live.add(self.key, self._end)
        tracing.name_tenant(self.key)
        if self.recorded:
            self.trace = RequestTrace(self.key, self.request_id, self.endpoint, self.started)
        return self.key

    async def read_body(self) -> bytes:
        """Receive the body, after `authenticate`. The first call under an Idempotency-Key continues.

        Raises:
            ApiError: 413, it is too large; others, it cannot be read now.
            Replay: the call was made before.
        """
        body = b"".join([piece async for piece in self.pieces()])
        await self.do_once(body)
        return body

    def pieces(self) -> AsyncIterator[bytes]:
        """Receive the body piece by piece, within the bounds of this endpoint."""
        return self.body.pieces(FORM_BODY_BYTES)

    async def do_once(self, sent: bytes) -> None:
        """If the call has an Idempotency-Key, go on only if it is the first. `sent`: the body, or its hash.

        Raises:
            Replay, ApiError: it is not.
        """
        name = self.headers.get(b"idempotency-key")
        if name is not None and self.key is not None:
            call = self.scope["path"].encode() + b"\0" + sent
            self.once = await self.gateway.idempotency.begin(self.key, name, call, self.request_id)

    async def handle(self) -> None:
        """Answer the request: authenticate its caller, and only then receive the body."""
        raise ApiError("not_found", "There is nothing here.")

    async def _run(self) -> None:
        try:
            await self._answer()
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if self.key_died is None:
                raise
            self._telling = True
            if not self._complete:
                await self._tell(self.key_died)
        finally:
            self.release_body()
            if self.logged:
                took = round((time.monotonic() - self.started) * 1000)
                log.info("request", request_id=self.request_id, endpoint=self.endpoint, status=self.told, ms=took)
            if self.trace is not None:
                self.gateway.recorder.end(self.trace, self.told, complete=self._complete)
            if self.key is not None:
                self.gateway.live.remove(self.key, self._end)
            if self.once is not None:
                await asyncio.shield(self.once.end())

    def release_body(self) -> None:
        """Give the memory of a large body back: it is not needed any more."""
        if self.lease is not None:
            self.lease.release()

    async def _answer(self) -> None:
        try:
            if self.method not in (self.http_method, ANY_METHOD):
                raise ApiError("method_not_allowed", f"This endpoint takes {self.method}, not {self.http_method}.")
            await self.handle()
        except Replay as exc:
            await self._replay(exc.answer)
        except ApiError as exc:
            # The frames of the traceback refer to the body, and this request's log to the error: a cycle.
            exc.__traceback__ = None
            await self.respond_error(exc)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            await self.respond_error(ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1))
        except ClientGone:
            raise
        except Exception:
            log.exception("request_failed", request_id=self.request_id, endpoint=self.endpoint)
            await self.respond_error(
                ApiError("internal_error", "The server had an error; please send the request again.")
            )

    def _end(self, fault: ApiError) -> None:
        """End the request, since its key was revoked."""
        self.key_died = fault
        self._ending = asyncio.create_task(self._cancel_until_told())

    async def _cancel_until_told(self) -> None:
        # Again and again: redis-py swallows a cancellation that arrives while it connects.
        while not self._task.done() and not self._telling:
            self._task.cancel()
            await asyncio.sleep(CANCEL_AGAIN_SECONDS)

    async def _tell(self, fault: ApiError) -> None:
        try:
            async with asyncio.timeout(TELL_SECONDS):
                await self.respond_error(fault)
        except TimeoutError:  # it does not read
            self._abort()

    async def _replay(self, answer: StoredResponse) -> None:
        """Answer again as it was answered before."""
        self.request_id = answer.request_id
        if self.trace is not None:
            self.trace.replay_of = answer.request_id
        await self._start(answer.status, [*answer.headers, (b"idempotent-replayed", b"true")])
        await self._send({"type": "http.response.body", "body": answer.body, "more_body": False})

    async def respond_error(self, fault: ApiError) -> None:
        """Tell the fault as a status, or as the last event of a stream already begun."""
        if self.once is not None:
            self.once.failed = True
        if self.trace is not None:
            self.trace.fault = fault
        if self._responding:
            self.count(f"stream_{fault.code}")
            body = sse(self.words.event(fault, self.stream_id, self._events_sent))
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            if fault.limit_statuses is not None:
                self.limit_statuses = fault.limit_statuses
            await self.respond_json(self.words.status(fault), self.words.body(fault, self.request_id), fault.headers())

    async def respond_json(self, status: int, content: Any, headers: Headers | None = None) -> None:
        await self.respond(status, msgspec.json.encode(content), b"application/json", headers)

    async def respond(self, status: int, body: bytes, content_type: bytes, headers: Headers | None = None) -> None:
        head = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self._start(status, head + (headers or []))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def respond_file(self, name: str, content_type: bytes) -> None:
        """Send a stored file, as fast as the client reads."""
        path = self.gateway.storage.path(name)
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError:
            raise ApiError("not_found", f"The contents of {name!r} are gone.") from None
        with file:
            size = path.stat().st_size
            await self._start(200, [(b"content-type", content_type), (b"content-length", str(size).encode())])
            sent = 0
            while sent < size:
                part = await asyncio.to_thread(file.read, FILE_PART_BYTES)
                sent += len(part)
                await self._send({"type": "http.response.body", "body": part, "more_body": sent < size})

    async def start_stream(self, headers: Headers) -> None:
        """Begin a stream of server-sent events."""
        head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._start(200, [*head, (b"x-accel-buffering", b"no"), *headers])

    async def send_events(self, datas: list[bytes], first: int, *, last: bool = False) -> None:
        """Send server-sent events with the ids `<request>:<first>` and on. Waits while the client is slow."""
        name = self.stream_id.encode()
        parts = [b"id: %s:%d\n%s" % (name, first + n, sse(data)) for n, data in enumerate(datas)]
        self._events_sent = first + len(datas)
        await self._send({"type": "http.response.body", "body": b"".join(parts), "more_body": not last})

    @property
    def stream_id(self) -> str:
        """The request whose stream is sent."""
        return self.request_id

    def count(self, status: str) -> None:
        self.told = status
        self.gateway.metrics.requests.labels(self.endpoint, status).inc()

    async def _start(self, status: int, headers: Headers) -> None:
        limit_statuses = self.limit_statuses
        if limit_statuses is None:
            limit_statuses = [] if self.key is None else await self.gateway.admission.standing(self.key)
        rates = self.words.rates(limit_statuses)
        self._responding = True
        if self.once is not None:
            self.once.began(status, headers)
        self.count(str(status))
        took = round((time.monotonic() - self.started) * 1000)
        common = [
            *[(name, self.request_id.encode()) for name in self.words.id_headers],
            (b"openai-processing-ms", str(took).encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        if self.body.must_close:
            common.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *rates, *common]})

    async def _send(self, message: Any) -> None:
        """Send, and wait while the client reads slowly; cut it off when it seems to have stopped."""
        if self.once is not None and message["type"] == "http.response.body":
            self.once.sent(message["body"])
            if not message["more_body"]:
                await self.once.keep(self.request_id)
        last = message["type"] == "http.response.body" and not message["more_body"]
        refused = last and self.body.unread  # the server must not end the request before its body was discarded
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                await self.base_send(dict(message, more_body=True) if refused else message)  # type: ignore[arg-type]
            self._complete = last
        except TimeoutError:
            log.info("client_stalled", request_id=self.request_id)
            self._abort()
            raise asyncio.CancelledError from None  # as if it had gone
        if refused:
            await self.body.discard()
            await self.base_send({"type": "http.response.body", "body": b"", "more_body": False})
            if self.body.unread:
                self._abort()

    def _abort(self) -> None:
        """Close the connection without waiting for the client to take what was sent."""
        transport = getattr(getattr(self.base_send, "__self__", None), "transport", None)  # uvicorn's
        if transport is not None:
            transport.abort()


def sse(data: bytes) -> bytes:
    """Return a server-sent event. Data that begins with its type also gets it as the event's name."""
    named = data.startswith(_TYPE)
    name = b"event: %s\n" % data[len(_TYPE) : data.index(b'"', len(_TYPE))] if named else b""
    return b"%sdata: %s\n\n" % (name, data)
