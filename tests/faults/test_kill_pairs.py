"""Two processes killed one after the other during streams: each execution ends in exactly one usage event.

If the worker was killed, its streams are not billed. Otherwise the worker completes them, and they are billed once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import psutil
import pytest

from millrace.local.program import die_with_parent
from tests.support.e2e.streams import Stream
from tests.support.invariants import assert_ledger_invariants
from tests.support.stack import Stack, eventually, running

GAP_SECONDS = 1.0
STREAMS = 4
SHORT, LONG = 150, 1800  # tokens: of a stream that completes, and of one that runs until its worker is killed
PIDS: dict[str, Callable[[Stack], int]] = {
    "gateway": Stack.gateway,
    "worker": Stack.worker,
    "settler": lambda stack: stack.pid("run_settler"),
    "valkey": lambda stack: stack.pid("valkey-server"),
}
QUICK = ("gateway", "worker")


def kill(stack: Stack, name: str) -> None:
    os.kill(PIDS[name](stack), signal.SIGKILL)


@contextmanager
def cut_streams(stack: Stack, *, is_worker_killed: bool) -> Iterator[list[str]]:
    """Start streams, whose requests are yielded. After the block each must have exactly one usage event."""
    stack.wait_until_ready()
    max_tokens = LONG if is_worker_killed else SHORT
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = list(pool.map(lambda _: Stream(stack, max_tokens=max_tokens), range(STREAMS)))
    for stream in streams:
        stream.read(3)
    names = [stream.request_id for stream in streams]
    yield names
    for stream in streams:  # to its end, since a disconnect would cancel it
        with contextlib.suppress(httpx2.TransportError):
            stream.read()
        stream.close()
    expected = ("failed", 0, 0) if is_worker_killed else ("completed", None, max_tokens)
    for name in names:
        eventually(lambda: stack.events(request_id=name), 180)  # noqa: B023 - awaited before name changes
        (event,) = stack.events(request_id=name)
        tokens = event["tokens"]
        assert (event["outcome"], tokens["input"] if is_worker_killed else None, tokens["output"]) == expected


@pytest.mark.usefixtures("balanced_books")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(*pair, marks=[] if pair == QUICK else pytest.mark.extended)
        for pair in itertools.permutations(PIDS, 2)
    ],
)
def test_streams_cut_by_two_kills_have_one_usage_event_each(stack: Stack, first: str, second: str) -> None:
    with cut_streams(stack, is_worker_killed="worker" in (first, second)) as names:
        kill(stack, first)
        time.sleep(GAP_SECONDS)
        kill(stack, second)
        stack.wait_until_ready()
    for name in names:  # also after everything has settled
        assert len(stack.events(request_id=name)) == 1


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_streams_cut_by_a_kill_of_the_supervisor_have_one_usage_event_each(tmp_path: Path) -> None:
    """The supervisor's death ends every process, also while it restarts another one."""
    with running(tmp_path) as first:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            stack = first
            for name in ("", *PIDS):
                with cut_streams(stack, is_worker_killed=True) as names:
                    if name:
                        kill(stack, name)
                        time.sleep(GAP_SECONDS)
                    stack = kill_and_restart(stack)
                    processes.append(stack.process)
                    stack.wait_until_ready()
                for request_id in names:
                    assert len(stack.events(request_id=request_id)) == 1
                assert_ledger_invariants(stack.database_url)
        finally:
            for process in processes[-1:]:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def kill_and_restart(stack: Stack) -> Stack:
    """Kill `millrace up`, and start it again with the same settings."""
    supervisor = psutil.Process(stack.process.pid)
    command, environ, children = supervisor.cmdline(), supervisor.environ(), supervisor.children(recursive=True)
    stack.process.kill()
    stack.process.wait()
    psutil.wait_procs(children, timeout=60)
    with (stack.data_dir.parent / "up.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environ, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent(signal.SIGINT)
        )
    return replace(stack, process=process)
