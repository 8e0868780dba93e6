"""A bound on the request bodies of the console and the management API, which Django writes to the disk unbounded."""

from __future__ import annotations

from typing import Any

from millrace.gateway.core.request_body import RequestBody, too_large

MAX_BYTES = 8 * 2**20  # price files are the largest that is uploaded there


class BoundedBodies:
    """An ASGI application that refuses larger bodies with 413 and passes all else on."""

    def __init__(self, application: Any, most: int = MAX_BYTES) -> None:
        self._application = application
        self._most = most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = RequestBody(scope["method"], dict(scope["headers"]), receive)
        if (body.declared or 0) > self._most:
            await _refuse(body, send, self._most)
            return
        received, answered = 0, False

        async def receive_bounded() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message if received <= self._most else {"type": "http.disconnect"}

        async def send_and_note(message: Any) -> None:
            nonlocal answered
            answered = True
            await send(message)

        await self._application(scope, receive_bounded, send_and_note)
        if received > self._most and not answered:
            await _refuse(body, send, self._most)


async def _refuse(body: RequestBody, send: Any, most: int) -> None:
    text = too_large(most).message.encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(text)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": text, "more_body": True})
    await body.discard()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
