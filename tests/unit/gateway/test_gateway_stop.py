"""The end of the gateway, in which a part hangs or fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import CapturingLogger

from millrace.gateway import app
from millrace.gateway.core.asyncio_utils import run_for, run_to_end

PARTS = ("disk", "batches", "catalog", "prompt_pool", "idempotency", "changes", "admission", "monitor", "dispatcher")
PARTS = (*PARTS, "request_log", "callers")
CONNECTIONS = ("tenant_db", "control_database", "database", "broker", "blocking_broker")


class FakePart:
    """A part of the gateway that records its end."""

    def __init__(self, name: str, stopped: list[str]) -> None:
        self.name = name
        self._stopped = stopped
        self.stop = self.close = self.aclose = self.drain = self.end

    async def end(self) -> None:
        self._stopped.append(self.name)


def test_a_part_that_hangs_or_fails_does_not_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STOP_SECONDS", 0.05)
    stopped: list[str] = []
    parts: Any = SimpleNamespace(
        **{name: FakePart(name, stopped) for name in (*PARTS, *CONNECTIONS)}, service=FakePart("service", stopped)
    )

    async def hang() -> None:
        await run_to_end(asyncio.sleep(0.5))  # also if it is cancelled

    async def fail() -> None:
        raise OSError("no route to host")

    parts.service.drain, parts.monitor.stop = hang, fail
    log = CapturingLogger()
    monkeypatch.setattr(app, "log", log)
    asyncio.run(app.Gateway.stop(parts))
    assert stopped == [name for name in (*PARTS, *CONNECTIONS) if name != "monitor"]
    assert [(*call.args, call.kwargs["part"]) for call in log.calls] == [
        ("gateway_part_left", "requests"),
        ("gateway_stop_failed", "monitor"),
    ]


def test_a_coroutine_runs_for_a_limited_time() -> None:
    async def run() -> None:
        assert await run_for(60, asyncio.sleep(0))
        assert not await run_for(0.01, asyncio.sleep(60))
        with pytest.raises(ZeroDivisionError):
            await run_for(60, divide())

    async def divide() -> float:
        return 1 / 0

    asyncio.run(run())
