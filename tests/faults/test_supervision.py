"""A process that keeps dying is restarted with growing delays, and no other process stops."""

from __future__ import annotations

import os
import signal
import time

import httpx2

from tests.support.invariants import assert_ledger_invariants
from tests.support.stack import MODEL, Stack, eventually

KILLS = 6
# Words of the command lines of processes that must keep running.
OTHERS = (("bin/postgres", "-D"), ("valkey-server",), ("uvicorn",), ("django", "run_settler"), ("celery", "beat"))


def test_a_worker_killed_six_times_in_a_minute_stops_no_other_process(stack: Stack) -> None:
    stack.wait_until_ready()
    others = [stack.pid(*words) for words in OTHERS]
    began = time.monotonic()
    killed: set[int] = set()

    def kill() -> bool:
        worker = stack.worker()
        if worker in killed:
            return False
        os.kill(worker, signal.SIGKILL)
        killed.add(worker)
        return True

    def worker_state() -> str:
        return str(httpx2.get(f"{stack.url}/readyz", timeout=20).json()["down"].get(f"worker-{MODEL}", ""))

    def deaths() -> int:
        state = worker_state()
        return int(state.removeprefix("restarting, ").split()[0]) if state.startswith("restarting, ") else 0

    for _ in range(KILLS):
        eventually(kill)
        observed = time.monotonic()
        while deaths() < KILLS and time.monotonic() - observed < 2:
            time.sleep(0.1)
        if deaths() >= KILLS:  # tests before this one may have killed it too, and each death lengthens the next pause
            break
    assert time.monotonic() - began < 60
    eventually(lambda: "last: killed by SIGKILL, next start in" in worker_state(), 5)
    assert deaths() >= KILLS
    stack.wait_until_ready()
    answer = stack.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=3
    )
    assert answer.choices[0].message.content
    assert [stack.pid(*words) for words in OTHERS] == others
    assert httpx2.get(f"{stack.url}/readyz", timeout=20).json()["down"] == {}
    assert_ledger_invariants(stack.database_url)
