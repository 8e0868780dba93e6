"""A request to a URL of a tenant or operator, limited in time and size, to a checked IP address.

Does not import Django.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from inference_worker.contract.texts import Text, text_of
from tenants.webhooks.targets import TargetRefused, WebhookTarget, addresses, parse

TIMEOUT_SECONDS = 10.0  # without the DNS query
MAX_RESPONSE_BYTES = 1024  # bytes of the response body; the rest is not read


class WebhookResponse(NamedTuple):
    """The result of a POST. If there was no response, `status` is None and `error` is the reason."""

    status: int | None
    duration_ms: int
    error: str = ""
    excerpt: str = ""
    is_outdated: bool = False  # there was no POST, and there will be none

    @property
    def is_success(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class RawResponse(NamedTuple):
    """A response: its status, and the beginning of its body."""

    status: int
    body: bytes


class _Pinned(HTTPConnection):
    """A connection to one of the checked IP addresses. Certificates are verified against the host name."""

    def __init__(self, target: WebhookTarget, found: Collection[str], seconds: float) -> None:
        super().__init__(target.host, target.port, timeout=seconds)
        self.default_port = 443 if target.tls else 80  # so that the `Host` header omits it
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

    def abort(self) -> None:
        """Shut the connection down. A socket timeout would limit each wait, but not the number of waits."""
        self.is_over = True
        if self.sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def post(
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    private_hosts: Collection[str] = (),
    seconds: float = TIMEOUT_SECONDS,
) -> WebhookResponse:
    """POST the body to the URL without following redirects. Failures are in the result and do not raise."""
    began = time.monotonic()
    try:
        status, excerpt = exchange(
            "POST", url, headers, body, private_hosts=private_hosts, seconds=seconds, max_bytes=MAX_RESPONSE_BYTES
        )
    except (OSError, HTTPException, TargetRefused, ValueError) as exc:
        return WebhookResponse(None, _milliseconds_since(began), describe_failure(exc))
    text = excerpt.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    is_success = 200 <= status < 300
    error = "" if is_success else Text("The response status was %(status)s.", status=status)
    return WebhookResponse(status, _milliseconds_since(began), error, text)


def exchange(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    private_hosts: Collection[str],
    seconds: float,
    max_bytes: int,
) -> RawResponse:
    """Send a request to the URL without following redirects, and return the response with `max_bytes` of its body.

    Raises:
        TargetRefused: the host is internal and none of `private_hosts`.
        OSError, HTTPException, ValueError: there was no response in time.
    """
    target = parse(url, private_hosts)
    connection = _Pinned(target, addresses(target, private_hosts), seconds)
    timer = threading.Timer(seconds, connection.abort)
    timer.daemon = True
    timer.start()
    try:
        connection.request(method, target.path, body, dict(headers))
        response = connection.getresponse()
        found = RawResponse(response.status, response.read(max_bytes))
    except (OSError, HTTPException) as exc:
        if connection.is_over:
            raise TimeoutError from exc
        raise
    finally:
        timer.cancel()
        connection.close()
    if connection.is_over:  # the truncated response may look complete
        raise TimeoutError
    return found


def _milliseconds_since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)


def describe_failure(error: Exception) -> str:
    """Return the message of an error of `exchange`, for the tenant or operator who set the URL."""
    if isinstance(error, TargetRefused):
        return text_of(error)
    if isinstance(error, TimeoutError):
        return Text("The endpoint did not respond in time.")
    if isinstance(error, ssl.SSLCertVerificationError):
        return Text("The certificate is not valid: %(reason)s.", reason=error.verify_message)
    if isinstance(error, ssl.SSLError):
        return Text("The TLS connection failed.")
    if isinstance(error, OSError):
        return Text("The connection failed: %(reason)s.", reason=error.strerror or type(error).__name__)
    return Text("The response was not valid HTTP.")
