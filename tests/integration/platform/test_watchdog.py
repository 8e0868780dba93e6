"""The watchdog with small real servers: only a loop that is blocked by computation is ended, after its stacks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.local.program import Program, free_port
from millrace.local.stack import Stack
from millrace.local.supervisor import Supervisor
from millrace.local.watchdog import WatchdogLimits, cpu_seconds
from tests.support.waiting import eventually_async

LIMITS = WatchdogLimits(blocked_seconds=1.0, poll_seconds=0.1, max_restarts=2, window_seconds=600)
# Answers each request. A request for /block runs code in the event loop.
SERVER = """
import asyncio, os, re, sys, time

def compute():
    while True:
        pass

def match():  # one call of C code, which holds the interpreter
    re.match(r"(a+)+$", "a" * 64 + "b")

def wait():
    time.sleep(3600)

async def answer(reader, writer):
    path = (await reader.readline()).split()[1].decode()
    if path != "/healthz":
        writer.close()
        globals()[path[1:]]()
    writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
    writer.close()

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()

asyncio.run(main())
"""


class Gateway:
    """A supervised server."""

    def __init__(self, supervisor: Supervisor, port: int, log: Path, messages: list[str]) -> None:
        self.supervisor, self.port, self.log, self.messages = supervisor, port, log, messages

    @property
    def pid(self) -> int:
        pid = self.supervisor.pid("gateway")
        assert pid is not None
        return pid

    def request(self, path: str) -> None:
        urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=2).close()

    async def answers(self) -> bool:
        try:
            await asyncio.to_thread(self.request, "healthz")
        except OSError:
            return False
        return True

    async def block(self, how: str) -> None:
        """Let the server run `how` in its event loop, once the watchdog has seen an answer."""
        await asyncio.sleep(3 * LIMITS.poll_seconds)
        with pytest.raises(OSError):
            await asyncio.to_thread(self.request, how)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    port, messages = free_port(), []
    supervisor = Supervisor(tmp_path, messages.append, limits=LIMITS)
    program = Program(
        "gateway",
        (sys.executable, "-c", SERVER, str(port)),
        environ={"PYTHONFAULTHANDLER": "1"},
        http_address=("127.0.0.1", port),
    )
    supervisor.add([program])
    await supervisor.start("gateway")
    gateway = Gateway(supervisor, port, tmp_path / "gateway.log", messages)
    await eventually_async(gateway.answers)
    yield gateway
    stop_now = asyncio.Event()
    stop_now.set()
    await supervisor.stop(stop_now)


@pytest.mark.parametrize("how", ["compute", "match"])
async def test_a_blocked_loop_is_ended_after_its_stacks_are_in_the_log(gateway: Gateway, how: str) -> None:
    first = gateway.pid
    await gateway.block(how)
    await eventually_async(lambda: gateway.supervisor.pid("gateway") not in (None, first))
    await eventually_async(gateway.answers)
    assert gateway.messages[0].startswith("gateway has answered no request for 1 s while it used CPU time; ending it")
    assert "gateway was killed by SIGABRT; starting it again" in gateway.messages[1]
    log = gateway.log.read_text()
    assert "Fatal Python error: Aborted" in log
    assert f" in {how}" in log


@pytest.mark.parametrize("how", ["idle", "stopped", "wait"])
async def test_a_loop_that_uses_no_cpu_time_is_not_restarted(gateway: Gateway, how: str) -> None:
    first = gateway.pid
    if how == "stopped":
        os.kill(first, signal.SIGSTOP)
    elif how == "wait":
        await gateway.block(how)
    await asyncio.sleep(2.5 * LIMITS.blocked_seconds)  # a negative: nothing may happen in this time
    assert (gateway.supervisor.pid("gateway"), gateway.messages) == (first, [])
    if how == "stopped":
        os.kill(first, signal.SIGCONT)
        await eventually_async(gateway.answers)
        assert gateway.pid == first


async def test_a_process_that_computes_and_answers_is_not_restarted(gateway: Gateway) -> None:
    """The bound is on the time without an answer, not on the CPU time."""
    first, deadline = gateway.pid, time.monotonic() + 2 * LIMITS.blocked_seconds
    before = cpu_seconds(first)
    while time.monotonic() < deadline:
        assert await gateway.answers()
    assert cpu_seconds(first) > before
    assert (gateway.pid, gateway.messages) == (first, [])


async def test_a_child_that_blocks_again_and_again_is_left_after_two_restarts(gateway: Gateway) -> None:
    for count in (1, 2):
        pid = gateway.pid
        await gateway.block("compute")
        await eventually_async(lambda: gateway.supervisor.pid("gateway") not in (None, pid))  # noqa: B023 - awaited before
        await eventually_async(gateway.answers)
        assert len(gateway.messages) == 2 * count
    pid = gateway.pid
    await gateway.block("compute")
    await eventually_async(lambda: len(gateway.messages) == 5)
    assert "It was restarted 2 times in 10 minutes for this, so it is left running" in gateway.messages[4]
    await asyncio.sleep(2 * LIMITS.blocked_seconds)  # a negative: the message is not repeated
    assert (gateway.pid, len(gateway.messages)) == (pid, 5)


def test_the_gateway_of_the_platform_is_watched(tmp_path: Path) -> None:
    settings = {"MILLRACE_DATA_DIR": str(tmp_path), "MILLRACE_HOST": "0.0.0.0", "MILLRACE_PORT": "8123"}  # noqa: S104
    stack = Stack(dict(os.environ) | settings)
    watched = {program.name: program for program in stack.programs() if program.http_address}
    assert watched["gateway"].http_address == ("127.0.0.1", 8123)
    assert watched["gateway"].environ["PYTHONFAULTHANDLER"] == "1"
    assert list(watched) == ["gateway"]
