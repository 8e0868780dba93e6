from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis
from django.db import connection

from inference_worker.contract.messages import USAGE_STREAM, BillingContext, ExecutionUsage, encode
from inference_worker.contract.request import TokenUsage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def broker() -> Iterator[redis.Redis]:
    """The tests' Valkey, empty."""
    from billing.metering.settler import connect  # here: this file is read before Django is set up

    client = connect(os.environ["MILLRACE_VALKEY_URL"])
    client.flushdb()
    yield client
    client.close()


@pytest.fixture
def table(transactional_db: None, as_owner: Any) -> Iterator[None]:
    """Real commits; the rows they leave are taken out past the triggers that forbid it."""
    yield
    with as_owner(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE billing_usageevent DISABLE TRIGGER USER")
        cursor.execute("DELETE FROM billing_usageevent")
        cursor.execute("ALTER TABLE billing_usageevent ENABLE TRIGGER USER")


def make_event(**changes: Any) -> ExecutionUsage:
    """A plausible event; `changes` name fields of the event, its envelope or its token usage. `at` is a datetime."""
    at = changes.pop("at", datetime.now(UTC))
    usage = {name: changes.pop(name) for name in TokenUsage.__dataclass_fields__ if name in changes}
    billing_context: dict[str, Any] = {
        "admitted_at": int(at.timestamp()) * 1_000_000 + at.microsecond,
        "request_id": f"req_{secrets.token_hex(16)}",
        "execution": 0,
        "tenant_id": 1,
        "project_id": 2,
        "key_id": 3,
        "model": "smollm2-135m",
    }
    billing_context |= {name: changes.pop(name) for name in BillingContext.__struct_fields__ if name in changes}
    fields: dict[str, Any] = {
        "attempt": 1,
        "outcome": "completed",
        "finish_reason": "stop",
        "replica_id": "smollm2-135m-0.0a1b2c3d",
        "block_size": 32,
    }
    counts = TokenUsage(**({"uncached": 10, "cache_read": 64, "output": 7} | usage))
    return ExecutionUsage(billing_context=BillingContext(**billing_context), usage=counts, **(fields | changes))


@pytest.fixture
def event() -> Callable[..., ExecutionUsage]:
    return make_event


@pytest.fixture
def send(broker: redis.Redis) -> Callable[..., None]:
    """Puts events, or raw bytes, on the stream as a worker does."""

    def send(*events: ExecutionUsage | bytes) -> None:
        pipe = broker.pipeline(transaction=False)
        for item in events:
            pipe.xadd(USAGE_STREAM, {"e": item if isinstance(item, bytes) else encode(item)})
        pipe.execute()

    return send


@pytest.fixture
def start_settler(table: None) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Runs `manage.py run_settler` as it runs in production, against the tests' database."""
    parts = urlsplit(os.environ["MILLRACE_DATABASE_URL"])
    url = urlunsplit(parts._replace(path=f"/{connection.settings_dict['NAME']}"))
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "manage.py", "run_settler", "--name", name]
        started.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | {"MILLRACE_DATABASE_URL": url}))
        return started[-1]

    yield start
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Waits until something holds, and fails if it does not in a long while."""

    def until(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not holds():
            assert time.monotonic() < deadline, "it never came about"
            time.sleep(0.02)

    return until
