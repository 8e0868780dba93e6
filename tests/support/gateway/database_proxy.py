"""A TCP proxy before PostgreSQL, which can refuse connections, or let them hang as those of a lost machine do."""

from __future__ import annotations

import asyncio
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class DatabaseProxy:
    """A proxy with the connection string `url`. It forwards until `refuse` or `hang`, and again after `restore`."""

    def __init__(self, url: str) -> None:
        parameters: dict[str, Any] = conninfo_to_dict(url)
        self._target = str(parameters["host"]), int(parameters.get("port") or 5432)
        self._url = url
        self._is_refusing = False
        self._forwards = asyncio.Event()
        self._forwards.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._close_connections()

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return make_conninfo(self._url, host=host, port=port)

    def refuse(self) -> None:
        """Close all connections, and each new one immediately."""
        self._is_refusing = True
        self._close_connections()

    def hang(self) -> None:
        """Forward nothing more, and keep the connections open."""
        self._forwards.clear()

    def restore(self) -> None:
        self._is_refusing = False
        self._forwards.set()

    def _close_connections(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            writer.close()
            return
        target_reader, target_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, target_writer}
        await asyncio.gather(self._forward(reader, target_writer), self._forward(target_reader, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self._forwards.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
            self._writers.discard(writer)
