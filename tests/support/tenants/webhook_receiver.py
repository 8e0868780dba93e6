"""A server that receives webhooks, and a check of their signatures as a tenant would write it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Received(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """A receiver that stores its requests and sends configured responses."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.status = 200
        self.answer = b"thanks"
        self.headers: dict[str, str] = {}
        self.before: Callable[[], object] = int  # runs before the response
        self.drip = 0.0  # seconds between the bytes of the response's headers

    @property
    def ids(self) -> list[str]:
        return [each.headers["webhook-id"] for each in self.received]


@contextmanager
def receiving(*, wrap: Callable[[ThreadingHTTPServer], None] = id) -> Iterator[tuple[Receiver, int]]:  # type: ignore[assignment]
    """Run a receiver, and yield it with its port on 127.0.0.1."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.received.append(Received(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            receiver.before()
            if receiver.drip:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                for byte in b"x-slow: 1\r\n" * 500:
                    try:
                        self.wfile.write(bytes([byte]))
                    except OSError:
                        return
                    time.sleep(receiver.drip)
            self.send_response(receiver.status)
            for name, value in receiver.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(receiver.answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    wrap(server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # checks for shutdown
    thread.start()
    try:
        yield receiver, server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def is_genuine(secret: str, received: Received) -> bool:
    """Return whether one of the signatures was made with this secret, according to Standard Webhooks."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{received.headers['webhook-id']}.{received.headers['webhook-timestamp']}.".encode() + received.body
    mine = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    given = [each.partition(",") for each in received.headers["webhook-signature"].split()]
    return any(version == "v1" and hmac.compare_digest(mine, it) for version, _, it in given)


def signed_headers(secret: str, event_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """Return the headers of an event that is signed with the secret."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    timestamp = str(int(at.timestamp()))
    signed = f"{event_id}.{timestamp}.".encode() + body
    signature = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {"webhook-id": event_id, "webhook-timestamp": timestamp, "webhook-signature": f"v1,{signature}"}
