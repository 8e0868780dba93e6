"""One POST to an address a tenant chose: bounded in time and size, to the address that was checked. Free of Django."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from tenants.webhooks.targets import TargetRefused, WebhookTarget, addresses, parse

SECONDS = 10.0  # for all of it but the look-up of the name
MAX_RESPONSE_BYTES = 1024  # of the answer's body; no more is read


class WebhookResponse(NamedTuple):
    """What came of a POST. Without a status there was no answer, and `error` says why."""

    status: int | None
    ms: int
    error: str = ""
    excerpt: str = ""

    @property
    def is_success(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class _Pinned(HTTPConnection):
    """A connection to one of the addresses that were checked; certificates are still the host name's."""

    def __init__(self, target: WebhookTarget, found: Collection[str], seconds: float) -> None:
        super().__init__(target.host, target.port, timeout=seconds)
        self.default_port = 443 if target.tls else 80  # so that `Host` leaves it out
        self._found = found
        self._tls = ssl.create_default_context() if target.tls else None
        self.is_over = False

    def connect(self) -> None:
        for number, address in enumerate(self._found, 1):
            try:
                self.sock = socket.create_connection((address, self.port), self.timeout)
                break
            except OSError:
                if number == len(self._found) or self.is_over:
                    raise
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock.do_handshake()

    def cut(self) -> None:
        """End it, whatever it waits for: a timeout alone would bound each wait, but not their number."""
        self.is_over = True
        if self.sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def post(
    url: str, headers: Mapping[str, str], body: bytes, *, private_hosts: Collection[str] = (), seconds: float = SECONDS
) -> WebhookResponse:
    """POST the body there. Follows no redirect; never raises for what the other side does."""
    began = time.monotonic()
    connection = None
    try:
        target = parse(url, private_hosts)
        connection = _Pinned(target, addresses(target, private_hosts), seconds)
        timer = threading.Timer(seconds, connection.cut)
        timer.daemon = True
        timer.start()
        try:
            connection.request("POST", target.path, body, dict(headers))
            response = connection.getresponse()
            excerpt = response.read(MAX_RESPONSE_BYTES)
        finally:
            timer.cancel()
        if connection.is_over:  # what was read until then may look like a whole answer
            raise TimeoutError
    except (OSError, HTTPException, TargetRefused, ValueError) as exc:
        return WebhookResponse(None, _since(began), _said(exc, over=_since(began) >= seconds * 1000))
    finally:
        if connection is not None:
            connection.close()
    text = excerpt.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    error = "" if 200 <= response.status < 300 else f"The response status was {response.status}."
    return WebhookResponse(response.status, _since(began), error, text)


def _since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)


def _said(fault: Exception, *, over: bool) -> str:
    """Return the error message for the tenant."""
    if isinstance(fault, TargetRefused):
        return str(fault)
    if over or isinstance(fault, TimeoutError):
        return "The endpoint did not respond in time."
    if isinstance(fault, ssl.SSLCertVerificationError):
        return f"The certificate is not valid: {fault.verify_message}."[:200]
    if isinstance(fault, ssl.SSLError):
        return "The TLS connection failed."
    if isinstance(fault, OSError):
        return f"The connection failed: {fault.strerror or type(fault).__name__}."[:200]
    return "The response was not valid HTTP."
