"""`manage.py run_settler`: the process that turns usage events into rows."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import connection

from billing.metering.settler import Settler, connect
from millrace.conf.environment import platform_settings


class Command(BaseCommand):
    """Runs settlers side by side until SIGTERM or SIGINT, which let them finish the batches in hand."""

    help = (
        "Move usage events from the broker into the database, until stopped. Several may run at once, each with a"
        " --name of its own that stays the same over restarts."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--name", default=socket.gethostname(), help="this settler's name; default: the host's")
        parser.add_argument(
            "--threads", type=int, default=2, help="batches at once: one is prepared while the database has another"
        )
        parser.add_argument("--once", action="store_true", help="settle what is waiting now, say how much, and end")

    def handle(self, *args: Any, name: str, threads: int, once: bool, **options: Any) -> None:
        stopping = threading.Event()
        names = [name, *(f"{name}.{number}" for number in range(2, threads + 1))]
        url = platform_settings().valkey_url
        settlers = [Settler(connect(url), consumer=each, stopping=stopping) for each in names]
        if once:
            self.stdout.write(f"{settlers[0].drain()} messages settled")
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        _without_pool()
        gc.collect()
        gc.freeze()  # a batch makes many objects: what was loaded is not to be looked through for each
        _run(settlers, stopping)


def _run(settlers: Sequence[Settler], stopping: threading.Event) -> None:
    """Until they are told to stop. A fault that one does not know how to survive stops all, and is raised."""
    with ThreadPoolExecutor(len(settlers)) as pool:
        running = [pool.submit(settler.run) for settler in settlers]
        wait(running, return_when=FIRST_COMPLETED)
        stopping.set()
    for each in running:
        each.result()


def _without_pool() -> None:
    """One connection, made again after each fault: a pool would come back up to a minute after its server does."""
    connection.close()
    options = dict(connection.settings_dict["OPTIONS"])
    options.pop("pool", None)
    connection.settings_dict["OPTIONS"] = options
