"""Load for benchmarks/gateway.py: plain sockets on one event loop, to minimize the cost of the load."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TOKEN = re.compile(rb"(\d{11,}) ")  # a chunk contains several tokens if the broker was slow


@dataclass
class ClosedLoopResult:
    """The result of one closed-loop run."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)  # seconds
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds if self.seconds else 0.0


@dataclass
class StreamsResult:
    """The result of parallel streams. A delay is the time from a token's step to its client, in seconds."""

    expected: int = 0
    received: int = 0
    delays: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def request_bytes(url: str, key: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    parts, payload = urlsplit(url), json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {key}\r\n{more}"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


async def closed_loop(url: str, request: bytes, connections: int, seconds: float) -> ClosedLoopResult:
    """Run `connections` clients, each of which sends the next request after the previous response."""
    result, until = ClosedLoopResult(), time.perf_counter() + seconds
    started = time.perf_counter()
    await asyncio.gather(*(_caller(url, request, until, result) for _ in range(connections)))
    result.seconds = time.perf_counter() - started
    return result


async def _caller(url: str, request: bytes, until: float, result: ClosedLoopResult) -> None:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        while (sent := time.perf_counter()) < until:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            body = await reader.readexactly(int(length.group(1)) if length else 0)
            if not head.startswith(b"HTTP/1.1 200"):
                result.errors.append((head.split(b"\r\n")[0] + b" " + body[:200]).decode(errors="replace"))
                return
            result.latencies.append(time.perf_counter() - sent)
    except (OSError, asyncio.IncompleteReadError) as exc:
        result.errors.append(str(exc))
    finally:
        writer.close()


class _Reader(asyncio.Protocol):
    """A client that reads one stream. A stalled client stops reading after the headers."""

    def __init__(self, request: bytes, result: StreamsResult, *, stalled: bool) -> None:
        self._request = request
        self._result = result
        self._stalled = stalled
        self._remainder = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if self._stalled:
            self.transport.pause_reading()
            return
        data = self._remainder + data
        end = 0
        for match in _TOKEN.finditer(data):
            end = match.end()
            self._result.received += 1
            self._result.delays.append((now - int(match.group(1))) / 1e9)
        self._remainder = data[max(end, len(data) - 200) :]
        if b"data: [DONE]" in data or b'"error"' in data:
            if b"[DONE]" not in data:
                self._result.errors.append(data[-300:].decode(errors="replace"))
            self.finish()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            if not self._stalled:
                self._result.errors.append(f"cut: {error}")
            self.done.set_result(None)

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        self.transport.close()


async def many_streams(
    url: str, request: bytes, count: int, tokens: int, stalled: int, seconds: float
) -> StreamsResult:
    """Start `count` reading and `stalled` stalled clients, and wait for the reading ones."""
    parts, result = urlsplit(url), StreamsResult(expected=count * tokens)
    loop = asyncio.get_running_loop()
    readers: list[_Reader] = []
    for n in range(count + stalled):
        _, reader = await loop.create_connection(
            partial(_Reader, request, result, stalled=n >= count),
            parts.hostname,
            parts.port,
        )
        readers.append(reader)
    _, late = await asyncio.wait([reader.done for reader in readers[:count]], timeout=seconds)
    result.errors += ["not ended in time"] * len(late)
    for reader in readers:
        reader.transport.abort()
    return result
