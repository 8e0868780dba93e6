"""Commands of one thread on its own connection to Valkey.

The commands of a call are written together. redis-py's pipelines take several times the CPU time, since they check the
connection before each call, and process each reply in several calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import hiredis
import redis
from redis.exceptions import InvalidResponse

from inference_worker.contract.command_connection import Command

CHUNK_BYTES = 2**16  # written or read in one system call, for which the connection's timeout applies
PING = hiredis.pack_command(("PING",))
_INCOMPLETE = object()


class ThreadCommands:
    """A connection that is opened at its first use, and again after a failure. Only one thread may use it.

    A connection that was idle for the client's health check interval is checked before its next use. A network device
    may have dropped it: its commands would then be lost, and only the timeout of their replies would report it.
    """

    def __init__(self, broker: redis.Redis) -> None:
        """Create a connection with the options of `broker`."""
        self._connection: Any = broker.connection_pool.make_connection()
        self._reader = hiredis.Reader()
        self._check_at = 0.0  # on the monotonic clock

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands together, and return their replies. Errors of commands are among them.

        If an open connection is lost, all commands are sent again, once.

        Raises:
            RedisError: Valkey did not respond.
        """
        if not commands:
            return []
        packed = b"".join([hiredis.pack_command(tuple(command)) for command in commands])
        self._check_idle()
        was_open = self._connection.is_connected
        try:
            return self._send(packed, len(commands))
        except redis.ConnectionError:
            if not was_open:
                raise
        return self._send(packed, len(commands))

    def close(self) -> None:
        """Close the connection. A later call opens it again."""
        self._connection.disconnect()

    def _check_idle(self) -> None:
        """Close an idle connection to which Valkey does not respond."""
        connection = self._connection
        if connection.is_connected and connection.health_check_interval and time.monotonic() >= self._check_at:
            with suppress(redis.RedisError):
                self._send(PING, 1)

    def _send(self, packed: bytes, count: int) -> list[Any]:
        connection = self._connection
        replies: list[Any] = []
        try:
            if not connection.is_connected:
                self._open()
            socket, reader = connection._sock, self._reader
            for start in range(0, len(packed), CHUNK_BYTES):
                socket.sendall(packed[start : start + CHUNK_BYTES])
            while len(replies) < count:
                reply = reader.gets()
                if reply is _INCOMPLETE:
                    if not (data := socket.recv(CHUNK_BYTES)):
                        raise redis.ConnectionError("Valkey has closed the connection.")
                    reader.feed(data)
                elif isinstance(reply, redis.ConnectionError):  # such as during the load of a snapshot
                    raise reply
                elif not isinstance(reply, hiredis.PushNotification):
                    replies.append(reply)
        except BaseException as exc:  # replies that were not read must not be those of the next call
            connection.disconnect()
            if isinstance(exc, TimeoutError):
                raise redis.TimeoutError("Timeout reading from Valkey") from exc
            if isinstance(exc, OSError):
                raise redis.ConnectionError(f"The connection to Valkey was lost: {exc}") from exc
            raise
        self._check_at = time.monotonic() + connection.health_check_interval
        return replies

    def _open(self) -> None:
        self._connection.connect()
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=self._connection._parser.parse_error,
            notEnoughData=_INCOMPLETE,
        )
