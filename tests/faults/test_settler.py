"""Settlers and brokers that are killed or stopped."""

from __future__ import annotations

import os
import signal
import threading

from billing.metering.settler import Settler
from billing.models import UsageEvent
from inference_worker.contract.messages import USAGE_STREAM, encode
from tests.support.billing.settlers import pending, quarantined
from tests.support.rows import unscoped
from tests.support.waiting import eventually


def test_a_killed_settlers_events_are_settled_after_its_restart(broker, start_settler, send, event):
    events = [event() for _ in range(6000)]
    send(*events, *events)
    first, second = start_settler("first"), start_settler("second")
    eventually(lambda: unscoped(UsageEvent).exists())
    first.send_signal(signal.SIGKILL)
    first.wait()
    start_settler("first")  # as the supervisor does, with the same name, so it finds its pending messages
    eventually(lambda: broker.xlen(USAGE_STREAM) == 0)
    assert unscoped(UsageEvent).count() == 6000
    assert quarantined() == []
    assert second.poll() is None


def test_a_settler_completes_its_batch_on_sigterm(broker, start_settler, send, event):
    send(*(event() for _ in range(5000)))
    process = start_settler("only")
    eventually(lambda: unscoped(UsageEvent).exists())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert pending(broker) == 0  # all read messages are acknowledged
    assert unscoped(UsageEvent).count() + broker.xlen(USAGE_STREAM) == 5000


def test_settling_continues_after_a_stopped_valkey(table, event, tmp_path_factory):
    """It uses a separate server, so that the tests' server is not affected."""
    import subprocess

    from inference_worker.contract.valkey import SETTLER, connect
    from millrace.local.valkey import Valkey

    folder = tmp_path_factory.mktemp("valkey")
    server = Valkey(folder)
    program = server.prepare()
    with (folder / "log").open("ab") as log:
        process: subprocess.Popen[bytes] = program.start(log)
        stopping = threading.Event()
        thread = threading.Thread(target=Settler(connect(server.url, SETTLER), consumer="a", stopping=stopping).run)
        try:
            connect(server.url, SETTLER).xadd(USAGE_STREAM, {"e": encode(event())})
            thread.start()
            eventually(lambda: unscoped(UsageEvent).count() == 1)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process = program.start(log)
            connect(server.url, SETTLER).xadd(USAGE_STREAM, {"e": encode(event())})
            eventually(lambda: unscoped(UsageEvent).count() == 2)
        finally:
            stopping.set()
            thread.join()
            program.stop(process)
