"""The console behind uvicorn for tests with a browser, with a wait for the end of its requests."""

from __future__ import annotations

import http.client
import threading
from typing import Any

import uvicorn

from tests.support.waiting import eventually

IDLE_SECONDS = 60  # a limit for busy machines
_BARRIER = "/-/barrier"


class LiveServer:
    """uvicorn in a thread, with a count of its unfinished requests."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._unfinished = 0  # changed by the server's thread only
        config = uvicorn.Config(self._count, "127.0.0.1", 0, interface="asgi3", log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        eventually(lambda: self._server.started)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def wait_until_idle(self) -> None:
        """Wait until no request is in flight. A request that its client has cancelled still runs to its end.

        Call it after the browser's pages are closed, and before the database is emptied.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=IDLE_SECONDS)
        connection.request("GET", _BARRIER)  # answered after everything sent before it was read
        connection.getresponse().read()
        connection.close()
        eventually(lambda: not self._unfinished, describe=lambda: f"{self._unfinished} requests do not end")

    async def _count(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == _BARRIER:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
            return
        self._unfinished += 1
        try:
            await self._application(scope, receive, send)
        finally:
            self._unfinished -= 1
