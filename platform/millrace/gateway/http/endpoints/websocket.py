"""WebSocket /v1/realtime/chat: each message is a chat completion request, and its chunks are sent as messages.

One connection can run several requests concurrently. Browsers cannot send a key in a header, so the first message may
contain it. Pages of the console have no key and send a playground token instead (`tenants.keys.playground_tokens`).
Cookies are not used. Nevertheless, pages of other origins are rejected unless MILLRACE_ALLOWED_ORIGINS names them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from codecs import BOM_UTF8
from typing import Any
from urllib.parse import urlsplit

import msgspec
import redis
import structlog

from inference_worker.contract.messages import AnswerEvent, End
from inference_worker.contract.request import TokenCounts
from millrace.gateway.app import running_gateway
from millrace.gateway.connections import mark_authenticated
from millrace.gateway.core import tracing
from millrace.gateway.core.asyncio_utils import RETRY_SECONDS, cancel_and_wait
from millrace.gateway.core.errors import OVERLOADED, ApiError, invalid, unavailable
from millrace.gateway.core.ids import new_request_id
from millrace.gateway.core.request_body import too_large
from millrace.gateway.core.types import Writer
from millrace.gateway.http.consumer import STALLED_SECONDS
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.request_log import RequestTrace
from millrace.gateway.protocols.dialect_readers import SOCKET
from millrace.gateway.protocols.openai import chat
from millrace.gateway.protocols.openai.writer import DONE
from tenants.keys import playground_tokens
from tenants.keys.playground_tokens import PlaygroundToken
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

ENDPOINT = "realtime.chat"
USER_CHECK_SECONDS = 1.0  # how often it is checked that a playground token's user still has access
MAX_CONCURRENT_REQUESTS = 64
MAX_AUTH_BYTES = 4096
MAX_ID_CHARACTERS = 64
UNAUTHORIZED, REFUSED = 4401, 1008  # close codes
_encode = msgspec.json.Encoder().encode


class Head(msgspec.Struct):
    """The fields of a message that do not belong to its request."""

    type: Any = "request"
    id: Any = None


_decode_head = msgspec.json.Decoder(Head).decode


async def realtime_chat(scope: Any, receive: Any, send: Any) -> None:
    """Serve the WebSocket as an ASGI application."""
    await Socket(scope, receive, send).run()


async def refuse_socket(scope: Any, receive: Any, send: Any) -> None:
    """Close WebSocket connections to every other path."""
    await send({"type": "websocket.close", "code": REFUSED})


class Socket:
    """One WebSocket connection."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self._gateway = running_gateway()
        self._scope = scope
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._address = (scope["client"] or ("",))[0]
        self._receive, self._base_send = receive, send
        self._token: PlaygroundToken | None = None  # used instead of a key
        self._max_message_bytes = 0  # maximum size of a message
        self._main = asyncio.current_task()
        self._sending = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._errors: dict[str, ApiError] = {}  # requests that are cancelled or whose key was revoked -> error to send
        self._streams: dict[str, tuple[Writer, ActiveRequest]] = {}
        self._stalled = False

    async def run(self) -> None:
        await self._receive()  # websocket.connect
        if not self._from_allowed_origin():
            await self._base_send({"type": "websocket.close", "code": REFUSED})
            return
        await self._base_send({"type": "websocket.accept"})
        user_watch: asyncio.Task[None] | None = None
        try:
            await self._authenticate()
            if self._token is not None:
                user_watch = asyncio.create_task(self._watch_user(self._token))
            while (message := await self._next()) is not None:
                await self._handle_message(message)
        except ApiError as exc:
            await self._close(exc)
        except asyncio.CancelledError:  # the client does not read
            if not self._stalled:
                raise
        finally:
            await cancel_and_wait([*self._tasks.values(), *([user_watch] if user_watch else [])])

    def _from_allowed_origin(self) -> bool:
        origin = self._headers.get(b"origin", b"").decode("latin-1")
        allowed = self._gateway.settings.allowed_origins
        if not origin or "*" in allowed or origin in (*allowed, self._gateway.settings.base_url):
            return True
        return urlsplit(origin).netloc == self._headers.get(b"host", b"").decode("latin-1")

    async def _authenticate(self) -> None:
        """Authenticate the connection by its headers or its first message.

        Raises:
            ApiError: 401, 403 or 429.
        """
        if not self._headers.keys() & {b"authorization", b"x-api-key", b"api-key"}:
            try:
                async with asyncio.timeout(self._gateway.settings.websocket_auth_timeout_seconds):
                    first = await self._next()
            except TimeoutError:
                first = None
            fields = {} if first is None or len(first) > MAX_AUTH_BYTES else _object(first)
            if fields.get("type") == "auth" and isinstance(fields.get("playground_token"), str):
                self._token = await self._redeem_token(fields["playground_token"])
            elif fields.get("type") == "auth" and isinstance(fields.get("key"), str):
                self._headers[b"x-api-key"] = fields["key"].encode("utf-8", "replace")
            else:
                raise ApiError("invalid_api_key", 'The first message must be {"type": "auth", "key": "sk-…"}.')
        await self._key()
        mark_authenticated(self._scope)
        await self._send({"type": "ready"})

    async def _redeem_token(self, text: str) -> PlaygroundToken:
        """Return the playground token, which can be used once.

        Raises:
            ApiError: 401, it is invalid, expired or used; 429, too many wrong tokens; 503, Valkey is unavailable.
        """
        token = playground_tokens.read(self._gateway.settings.secret_key, text)
        if token is None or not token.may_be_taken(time.time_ns() // 1000):
            raise self._gateway.keys.reject_playground_token(
                self._address, "This token is invalid or expired. Request a new one."
            )
        try:
            is_first = await self._gateway.broker.set(token.name, 1, nx=True, ex=2 * playground_tokens.TAKEN_WITHIN)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise unavailable() from exc
        if not is_first:
            raise self._gateway.keys.reject_playground_token(
                self._address, "This token was used before. Request a new one."
            )
        return token

    async def _watch_user(self, token: PlaygroundToken) -> None:
        """End the connection's requests when the token's user has lost access."""
        while True:
            await asyncio.sleep(USER_CHECK_SECONDS)
            try:
                await self._gateway.keys.check_user(token)
            except ApiError as exc:
                if exc.code == OVERLOADED:  # the database is unavailable; check again later
                    continue
                for name in list(self._tasks):
                    self._end(name, exc)

    async def _key(self) -> ApiKeySnapshot:
        """Return the current snapshot of the connection's key."""
        if self._token is not None:
            key = await self._gateway.keys.authenticate_playground_token(self._token, "inference", self._address)
        else:
            key = await self._gateway.keys.authenticate(self._headers, "inference", self._address)
        self._max_message_bytes = self._gateway.prompts.max_body_bytes(key, SOCKET)
        return key

    async def _next(self) -> bytes | None:
        """Return the next message, or None if the client has disconnected."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            return None
        text = message.get("text")
        content = bytes(message["bytes"] if text is None else text.encode("utf-8", "surrogatepass"))
        return content.removeprefix(BOM_UTF8)

    async def _handle_message(self, message: bytes) -> None:
        name = None
        try:
            if len(message) > self._max_message_bytes:
                raise too_large(self._max_message_bytes)
            head = _head(message)
            name = _name(head)
            if head.type == "cancel":
                self._cancel(name)
            elif head.type == "request":
                self._begin(name, message)
            else:
                raise invalid("type", "type must be request or cancel.")
        except ApiError as exc:
            await self._send_error(name, exc)

    def _cancel(self, name: str) -> None:
        if name not in self._tasks:
            raise ApiError("not_found", f"No request with the id {name!r} is active.", "id")
        self._end(name, ApiError("cancelled", "The request was cancelled."))

    def _end(self, name: str, error: ApiError) -> None:
        if name not in self._errors:
            self._errors[name] = error
            self._ending.add(task := asyncio.create_task(self._cancel_until_reported(name)))
            task.add_done_callback(self._ending.discard)

    async def _cancel_until_reported(self, name: str) -> None:
        # The cancellation is repeated, because redis-py swallows one that arrives while it connects.
        while name in self._errors:
            self._tasks[name].cancel()
            await asyncio.sleep(RETRY_SECONDS)

    def _begin(self, name: str, message: bytes) -> None:
        if name in self._tasks:
            raise ApiError("conflict", f"A request with the id {name!r} is active. Use another id.", "id")
        if len(self._tasks) >= MAX_CONCURRENT_REQUESTS:
            raise ApiError(
                "rate_limit_exceeded",
                f"A connection may run {MAX_CONCURRENT_REQUESTS} concurrent requests. Retry later.",
                retry_after=1,
            )
        self._tasks[name] = asyncio.create_task(self._run(name, message))

    # One request.

    async def _run(self, name: str, message: bytes) -> None:
        request_id, status, complete = new_request_id(), "200", False
        arrived, trace = time.monotonic(), None
        tracing.begin(request_id, self._headers.get(b"traceparent"))
        try:
            key = await self._key()
            tracing.name_tenant(key)
            trace = RequestTrace(key, request_id, ENDPOINT, arrived)
            await self._generate(name, message, trace)
            complete = True
        except asyncio.CancelledError:
            error = self._errors.pop(name, None)
            if error is None:
                raise
            await self._send_billed_usage(name, error, is_billed=True)
            status = await self._send_error(name, error, trace)
        except ApiError as exc:
            # The execution was cancelled because the key was revoked. Its end can arrive before this task is cancelled.
            # Without an entry in `_errors`, the task is not cancelled while it reports the error.
            ended, is_billed = self._errors.pop(name, exc), exc.code == "cancelled"
            error = ended if is_billed else exc
            await self._send_billed_usage(name, error, is_billed=is_billed)
            status = await self._send_error(name, error, trace)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            status = await self._send_error(name, unavailable(), trace)
        except Exception:
            log.exception("request_failed", request_id=request_id, endpoint=ENDPOINT)
            status = await self._send_error(
                name, ApiError("internal_error", "The server had an internal error. Send the request again."), trace
            )
        finally:
            for requests in (self._tasks, self._errors, self._streams):
                requests.pop(name, None)
            self._gateway.metrics.requests.labels(ENDPOINT, status).inc()
            log.info("request", request_id=request_id, endpoint=ENDPOINT, status=status)
            if trace is not None:
                self._gateway.request_log.end(trace, status, complete=complete)

    async def _generate(self, name: str, message: bytes, trace: RequestTrace) -> None:
        service, prompts, key = self._gateway.service, self._gateway.prompts, trace.key
        with self._gateway.active_requests.register(key, lambda error: self._end(name, error)):
            with self._gateway.body_memory.lease(key.tenant_id) as lease:
                await prompts.charge(key, len(message))
                lease.grow(len(message))
                request = await prompts.read(key, SOCKET, message)
            trace.set_request(request, message)
            active = await service.begin(key, request, chat.DIALECT, trace.request_id, trace)
            try:
                await self._forward(name, active)
            except (ApiError, OSError):  # the request has ended, or the client has disconnected
                raise
            except Exception:
                await service.mark_failed(active)
                raise
            finally:
                service.release(active)

    async def _forward(self, name: str, active: ActiveRequest) -> None:
        events = self._gateway.service.events(active)
        event: AnswerEvent = await anext(events)
        writer = active.writer()
        self._streams[name] = writer, active
        started = {"type": "started", "id": name, "request_id": active.request_id, "model": active.model}
        details = {"ignored": active.ignored, **active.decision_record.select(("sampling_defaults",))}
        await self._send(started | {field: value for field, value in details.items() if value})
        while True:
            for data in writer.stream(event):
                if data != DONE:
                    await self._send({"type": "chunk", "id": name, "chunk": msgspec.Raw(data)})
            if isinstance(event, End):
                break
            event = await anext(events)
        await self._send({"type": "done", "id": name})

    # Sending.

    async def _send_billed_usage(self, name: str, error: ApiError, *, is_billed: bool) -> None:
        """Send the usage of a stream that this error ends, if the request asked for usage."""
        if name in self._streams:
            writer, active = self._streams[name]
            for data in writer.interrupt(error.code, await active.final_usage() if is_billed else TokenCounts()):
                await self._send({"type": "chunk", "id": name, "chunk": msgspec.Raw(data)})

    async def _send_error(self, name: str | None, error: ApiError, trace: RequestTrace | None = None) -> str:
        """Send the error and return its status for the metrics."""
        if trace is not None:
            trace.error = error
        retry = {} if error.retry_after is None else {"retry_after": error.retry_after}
        await self._send({"type": "error", "id": name, **error.body(), **retry})
        return str(error.status)

    async def _send(self, content: dict[str, Any]) -> None:
        """Send a message. Waits while the client reads slowly, and gives up if it has stopped reading."""
        try:
            async with asyncio.timeout(STALLED_SECONDS), self._sending:
                await self._base_send({"type": "websocket.send", "text": _encode(content).decode()})
        except TimeoutError:
            self._stalled = True
            if self._main is not None:
                self._main.cancel()
            raise asyncio.CancelledError from None

    async def _close(self, error: ApiError) -> None:
        """Close the connection of a client that was not authenticated."""
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._send_error(None, error)
            await self._base_send({"type": "websocket.close", "code": UNAUTHORIZED})


def _object(message: bytes) -> dict[str, Any]:
    try:
        return dict(msgspec.json.decode(message, type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise ApiError("invalid_json", "A message must be a JSON object.") from None


def _head(message: bytes) -> Head:
    try:
        return _decode_head(message)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise ApiError("invalid_json", "A message must be a JSON object.") from None


def _name(head: Head) -> str:
    """Return the client's ID of the request."""
    name = head.id
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARACTERS:
        raise invalid("id", f"id must be a string of 1 to {MAX_ID_CHARACTERS} characters.")
    return name
