"""A limit on request bodies of the console and the management API, which Django would write to disk without a limit."""

from __future__ import annotations

from typing import Any

from millrace.gateway.core.request_body import RequestBody, too_large

MAX_BYTES = 8 * 2**20  # the largest uploads are price files


class BoundedBodies:
    """An ASGI application that rejects larger bodies with 413 and passes other requests to another application."""

    def __init__(self, application: Any, max_bytes: int = MAX_BYTES) -> None:
        self._application = application
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = RequestBody(scope["method"], dict(scope["headers"]), receive)
        if (body.declared or 0) > self._max_bytes:
            await _reject(body, send, self._max_bytes)
            return
        received, response_started = 0, False

        async def receive_bounded() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message if received <= self._max_bytes else {"type": "http.disconnect"}

        async def send_and_record(message: Any) -> None:
            nonlocal response_started
            response_started = True
            await send(message)

        await self._application(scope, receive_bounded, send_and_record)
        if received > self._max_bytes and not response_started:
            await _reject(body, send, self._max_bytes)


async def _reject(body: RequestBody, send: Any, max_bytes: int) -> None:
    text = too_large(max_bytes).message.encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(text)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": text, "more_body": True})
    await body.discard()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
