"""Limits that all connections of a gateway share: their number and the unauthenticated bytes that they buffer.

A request counts with every received byte, including headers, from its first byte until it is authenticated or has its
response. Small requests (headers and the first 64 KiB of a body) may use the whole limit; requests above it are
rejected. The rest of larger bodies may use half of the limit, so that they cannot block sign-ins and API calls. Beyond
that, only one of them is read at a time. One address may use half of each limit.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from millrace.environment.configuration import PlatformSettings, platform_settings
from tenants.keys.ip_allowlist import client_network, is_allowed, normalize_networks

log = structlog.get_logger(__name__)

SWEEP_SECONDS = 0.5
OTHER_FILES = 1024  # open files that are not client connections
LOG_SECONDS = 10.0  # at most one line per reason in this time
SMALL_BODY_BYTES = 2**16
READ_BYTES = 2**18  # the most that the event loop reads from a connection in one call
# Reasons for rejecting or closing a connection: the values of the metric's label.
ADDRESS_CONNECTIONS, ALL_CONNECTIONS = "address_connections", "connections"
ADDRESS_BYTES, ALL_BYTES = "address_unauthenticated_bytes", "unauthenticated_bytes"
HEADER_SIZE, HEADER_TIMEOUT = "header_size", "header_timeout"
BODY_SIZE, BODY_TIMEOUT = "body_size", "body_timeout"
INVALID_HTTP, PIPELINING, NOT_READING = "invalid_http", "pipelining", "not_reading"
WEBSOCKET_AUTH_TIMEOUT, WEBSOCKET_MESSAGES = "websocket_auth_timeout", "websocket_messages"
REASONS = (
    *(ADDRESS_CONNECTIONS, ALL_CONNECTIONS, ADDRESS_BYTES, ALL_BYTES, HEADER_SIZE, HEADER_TIMEOUT, BODY_SIZE),
    *(BODY_TIMEOUT, INVALID_HTTP, PIPELINING, NOT_READING, WEBSOCKET_AUTH_TIMEOUT, WEBSOCKET_MESSAGES),
)


@dataclass(frozen=True)
class ConnectionLimits:
    """The settings that apply to connections."""

    header_seconds: float
    header_bytes: int
    body_seconds: float
    body_bytes_per_second: int
    body_bytes: int  # bytes of a request that is not authenticated
    keepalive_seconds: int
    connections: int
    connections_per_address: int
    unauthenticated_bytes: int
    websocket_auth_seconds: float
    trusted_proxies: str

    @classmethod
    def from_settings(cls, settings: PlatformSettings) -> ConnectionLimits:
        return cls(
            header_seconds=settings.header_timeout_seconds,
            header_bytes=settings.max_header_bytes,
            body_seconds=settings.body_timeout_seconds,
            body_bytes_per_second=settings.min_body_bytes_per_second,
            body_bytes=settings.max_request_body_bytes,
            keepalive_seconds=settings.keepalive_timeout_seconds,
            connections=settings.max_connections,
            connections_per_address=settings.max_connections_per_address,
            unauthenticated_bytes=settings.max_unauthenticated_bytes,
            websocket_auth_seconds=settings.websocket_auth_timeout_seconds,
            trusted_proxies=settings.trusted_proxies,
        )


class GuardedConnection(Protocol):
    """The part of a connection that the guard uses."""

    def check(self, now: float, elapsed: float) -> None:
        """Enforce the deadlines. `elapsed` is the time in seconds since the last check."""

    def resume_reading(self) -> None:
        """Resume reading, since there is capacity for a large body again."""


class Peer:
    """One client address (an IPv6 /64 counts as one) with the resources that its connections use."""

    __slots__ = ("buffered_bytes", "connections", "is_proxy", "name")

    def __init__(self, name: str, is_proxy: bool) -> None:
        self.name = name
        self.is_proxy = is_proxy  # it has the connections of many clients, so no limit per address applies
        self.connections = 0
        self.buffered_bytes = 0


class ConnectionGuard:
    """The limits of one process. Must be used only on its event loop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.buffered_bytes = 0  # unauthenticated bytes
        self.peak_buffered_bytes = 0
        self.rejections: Counter[str] = Counter()
        self._proxies = _networks(limits.trusted_proxies)
        self._peers: dict[str, Peer] = {}
        self._connections: dict[GuardedConnection, Peer] = {}
        self._waiting: dict[GuardedConnection, None] = {}  # connections whose large body waits for capacity, in order
        # Reason -> (time of the last log line, number of rejections then).
        self._logged: dict[str, tuple[float, int]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._swept_at = 0.0

    @property
    def connections(self) -> int:
        return len(self._connections)

    def open(self, connection: GuardedConnection, address: str) -> tuple[Peer, str | None]:
        """Register a new connection. Return its peer, and the reason to reject the connection or None."""
        name = client_network(address)
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = Peer(name, self._proxies is None or is_allowed(address, self._proxies))
        rejection = None
        if len(self._connections) >= self.limits.connections:
            rejection = ALL_CONNECTIONS
        elif not peer.is_proxy and peer.connections >= self.limits.connections_per_address:
            rejection = ADDRESS_CONNECTIONS
        self._connections[connection] = peer
        peer.connections += 1
        if self._sweeping is None:
            loop = asyncio.get_running_loop()
            self._swept_at = loop.time()
            self._sweeping = loop.call_later(SWEEP_SECONDS, self._sweep)
        return peer, rejection

    def close(self, connection: GuardedConnection) -> None:
        """Unregister a connection that has released its bytes."""
        peer = self._connections.pop(connection, None)
        if peer is not None:
            peer.connections -= 1
            if not peer.connections:
                self._peers.pop(peer.name, None)

    def count_bytes(self, peer: Peer, size: int) -> None:
        """Add to the number of unauthenticated bytes."""
        peer.buffered_bytes += size
        self.buffered_bytes += size
        if self.buffered_bytes > self.peak_buffered_bytes:
            self.peak_buffered_bytes = self.buffered_bytes

    def release(self, peer: Peer, size: int) -> None:
        """Subtract from the number of unauthenticated bytes."""
        peer.buffered_bytes -= size
        self.buffered_bytes -= size
        self._resume()

    def excess(self, peer: Peer, *, large: bool) -> str | None:
        """Return the exceeded limit, or None. `large`: whether the request has a large body."""
        bound = self.limits.unauthenticated_bytes // (2 if large else 1)
        if self.buffered_bytes > bound:
            return ALL_BYTES
        if not peer.is_proxy and peer.buffered_bytes > bound // 2:
            return ADDRESS_BYTES
        return None

    def wait(self, connection: GuardedConnection) -> bool:
        """Queue a large body until there is capacity.

        Returns:
            False if it is the first in the queue, which is read anyway. Therefore bodies that have used the whole
            limit together do not wait for each other.
        """
        self._waiting[connection] = None
        return next(iter(self._waiting)) is not connection

    def stop_waiting(self, connection: GuardedConnection) -> None:
        """Remove a body from the queue."""
        self._waiting.pop(connection, None)
        self._resume()

    def _resume(self) -> None:
        """Resume the waiting bodies that fit the limit with one read each, and in any case the first."""
        if not self._waiting:
            return
        room = self.limits.unauthenticated_bytes // 2 - self.buffered_bytes
        for connection in list(itertools.islice(self._waiting, max(0, room // READ_BYTES))):
            if self.excess(self._connections[connection], large=True) is None:
                del self._waiting[connection]
                connection.resume_reading()
        if self._waiting:
            next(iter(self._waiting)).resume_reading()

    def reject(self, reason: str, address: str) -> None:
        """Count a rejection, and log it unless one for the same reason was logged within LOG_SECONDS."""
        self.rejections[reason] += 1
        now = time.monotonic()
        logged_at, count = self._logged.get(reason, (float("-inf"), 0))
        if now - logged_at >= LOG_SECONDS:
            self._logged[reason] = (now, self.rejections[reason])
            log.warning("connection_rejected", reason=reason, address=address, count=self.rejections[reason] - count)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for Prometheus."""
        yield GaugeMetricFamily(
            "millrace_connections", "client connections, including WebSockets", value=len(self._connections)
        )
        yield GaugeMetricFamily(
            "millrace_unauthenticated_bytes",
            "buffered bytes of requests that are not authenticated yet",
            value=self.buffered_bytes,
        )
        rejections = CounterMetricFamily(
            "millrace_connection_rejections",
            "requests and connections rejected or closed below the API by a limit or deadline",
            labels=["reason"],
        )
        for reason in REASONS:
            rejections.add_metric([reason], self.rejections[reason])
        yield rejections

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        elapsed, self._swept_at = now - self._swept_at, now
        self._sweeping = loop.call_later(SWEEP_SECONDS, self._sweep) if self._connections else None
        for connection in list(self._connections):
            connection.check(now, elapsed)


def _networks(trusted_proxies: str) -> tuple[str, ...] | None:
    """Return the networks of the trusted proxies, or None if every address is trusted."""
    networks: list[str] = []
    for network in trusted_proxies.split(","):
        if network.strip() == "*":
            return None
        try:
            networks += normalize_networks([network])
        except ValueError:
            continue  # uvicorn compares host names with addresses as text, so they match no address
    return tuple(networks)


@cache
def process_guard() -> ConnectionGuard:
    """Return the guard of this process."""
    limits = ConnectionLimits.from_settings(platform_settings())
    _raise_open_files(limits.connections + OTHER_FILES)
    return ConnectionGuard(limits)


def _raise_open_files(required: int) -> None:
    """Raise this process's limit of open files to `required`, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= required:
        return
    limit = required if hard == resource.RLIM_INFINITY else min(required, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < required:
        log.warning("open_files_limited", limit=limit, required=required)
