"""`millrace manage run_settler`: the process that turns usage events into rows."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.db import connection

from billing.metering.settler import Settler, Turns
from inference_worker.contract import valkey
from inference_worker.contract.readiness import report_ready


class Command(BaseCommand):
    """Command that runs settlers until SIGTERM or SIGINT. They finish their current batches first."""

    help = (
        "Move usage events from the broker into the database, until stopped. Several may run concurrently, each with a"
        " --name of its own that stays the same over restarts."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--name", default=socket.gethostname(), help="this settler's name; default: the host's")
        parser.add_argument(
            "--threads", type=int, default=2, help="concurrent batches: one is prepared while the database has another"
        )
        parser.add_argument(
            "--once", action="store_true", help="settle the waiting messages, print their number, and exit"
        )

    def handle(self, *args: Any, name: str, threads: int, once: bool, **options: Any) -> None:
        stopping = threading.Event()
        names = [name, *(f"{name}.{number}" for number in range(2, threads + 1))]
        url = settings.MILLRACE.valkey_url
        turns = Turns()
        settlers = [
            Settler(valkey.connect(url, valkey.SETTLER), consumer=each, stopping=stopping, turns=turns)
            for each in names
        ]
        if once:
            self.stdout.write(f"{settlers[0].drain()} messages settled")
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        _without_pool()
        gc.collect()
        gc.freeze()  # a batch creates many objects: exclude the loaded modules from garbage collection
        report_ready()
        _run(settlers, stopping)


def _run(settlers: Sequence[Settler], stopping: threading.Event) -> None:
    """Run the settlers until they are stopped. An unexpected error stops all of them and is raised."""
    with ThreadPoolExecutor(len(settlers)) as pool:
        running = [pool.submit(settler.run) for settler in settlers]
        wait(running, return_when=FIRST_COMPLETED)
        stopping.set()
    for future in running:
        future.result()


def _without_pool() -> None:
    """Use one connection, opened again after each error. A pool would reconnect up to a minute late."""
    connection.close()
    options = dict(connection.settings_dict["OPTIONS"])
    options.pop("pool", None)
    connection.settings_dict["OPTIONS"] = options
