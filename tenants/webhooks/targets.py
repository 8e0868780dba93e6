"""Validation of webhook URLs: only public IP addresses are allowed. Does not import Django.

Tenants choose the host. Hosts that the operator allows may have private addresses and use plain http.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Collection
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from inference_worker.contract.ip_addresses import InternalHost, UnresolvedHost, checked_addresses, is_public
from inference_worker.contract.texts import Text

LOOKUP_SECONDS = 2.0  # to resolve a name while an endpoint is created or changed
_MAX_LOOKUPS = 16  # concurrent
_LOCALHOST = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
_ADVICE = Text(
    "Use a host with a public address, or have the operator add this host to MILLRACE_WEBHOOK_ALLOWED_PRIVATE_HOSTS."
)
_lookups = threading.BoundedSemaphore(_MAX_LOOKUPS)


class TargetRefused(ValueError):
    """An error of a URL that webhooks may not use. The message is for the tenant."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(Text("%(reason)s %(advice)s", reason=reason, advice=advice) if advice else reason)
        self.reason = reason


class CheckedUrl(str):
    """A URL that `check_url` has accepted."""

    __slots__ = ()


class WebhookTarget(NamedTuple):
    """The parts of an endpoint's URL."""

    tls: bool
    host: str
    port: int
    path: str


def parse(url: str, private_hosts: Collection[str]) -> WebhookTarget:
    """Parse a URL and check it without resolving the host.

    Raises:
        TargetRefused: the URL is not an https URL of a public host.
    """
    if not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
        raise TargetRefused(Text("The URL must contain only ASCII characters without spaces."))
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as exc:
        raise TargetRefused(Text("This is no URL.")) from exc
    inside = host in private_hosts
    if parts.scheme != "https" and not (inside and parts.scheme == "http"):
        raise TargetRefused(Text("The URL must begin with https://."))
    if not host or port == 0 or "@" in parts.netloc or parts.fragment:
        raise TargetRefused(Text("The URL must name a host, and neither a user nor a fragment."))
    literal = _literal(host)
    if literal is not None and not inside and not is_public(literal):
        raise TargetRefused(Text("The address %(host)s is internal.", host=host), _ADVICE)
    if not inside and _is_localhost(host):
        raise TargetRefused(Text("The host %(host)s is internal.", host=host), _ADVICE)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebhookTarget(parts.scheme == "https", host, port or (443 if parts.scheme == "https" else 80), path)


def check_url(url: str, private_hosts: Collection[str], seconds: float = LOOKUP_SECONDS) -> CheckedUrl:
    """Check a URL that a tenant sets. A name that does not resolve in time is accepted: delivery checks it again.

    Call it outside of transactions: it waits up to `seconds` for the name server.

    Raises:
        TargetRefused: the URL is not an https URL, or its host is internal.
    """
    target = parse(url, private_hosts)
    if target.host not in private_hosts and _is_internal(target, seconds):
        raise TargetRefused(Text("The host %(host)s has an internal address.", host=target.host), _ADVICE)
    return CheckedUrl(url)


def _is_internal(target: WebhookTarget, seconds: float) -> bool:
    """Return whether the host has an internal address, as far as the name server responds in time."""
    lookups = _lookups
    if not lookups.acquire(timeout=seconds):
        return False
    found: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            with suppress(UnresolvedHost):
                checked_addresses(target.host, target.port, allow_internal=False)
            found.put(False)
        except InternalHost:
            found.put(True)
        finally:
            lookups.release()

    # A DNS query cannot be interrupted. A daemon thread does not delay the end of the process.
    threading.Thread(target=look_up, name="webhook-lookup", daemon=True).start()
    try:
        return found.get(timeout=seconds)
    except queue.Empty:
        return False


def addresses(target: WebhookTarget, private_hosts: Collection[str]) -> list[str]:
    """Return the host's current IP addresses. Connect to one of these without resolving the name again.

    Raises:
        TargetRefused: the host has no address, or one of them is not public.
    """
    try:
        return checked_addresses(target.host, target.port, allow_internal=target.host in private_hosts)
    except UnresolvedHost as exc:
        raise TargetRefused(Text("The host's name has no address.")) from exc
    except InternalHost as exc:
        raise TargetRefused(Text("The host's address is not public.")) from exc


def _is_localhost(host: str) -> bool:
    name = host.rstrip(".")
    return name in _LOCALHOST or name.endswith(".localhost")


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address if the host is one, also in forms that resolvers accept (127.1, 0x7f000001)."""
    host = host.rstrip(".")  # the dot at the end of a fully qualified name
    try:
        return ip_address(host)
    except ValueError:
        pass
    try:
        return ip_address(socket.inet_aton(host))
    except OSError:
        return None
