"""A worker's publisher while its broker is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from inference_worker.contract.journal import Journal
from inference_worker.contract.messages import (
    USAGE_STREAM,
)
from inference_worker.contract.valkey import WORKER, connect
from inference_worker.worker.engine_client import ActiveJob
from millrace.local.valkey import Valkey, is_accepting
from tests.support.waiting import eventually
from tests.support.worker.jobs import make_job
from tests.support.worker.publishing import last, new_publisher, usage_events


def test_events_that_a_restarted_broker_lost_are_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of the worker fails meanwhile, since its client reconnects. The journal must not be trimmed by the
    settler's position in the new stream."""
    monkeypatch.setattr("inference_worker.worker.publisher.TRIM_SECONDS", 0.1)
    server = Valkey(tmp_path, durable=False)
    program = server.prepare()
    with (tmp_path / "log").open("ab") as log:
        process: subprocess.Popen[bytes] = program.start(log)
        eventually(lambda: is_accepting(server.url))
        broker = connect(server.url, WORKER)
        journal = Journal(tmp_path / "journal")
        publisher = new_publisher(connect(server.url, WORKER), journal)
        try:
            live = ActiveJob(make_job(), 1)
            publisher.deliver([last(live, 1)])
            assert publisher.has_ended(live)
            (usage,) = usage_events(broker)
            time.sleep(0.5)  # it has read it
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process = program.start(log)
            eventually(lambda: is_accepting(server.url))
            eventually(lambda: broker.exists(USAGE_STREAM))
            assert usage_events(broker) == [usage]
        finally:
            publisher.close()
            program.stop(process)
