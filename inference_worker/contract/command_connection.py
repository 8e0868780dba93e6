"""Commands of many requests on one connection to Valkey, for event loops.

The commands of all calls in one iteration of the event loop are written together, since each write is a system call
for this process and for Valkey. Replies have the order of the commands. So calls share a connection without a pool, a
lock or a task. redis-py's pipelines take several times the CPU time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import redis.asyncio as redis
from redis.asyncio.connection import AbstractConnection
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, ResponseError

Command = Sequence[Any]  # texts, bytes and numbers
LateReply = Callable[[Any], None]  # receives a reply to a cancelled caller; errors are dropped
_INCOMPLETE = object()


class CommandConnection:
    """A connection that is opened at its first use, and again after a failure. It must not block Valkey for others."""

    def __init__(self, broker: redis.Redis) -> None:
        """Create a connection with the options of `broker`."""
        self._pool = broker.connection_pool
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands together and return their replies. They run even if the caller is cancelled.

        Raises:
            RedisError: Valkey did not respond, or a command failed.
        """
        replies = await self._send(commands)
        for reply in replies:
            if isinstance(reply, redis.RedisError):
                raise reply
        return replies

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands as `execute` does. Return their replies, with the errors of commands among them.

        Raises:
            RedisError: Valkey did not respond.
        """
        return await self._send(commands)

    async def run(
        self, script: AsyncScript, keys: Sequence[Any], arguments: Sequence[Any], late: LateReply | None = None
    ) -> Any:
        """Run the script and return its result. It runs even if the caller is cancelled; then `late` gets its result.

        Raises:
            RedisError: Valkey did not respond, or the script failed.
        """
        (reply,) = await self._send([("EVALSHA", script.sha, len(keys), *keys, *arguments)], late)
        if isinstance(reply, NoScriptError):  # Valkey was restarted; this call loads the script
            (reply,) = await self._send([("EVAL", script.script, len(keys), *keys, *arguments)], late)
        if isinstance(reply, redis.RedisError):
            raise reply
        return reply

    def close(self) -> None:
        """Close the connection. A later call opens it again."""
        link, self._link = self._link, None
        if link is not None:
            link.fail(redis.ConnectionError("The connection to Valkey was closed."))

    async def _send(self, commands: Sequence[Command], late: LateReply | None = None) -> list[Any]:
        link = self._link
        if link is None or not link.is_open:
            link = await self._open()
        replies = link.send(commands, late)
        try:
            return await replies
        except asyncio.CancelledError:
            if late is not None and not replies.cancelled() and replies.exception() is None:
                _pass_on(replies.result(), late)  # they arrived before the cancellation
            raise

    async def _open(self) -> _Link:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._set_link)
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Link:
        connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        await connection.connect()  # type: ignore[no-untyped-call]
        writer, connection._writer, connection._reader = connection._writer, None, None
        if writer is None:
            raise redis.ConnectionError("The connection to Valkey was lost.")
        return _Link(writer, connection.socket_timeout)

    def _set_link(self, connecting: asyncio.Task[_Link]) -> None:
        self._connecting = None
        if not connecting.cancelled() and connecting.exception() is None:
            self._link = connecting.result()


class _Batch:
    """The commands of one call, until they are answered."""

    __slots__ = ("future", "late", "replies", "sent_at", "size")

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop, late: LateReply | None) -> None:
        self.size = size
        self.late = late
        self.replies: list[Any] = []
        self.future: asyncio.Future[list[Any]] = loop.create_future()
        self.sent_at = loop.time()


class _Link(asyncio.Protocol):
    """An open connection. redis-py connects and authenticates; then this protocol replaces its own."""

    def __init__(self, writer: asyncio.StreamWriter, timeout: float | None) -> None:
        self._writer = writer  # closes the transport when it is deleted
        self._transport = writer.transport
        self._transport.set_protocol(self)
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=_reply_error, notEnoughData=_INCOMPLETE)
        self._batches: deque[_Batch] = deque()
        self._unwritten: list[bytes] = []
        self._received_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_open = True

    def send(self, commands: Sequence[Command], late: LateReply | None = None) -> asyncio.Future[list[Any]]:
        """Send the commands. The result is the list of their replies; errors are among them."""
        batch = _Batch(len(commands), self._loop, late)
        packed = b"".join([hiredis.pack_command(tuple(command)) for command in commands])  # may raise
        if not commands:
            batch.future.set_result([])
            return batch.future
        if not self.is_open:
            batch.future.set_exception(redis.ConnectionError("The connection to Valkey is closed."))
            return batch.future
        self._batches.append(batch)
        if not self._unwritten:
            self._loop.call_soon(self._write)
        self._unwritten.append(packed)
        if self._timer is None and self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout, self._check)
        return batch.future

    def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if self.is_open:
            self._transport.write(b"".join(unwritten))

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                if self._batches and not isinstance(reply, hiredis.PushNotification):
                    self._add_reply(reply)
        except hiredis.ProtocolError as exc:
            self.fail(redis.ConnectionError(f"Valkey sent an invalid reply: {exc}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(redis.ConnectionError(f"Connection to Valkey lost: {exc or 'closed by the server'}"))

    def _add_reply(self, reply: Any) -> None:
        batch = self._batches[0]
        batch.replies.append(reply)
        if len(batch.replies) == batch.size:
            self._batches.popleft()
            if not batch.future.done():
                batch.future.set_result(batch.replies)
            elif batch.late is not None:  # the caller was cancelled
                _pass_on(batch.replies, batch.late)

    def _check(self) -> None:
        """Fail if a reply is overdue. One timer serves all batches."""
        self._timer = None
        if not self._batches or self._timeout is None:
            return
        left = max(self._received_at, self._batches[0].sent_at) + self._timeout - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self.fail(redis.TimeoutError("Timeout reading from Valkey"))

    def fail(self, error: redis.RedisError) -> None:
        """Close the connection. Its unanswered calls raise the error."""
        self.is_open = False
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batches, self._batches = self._batches, deque()
        for batch in batches:
            if not batch.future.done():
                batch.future.set_exception(error)


def _pass_on(replies: list[Any], late: LateReply) -> None:
    for reply in replies:
        if not isinstance(reply, redis.RedisError):
            late(reply)


def _reply_error(text: str) -> ResponseError:
    return NoScriptError(text) if text.startswith("NOSCRIPT") else ResponseError(text)
