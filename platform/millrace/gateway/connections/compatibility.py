"""Requests of clients that offer another protocol or use HTTP/1.0."""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def create_parser(protocol: Any) -> Any:
    """Return a parser with the leniencies of uvicorn's."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def is_supported(parser: Any) -> bool:
    """Return whether the method and the HTTP version of a request are supported."""
    return parser.get_http_version() in ("1.0", "1.1") and parser.get_method() != b"CONNECT"


def add_path(url: bytes) -> bytes:
    """Return a request target with a path: `/` if the target has none (RFC 9112, 3.2.2 and 3.2.4)."""
    if url.startswith(b"/"):
        return url
    if url == b"*":
        return b"/"
    scheme, separator, rest = url.partition(b"://")
    end = next((at for at, byte in enumerate(rest) if byte in b"/?#"), len(rest))
    return url if not separator or rest[end : end + 1] == b"/" else b"%s://%s/%s" % (scheme, rest[:end], rest[end:])


def is_websocket_handshake(parser: Any, headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether a request with an offer to change the protocol offers only WebSocket (RFC 6455)."""
    offers = [value.lower() for name, value in headers if name == b"upgrade"]
    return offers == [b"websocket"] and parser.get_method() == b"GET" and parser.get_http_version() == "1.1"


def head_without_offer(parser: Any, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request without the field `upgrade`. Parsers read the body after such a head."""
    request_line = b"%s %s HTTP/%s\r\n" % (parser.get_method(), url, parser.get_http_version().encode())
    return request_line + b"".join(b"%s: %s\r\n" % field for field in headers if field[0] != b"upgrade") + b"\r\n"


async def respond_without_chunks(
    cycle: RequestResponseCycle, application: Any, scope: Any, receive: Any, send: Any
) -> None:
    """Run the application for an HTTP/1.0 client, which cannot read chunks.

    If the response has no `content-length`, its body ends when the connection is closed.
    """
    has_length = False

    async def send_without_chunks(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            headers = [field for field in message.get("headers", ()) if field[0].lower() != b"transfer-encoding"]
            has_length = any(name.lower() == b"content-length" for name, _ in headers)
            message = {**message, "headers": headers}
            if not has_length:
                cycle.chunked_encoding = False  # uvicorn sends chunks if it is None
        elif not has_length:
            cycle.expected_content_length += len(message.get("body", b""))
        await send(message)

    await application(scope, receive, send_without_chunks)
