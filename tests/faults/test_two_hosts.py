"""Two hosts: two process trees from two data directories, which share only PostgreSQL and Valkey."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import psycopg
import pytest
import redis

from inference_worker.contract.messages import REPLICAS_KEY, worker_of
from millrace.environment.configuration import read_env_file
from millrace.local.program import free_port
from tests.support.models import share_models
from tests.support.stack import MODEL, Stack, eventually, running, start, wait_for_output

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SETTINGS = {
    "MILLRACE_MODELS": f"{MODEL}=embedded?dtype=float32",
    "MILLRACE_STALE_KEY_SECONDS": "600",  # longer than any test
}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Stack]]:
    """Two platforms. The second one uses the services and the secrets of the first one."""
    first_dir, second_dir = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    with (
        running(first_dir, **SETTINGS) as first,
        second_host(second_dir, first) as second,
    ):
        for host in (first, second):
            host.wait_until_ready()
        yield first, second


@contextmanager
def second_host(folder: Path, first: Stack) -> Iterator[Stack]:
    share_models(folder / "state")
    settings = {name: value for name, value in read_env_file(first.data_dir / "env").items() if "DATA_DIR" not in name}
    settings |= SETTINGS | {"MILLRACE_SHUTDOWN_TIMEOUT_SECONDS": "15"}
    log, port = folder / "up.log", free_port()
    process = start(folder / "state", port, log, **settings)
    try:
        wait_for_output(process, log, "All processes are running.")
        yield Stack(process, folder / "state", port, first.key)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()


def readiness(host: Stack, query: str = "") -> int:
    return httpx2.get(f"{host.url}/readyz{query}", timeout=20).status_code


def chat(host: Stack) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    return httpx2.post(f"{host.url}/v1/chat/completions", json=body, headers=host.headers, timeout=60).status_code


def database_check(host: Stack) -> str:
    return str(httpx2.get(f"{host.url}/readyz", timeout=20).json()["checks"]["postgres"])


@contextmanager
def hanging_postgresql(host: Stack) -> Iterator[None]:
    """Stop all processes of PostgreSQL until the end of the block, as the loss of its machine does."""
    postmaster = psutil.Process(host.pid("bin/postgres", "-D"))
    stopped = [postmaster]
    try:
        postmaster.suspend()  # first, so that it starts no further process
        for process in postmaster.children(recursive=True):
            stopped.append(process)
            process.suspend()
        yield
    finally:
        for process in reversed(stopped):  # the parent last, since it removes children that have ended
            process.resume()


def running_workers(host: Stack) -> set[str]:
    with redis.Redis.from_url(read_env_file(host.data_dir / "env")["MILLRACE_VALKEY_URL"]) as broker:
        replicas: Any = broker.hgetall(REPLICAS_KEY)
        return {worker_of(name.decode()) for name in replicas}


def beat(host: Stack) -> tuple[str, int]:
    """Return the process and the fencing number of the active beat."""
    with psycopg.connect(host.database_url) as connection:
        row = connection.execute("SELECT holder, fencing_number FROM operations_beatlease").fetchone()
    assert row is not None
    return str(row[0]), int(row[1])


def test_workers_of_two_hosts_have_names_of_their_own(hosts: tuple[Stack, Stack]) -> None:
    first, second = hosts
    assert first.worker_name != second.worker_name
    eventually(lambda: running_workers(first) == {first.worker_name, second.worker_name})


def test_no_gateway_is_unready_while_no_worker_runs(hosts: tuple[Stack, Stack]) -> None:
    for host in hosts:
        os.kill(host.worker(), signal.SIGKILL)
    for host in hosts:
        eventually(lambda host=host: readiness(host, "?models=all") == 503)
        assert readiness(host) == 200
    for host in hosts:
        host.wait_until_ready()
    eventually(lambda: running_workers(hosts[0]) == {host.worker_name for host in hosts})


def test_the_beat_of_the_other_host_continues(hosts: tuple[Stack, Stack]) -> None:
    holder, number = beat(hosts[0])
    webs = {host.pid("millrace.conf.web_jobs") for host in hosts}
    active = int(holder.split()[1])
    assert active in webs
    os.kill(active, signal.SIGSTOP)
    try:
        eventually(lambda: beat(hosts[0])[1] > number)
        successor = beat(hosts[0])
        assert int(successor[0].split()[1]) in webs - {active}
    finally:
        os.kill(active, signal.SIGCONT)
    logs = [host.data_dir / "logs" / "web.log" for host in hosts]
    eventually(lambda: any("beat_lease_lost" in log.read_text() for log in logs))
    assert beat(hosts[0]) == successor


def test_both_gateways_accept_known_keys_while_postgresql_does_not_answer(hosts: tuple[Stack, Stack]) -> None:
    for host in hosts:
        eventually(lambda host=host: chat(host) == 200)
    with hanging_postgresql(hosts[0]):
        for host in hosts:
            eventually(lambda host=host: database_check(host) == "stale")
            assert readiness(host) == 200
            assert [chat(host) for _ in range(3)] == [200] * 3
    for host in hosts:
        eventually(lambda host=host: database_check(host) == "ok")
        assert chat(host) == 200
