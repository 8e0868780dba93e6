"""A full disk under load: running requests complete, new ones are rejected, and the platform recovers by itself."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from inference_worker.contract.disk import free_bytes
from inference_worker.contract.host import host_name
from millrace.local.postgres import Postgres
from tenants.text_field import decode_text
from tests.support.e2e.streams import Stream, usage_of
from tests.support.invariants import assert_ledger_invariants
from tests.support.stack import MODEL, Stack, eventually, running

pytestmark = pytest.mark.timeout(600)
DISK = "1150m"  # `millrace up` requires 1 GiB
STREAMS, TOKENS = 4, 400
OWN_CHECKS = ("postgres", "valkey", "disk", "prices", "catalog", "replicas")  # of a gateway
RECOVERY_SECONDS = 120


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """Mount a separate disk, in memory."""
    folder = Path(tempfile.mkdtemp(prefix="millrace-disk-"))
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=711", "tmpfs", folder],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounting.returncode:
        pytest.skip(f"only root can mount a small disk: {mounting.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()


def fill(disk: Path) -> None:
    """Use the space that is free now. The platform's reserve, which is released meanwhile, stays free."""
    with (disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free_bytes(disk) - 2**20)


def fill_up(disk: Path) -> None:
    """Use every byte of the disk."""
    with (disk / "filler").open("ab") as filler:
        for block in (2**24, 2**20, 2**12):
            while True:
                try:
                    os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, block)
                except OSError as exc:
                    assert exc.errno == errno.ENOSPC
                    break


def send(stack: Stack) -> httpx2.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    return httpx2.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=60)


def readiness(stack: Stack) -> dict[str, Any]:
    return dict(httpx2.get(f"{stack.url}/readyz", timeout=20).json())


def issues(stack: Stack) -> list[tuple[str, str, bool]]:
    """Return the disk issues of the operators' health page: subject, title, and whether each has ended."""
    with psycopg.connect(stack.database_url) as connection:
        noted = "SELECT subject, title, closed_at IS NOT NULL FROM operations_healthevent WHERE issue_type = 'disk'"
        rows = connection.execute(f"{noted} ORDER BY subject").fetchall()
    return [(subject, decode_text(title), is_over) for subject, title, is_over in rows]


def check_health(stack: Stack) -> None:
    """Run the health checks, which beat starts every minute."""
    code = "from millrace.apps.health.tasks import run_health_checks; run_health_checks()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    environ["MILLRACE_DATA_DIR"] = str(stack.data_dir)
    subprocess.run([sys.executable, "manage.py", "shell", "-c", code], check=True, env=environ, timeout=60)


def test_a_full_disk_rejects_new_requests_and_recovers(small_disk: Path) -> None:
    with running(
        small_disk, MILLRACE_MODELS=f"{MODEL}=embedded?dtype=float32", MILLRACE_MIN_FREE_DISK="96MiB"
    ) as stack:
        stack.wait_until_ready()
        budget = {"name": "month", "unit": "money", "period": "month", "amount": 10**15}
        response = httpx2.post(f"{stack.url}/api/budgets", json=budget, headers=stack.headers, timeout=60)
        assert response.status_code == 201
        assert (stack.data_dir / "disk-reserve").stat().st_size == 48 * 2**20
        streams = [Stream(stack, max_tokens=TOKENS) for _ in range(STREAMS)]
        for stream in streams:
            stream.read(5)
        fill(small_disk)

        # Running requests complete and are billed once.
        with ThreadPoolExecutor(STREAMS) as pool:
            finishing = [pool.submit(stream.read) for stream in streams]
            eventually(lambda: readiness(stack)["checks"]["disk"] != "ok", 10)
            assert not all(each.done() for each in finishing)
            assert_refused(stack)
            for each in finishing:
                each.result()
        for stream in streams:
            assert usage_of(stream.datas)["completion_tokens"] == TOKENS
            event = stack.event(stream.request_id)
            assert (event["outcome"], event["output"]) == ("completed", TOKENS)
        check_health(stack)
        found = {subject: (title, over) for subject, title, over in issues(stack)}
        title, over = found.pop(host_name())
        ((replica, (of_replica, _)),) = found.items()
        assert title.startswith("Disk of ")
        assert not over
        assert replica.startswith(f"{stack.worker_name}.")
        assert "accepts no new requests" in of_replica

        # No byte is left, so PostgreSQL stops too.
        fill_up(small_disk)
        with pytest.raises(psycopg.OperationalError):
            write_log(stack)
        eventually(lambda: "postgres" in readiness(stack)["down"], 20)
        assert stack.process.poll() is None

        (small_disk / "filler").unlink()
        began = time.monotonic()
        eventually(lambda: send(stack).status_code == 200, RECOVERY_SECONDS)
        stack.wait_until_ready()
        assert time.monotonic() - began < RECOVERY_SECONDS
        assert readiness(stack) == {
            "status": "ready",
            "checks": dict.fromkeys((*OWN_CHECKS, f"model {MODEL}"), "ok"),
            "down": {},
        }
        eventually((stack.data_dir / "disk-reserve").exists, 10)
        eventually(lambda: all(over for *_, over in issues(stack)), 90)
        for stream in streams:
            assert len(stack.events(request_id=stream.request_id)) == 1
        assert_ledger_invariants(stack.database_url)


def write_log(stack: Stack) -> None:
    """Let PostgreSQL write enough WAL that it needs new files."""
    with psycopg.connect(Postgres(stack.data_dir).superuser_url, autocommit=True) as connection:
        for _ in range(200):
            connection.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 1000000)), pg_switch_wal()")


def assert_refused(stack: Stack) -> None:
    """Check that new work of any kind is rejected, and that the reason is shown."""
    answers = [send(stack)]
    upload = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
    answers.append(httpx2.post(f"{stack.url}/v1/files", headers=stack.headers, timeout=60, **upload))
    batch = {"input_file_id": "file-x", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answers.append(httpx2.post(f"{stack.url}/v1/batches", headers=stack.headers, json=batch, timeout=60))
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "server_is_overloaded"
        assert int(answer.headers["retry-after"]) >= 1
    ready = httpx2.get(f"{stack.url}/readyz", timeout=20)
    assert ready.status_code == 503
    assert "new requests are rejected" in ready.json()["checks"]["disk"]
