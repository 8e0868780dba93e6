"""`manage.py settle`: the process that turns usage events into rows."""

from __future__ import annotations

import signal
import socket
import threading
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import connection

from billing.settler import Settler, connect
from millrace.config import platform_settings


class Command(BaseCommand):
    """Runs one settler until SIGTERM or SIGINT, which let it finish the batch in hand."""

    help = (
        "Move usage events from the broker into the database, until stopped. Several may run at once, each with a"
        " --name of its own that stays the same over restarts."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--name", default=socket.gethostname(), help="this settler's name; default: the host's")
        parser.add_argument("--once", action="store_true", help="settle what is waiting now, say how much, and end")

    def handle(self, *args: Any, name: str, once: bool, **options: Any) -> None:
        stopping = threading.Event()
        settler = Settler(connect(platform_settings().broker_url), consumer=name, stopping=stopping)
        if once:
            self.stdout.write(f"{settler.drain()} messages settled")
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        _without_pool()
        settler.run()


def _without_pool() -> None:
    """One connection, made anew after each fault: a pool would come back up to a minute after its server does."""
    connection.close()
    options = dict(connection.settings_dict["OPTIONS"])
    options.pop("pool", None)
    connection.settings_dict["OPTIONS"] = options
