"""WebSocket /v1/realtime/chat: a chat completion's body in each message, its chunks back; several at once.

A browser cannot send a key in a header, so it may come in the first message; the console's pages have no key, but a
ticket for one (`tenants.keys.playground_tokens`). Cookies play no part, but a page of another site is refused all the
same, unless MILLRACE_ALLOWED_ORIGINS names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
import redis
import structlog

from inference_worker.contract.messages import AnswerEvent, End
from millrace.gateway.app import running_gateway
from millrace.gateway.connections import mark_authenticated
from millrace.gateway.core import tracing
from millrace.gateway.core.asyncio_utils import AGAIN_SECONDS, cancel_and_wait
from millrace.gateway.core.errors import OVERLOADED, ApiError, invalid
from millrace.gateway.core.ids import new_request_id
from millrace.gateway.core.request_body import too_large
from millrace.gateway.http.consumer import STALLED_SECONDS
from millrace.gateway.lifecycle.request_log import RequestTrace
from millrace.gateway.lifecycle.service import ActiveRequest
from millrace.gateway.protocols.dialect_readers import SOCKET
from millrace.gateway.protocols.openai import chat
from millrace.gateway.protocols.openai.writer import DONE
from tenants.keys import playground_tokens
from tenants.keys.playground_tokens import PlaygroundToken
from tenants.keys.snapshot import ApiKeySnapshot

log = structlog.get_logger(__name__)

ENDPOINT = "realtime.chat"
TICKET_CHECK_SECONDS = 1.0  # how often a socket with a ticket checks that its user still has access
MAX_CONCURRENT_REQUESTS = 64
MOST_AUTH_BYTES = 4096
MAX_ID_CHARACTERS = 64
UNAUTHORIZED, REFUSED = 4401, 1008  # close codes
_encode = msgspec.json.Encoder().encode


class Head(msgspec.Struct):
    """The fields of a message that are not of its request."""

    type: Any = "request"
    id: Any = None


_decode_head = msgspec.json.Decoder(Head).decode


async def realtime_chat(scope: Any, receive: Any, send: Any) -> None:
    """Serve the WebSocket as an ASGI application."""
    await Socket(scope, receive, send).run()


async def refuse_socket(scope: Any, receive: Any, send: Any) -> None:
    """At every other path."""
    await send({"type": "websocket.close", "code": REFUSED})


class Socket:
    """One connection."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self._gateway = running_gateway()
        self._scope = scope
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._address = (scope["client"] or ("",))[0]
        self._receive, self._base_send = receive, send
        self._ticket: PlaygroundToken | None = None  # instead of a key
        self._most = 0  # bytes of a message
        self._main = asyncio.current_task()
        self._sending = asyncio.Lock()
        self._generations: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._ended: dict[str, ApiError] = {}  # by its client or with its key, and not told yet
        self._stalled = False

    async def run(self) -> None:
        await self._receive()  # the wish to connect
        if not self._from_allowed_origin():
            await self._base_send({"type": "websocket.close", "code": REFUSED})
            return
        await self._base_send({"type": "websocket.accept"})
        watching: asyncio.Task[None] | None = None
        try:
            await self._authenticate()
            if self._ticket is not None:
                watching = asyncio.create_task(self._watch_user(self._ticket))
            while (message := await self._next()) is not None:
                await self._take(message)
        except ApiError as exc:
            await self._close(exc)
        except asyncio.CancelledError:  # it does not read
            if not self._stalled:
                raise
        finally:
            await cancel_and_wait([*self._generations.values(), *([watching] if watching else [])])

    def _from_allowed_origin(self) -> bool:
        origin = self._headers.get(b"origin", b"").decode("latin-1")
        allowed = self._gateway.settings.allowed_origins
        if not origin or "*" in allowed or origin in (*allowed, self._gateway.settings.base_url):
            return True
        return urlsplit(origin).netloc == self._headers.get(b"host", b"").decode("latin-1")

    async def _authenticate(self) -> None:
        """By header, or else by the first message.

        Raises:
            ApiError: 401 or 403.
        """
        if not self._headers.keys() & {b"authorization", b"x-api-key"}:
            try:
                async with asyncio.timeout(self._gateway.settings.websocket_auth_timeout_seconds):
                    first = await self._next()
            except TimeoutError:
                first = None
            fields = {} if first is None or len(first) > MOST_AUTH_BYTES else _object(first)
            if fields.get("type") == "auth" and isinstance(fields.get("ticket"), str):
                self._ticket = await self._take_ticket(fields["ticket"])
            elif fields.get("type") == "auth" and isinstance(fields.get("key"), str):
                self._headers[b"x-api-key"] = fields["key"].encode("utf-8", "replace")
            else:
                raise ApiError("invalid_api_key", 'The first message must be {"type": "auth", "key": "sk-…"}.')
        await self._key()
        mark_authenticated(self._scope)
        await self._tell({"type": "ready"})

    async def _take_ticket(self, text: str) -> PlaygroundToken:
        """Each can be taken once.

        Raises:
            ApiError: 401, it is none of ours, too old, or was taken; 429, too many such; 503, that cannot be known.
        """
        ticket = playground_tokens.read(self._gateway.settings.secret_key, text)
        if ticket is None or not ticket.may_be_taken(time.time_ns() // 1000):
            raise self._gateway.keys.reject_ticket(self._address, "This ticket is unknown or too old: get a new one.")
        try:
            first = await self._gateway.broker.set(ticket.name, 1, nx=True, ex=2 * playground_tokens.TAKEN_WITHIN)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            raise ApiError(OVERLOADED, "The service is briefly unavailable.", retry_after=1) from exc
        if not first:
            raise self._gateway.keys.reject_ticket(self._address, "This ticket was taken before: get a new one.")
        return ticket

    async def _watch_user(self, ticket: PlaygroundToken) -> None:
        """End what runs on this socket once the ticket's user has lost access."""
        while True:
            await asyncio.sleep(TICKET_CHECK_SECONDS)
            try:
                await self._gateway.keys.check_user(ticket)
            except ApiError as exc:
                if exc.code == OVERLOADED:  # the database cannot be reached; the next look decides
                    continue
                for name in list(self._generations):
                    self._end(name, exc)

    async def _key(self) -> ApiKeySnapshot:
        """As it is now."""
        if self._ticket is not None:
            key = await self._gateway.keys.authenticate_ticket(self._ticket, "inference", self._address)
        else:
            key = await self._gateway.keys.authenticate(self._headers, "inference", self._address)
        self._most = self._gateway.prompts.max_body_bytes(key, SOCKET)
        return key

    async def _next(self) -> bytes | None:
        """Return the next message; None: there comes no more."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            return None
        text = message.get("text")
        return bytes(message["bytes"] if text is None else text.encode("utf-8", "surrogatepass"))

    async def _take(self, message: bytes) -> None:
        name = None
        try:
            if len(message) > self._most:
                raise too_large(self._most)
            head = _head(message)
            name = _name(head)
            if head.type == "cancel":
                self._cancel(name)
            elif head.type == "request":
                self._begin(name, message)
            else:
                raise invalid("type", "type must be request or cancel.")
        except ApiError as exc:
            await self._tell_fault(name, exc)

    def _cancel(self, name: str) -> None:
        if name not in self._generations:
            raise ApiError("not_found", f"Nothing runs under the id {name!r}.", "id")
        self._end(name, ApiError("cancelled", "The request was cancelled."))

    def _end(self, name: str, fault: ApiError) -> None:
        if name not in self._ended:
            self._ended[name] = fault
            self._ending.add(task := asyncio.create_task(self._cancel_until_heard(name)))
            task.add_done_callback(self._ending.discard)

    async def _cancel_until_heard(self, name: str) -> None:
        # Again and again: redis-py swallows a cancellation that arrives while it connects.
        while name in self._ended:
            self._generations[name].cancel()
            await asyncio.sleep(AGAIN_SECONDS)

    def _begin(self, name: str, message: bytes) -> None:
        if name in self._generations:
            raise ApiError("conflict", f"A request with the id {name!r} is under way.", "id")
        if len(self._generations) >= MAX_CONCURRENT_REQUESTS:
            raise ApiError(
                "rate_limit_exceeded", f"A socket takes {MAX_CONCURRENT_REQUESTS} requests at once.", retry_after=1
            )
        self._generations[name] = asyncio.create_task(self._run(name, message))

    # One generation.

    async def _run(self, name: str, message: bytes) -> None:
        request_id, told, complete = new_request_id(), "200", False
        arrived, trace = time.monotonic(), None
        tracing.begin(request_id, self._headers.get(b"traceparent"))
        try:
            key = await self._key()
            tracing.name_tenant(key)
            trace = RequestTrace(key, request_id, ENDPOINT, arrived)
            await self._generate(name, message, trace)
            complete = True
        except asyncio.CancelledError:
            fault = self._ended.pop(name, None)
            if fault is None:
                raise
            told = await self._tell_fault(name, fault, trace)
        except ApiError as exc:
            told = await self._tell_fault(name, exc, trace)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
            told = await self._tell_fault(name, ApiError(OVERLOADED, "The service is briefly unavailable."), trace)
        except Exception:
            log.exception("request_failed", request_id=request_id, endpoint=ENDPOINT)
            told = await self._tell_fault(
                name, ApiError("internal_error", "The server had an error; please try again."), trace
            )
        finally:
            self._generations.pop(name, None)
            self._ended.pop(name, None)
            self._gateway.metrics.requests.labels(ENDPOINT, told).inc()
            log.info("request", request_id=request_id, endpoint=ENDPOINT, status=told)
            if trace is not None:
                self._gateway.recorder.end(trace, told, complete=complete)

    async def _generate(self, name: str, message: bytes, trace: RequestTrace) -> None:
        service, prompts, key = self._gateway.service, self._gateway.prompts, trace.key
        with self._gateway.live.listed(key, lambda fault: self._end(name, fault)):
            with self._gateway.body_memory.lease(key.tenant_id) as lease:
                await prompts.charge(key, len(message))
                lease.grow(len(message))
                request = await prompts.read(key, SOCKET, message)
            trace.asked(request, message)
            call = await service.begin(key, request, chat.DIALECT, trace.request_id, trace)
            try:
                await self._forward(name, call)
            except (ApiError, OSError):  # it has its verdict, or the client has gone
                raise
            except Exception:
                await service.fault(call)
                raise
            finally:
                service.let_go(call)

    async def _forward(self, name: str, call: ActiveRequest) -> None:
        events = self._gateway.service.events(call)
        event: AnswerEvent = await anext(events)
        writer = call.writer()
        await self._tell({"type": "started", "id": name, "request_id": call.request_id, "model": call.model})
        while True:
            for data in writer.stream(event):
                if data != DONE:
                    await self._tell({"type": "chunk", "id": name, "chunk": msgspec.Raw(data)})
            if isinstance(event, End):
                break
            event = await anext(events)
        await self._tell({"type": "done", "id": name})

    # Out.

    async def _tell_fault(self, name: str | None, fault: ApiError, trace: RequestTrace | None = None) -> str:
        """Send the error and return the status that it counts as."""
        if trace is not None:
            trace.fault = fault
        retry = {} if fault.retry_after is None else {"retry_after": fault.retry_after}
        await self._tell({"type": "error", "id": name, **fault.body(), **retry})
        return str(fault.status)

    async def _tell(self, content: dict[str, Any]) -> None:
        """Send, and wait while the client reads slowly; give it up when it seems to have stopped."""
        try:
            async with asyncio.timeout(STALLED_SECONDS), self._sending:
                await self._base_send({"type": "websocket.send", "text": _encode(content).decode()})
        except TimeoutError:
            self._stalled = True
            if self._main is not None:
                self._main.cancel()
            raise asyncio.CancelledError from None

    async def _close(self, fault: ApiError) -> None:
        """Close the connection of a caller that was not authenticated."""
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._tell_fault(None, fault)
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
    """Return what the client calls the request."""
    name = head.id
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARACTERS:
        raise invalid("id", f"id must be a text of 1 to {MAX_ID_CHARACTERS} characters, of your choice.")
    return name
